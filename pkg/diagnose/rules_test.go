// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// kindnet is its masquerading as kindnetd writes it (pkg/masq), in a cluster with IPv6
// too, and the owned chain.
const kindnet = `table inet kindnet-ipmasq {
	set noMasqV4 { type ipv4_addr; flags interval; auto-merge; elements = { 10.96.0.0/16, 10.244.0.0/16 }
	}
	set noMasqV6 { type ipv6_addr; flags interval; auto-merge; elements = { fd00:10:244::/56 }
	}
	chain postrouting {
		type nat hook postrouting priority srcnat - 10; policy accept;
		ct state established,related accept
		fib daddr type local accept
		ip daddr @noMasqV4 accept
		ip6 daddr @noMasqV6 accept
		masquerade
		counter
	}
}
table ip ip-masq { chain masq-IP-MASQ-AGENT { masquerade; }
chain postrouting { type nat hook postrouting priority 101; fib daddr type != local jump masq-IP-MASQ-AGENT; }
}`

// enforced is the chain of enforceExempt, which is owned.
var enforced = `table ip ip-masq-guard {
	chain enforce { type nat hook postrouting priority 99; policy accept;
		ip saddr 10.244.0.0/16 ip daddr 10.0.0.0/8 snat to ip saddr comment "` + policy.OwnedBy("/elsewhere").Comment() + `"
	}
}`

