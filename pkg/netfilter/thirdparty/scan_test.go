// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

var isolate, feed = sandbox.NetworkNamespace, sandbox.Feed

// restore loads lines into table nat of a variant of iptables.
func restore(t *testing.T, f policy.Family, variant string, lines ...string) {
	t.Helper()
	program := map[policy.Family]string{policy.IPv4: "iptables", policy.IPv6: "ip6tables"}[f] + "-" + variant + "-restore"
	feed(t, "*nat\n"+strings.Join(lines, "\n")+"\nCOMMIT\n", program, "--noflush")
}

func owned(p Place) bool {
	return p.Table == "nat" && p.Chain == "OURS" || p.Table == "ip-masq" || p.Owner.DataDir == "/state"
}

func scanned(t *testing.T) []Rule {
	t.Helper()
	return assert.Must(Scan(owned))(t)
}

// shown writes rules without what each of a test has in common.
func shown(rules []Rule) []string {
	var out []string
	for _, r := range rules {
		_, text, _ := strings.Cut(r.Text, ", chain ")
		if to := r.Destinations(nil); !to.Equal(policy.RangesOf(r.Family.All()).Intersect(r.Match.To)) {
			text += " => " + r.side("to", to)
		}
		out = append(out, text)
	}
	return out
}

// TestIPTables has what is found on nodes, in both variants, which must say the
// same.
func TestIPTables(t *testing.T) {
	for _, tc := range []struct {
		name  string
		rules []string
		want  []string
	}{
		{name: "nothing", rules: []string{"-A POSTROUTING -d 10.0.0.0/8 -j RETURN"}},
		{name: "docker", rules: []string{"-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"},
			want: []string{"POSTROUTING: from 172.17.0.0/16 not out docker0 masquerade"}},
		{name: "docker's port", rules: []string{"-A POSTROUTING -s 172.17.0.2/32 -d 172.17.0.2/32 -p tcp -m tcp --dport 80 -j MASQUERADE"},
			want: []string{"POSTROUTING: from 172.17.0.2/32 to 172.17.0.2/32 tcp masquerade; not decoded: the transport header"}},
		{name: "kube-proxy", rules: []string{":KUBE-POSTROUTING -", `-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING`,
			"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN", "-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000",
			`-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully`}},
		{name: "kube-proxy of old", rules: []string{":KUBE-POSTROUTING -", "-A POSTROUTING -j KUBE-POSTROUTING",
			"-A KUBE-POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE"}},
		{name: "masquerade all", rules: []string{":KUBE-POSTROUTING -", "-A POSTROUTING -j KUBE-POSTROUTING", "-A KUBE-POSTROUTING -j MASQUERADE"},
			want: []string{"KUBE-POSTROUTING: masquerade"}},
		{name: "kubenet", rules: []string{`-A POSTROUTING ! -d 10.0.0.0/8 -m comment --comment "kubenet: SNAT for outbound traffic from cluster" ` +
			"-m addrtype ! --dst-type LOCAL -j MASQUERADE"},
			want: []string{`POSTROUTING: not to 10.0.0.0/8 masquerade ("kubenet: SNAT for outbound traffic from cluster")`}},
		{name: "portmap", rules: []string{":CNI-HOSTPORT-MASQ -", `-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ`,
			"-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE"}},
		{name: "bridge with ipMasq", rules: []string{":CNI-0123 -", "-A POSTROUTING -s 10.244.0.5/32 -j CNI-0123", "-A CNI-0123 -d 10.244.0.0/24 -j ACCEPT",
			"-A CNI-0123 ! -d 224.0.0.0/4 -j MASQUERADE"},
			want: []string{"CNI-0123: from 10.244.0.5/32 not to 224.0.0.0/4 masquerade => not to {10.244.0.0/24, 224.0.0.0/4}"}},
		{name: "flannel", rules: []string{":FLANNEL-POSTRTG -", "-A POSTROUTING -j FLANNEL-POSTRTG", "-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN",
			"-A FLANNEL-POSTRTG -s 10.244.0.0/24 -d 10.244.0.0/16 -j RETURN", "-A FLANNEL-POSTRTG -s 10.244.0.0/16 -d 10.244.0.0/24 -j RETURN",
			"-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.0.0/24 -j RETURN", "-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE",
			"-A FLANNEL-POSTRTG ! -s 10.244.0.0/16 -d 10.244.0.0/16 -j MASQUERADE"},
			want: []string{"FLANNEL-POSTRTG: from 10.244.0.0/16 not to 224.0.0.0/4 masquerade => not to {10.244.0.0/24, 224.0.0.0/4}",
				"FLANNEL-POSTRTG: not from 10.244.0.0/16 to 10.244.0.0/16 masquerade => to 10.244.1.0-10.244.255.255"}},
		{name: "an agent", rules: []string{":AGENT -", "-A POSTROUTING -m addrtype ! --dst-type LOCAL -j AGENT", "-A AGENT -d 169.254.0.0/16 -j RETURN",
			"-A AGENT -d 10.0.0.0/8 -j RETURN", "-A AGENT -j MASQUERADE --random-fully"},
			want: []string{"AGENT: masquerade => not to {10.0.0.0/8, 169.254.0.0/16}"}},
		{name: "accepted in part only", rules: []string{"-A POSTROUTING -p tcp -d 10.0.0.0/8 -j ACCEPT", "-A POSTROUTING -o eth0 -j ACCEPT", "-A POSTROUTING -j MASQUERADE"},
			want: []string{"POSTROUTING: masquerade"}},
		{name: "unread before it", rules: []string{"-A POSTROUTING -d 10.0.0.0/8 -m policy --pol ipsec --dir out -j ACCEPT", "-A POSTROUTING -d 11.0.0.0/8 -j MASQUERADE", "-A POSTROUTING -j MASQUERADE"},
			want: []string{"POSTROUTING: to 11.0.0.0/8 masquerade", "POSTROUTING: masquerade; not decoded: an earlier rule => not to 11.0.0.0/8"}},
		{name: "return that is not decoded", rules: []string{":A -", "-A POSTROUTING -j A", "-A POSTROUTING -d 10.0.0.0/8 -j MASQUERADE",
			"-A A -m policy --pol ipsec --dir out -j RETURN", "-A A -j ACCEPT"},
			want: []string{"POSTROUTING: to 10.0.0.0/8 masquerade; not decoded: an earlier rule"}},
		{name: "snat", rules: []string{"-A POSTROUTING -s 10.0.0.0/8 ! -d 10.0.0.0/8 -o eth+ -j SNAT --to-source 192.0.2.1"},
			want: []string{"POSTROUTING: from 10.0.0.0/8 not to 10.0.0.0/8 out eth+ snat"}},
		{name: "never", rules: []string{":A -", "-A POSTROUTING -o eth0 -s 10.0.0.0/8 -j A", "-A A -o docker0 -j MASQUERADE", "-A A -s 11.0.0.0/8 -j MASQUERADE", "-A A ! -o eth+ -j MASQUERADE",
			":T -", "-A POSTROUTING -p tcp -j T", "-A T -p udp -j MASQUERADE"}},
		{name: "narrowed twice", rules: []string{":A -", "-A POSTROUTING -o eth+ -s 10.0.0.0/8 -p tcp -j A", "-A A -o eth0 -s 10.1.0.0/16 -m statistic --mode random --probability 0.5 -j MASQUERADE"},
			want: []string{"A: from 10.1.0.0/16 out eth0 tcp masquerade; not decoded: a random choice"}},
		{name: "unmarked packets", rules: []string{"-A POSTROUTING -d 10.0.0.0/8 -m mark --mark 0x0/0x1 -j MASQUERADE", "-A POSTROUTING -m mark ! --mark 0x1 -j MASQUERADE"},
			want: []string{"POSTROUTING: to 10.0.0.0/8 masquerade", "POSTROUTING: masquerade => not to 10.0.0.0/8"}},
		{name: "not exact", rules: []string{"-A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE",
			"-A POSTROUTING -p icmp -j MASQUERADE", "-A POSTROUTING ! -p tcp -j MASQUERADE", "-A POSTROUTING -d 10.0.0.0/255.1.255.0 -j MASQUERADE",
			"-A POSTROUTING -m addrtype --src-type LOCAL -j MASQUERADE", "-A POSTROUTING -m addrtype --dst-type LOCAL -j MASQUERADE",
			"-A POSTROUTING -m statistic --mode nth --every 2 --packet 0 -j MASQUERADE"},
			want: []string{"POSTROUTING: masquerade; not decoded: match conntrack",
				"POSTROUTING: masquerade; not decoded: protocol 1", "POSTROUTING: masquerade; not decoded: protocol 6",
				"POSTROUTING: masquerade; not decoded: destination under a mask that is no prefix's",
				"POSTROUTING: masquerade; not decoded: the node's own addresses",
				"POSTROUTING: masquerade; not decoded: match statistic"}},
		{name: "of the node itself", rules: []string{"-A POSTROUTING -m addrtype --src-type LOCAL -j ACCEPT", "-A POSTROUTING -m addrtype --dst-type LOCAL -j ACCEPT", "-A POSTROUTING -j MASQUERADE"},
			want: []string{"POSTROUTING: masquerade"}},
		{name: "owned, says a comment", rules: []string{":A -", "-A POSTROUTING -j A", "-A A -d 10.0.0.0/8 -j MASQUERADE",
			"-A A -j MASQUERADE -m comment --comment \"ip-masq/1 keeps its state in /state\"", "-A POSTROUTING -d 11.0.0.0/8 -j MASQUERADE"},
			want: []string{"POSTROUTING: to 11.0.0.0/8 masquerade"}},
		{name: "owned by another, says a comment", rules: []string{":A -", "-A POSTROUTING -j A", "-A A -j MASQUERADE -m comment --comment \"ip-masq/1 keeps its state in /elsewhere\""},
			want: []string{`A: masquerade ("ip-masq/1 keeps its state in /elsewhere")`}},
		{name: "owned chain between", rules: []string{":OURS -", "-A POSTROUTING -d 10.0.0.0/8 -j MASQUERADE", "-A POSTROUTING -j OURS", "-A POSTROUTING -d 11.0.0.0/8 -j MASQUERADE", "-A OURS -j MASQUERADE"},
			want: []string{"POSTROUTING: to 10.0.0.0/8 masquerade", "POSTROUTING: to 11.0.0.0/8 masquerade"}},
	} {
		for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
			t.Run(tc.name+"/"+variant, func(t *testing.T) {
				isolate(t)
				restore(t, policy.IPv4, variant, tc.rules...)
				rules := scanned(t)
				assert.Equal(t, "rules", shown(rules), tc.want)
				for _, r := range rules {
					if r.Backend != policy.IPTables || r.Variant != variant || r.Family != policy.IPv4 || r.Table != "nat" || r.Exact != (len(r.Unread) == 0) {
						t.Errorf("%+v", r)
					}
				}
			})
		}
	}
}

