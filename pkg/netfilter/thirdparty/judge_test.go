// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
	program := "iptables-" + variant + "-restore"
	if f == policy.IPv6 {
		program = "ip6tables-" + variant + "-restore"
	}
	feed(t, "*nat\n"+strings.Join(lines, "\n")+"\nCOMMIT\n", program, "--noflush")
}

// isOURS makes the chain OURS of table nat an owned one, and the table ip-masq.
func isOURS(p Place) bool {
	return p.Table == "nat" && p.Chain == "OURS" || p.Table == "ip-masq" || p.Owner.DataDir == "/state"
}

func ruleset(t *testing.T, f policy.Family) *Ruleset {
	t.Helper()
	return assert.Must(ReadPostrouting(f, isOURS))(t)
}

// answer writes a verdict: each possible fate with its rule, as the tool prints it.
func answer(v Verdict) string {
	var texts []string
	for _, o := range v.Outcomes {
		text := string(o.Fate)
		if o.Rule != nil {
			text = o.Rule.text()
		}
		texts = append(texts, text)
	}
	for _, r := range v.Bypasses {
		texts = append(texts, "kept by "+r.text())
	}
	return strings.Join(texts, " | ")
}

// pod is a packet of a pod to an address.
func pod(to string) Packet {
	return Packet{Src: netip.MustParsePrefix("10.244.0.5/32"), Dst: HostPrefix(netip.MustParseAddr(to)), Out: "eth0", OutIndex: 7}
}

func ownedBinds(Place) Answer { return Yes }