// TestThirdPartyRules has third-party rules in a kernel.
func TestThirdPartyRules(t *testing.T) {
	for _, tc := range []struct {
		name    string
		set     func(*testHost)
		rules   string // for iptables-restore
		rules6  string
		nft     string
		want    map[string]string
		counted int
	}{
		{name: "none"},
		{name: "the agents' chain, which is owned now", rules: ":IP-MASQ-AGENT -\n-A POSTROUTING -j IP-MASQ-AGENT\n-A IP-MASQ-AGENT -j MASQUERADE"},
		{name: "masquerading of all", rules: "-A POSTROUTING -o eth0 -j MASQUERADE\n:IP-MASQ-AGENT -\n-A POSTROUTING -j IP-MASQ-AGENT", counted: 1,
			want: map[string]string{"problem foreign-masquerade": "iptables (nft), table nat: -A POSTROUTING -o eth0 -j MASQUERADE: applies to 169.254.0.0/16, 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16, no longer apply to the traffic of pods to exempt destinations"}},
		{name: "through an interface that does not exist", rules: "-A POSTROUTING -o wg0 -j MASQUERADE",
			want: map[string]string{"notice foreign-masquerade-possible": "-A POSTROUTING -o wg0 -j MASQUERADE: applies to 169.254.0.0/16, only packets through other interfaces can meet it"}},
		{name: "in a verdict map", nft: "table ip x {\nchain d {\nmasquerade\n}\nchain c {\ntype nat hook postrouting priority srcnat\noifname vmap { \"eth0\" : jump d }\n}\n}", counted: 1,
			want: map[string]string{"problem foreign-masquerade": "nftables, ipv4, table x, chain d: masquerade: applies to"}},
		{name: "behind a negated interface", nft: "table ip x {\nchain c {\ntype nat hook postrouting priority srcnat\noifname != \"mgmt0\" return\nsnat to 10.244.0.2\n}\n}",
			want: map[string]string{"notice foreign-masquerade-possible": "snat to 10.244.0.2: applies to, only packets through other interfaces can meet it"}},
		{name: "in nftables", nft: "table ip x {\nchain p {\ntype nat hook postrouting priority 300\nip daddr 10.1.0.0/16 masquerade\n}\n}", counted: 1,
			want: map[string]string{"problem foreign-masquerade": "nftables, table x, chain p: ip daddr 10.1.0.0/16 masquerade: applies to 10.0.0.0/8, which IP-MASQ-AGENT exempts"}},
		{name: "of pods", rules: "-A POSTROUTING -s 10.244.0.0/16 ! -d 10.244.0.0/16 -j MASQUERADE", counted: 1,
			want: map[string]string{"problem foreign-masquerade": "-s 10.244.0.0/16 ! -d 10.244.0.0/16"}},
		{name: "of Docker", rules: "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE",
			want: map[string]string{"notice foreign-masquerade-possible": "its sources are not in a known pod network, Docker:"}},
		{name: "of sources that may be pods", rules: "-A POSTROUTING -s 172.17.0.0/16 -j MASQUERADE",
			set: func(h *testHost) {
				h.files["etc/cni/net.d/10-pods.conflist"] = conflist("pods", `{"type": "bridge"}`, entry)
			},
			want: map[string]string{"notice foreign-masquerade-possible": "no pod network is known"}},
		{name: "of pods that the policy names", rules: "-A POSTROUTING -s 172.17.0.0/16 -j MASQUERADE", counted: 1,
			set:  func(h *testHost) { h.policies[0].PodCIDRs = prefixes("172.17.0.0/16") },
			want: map[string]string{"problem foreign-masquerade": "-s 172.17.0.0/16"}},
		{name: "of a scope that the policy names", rules: "-A POSTROUTING -s 10.9.0.0/24 -j MASQUERADE", counted: 1,
			set:  func(h *testHost) { h.policies[0].SourceCIDRs = prefixes("10.9.0.0/16") },
			want: map[string]string{"problem foreign-masquerade": "-s 10.9.0.0/24"}},
		{name: "outside the scope", rules: "-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE\n-A POSTROUTING -o docker0 -j MASQUERADE",
			set: func(h *testHost) {
				h.policies[0].SourceCIDRs, h.policies[0].OutputInterfaces = prefixes("10.244.0.0/16"), []string{"eth+"}
			}},
		{name: "of what is not exempt", rules: "-A POSTROUTING -d 8.8.8.0/24 -j MASQUERADE\n-A POSTROUTING -o lo -j MASQUERADE"},
		{name: "of what a longer prefix has masqueraded", rules: "-A POSTROUTING -d 10.9.0.0/16 -j MASQUERADE",
			set: func(h *testHost) { h.policies[0].MasqueradeCIDRs = prefixes("10.9.0.0/16") }},
		{name: "of sources that are exempt", rules: "-A POSTROUTING -s 10.9.0.0/24 -d 8.8.8.8 -j MASQUERADE\n-A POSTROUTING -s 10.8.0.0/24 -d 8.8.8.8 -j MASQUERADE", counted: 1,
			set: func(h *testHost) {
				h.policies[0].NonMasqueradeSourceCIDRs, h.policies[0].SourceCIDRs = prefixes("10.9.0.0/16"), prefixes("10.0.0.0/8")
			},
			want: map[string]string{"problem foreign-masquerade": "applies to all from 10.9.0.0/16"}},
		{name: "that cannot be read", rules: "-A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE",
			want: map[string]string{"notice foreign-masquerade-possible": "-m conntrack …, it depends on what is not known of packets"}},
		{name: "for marked packets", rules: ":KUBE-POSTROUTING -\n-A POSTROUTING -j KUBE-POSTROUTING\n-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN\n-A KUBE-POSTROUTING -j MASQUERADE"},
		{name: "kube-proxy's for all", rules: ":KUBE-POSTROUTING -\n-A POSTROUTING -j KUBE-POSTROUTING\n-A KUBE-POSTROUTING -j MASQUERADE", counted: 1,
			want: map[string]string{"problem foreign-masquerade": "-A KUBE-POSTROUTING -j MASQUERADE, --masquerade-all"}},
		{name: "kubenet's", rules: `-A POSTROUTING ! -d 10.0.0.0/8 -m comment --comment "kubenet: SNAT for outbound traffic from cluster" -m addrtype ! --dst-type LOCAL -j MASQUERADE`, counted: 1,
			want: map[string]string{"problem foreign-masquerade": "applies to 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16, which, --non-masquerade-cidr"}},
		{name: "flannel's", rules: ":FLANNEL-POSTRTG -\n-A POSTROUTING -j FLANNEL-POSTRTG\n-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE", counted: 1,
			want: map[string]string{"problem foreign-masquerade": "-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE, \"ipMasq\": false into its delegate (ConfigMap kube-flannel-cfg), without --ip-masq, reboot: its rules stay"}},
		{name: "kindnet's", nft: kindnet, counted: 1,
			set:  func(h *testHost) { h.policies[0].NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "192.168.0.0/16") },
			want: map[string]string{"problem foreign-masquerade": "table kindnet-ipmasq, chain postrouting: masquerade: applies to 169.254.0.0/16, 10.0.0.0/8, 192.168.0.0/16, not kind's kindnetd, --masquerading=false"}},
		{name: "those of kind's kindnetd", rules: ":KIND-MASQ-AGENT -\n-A POSTROUTING -m addrtype ! --dst-type LOCAL -j KIND-MASQ-AGENT\n-A KIND-MASQ-AGENT -d 10.244.0.0/16 -j RETURN\n-A KIND-MASQ-AGENT -j MASQUERADE", counted: 1,
			want: map[string]string{"problem foreign-masquerade": "-A KIND-MASQ-AGENT -j MASQUERADE, kind's kindnetd always masquerades, disableDefaultCNI, no longer apply to the traffic of pods to exempt destinations"}},
		{name: "kindnet's, of what it exempts too", nft: kindnet,
			set: func(h *testHost) {
				h.policies[0].NonMasqueradeCIDRs, h.policies[0].MasqLinkLocal = prefixes("10.244.0.0/16", "10.96.0.0/16"), new(true)
			}},
		{name: "that enforceExempt precedes", rules: "-A POSTROUTING -o eth0 -j MASQUERADE", nft: enforced,
			set: func(h *testHost) {
				h.policies[0].EnforceExempt, h.policies[0].PodCIDRs = new(true), prefixes("10.244.0.0/16")
			}},
		{name: "that precede enforceExempt", nft: "table ip x {\nchain p {\ntype nat hook postrouting priority 99\nip daddr 10.1.0.0/16 masquerade\n}\n}", counted: 1,
			set: func(h *testHost) {
				h.policies[0].EnforceExempt, h.policies[0].PodCIDRs = new(true), prefixes("10.244.0.0/16")
			},
			want: map[string]string{"problem foreign-masquerade": "table x, chain p: ip daddr 10.1.0.0/16 masquerade"}},
		{name: "of sources that are exempt, which enforceExempt does not bind", rules: "-A POSTROUTING -s 10.244.1.0/25 -d 8.8.8.8 -j MASQUERADE", counted: 1,
			set: func(h *testHost) {
				h.policies[0].EnforceExempt, h.policies[0].PodCIDRs = new(true), prefixes("10.244.0.0/16")
				h.policies[0].NonMasqueradeSourceCIDRs = prefixes("10.244.1.0/25")
			},
			want: map[string]string{"problem foreign-masquerade": "applies to all from 10.244.1.0/25"}},
		{name: "of IPv6, which is not managed", rules6: "-A POSTROUTING -j MASQUERADE"},
		{name: "of IPv6", rules6: "-A POSTROUTING -j MASQUERADE", counted: 1,
			set: func(h *testHost) {
				h.policies[0].EnableIPv6, h.policies[0].NonMasqueradeCIDRs = new(true), prefixes("10.0.0.0/8", "fd00::/8")
			},
			want: map[string]string{"problem foreign-masquerade": "ipv6, table nat, applies to fe80::/10, fd00::/8"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			feed(t, "ip link add eth0 type bridge\nip link set eth0 up\nip address add 192.0.2.10/24 dev eth0\n"+
				"ip route add default via 192.0.2.1\nip -6 route add default dev eth0\n", "sh", "-e")
			if tc.rules != "" {
				feed(t, "*nat\n"+tc.rules+"\nCOMMIT\n", "iptables-nft-restore", "--noflush")
			}
			if tc.rules6 != "" {
				feed(t, "*nat\n"+tc.rules6+"\nCOMMIT\n", "ip6tables-nft-restore", "--noflush")
			}
			feed(t, tc.nft, "nft", "-f", "-")
			h := newHost(t)
			if tc.set != nil {
				tc.set(h)
			}
			n := h.node()
			compare(t, tc.want, Examine(n))
			assert.Equal(t, "rules that are counted", assert.Must(CountThirdParty(n))(t), tc.counted)
		})
	}
}

