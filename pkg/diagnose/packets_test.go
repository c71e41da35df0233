// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// restoreNAT loads rules into table nat of a variant of iptables.
func restoreNAT(t *testing.T, variant string, rules ...string) {
	t.Helper()
	feed(t, "*nat\n"+strings.Join(rules, "\n")+"\nCOMMIT\n", "iptables-"+variant+"-restore", "--noflush")
}

// TestMasqueradeSource has the addresses and routes with which the address that MASQUERADE takes was seen with
// real packets.
func TestMasqueradeSource(t *testing.T) {
	const node, pods = "ip address add 192.0.2.10/24 dev eth0\n", "ip link add cni0 type bridge\nip link set cni0 up\nip address add 10.88.0.1/16 dev cni0\n"
	const route = "ip route replace default via 192.0.2.1 dev eth0 src 192.0.2.10\n"
	for _, tc := range []struct {
		name, script, want string
		out                string // outputInterfaces
	}{
		{name: "one address", script: node + route},
		{name: "no src", script: "ip address add 192.0.2.100/24 dev eth0\n" + node + "ip route add default via 192.0.2.1\n"},
		{name: "a VIP of the same length before it", script: "ip address add 192.0.2.100/24 dev eth0\n" + node + route,
			want: "eth0: MASQUERADE takes 192.0.2.100, and the default route via 192.0.2.1 has src 192.0.2.10, scope link"},
		{name: "a VIP of the same length after it", script: node + "ip address add 192.0.2.100/24 dev eth0\n" + route},
		{name: "a VIP /32 before it", script: "ip address add 192.0.2.100/32 dev eth0\n" + node + route},
		{name: "all /32, with an onlink gateway",
			script: "ip address add 192.0.2.100/32 dev eth0\nip address add 192.0.2.10/32 dev eth0\nip route add default via 192.0.2.1 dev eth0 onlink src 192.0.2.10\n",
			want:   "takes 192.0.2.100"},
		{name: "the VIP /32 with scope link",
			script: "ip address add 192.0.2.100/32 dev eth0 scope link\nip address add 192.0.2.10/32 dev eth0\nip route add default via 192.0.2.1 dev eth0 onlink src 192.0.2.10\n"},
		{name: "src in another subnet", script: node + "ip address add 198.51.100.10/24 dev eth0\nip route add default via 192.0.2.1 dev eth0 src 198.51.100.10\n",
			want: "takes 192.0.2.10, src 198.51.100.10"},
		{name: "an unnumbered uplink", script: pods + "ip link add dummy1 type bridge\nip link set dummy1 up\nip address add 192.0.2.10/32 dev dummy1\n" +
			"ip route add default dev eth0 src 192.0.2.10\n", want: "eth0: MASQUERADE takes 10.88.0.1, and the default route has src 192.0.2.10"},
		{name: "two next hops", script: "ip address add 192.0.2.100/24 dev eth0\n" + node + pods +
			"ip route add default src 192.0.2.10 nexthop via 192.0.2.1 dev eth0 nexthop via 10.88.0.9 dev cni0\n",
			want: "eth0: MASQUERADE takes 192.0.2.100, cni0: MASQUERADE takes 10.88.0.1"},
		{name: "another routing table", script: "ip address add 192.0.2.100/24 dev eth0\n" + node + "ip route add default via 192.0.2.1 dev eth0 src 192.0.2.10 table 7\n",
			want: "takes 192.0.2.100"},
		{name: "an uplink out of scope", script: "ip address add 192.0.2.100/24 dev eth0\n" + node + route, out: "wg+"},
		{name: "an uplink in scope", script: "ip address add 192.0.2.100/24 dev eth0\n" + node + route, out: "eth+", want: "takes 192.0.2.100"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			feed(t, "ip link add eth0 type bridge\nip link set eth0 up\n"+tc.script, "sh", "-e")
			h := newHost(t)
			if tc.out != "" {
				h.policies[0].OutputInterfaces = []string{tc.out}
			}
			want := map[string]string{}
			if tc.want != "" {
				want["notice masquerade-source"] = tc.want
			}
			compare(t, want, h.examine())
		})
	}
}