// TestJudgeIPTables has rules of programs, which are judged alike in both variants.
func TestJudgeIPTables(t *testing.T) {
	const masquerade = "-A POSTROUTING -j MASQUERADE"
	for _, tc := range []struct {
		name  string
		rules []string
		want  string // of a packet from 10.244.0.5 to 10.9.9.9 through eth0
	}{
		{"nothing", []string{"-A POSTROUTING -d 10.0.0.0/8 -j RETURN"}, "untouched"},
		{"masquerading", []string{masquerade}, masquerade},
		{"Docker", []string{"-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE"}, "untouched"},
		{"of pods", []string{"-A POSTROUTING -s 10.244.0.0/16 ! -o docker0 -j MASQUERADE"}, "-A POSTROUTING -s 10.244.0.0/16 ! -o docker0 -j MASQUERADE"},
		{"another interface", []string{"-A POSTROUTING -o wg0 -j MASQUERADE"}, "untouched"},
		{"a wildcard", []string{"-A POSTROUTING -o eth+ -j MASQUERADE"}, "-A POSTROUTING -o eth+ -j MASQUERADE"},
		{"not a wildcard", []string{"-A POSTROUTING ! -o eth+ -j MASQUERADE"}, "untouched"},
		{"TCP", []string{"-A POSTROUTING -p tcp -j MASQUERADE"}, "-A POSTROUTING -p tcp -j MASQUERADE | untouched"},
		{"all protocols", []string{"-A POSTROUTING -p tcp -j MASQUERADE", masquerade}, "-A POSTROUTING -p tcp -j MASQUERADE | " + masquerade},
		{"a port", []string{"-A POSTROUTING -p tcp -m tcp --dport 80 -j MASQUERADE"}, "-A POSTROUTING -p tcp -m tcp --dport 80 -j MASQUERADE | untouched"},
		{"kube-proxy", []string{":KUBE-POSTROUTING -", "-A POSTROUTING -j KUBE-POSTROUTING",
			"-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN", "-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000",
			"-A KUBE-POSTROUTING -j MASQUERADE --random-fully"}, "untouched"},
		{"a mark that is set before", []string{"-A POSTROUTING -d 10.9.0.0/16 -j MARK --set-xmark 0x10/0x10", "-A POSTROUTING -m mark --mark 0x10/0x10 -j MASQUERADE"},
			"-A POSTROUTING -m mark --mark 0x10/0x10 -j MASQUERADE"},
		{"a mark that is set perhaps", []string{"-A POSTROUTING -p tcp -j MARK --set-xmark 0x10/0x10", "-A POSTROUTING -m mark --mark 0x10/0x10 -j MASQUERADE"},
			"-A POSTROUTING -m mark --mark 0x10/0x10 -j MASQUERADE | untouched"},
		{"a jump that is perhaps and comes back", []string{":A -", "-A POSTROUTING -p tcp -j A", "-A A -d 11.0.0.0/8 -j ACCEPT", masquerade}, masquerade},
		{"a return that is perhaps", []string{":A -", "-A POSTROUTING -j A", masquerade, "-A A -p tcp -j RETURN", "-A A -j ACCEPT"}, masquerade + " | untouched"},
		{"goto", []string{":A -", "-A POSTROUTING -g A", masquerade, "-A A -d 11.0.0.0/8 -j ACCEPT"}, "untouched"},
		{"not local", []string{"-A POSTROUTING -m addrtype ! --dst-type LOCAL -m addrtype --src-type LOCAL -j ACCEPT", masquerade}, masquerade},
		{"unknown matches", []string{"-A POSTROUTING -m policy --pol ipsec --dir out -j ACCEPT", masquerade}, masquerade + " | untouched"},
		{"the state", []string{"-A POSTROUTING -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-A POSTROUTING -m conntrack --ctstate NEW -j MASQUERADE"},
			"-A POSTROUTING -m conntrack … -j MASQUERADE"},
		{"to its own address", []string{"-A POSTROUTING -j SNAT --to-source 10.244.0.5"}, "-A POSTROUTING -j SNAT --to-source 10.244.0.5"},
		{"accepted before the owned chain", []string{":OURS -", "-A POSTROUTING -j ACCEPT", "-A POSTROUTING -j OURS"}, "untouched | kept by -A POSTROUTING -j ACCEPT"},
		{"accepted behind it", []string{":OURS -", "-A POSTROUTING -j OURS", "-A POSTROUTING -j ACCEPT"}, "owned"},
		{"owned, says a comment", []string{":A -", "-A POSTROUTING -j A", "-A A -d 10.0.0.0/8 -j MASQUERADE",
			"-A A -j MASQUERADE -m comment --comment \"" + policy.OwnedBy("/state").Comment() + "\""}, "owned"},
		{"a policy", []string{":POSTROUTING DROP [0:0]", "-A POSTROUTING -d 11.0.0.0/8 -j ACCEPT"}, "-P POSTROUTING DROP"},
		{"a comment", []string{`-A POSTROUTING -m comment --comment "kubenet: SNAT" -j MASQUERADE`}, `-A POSTROUTING -m comment --comment "kubenet: SNAT" -j MASQUERADE`},
	} {
		for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
			t.Run(tc.name+"/"+variant, func(t *testing.T) {
				isolate(t)
				restore(t, policy.IPv4, variant, tc.rules...)
				assert.Equal(t, "answer", answer(ruleset(t, policy.IPv4).Judge(pod("10.9.9.9"), ownedBinds)), tc.want)
			})
		}
	}
}

