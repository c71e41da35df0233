// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
)

// kubeService is a Service with one endpoint, for UDP and TCP. Without an address it is a NodePort.
type kubeService struct {
	addr     netip.Addr
	port     uint16
	endpoint netip.AddrPort
	// marked is whether all packets are masqueraded, as with externalTrafficPolicy Cluster. Those
	// of the endpoint itself always are.
	marked bool
}

// kubeProxy loads the rules that kube-proxy writes for services of one family in its mode iptables
// or nftables. Like kube-proxy it inserts its jump first.
func (n *node) kubeProxy(t *testing.T, mode string, services []kubeService) {
	t.Helper()
	family := families()[0]
	if services[0].endpoint.Addr().Is6() {
		family = families()[1]
	}
	if mode == "nftables" {
		n.feed(t, kubeProxyNFT(family[1], services), "nft", "-f", "-")
		return
	}
	variant := n.backend.variant
	if variant == "" {
		variant = "nft"
	}
	n.feed(t, kubeProxyIPTables(services), family[0]+"-"+variant+"-restore", "--noflush")
}

func kubeProxyIPTables(services []kubeService) string {
	var chains, rules strings.Builder
	chains.WriteString("*nat\n:KUBE-SERVICES - [0:0]\n:KUBE-MARK-MASQ - [0:0]\n:KUBE-POSTROUTING - [0:0]\n")
	rules.WriteString("-A PREROUTING -j KUBE-SERVICES\n-A OUTPUT -j KUBE-SERVICES\n-I POSTROUTING -j KUBE-POSTROUTING\n" +
		"-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n" +
		"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n" +
		"-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000\n" +
		"-A KUBE-POSTROUTING -j MASQUERADE --random-fully\n")
	for i, s := range services {
		match, own := "-m addrtype --dst-type LOCAL", " -s "+s.endpoint.Addr().String()
		if s.addr.IsValid() {
			match = "-d " + s.addr.String()
		}
		if s.marked {
			own = ""
		}
		fmt.Fprintf(&chains, ":KUBE-SVC-%d - [0:0]\n", i)
		fmt.Fprintf(&rules, "-A KUBE-SVC-%d%s -j KUBE-MARK-MASQ\n", i, own)
		for _, protocol := range []string{"udp", "tcp"} {
			fmt.Fprintf(&rules, "-A KUBE-SERVICES %s -p %s --dport %d -j KUBE-SVC-%d\n", match, protocol, s.port, i)
			fmt.Fprintf(&rules, "-A KUBE-SVC-%d -p %s -j DNAT --to-destination %s\n", i, protocol, s.endpoint)
		}
	}
	return chains.String() + rules.String() + "COMMIT\n"
}

func kubeProxyNFT(family string, services []kubeService) string {
	var b strings.Builder
	fmt.Fprintf(&b, "table %s kube-proxy {\n", family)
	b.WriteString("chain masquerading {\nmark and 0x4000 == 0 return\nmark set mark xor 0x4000\nmasquerade fully-random\n}\n")
	for i, s := range services {
		own := family + " saddr " + s.endpoint.Addr().String() + " "
		if s.marked {
			own = ""
		}
		fmt.Fprintf(&b, "chain service-%d {\n%smark set mark or 0x4000\nmeta l4proto { tcp, udp } dnat to %s\n}\n", i, own, s.endpoint)
	}
	b.WriteString("chain services {\n")
	for i, s := range services {
		match := "fib daddr type local"
		if s.addr.IsValid() {
			match = family + " daddr " + s.addr.String()
		}
		fmt.Fprintf(&b, "%s meta l4proto { tcp, udp } th dport %d goto service-%d\n", match, s.port, i)
	}
	b.WriteString("}\nchain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }\n" +
		"chain nat-output { type nat hook output priority -100; jump services; }\n" +
		"chain nat-postrouting { type nat hook postrouting priority srcnat; jump masquerading; }\n}\n")
	return b.String()
}