// TestMixedVariantsInKernel has rules in both variants.
func TestMixedVariantsInKernel(t *testing.T) {
	const own = "-A POSTROUTING -m addrtype ! --dst-type LOCAL -j " + policy.DefaultChain + "\n" +
		"-A " + policy.DefaultChain + " -j MASQUERADE\n"
	const third = "-A POSTROUTING -d 10.0.0.0/8 -j RETURN\n"
	for name, tc := range map[string]struct {
		nft, legacy string
		choice      string // of ip-masq
		want        map[string]string
	}{
		"third-party rules in both": {nft: third, legacy: third, choice: netfilter.VariantNFT,
			want: map[string]string{"notice mixed-iptables": "iptables-nft (1.8.9) has 1 rules, iptables-legacy (1.8.9) has 1 rules"}},
		"legacy has those of ip-masq": {nft: third, legacy: own, choice: netfilter.VariantLegacy},
		"legacy has more than those of ip-masq": {nft: third, legacy: third + own, choice: netfilter.VariantLegacy,
			want: map[string]string{"notice mixed-iptables": "iptables-nft (1.8.9) has 1 rules, iptables-legacy (1.8.9) has 3 rules"}},
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			const chain = ":" + policy.DefaultChain + " -\n"
			feed(t, "*nat\n"+chain+tc.legacy+"COMMIT\n", "iptables-legacy-restore", "--noflush")
			feed(t, "*nat\n"+tc.nft+"COMMIT\n", "iptables-nft-restore", "--noflush")
			h := newHost(t)
			h.choice.Variant = tc.choice
			compare(t, tc.want, h.examine())
		})
	}
}
