// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// kubeProxyNFT is a part of kube-proxy's table in nftables mode.
const kubeProxyNFT = `table ip kube-proxy {
	map service-nodeports { type inet_proto . inet_service : verdict
		elements = { tcp . 30080 : goto external-X, udp . 30053 : goto external-X }
	}
	chain external-X { jump mark-for-masquerade; }
	chain mark-for-masquerade { mark set mark or 0x4000; }
	chain nodeports { meta l4proto . th dport vmap @service-nodeports; }
}`

func TestReadServices(t *testing.T) {
	kubeProxy := []string{":KUBE-MARK-MASQ -", ":KUBE-NODEPORTS -", ":KUBE-EXT-X -",
		"-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000", "-A KUBE-EXT-X -j KUBE-MARK-MASQ",
		`-A KUBE-NODEPORTS -p tcp -m comment --comment "default/web:http" -m tcp --dport 30080 -j KUBE-EXT-X`,
		"-A KUBE-NODEPORTS -d 127.0.0.0/8 -p udp -m udp --dport 30053 -j KUBE-EXT-X",
		"-A KUBE-NODEPORTS -p tcp -m tcp --sport 1000 --dport 30000:30100 -j KUBE-EXT-X"}
	portmap := []string{":CNI-HOSTPORT-SETMARK -", `-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000`}
	for _, tc := range []struct {
		name  string
		write func(*testing.T)
		marks []string
		ports []uint16
	}{
		{name: "nothing", write: func(*testing.T) {}},
		{"iptables-nft", func(t *testing.T) { restore(t, policy.IPv4, netfilter.VariantNFT, append(kubeProxy, portmap...)...) },
			[]string{"0x4000 in iptables (nft), ipv4, table nat, chain KUBE-MARK-MASQ", "0x2000 in iptables (nft), ipv4, table nat, chain CNI-HOSTPORT-SETMARK"}, []uint16{30053, 30080}},
		{"iptables-legacy", func(t *testing.T) { restore(t, policy.IPv4, netfilter.VariantLegacy, append(kubeProxy, portmap...)...) },
			[]string{"0x4000 in iptables (legacy), ipv4, table nat, chain KUBE-MARK-MASQ", "0x2000 in iptables (legacy), ipv4, table nat, chain CNI-HOSTPORT-SETMARK"}, []uint16{30053, 30080}},
		{"IPv6, another mark", func(t *testing.T) {
			restore(t, policy.IPv6, netfilter.VariantNFT, ":KUBE-MARK-MASQ -", "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x80000000/0x80000000")
		}, []string{"0x80000000 in iptables (nft), ipv6, table nat, chain KUBE-MARK-MASQ"}, nil},
		{"nftables", func(t *testing.T) { feed(t, kubeProxyNFT, "nft", "-f", "-") },
			[]string{"0x4000 in nftables, ipv4, table kube-proxy, chain mark-for-masquerade"}, []uint16{30053, 30080}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			tc.write(t)
			got, err := ReadServices(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var marks []string
			for _, m := range got.Marks {
				marks = append(marks, m.Bits.String()+" in "+m.Name())
			}
			if diff := cmp.Diff(tc.marks, marks); diff != "" {
				t.Errorf("marks (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.ports, got.NodePorts); diff != "" {
				t.Errorf("node ports (-want +got):\n%s", diff)
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
	rules, err := Untracked(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, r := range rules {
		got = append(got, r.Text)
	}
	var want []string
	for _, variant := range []string{"legacy", "nft"} {
		want = append(want, "iptables ("+variant+"), ipv4, table raw, chain CILIUM_PRE_raw: from 10.244.0.0/16 notrack",
			"iptables ("+variant+"), ipv4, table raw, chain PREROUTING: to 169.254.20.10/32 udp notrack; not decoded: the transport header")
	}
	want = append(want, "nftables, ipv4, table x, chain early: from 10.7.0.0/16 notrack")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestAccepted(t *testing.T) {
	for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
		t.Run(variant, func(t *testing.T) {
			isolate(t)
			restore(t, policy.IPv4, variant, ":OURS -", ":A -", "-A POSTROUTING -m policy --pol ipsec --dir out -j ACCEPT", "-A POSTROUTING -j A",
				"-A A -d 10.1.0.0/16 -j RETURN", "-A A -s 10.2.0.0/16 -j ACCEPT", "-A POSTROUTING -o eth+ -j OURS",
				"-A POSTROUTING -d 10.3.0.0/16 -j RETURN", "-A POSTROUTING -o wg0 -j OURS", "-A POSTROUTING -d 10.4.0.0/16 -j ACCEPT", "-A OURS -j MASQUERADE")
			feed(t, "table ip other { chain p { type nat hook postrouting priority 90; accept; }\n}", "nft", "-f", "-")
			rules, err := Accepted(t.Context(), owned)
			if err != nil {
				t.Fatal(err)
			}
			want := []string{"POSTROUTING: accept; not decoded: match policy",
				"A: from 10.2.0.0/16 accept; not decoded: an earlier rule => not to 10.1.0.0/16", "POSTROUTING: to 10.3.0.0/16 return; not decoded: an earlier rule"}
			if diff := cmp.Diff(want, shown(rules)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}