// TestJudgeNFT has rules in the syntax of nft.
func TestJudgeNFT(t *testing.T) {
	const base = "type nat hook postrouting priority srcnat; policy accept;"
	for _, tc := range []struct{ name, script, want string }{
		{"a verdict map of interfaces", `table ip x { chain d { masquerade; }
chain c { ` + base + ` oifname vmap { "eth0" : jump d } }
}`, "masquerade"},
		{"another interface in it", `table ip x { chain d { masquerade; }
chain c { ` + base + ` oifname vmap { "eth1" : jump d } }
}`, "untouched"},
		{"a negated interface", `table ip x { chain c { ` + base + ` oifname != "mgmt0" return; snat to 10.244.0.2 }
}`, "untouched"},
		{"a negated set", `table ip x { set s { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }
}
chain c { ` + base + ` ip daddr != @s masquerade }
}`, "untouched"},
		{"a concatenation with intervals", `table ip x { set s { type ipv4_addr . ifname; flags interval; elements = { 10.8.0.0/15 . "eth0" }
}
chain c { ` + base + ` ip daddr . oifname @s masquerade }
}`, "ip daddr . oifname @s masquerade"},
		{"a concatenation with another interface", `table ip x { set s { type ipv4_addr . ifname; flags interval; elements = { 10.8.0.0/15 . "eth1" }
}
chain c { ` + base + ` ip daddr . oifname @s masquerade }
}`, "untouched"},
		{"a port in a concatenation", `table ip x { set s { type ipv4_addr . inet_service; elements = { 10.9.9.9 . 80 }
}
chain c { ` + base + ` ip daddr . tcp dport @s masquerade }
}`, "ip daddr . tcp dport @s masquerade | untouched"},
		{"a map of addresses", `table ip x { map m { type ipv4_addr : ipv4_addr; elements = { 10.244.0.5 : 192.0.2.9 }
}
chain c { ` + base + ` snat to ip saddr map @m }
}`, "snat to ip saddr map @m"},
		{"a map of marks", `table ip x { map m { type ipv4_addr : mark; elements = { 10.9.9.9 : 0x10 }
}
chain c { ` + base + ` meta mark set ip daddr map @m; meta mark 0x10 masquerade }
}`, "meta mark 0x00000010 masquerade"},
		{"a range", `table ip x { chain c { ` + base + ` ip daddr 10.9.0.0-10.9.9.8 masquerade; ip daddr != 10.9.0.0-10.9.9.9 masquerade; ip daddr > 10.9.9.8 masquerade }
}`, "ip daddr > 10.9.9.8 masquerade"},
		{"the number of an interface", `table ip x { chain c { ` + base + ` oif lo masquerade }
}`, "untouched"},
		{"what adds to a set", `table ip x { set s { type ipv4_addr; flags dynamic; size 10; }
chain c { ` + base + ` add @s { ip saddr} ip daddr @s masquerade }
}`, "add @s { ip saddr } ip daddr @s masquerade | untouched"},
		{"priorities", `table ip x { chain c { type nat hook postrouting priority 300; masquerade comment "late"; }
}
table ip y { chain c { type nat hook postrouting priority -100; masquerade comment "early"; }
}`, `masquerade comment "early"`},
		{"two chains of one priority in a table", `table ip x { chain c { ` + base + ` masquerade comment "first" }
chain d { ` + base + ` masquerade comment "second" }
}`, `masquerade comment "second"`},
		{"two tables of one priority", `table ip x { chain c { ` + base + ` masquerade }
}
table ip y { chain c { ` + base + ` snat to 192.0.2.9 }
}`, "snat to 192.0.2.9 | masquerade"},
		{"a mark of another table of that priority", `table ip x { chain c { ` + base + ` meta mark 0x7 snat to 192.0.2.9 }
}
table ip y { chain c { ` + base + ` meta mark set 0x7 }
}
table ip z { chain c { ` + base + ` masquerade }
}`, "masquerade | meta mark 0x00000007 snat to 192.0.2.9"},
		{"a chain that may be called behind those of NAT", `table ip x { chain f { type filter hook postrouting priority 100; meta mark set 0x7 }
chain c { ` + base + ` meta mark 0x7 masquerade }
}`, "meta mark 0x00000007 masquerade | untouched"},
		{"a chain behind those of NAT", `table ip x { chain f { type filter hook postrouting priority 101; meta mark set 0x7 }
chain c { type nat hook postrouting priority 300; meta mark 0x7 masquerade }
}`, "untouched"},
		{"translation of IPv6 in a table of both families", `table inet x { chain c { ` + base + ` snat ip6 to 2001:db8::1; snat ip to 192.0.2.9 }
}`, "snat to 192.0.2.9"},
		{"a mark of an earlier chain", `table ip x { chain f { type filter hook postrouting priority mangle; meta mark set 0x7 }
chain c { ` + base + ` meta mark 0x7 masquerade }
}`, "meta mark 0x00000007 masquerade"},
		{"an address that is written", `table ip x { chain c { type filter hook postrouting priority mangle; ip saddr 10.244.0.5 ip saddr set 192.0.2.9 }
}`, "ip saddr 10.244.0.5 ip saddr set 192.0.2.9 | untouched"},
		{"an address that is written behind NAT", `table ip x { chain c { type filter hook postrouting priority 300; ip saddr set 192.0.2.9 }
chain d { ` + base + ` masquerade }
}`, "masquerade | ip saddr set 192.0.2.9"},
		{"an address that was translated before", `table ip x { chain c { type filter hook postrouting priority 300; ip saddr 192.0.2.8 ip saddr set 192.0.2.9 }
chain d { ` + base + ` snat to 192.0.2.8 }
}`, "snat to 192.0.2.8 | ip saddr 192.0.2.8 ip saddr set 192.0.2.9"},
		{"an address that was perhaps translated before", `table ip x { chain c { type filter hook postrouting priority 100; ip saddr 192.0.2.8 ip saddr set 192.0.2.9 }
chain d { ` + base + ` snat to 192.0.2.8 }
}`, "snat to 192.0.2.8 | ip saddr 192.0.2.8 ip saddr set 192.0.2.9"},
		{"an address that is written before a condition", `table ip x { chain c { type filter hook postrouting priority mangle; ip saddr set 192.0.2.9 ip daddr 11.0.0.0/8 accept }
}`, "ip saddr set 192.0.2.9 ip daddr 11.0.0.0/8 accept | untouched"},
		{"an address that is written before a map of others", `table ip x { chain c { type filter hook postrouting priority mangle; ip saddr set 192.0.2.77 }
chain d { type nat hook postrouting priority 100; policy drop; snat to ip saddr map { 10.244.0.5 : 192.0.2.5 } }
}`, "ip saddr set 192.0.2.77 | snat to ip saddr map { 10.244.0.5 : 192.0.2.5 } | policy drop"},
		{"another field that is written", `table ip x { chain c { type filter hook postrouting priority mangle; ip dscp set cs1; ip ttl set 64 }
}`, "untouched"},
		{"a map of verdicts that may continue", `table ip x { chain d { masquerade; }
chain c { ` + base + ` meta l4proto vmap { tcp : jump d, udp : continue } 
snat to 192.0.2.9 }
}`, "masquerade | snat to 192.0.2.9"},
		{"dormant", `table ip x { flags dormant; chain c { ` + base + ` masquerade }
}`, "untouched"},
		{"a policy", `table ip x { chain c { type nat hook postrouting priority srcnat; policy drop; ip daddr 11.0.0.0/8 accept }
}`, "policy drop"},
		{"both families", `table inet x { chain c { ` + base + ` meta nfproto ipv6 masquerade; ip6 daddr ::/0 masquerade; ip daddr 10.0.0.0/8 masquerade }
}`, "ip daddr 10.0.0.0/8 masquerade"},
		{"a type in a set", `table ip x { chain c { ` + base + ` fib daddr type { local, broadcast } masquerade; fib daddr type local masquerade; fib daddr type != local masquerade }
}`, "fib daddr type { local, broadcast } masquerade | fib daddr type != local masquerade"},
		{"what is in no element", `table ip x { chain d { masquerade; }
map m { type ipv4_addr : verdict; flags interval; elements = { 10.1.0.0/16 : accept, * : goto d } 
}
chain c { ` + base + ` ip daddr vmap @m }
}`, "masquerade"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			isolate(t)
			feed(t, strings.ReplaceAll(tc.script, " }", "\n}"), "nft", "-f", "-")
			p := pod("10.9.9.9")
			p.Src = netip.MustParsePrefix("10.244.0.5/32")
			assert.Equal(t, "answer", answer(ruleset(t, policy.IPv4).Judge(p, ownedBinds)), tc.want)
		})
	}
}