func TestIPv6(t *testing.T) {
	for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
		t.Run(variant, func(t *testing.T) {
			isolate(t)
			restore(t, policy.IPv6, variant, "-A POSTROUTING -s fd00:1::/64 ! -d fd00::/8 ! -o docker0 -j MASQUERADE", "-A POSTROUTING -d 2001:db8::7/128 -p tcp -j SNAT --to-source 2001:db8::1")
			want := []string{"POSTROUTING: from fd00:1::/64 not to fd00::/8 not out docker0 masquerade", "POSTROUTING: to 2001:db8::7/128 tcp snat"}
			rules := scanned(t)
			if diff := cmp.Diff(want, shown(rules)); diff != "" || rules[0].Family != policy.IPv6 || rules[0].Variant != variant {
				t.Errorf("(-want +got):\n%s\n%+v", diff, rules)
			}
		})
	}
}

func TestNFT(t *testing.T) {
	for _, tc := range []struct {
		name, script string
		want         []string
	}{
		{"plain", `table ip t { chain p { type nat hook postrouting priority 100; ip saddr 10.244.0.0/16 ip daddr != 10.0.0.0/8 oifname "eth*" masquerade comment "mine"; }
}`,
			[]string{`nftables, ipv4, table t, chain p: from 10.244.0.0/16 not to 10.0.0.0/8 out eth+ masquerade ("mine")`}},
		{"sets", `table ip t {
			set pods { type ipv4_addr; flags interval; elements = { 10.1.0.0/16, 10.3.0.0-10.3.0.9 }
}
			chain p { type nat hook postrouting priority 100; ip saddr @pods ip daddr != { 10.0.0.0/8, 192.168.0.0/16 } oif lo masquerade; }
}`,
			[]string{"nftables, ipv4, table t, chain p: from {10.1.0.0/16, 10.3.0.0-10.3.0.9} not to {10.0.0.0/8, 192.168.0.0/16} out lo masquerade"}},
		{"ranges", `table ip t { chain p { type nat hook postrouting priority 100; ip saddr 10.0.0.1-10.0.0.9 ip daddr != 10.0.1.1-10.0.1.9 oifname != "docker0" snat to 192.0.2.1; ip daddr > 224.0.0.0 ip protocol udp masquerade; }
}`,
			[]string{"nftables, ipv4, table t, chain p: from 10.0.0.1-10.0.0.9 not out docker0 snat; not decoded: destination, range",
				"nftables, ipv4, table t, chain p: udp masquerade; not decoded: destination of another comparison"}},
		{"inet", `table inet t { chain p { type nat hook postrouting priority -5; ip daddr 10.0.0.0/8 masquerade; ip6 daddr fd00::/8 masquerade; meta nfproto ipv6 oifname "x" masquerade; oifname "y" masquerade; }
}`,
			[]string{"nftables, ipv4, table t, chain p: to 10.0.0.0/8 masquerade", "nftables, ipv4, table t, chain p: out y masquerade",
				"nftables, ipv6, table t, chain p: to fd00::/8 masquerade", "nftables, ipv6, table t, chain p: out x masquerade", "nftables, ipv6, table t, chain p: out y masquerade"}},
		{"jumps", `table ip t { chain b { accept; }
chain a { ip daddr 10.0.0.0/8 jump b; log prefix "x" masquerade; }
chain p { type nat hook postrouting priority 100; ip saddr 10.1.0.0/16 goto a; masquerade; }
}`,
			[]string{"nftables, ipv4, table t, chain a: from 10.1.0.0/16 masquerade", "nftables, ipv4, table t, chain p: masquerade"}},
		{"kube-proxy", `table ip kube-proxy { chain masquerading { meta mark & 0x4000 == 0 return; meta mark set mark xor 0x4000; masquerade fully-random; }
			chain p { type nat hook postrouting priority 100; jump masquerading; }
}`, nil},
		{"marks", `table ip t { chain p { type nat hook postrouting priority 100; meta mark 0x7 masquerade; meta mark != 0x7 masquerade; }
}`,
			[]string{"nftables, ipv4, table t, chain p: masquerade"}},
		{"unread", `table ip t { set s { type ipv4_addr . ipv4_addr; }
chain p { type nat hook postrouting priority 100; ip saddr 10.0.0.0/8 ct state new masquerade; ip saddr . ip daddr @s masquerade; tcp dport 80 masquerade; fib daddr type local masquerade; fib saddr type != local fib daddr type != local masquerade;}
}`,
			[]string{"nftables, ipv4, table t, chain p: from 10.0.0.0/8 masquerade",
				`nftables, ipv4, table t, chain p: masquerade; not decoded: set "s"`,
				"nftables, ipv4, table t, chain p: tcp masquerade; not decoded: the transport header",
				"nftables, ipv4, table t, chain p: from non-local masquerade"}},
		{"states", `table ip t { chain p { type nat hook postrouting priority 100; ct state established,related accept; ct state != new masquerade; ct status dnat accept; ct state new snat to 192.0.2.1; }
}`,
			[]string{"nftables, ipv4, table t, chain p: snat; not decoded: an earlier rule"}},
		{"kindnet", `table inet kindnet-ipmasq { set noMasqV4 { type ipv4_addr; flags interval; auto-merge; elements = { 10.96.0.0/12, 10.244.0.0/16 }
}
set noMasqV6 { type ipv6_addr; flags interval; auto-merge; elements = { fd00:10:244::/56 }
}
chain postrouting { type nat hook postrouting priority srcnat - 10; ct state established,related accept; fib daddr type local accept
ip daddr @noMasqV4 accept; ip6 daddr @noMasqV6 accept; masquerade
}
}`,
			[]string{"nftables, ipv4, table kindnet-ipmasq, chain postrouting: masquerade", "nftables, ipv6, table kindnet-ipmasq, chain postrouting: masquerade"}},
		{"unread, too", `table ip t { chain p { type nat hook postrouting priority 100; meta iifname "a" masquerade; ip daddr & 255.0.255.0 == 10.0.1.0 masquerade; ip saddr 10.0.0.0/8 ct mark 0x0a010000 masquerade; }
}`,
			[]string{"nftables, ipv4, table t, chain p: masquerade; not decoded: iifname", "nftables, ipv4, table t, chain p: masquerade; not decoded: destination under a mask that is no prefix's",
				"nftables, ipv4, table t, chain p: from 10.0.0.0/8 masquerade; not decoded: ct"}},
		{"snat", `table ip t { set s { type ipv4_addr . ipv4_addr; flags dynamic,timeout; timeout 1m; }
map m { type ipv4_addr : ipv4_addr; }
chain p { type nat hook postrouting priority 100; ip daddr 10.1.0.0/16 snat to 192.0.2.1-192.0.2.9; ip daddr 10.0.0.0/8 snat to ip saddr; update @s { ip saddr . ip saddr } masquerade; ip daddr 11.0.0.0/8 snat to ip saddr map @m; }
}`,
			[]string{"nftables, ipv4, table t, chain p: to 10.1.0.0/16 snat", "nftables, ipv4, table t, chain p: to 10.0.0.0/8 snat",
				"nftables, ipv4, table t, chain p: masquerade; not decoded: dynset, source", "nftables, ipv4, table t, chain p: to 11.0.0.0/8 snat; not decoded: lookup, source"}},
		{"elsewhere", `table ip t { chain p { type nat hook output priority 100; }
chain f { type filter hook postrouting priority 100; }
chain z { masquerade; }
}
			table ip d { flags dormant; chain p { type nat hook postrouting priority 100; masquerade; }
}`, nil},
		{"owned table among others", `table ip ip-masq { chain m { masquerade; }
chain postrouting { type nat hook postrouting priority 101; jump m; }
}
			table ip a { chain p { type nat hook postrouting priority 100; ip daddr 10.0.0.0/8 masquerade; }
}
			table ip b { chain p { type nat hook postrouting priority 101; ip daddr 10.0.0.0/8 masquerade; }
}
			table ip c { chain p { type nat hook postrouting priority 102; ip daddr 10.0.0.0/8 masquerade; }
}`,
			[]string{"nftables, ipv4, table a, chain p: to 10.0.0.0/8 masquerade", "nftables, ipv4, table b, chain p: to 10.0.0.0/8 masquerade",
				"nftables, ipv4, table c, chain p: to 10.0.0.0/8 masquerade"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			feed(t, tc.script, "nft", "-f", "-")
			var got []string
			for _, r := range scanned(t) {
				got = append(got, r.Text)
			}
			assert.Equal(t, "got", got, tc.want)
		})
	}
}

