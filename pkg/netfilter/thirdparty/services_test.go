// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestNodePorts(t *testing.T) {
	kubeProxy := []string{":KUBE-NODEPORTS -", ":KUBE-EXT-X -",
		`-A KUBE-NODEPORTS -p tcp -m comment --comment "default/web:http" -m tcp --dport 30080 -j KUBE-EXT-X`,
		"-A KUBE-NODEPORTS -d 127.0.0.0/8 -p udp -m udp --dport 30053 -j KUBE-EXT-X",
		"-A KUBE-NODEPORTS -p sctp -m sctp --dport 30132 -j KUBE-EXT-X",
		"-A KUBE-NODEPORTS -p tcp -m tcp --sport 1000 --dport 30000:30100 -j KUBE-EXT-X"}
	const nft = `table ip kube-proxy {
	map service-nodeports { type inet_proto . inet_service : verdict
		elements = { tcp . 30080 : goto external-X, udp . 30053 : goto external-X,
			sctp . 30132 : goto external-X }
	}
	chain external-X { }
}`
	for name, write := range map[string]func(*testing.T){
		"nothing":         nil,
		"iptables-nft":    func(t *testing.T) { restore(t, policy.IPv4, netfilter.VariantNFT, kubeProxy...) },
		"iptables-legacy": func(t *testing.T) { restore(t, policy.IPv4, netfilter.VariantLegacy, kubeProxy...) },
		"nftables":        func(t *testing.T) { feed(t, nft, "nft", "-f", "-") },
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			var want []uint16
			if write != nil {
				write(t)
				want = []uint16{30053, 30080, 30132}
			}
			if got, err := NodePorts(); err != nil || !slices.Equal(want, got) {
				t.Errorf("node ports %v, %v; want %v", got, err, want)
			}
		})
	}
}

func TestUntracked(t *testing.T) {
	isolate(t)
	raw := "*raw\n" + strings.Join([]string{":CILIUM_PRE_raw -", "-A PREROUTING -j CILIUM_PRE_raw", "-A CILIUM_PRE_raw -s 10.244.0.0/16 -j CT --notrack",
		"-A PREROUTING -d 169.254.20.10/32 -p udp -m udp --dport 53 -j CT --notrack", "-A PREROUTING -s 10.9.0.0/16 -j CT --zone 5",
		"-A PREROUTING -s 10.8.0.0/16 -j ACCEPT", "-A PREROUTING -s 10.8.1.0/24 -j CT --notrack", "-A OUTPUT -j CT --notrack"}, "\n") + "\nCOMMIT\n"
	for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
		feed(t, raw, "iptables-"+variant+"-restore", "--noflush")
	}
	feed(t, `table inet x {
	chain early { type filter hook prerouting priority raw; ip saddr 10.7.0.0/16 notrack accept; ip saddr 10.7.1.0/24 notrack; }
	chain late { type filter hook prerouting priority filter; notrack; }
	chain sent { type filter hook output priority raw; notrack; }
}`, "nft", "-f", "-")
	rules := assert.Must(ReadBeforeConntrack(policy.IPv4))(t)
	var got []string
	for _, r := range rules.Judge(Packet{}, ownedBinds).Untrackers {
		got = append(got, r.String())
	}
	var want []string
	for _, variant := range []string{"legacy", "nft"} {
		want = append(want, "iptables ("+variant+"), ipv4, table raw: -A CILIUM_PRE_raw -s 10.244.0.0/16 -j CT --notrack",
			"iptables ("+variant+"), ipv4, table raw: -A PREROUTING -d 169.254.20.10/32 -p udp -m udp --dport 53 -j CT --notrack",
			"iptables ("+variant+"), ipv4, table raw: -A PREROUTING -s 10.8.1.0/24 -j CT --notrack")
	}
	want = append(want, "nftables, ipv4, table x, chain early: ip saddr 10.7.0.0/16 notrack accept",
		"nftables, ipv4, table x, chain early: ip saddr 10.7.1.0/24 notrack")
	assert.Equal(t, "of all packets", got, want)
	of := func(source string) int {
		return len(rules.Judge(Packet{Src: netip.MustParsePrefix(source)}, ownedBinds).Untrackers)
	}
	assert.Equal(t, "of accepted packets", of("10.8.1.0/24"), 2) // to the address of the DNS cache, in both variants
	assert.Equal(t, "of packets that are accepted then", of("10.7.1.0/24"), 3)
}

func TestAccepted(t *testing.T) {
	for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
		t.Run(variant, func(t *testing.T) {
			isolate(t)
			restore(t, policy.IPv4, variant, ":OURS -", ":A -", "-A POSTROUTING -m policy --pol ipsec --dir out -j ACCEPT", "-A POSTROUTING -j A",
				"-A A -d 10.1.0.0/16 -j RETURN", "-A A -s 10.2.0.0/16 -j ACCEPT",
				":B -", "-A POSTROUTING -s 10.5.0.0/16 -g B", "-A B -d 10.6.0.0/16 -j MASQUERADE", "-A POSTROUTING -o eth+ -j OURS",
				"-A POSTROUTING -d 10.3.0.0/16 -j RETURN", "-A POSTROUTING -o wg0 -j OURS", "-A POSTROUTING -d 10.4.0.0/16 -j ACCEPT", "-A OURS -j MASQUERADE")
			feed(t, "table ip other { chain p { type nat hook postrouting priority 90; accept; }\n}", "nft", "-f", "-")
			want := "untouched | owned | -A B -d 10.6.0.0/16 -j MASQUERADE | kept by -A POSTROUTING -m policy … -j ACCEPT" +
				" | kept by -A A -s 10.2.0.0/16 -j ACCEPT | kept by -A POSTROUTING -s 10.5.0.0/16 -g B"
			got := ruleset(t, policy.IPv4).Judge(Packet{}, ownedBinds)
			assert.Equal(t, "rules", sorted(answer(got)), sorted(want))
		})
	}
}

// sorted sorts the parts of an answer.
func sorted(answer string) []string { return slices.Sorted(strings.SplitSeq(answer, " | ")) }