// TestJudgeIPv6 is about prefixes, of which not all bits are compared.
func TestJudgeIPv6(t *testing.T) {
	for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
		t.Run(variant, func(t *testing.T) {
			isolate(t)
			restore(t, policy.IPv6, variant, "-A POSTROUTING -s fd00:1::/64 ! -d fd00::/8 ! -o docker0 -j MASQUERADE",
				"-A POSTROUTING -d 2001:db8::7/128 -p tcp -j SNAT --to-source 2001:db8::1")
			judge := func(to string) string {
				p := Packet{Src: netip.MustParsePrefix("fd00:1::5/128"), Dst: HostPrefix(netip.MustParseAddr(to)), Out: "eth0"}
				return answer(ruleset(t, policy.IPv6).Judge(p, ownedBinds))
			}
			assert.Equal(t, "elsewhere", judge("2001:db8::7"), "-A POSTROUTING -s fd00:1::/64 ! -d fd00::/8 ! -o docker0 -j MASQUERADE")
			assert.Equal(t, "exempt", judge("fd00:9::9"), "untouched")
		})
	}
}

// TestPrefixTranslation has a target that translates without conntrack, in a table that has no NAT rules.
func TestPrefixTranslation(t *testing.T) {
	for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
		t.Run(variant, func(t *testing.T) {
			isolate(t)
			feed(t, "*mangle\n-A POSTROUTING -s fd00:1::/64 -j SNPT --src-pfx fd00:1::/64 --dst-pfx 2001:db8::/64\nCOMMIT\n", "ip6tables-"+variant+"-restore")
			p := Packet{Src: netip.MustParsePrefix("fd00:1::5/128"), Dst: HostPrefix(netip.MustParseAddr("2001:db8::7")), Out: "eth0"}
			assert.Equal(t, "answer", answer(ruleset(t, policy.IPv6).Judge(p, ownedBinds)), "-A POSTROUTING -s fd00:1::/64 -j SNPT … | untouched")
		})
	}
}