// TestNothingIsWritten scans an empty namespace, in which a table of
// iptables-legacy would be created by asking for one.
func TestNothingIsWritten(t *testing.T) {
	isolate(t)
	if rules := scanned(t); len(rules) != 0 {
		t.Errorf("found %v", rules)
	}
	if used, err := Variants(func(netfilter.Choice, string) bool { return false }); err != nil || len(used) > 0 {
		t.Errorf("variants %v, %v", used, err)
	}
	for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
		if tables, err := os.ReadFile("/proc/thread-self/net/" + name); err == nil && len(tables) > 0 {
			t.Errorf("%s: %s", name, tables)
		}
	}
	if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("ruleset: %s, %v", out, err)
	}
}

func TestVariants(t *testing.T) {
	isolate(t)
	restore(t, policy.IPv4, netfilter.VariantNFT, ":A -", "-A A -j RETURN", "-A POSTROUTING -j A")
	restore(t, policy.IPv6, netfilter.VariantLegacy, ":A -", "-A A -j RETURN", "-A OUTPUT -j A", "-A POSTROUTING -j A")
	got, err := Variants(func(netfilter.Choice, string) bool { return false })
	if diff := cmp.Diff(map[string]int{"nft": 2, "legacy": 3}, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// TestLongChain: a chain of an agent with many prefixes, which each scrape of the metrics walks through.
func TestLongChain(t *testing.T) {
	isolate(t)
	lines := []string{":AGENT -"}
	for i := range 5000 {
		lines = append(lines, fmt.Sprintf("-A AGENT -d 10.%d.%d.0/25 -j RETURN", i/256, i%256))
	}
	restore(t, policy.IPv4, netfilter.VariantNFT, append(lines, "-A AGENT -j MASQUERADE", "-A POSTROUTING -j AGENT")...)
	began := time.Now()
	if rules, took := scanned(t), time.Since(began); len(rules) != 1 || took > 5*time.Second {
		t.Errorf("%d rules after %v", len(rules), took)
	}
}