// TestPacketFindings has rules of other programs in a kernel.
func TestPacketFindings(t *testing.T) {
	const nft, legacy = netfilter.VariantNFT, netfilter.VariantLegacy
	nodePort := []string{":KUBE-NODEPORTS -", ":KUBE-EXT-X -", "-A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-X"}
	guarded := func(mode policy.GuardMode) func(*testHost) {
		return func(h *testHost) { h.policies[0].Guard, h.policies[0].PodCIDRs = mode, prefixes("10.244.0.0/16") }
	}
	cilium := "*raw\n:CILIUM_PRE_raw -\n-A PREROUTING -j CILIUM_PRE_raw\n-A CILIUM_PRE_raw -s 10.244.0.0/16 -j CT --notrack\n" +
		"-A PREROUTING -d 169.254.20.10/32 -p udp --dport 53 -j CT --notrack\n-A PREROUTING -s 172.17.0.0/16 -j CT --notrack\nCOMMIT\n"
	ipsec := []string{":IP-MASQ-AGENT -", "-A POSTROUTING -s 172.17.0.0/16 -j ACCEPT", "-A POSTROUTING -d 10.0.0.0/8 -j ACCEPT",
		"-A POSTROUTING -m policy --pol ipsec --dir out -j ACCEPT", "-A POSTROUTING -j IP-MASQ-AGENT", "-A IP-MASQ-AGENT -j MASQUERADE", "-A POSTROUTING -j ACCEPT"}
	for _, tc := range []struct {
		name  string
		write func(*testing.T)
		set   func(*testHost)
		want  map[string]string
	}{
		{"node ports", func(t *testing.T) { restoreNAT(t, nft, nodePort...) }, nil,
			map[string]string{"notice node-port-overlap": "IP-MASQ-AGENT: source ports 1024-65535 include node port 30080, 1024-29999,32768-65535"}},
		{"node ports of legacy, and ports that are stated", func(t *testing.T) { restoreNAT(t, legacy, nodePort...) },
			func(h *testHost) {
				h.policies[0].ToPorts = &policy.Ports{{First: 2000, Last: 3000}, {First: 30000, Last: 30080}}
			},
			map[string]string{"notice node-port-overlap": "source ports 2000-3000,30000-30080 include"}},
		{"node ports, and the remedy", func(t *testing.T) { restoreNAT(t, nft, nodePort...) },
			func(h *testHost) {
				h.policies[0].ToPorts = &policy.Ports{{First: 1024, Last: 29999}, {First: 32768, Last: 65535}}
			}, nil},
		{"node ports, and ports that are kept", func(t *testing.T) { restoreNAT(t, nft, nodePort...) },
			func(h *testHost) { h.policies[0].RandomFully = new(false) }, nil},
		{"node ports in nftables", func(t *testing.T) {
			feed(t, "table ip kube-proxy {\nmap service-nodeports { type inet_proto . inet_service : verdict; elements = { tcp . 30080 : accept }\n}\n}", "nft", "-f", "-")
		}, nil, map[string]string{"notice node-port-overlap": "node port 30080"}},

		{"NOTRACK, without a guard", func(t *testing.T) { feed(t, cilium, "iptables-nft-restore", "--noflush") }, nil, nil},
		{"NOTRACK, counted", func(t *testing.T) { feed(t, cilium, "iptables-nft-restore", "--noflush") }, guarded(policy.GuardCount),
			map[string]string{"problem guard-notrack": "table raw, -A CILIUM_PRE_raw -s 10.244.0.0/16 -j CT --notrack: the guard of IP-MASQ-AGENT counts"}},
		{"NOTRACK, dropped", func(t *testing.T) { feed(t, cilium, "iptables-legacy-restore", "--noflush") }, guarded(policy.GuardDrop),
			map[string]string{"problem guard-notrack": "drops these packets, Until then set guard to \"count\"."}},
		{"NOTRACK of exempt destinations", func(t *testing.T) {
			feed(t, "table ip x { chain p { type filter hook prerouting priority raw; ip saddr 10.244.0.0/16 ip daddr 10.0.0.0/8 notrack; }\n}", "nft", "-f", "-")
		}, guarded(policy.GuardDrop), nil},

		{"ACCEPT, without a guard", func(t *testing.T) { restoreNAT(t, nft, ipsec...) }, nil, nil},
		{"ACCEPT, dropped", func(t *testing.T) { restoreNAT(t, nft, ipsec...) }, guarded(policy.GuardDrop),
			map[string]string{"problem guard-accept": "-A POSTROUTING -m policy … -j ACCEPT: the guard of IP-MASQ-AGENT drops"}},
		{"ACCEPT of what no guard catches", func(t *testing.T) {
			restoreNAT(t, nft, ":IP-MASQ-AGENT -", "-A POSTROUTING -d 224.0.0.0/4 -j ACCEPT", "-A POSTROUTING -o wg0 -j ACCEPT",
				"-A POSTROUTING -o lo -j ACCEPT", "-A POSTROUTING -j IP-MASQ-AGENT", "-A IP-MASQ-AGENT -j MASQUERADE")
		}, func(h *testHost) {
			guarded(policy.GuardDrop)(h)
			h.policies[0].OutputInterfaces = []string{"eth+"}
		}, nil},
		{"ACCEPT in legacy", func(t *testing.T) { restoreNAT(t, legacy, ipsec...) }, func(h *testHost) {
			guarded(policy.GuardCount)(h)
			h.choice.Variant = legacy
		}, map[string]string{"problem guard-accept": "-m policy"}},
		{"ACCEPT before a chain in nftables", func(t *testing.T) { restoreNAT(t, nft, ipsec...) }, func(h *testHost) {
			guarded(policy.GuardDrop)(h)
			h.choice = netfilter.Choice{Backend: policy.NFTables}
		}, map[string]string{"notice foreign-masquerade-possible": "table nat, -A IP-MASQ-AGENT -j MASQUERADE"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			if tc.write != nil {
				tc.write(t)
			}
			h := newHost(t)
			if tc.set != nil {
				tc.set(h)
			}
			compare(t, tc.want, h.examine())
		})
	}
}