// TestNewAddress has translations to one address, to several, and of ports alone.
func TestNewAddress(t *testing.T) {
	for _, tc := range []struct{ rule, want string }{
		{"-j SNAT --to-source 192.0.2.9", "192.0.2.9/32"},
		{"-j SNAT --to-source 192.0.2.9-192.0.2.11", "192.0.2.8/30"},
		{"-p udp -j SNAT --to-source :1024-2000", "invalid Prefix"},
		{"-j NETMAP --to 192.0.2.0/28", "192.0.2.0/28"},
		{"-j SNAT --to-source 2001:db8::9", "2001:db8::9/128"},
		{"-j SNAT --to-source 2001:db8::9-2001:db8::b", "2001:db8::8/126"},
		{"-j NETMAP --to 2001:db8::/64", "2001:db8::/64"},
		{"snat to 192.0.2.9", "192.0.2.9/32"},
		{"snat to 192.0.2.9-192.0.2.11", "192.0.2.8/30"},
		{"meta l4proto udp snat to :1024-2000", "invalid Prefix"},
		{"snat to ip saddr", "10.244.0.5/32"},
	} {
		variants := []string{netfilter.VariantNFT, netfilter.VariantLegacy}
		if !strings.HasPrefix(tc.rule, "-") {
			variants = variants[:1]
		}
		for _, variant := range variants {
			t.Run(tc.rule+"/"+variant, func(t *testing.T) {
				isolate(t)
				p, f := pod("10.9.9.9"), policy.IPv4
				if strings.Contains(tc.rule, "2001") {
					f, p.Src, p.Dst = policy.IPv6, netip.MustParsePrefix("fd00::5/128"), netip.MustParsePrefix("fd00::7/128")
				}
				if strings.HasPrefix(tc.rule, "-") {
					restore(t, f, variant, "-A POSTROUTING "+tc.rule)
				} else {
					feed(t, "table ip x {\nchain c {\ntype nat hook postrouting priority 100\n"+tc.rule+"\n}\n}\n", "nft", "-f", "-")
				}
				assert.Equal(t, "address", ruleset(t, f).Judge(p, ownedBinds).Outcomes[0].To.String(), tc.want)
			})
		}
	}
}

// TestLocalSource has packets of the node itself: an address of another interface than the output interface is
// of the type UNICAST for --limit-iface-out.
func TestLocalSource(t *testing.T) {
	const limited = "-A POSTROUTING -m addrtype --src-type UNICAST --limit-iface-out -j MASQUERADE"
	for _, variant := range []string{netfilter.VariantNFT, netfilter.VariantLegacy} {
		t.Run(variant, func(t *testing.T) {
			isolate(t)
			restore(t, policy.IPv4, variant, limited, "-A POSTROUTING -m addrtype --src-type UNICAST -j SNAT --to-source 192.0.2.9",
				"-A POSTROUTING -m addrtype --src-type LOCAL -j ACCEPT", "-A POSTROUTING -j SNAT --to-source 192.0.2.8")
			p := pod("10.9.9.9")
			p.SrcLocal = Yes
			assert.Equal(t, "answer", answer(ruleset(t, policy.IPv4).Judge(p, ownedBinds)), "-A POSTROUTING -m addrtype --src-type UNICAST --limit-iface-out -j MASQUERADE | untouched")
		})
	}
}

// threadTime returns the processor time of the thread, which isolate keeps for the test.
func threadTime(t *testing.T) time.Duration {
	t.Helper()
	var used unix.Rusage
	assert.NoError(t, unix.Getrusage(unix.RUSAGE_THREAD, &used))
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// TestSearch finds each rule of thousands for the packets that only it is about.
func TestSearch(t *testing.T) {
	const most = time.Second
	isolate(t)
	lines := []string{}
	for i := range 4000 {
		lines = append(lines, fmt.Sprintf("-A POSTROUTING -s 10.244.0.0/16 -d 10.%d.%d.7/32 -j MASQUERADE", i/256, i%256))
	}
	restore(t, policy.IPv4, netfilter.VariantNFT, lines...)
	began := threadTime(t)
	steps := 10_000_000
	s := Search{
		Binds: ownedBinds, By: Source | Destination, Steps: &steps,
		Ask: func(p Packet, v Verdict) ([]*Rule, Answer) {
			return v.Against(func(o Outcome) Answer { return o.TranslatesExempt(p) })
		},
	}
	s.About(ruleset(t, policy.IPv4), Packet{Src: netip.MustParsePrefix("10.244.0.0/24"), Dst: netip.MustParsePrefix("10.0.0.0/8"), Out: "eth0"})
	took := threadTime(t) - began
	certain := 0
	for _, r := range s.Rules {
		if s.IsCertain(r) {
			certain++
		}
	}
	assert.Equal(t, "rules", certain, 4000)
	t.Logf("%v, %d steps", took, 10_000_000-steps)
	if took > most {
		t.Errorf("4000 rules took %v, want at most %v", took, most)
	}
}

// TestLargeSet reads a set once for all rules that use it.
func TestLargeSet(t *testing.T) {
	const most = time.Second
	isolate(t)
	var script strings.Builder
	script.WriteString("table ip x {\nset s { type ipv4_addr; elements = {\n")
	for i := range 60_000 {
		fmt.Fprintf(&script, "10.%d.%d.%d,\n", i>>16, i>>8&0xff, i&0xff)
	}
	script.WriteString("} }\nchain c { type nat hook postrouting priority 100;\n")
	for i := range 100 {
		fmt.Fprintf(&script, "ip saddr 192.0.2.%d ip daddr @s masquerade\n", i)
	}
	script.WriteString("}\n}\n")
	feed(t, script.String(), "nft", "-f", "-")
	began := threadTime(t)
	got := answer(ruleset(t, policy.IPv4).Judge(pod("10.0.0.7"), ownedBinds))
	took := threadTime(t) - began
	assert.Equal(t, "answer", got, "untouched")
	t.Logf("%v", took)
	if took > most {
		t.Errorf("100 rules with a set of 60,000 addresses took %v, want at most %v", took, most)
	}
}

// TestNothingIsWritten reads an empty namespace, in which a table of iptables-legacy would be created by
// asking for one.
func TestNothingIsWritten(t *testing.T) {
	isolate(t)
	for _, f := range policy.Families() {
		assert.Equal(t, "answer", len(ruleset(t, f).hooks), 0)
	}
	if used, err := Variants(func(netfilter.Choice, string) bool { return false }); err != nil || len(used) > 0 {
		t.Errorf("variants %v, %v", used, err)
	}
	for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
		if tables, err := os.ReadFile("/proc/thread-self/net/" + name); err == nil && len(tables) > 0 {
			t.Errorf("%s: %s", name, tables)
		}
	}
}

func TestVariants(t *testing.T) {
	isolate(t)
	restore(t, policy.IPv4, netfilter.VariantNFT, ":A -", "-A A -j RETURN", "-A POSTROUTING -j A")
	restore(t, policy.IPv6, netfilter.VariantLegacy, ":A -", "-A A -j RETURN", "-A OUTPUT -j A", "-A POSTROUTING -j A")
	got := assert.Must(Variants(func(netfilter.Choice, string) bool { return false }))(t)
	assert.Equal(t, "variants", got, map[string]int{"nft": 2, "legacy": 3})
}
