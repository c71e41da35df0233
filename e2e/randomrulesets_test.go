// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var (
	rulesetsFor  = flag.Duration("rulesets", 30*time.Second, "how long TestRandomRulesets loads rulesets")
	rulesetsSeed = flag.Uint64("ruleset", 0, "load the ruleset of this seed alone; 0: new seeds")
)

// TestRandomRulesets loads random rulesets of other programs, as nft and iptables text, and sends packets.
// What the receiver sees must be what the verdict of the rules says: no certain verdict may be wrong, and
// where everything can be known less than a fifth may be perhaps.
func TestRandomRulesets(t *testing.T) {
	t.Parallel()
	l := newRulesetLab(t)
	first := uint64(time.Now().UnixNano())
	if *rulesetsSeed != 0 {
		l.try(t, *rulesetsSeed)
		return
	}
	rulesets := 0
	for began := time.Now(); time.Since(began) < *rulesetsFor && !t.Failed(); rulesets++ {
		l.try(t, first+uint64(rulesets))
	}
	t.Logf("%d rulesets, the first of seed %d; %d packets, %d translated, %d dropped; of %d answers that could be known %d were perhaps, of %d others %d",
		rulesets, first, l.packets, l.translated, l.dropped, l.knowable.answers, l.knowable.perhaps, l.others.answers, l.others.perhaps)
	if 5*l.knowable.perhaps >= l.knowable.answers {
		t.Errorf("%d of %d answers that could be known were perhaps", l.knowable.perhaps, l.knowable.answers)
	}
	if few := l.packets / 10; l.translated < few || l.packets-l.translated < few {
		t.Errorf("the rulesets are too similar: of %d packets %d were translated", l.packets, l.translated)
	}
}

// rulesetLab is a topology without rules of ip-masq, whose pods send to hosts behind two interfaces.
type rulesetLab struct {
	*topology.Topology
	pods         []*topology.Host
	destinations []netip.AddrPort
	index        map[string]int // of interfaces

	packets, translated, dropped int
	knowable, others             struct{ answers, perhaps int }
}

func newRulesetLab(t *testing.T) *rulesetLab {
	l := &rulesetLab{Topology: topology.New(t, topology.Options{}), index: map[string]int{}}
	for _, address := range []string{"10.244.0.2", "10.244.1.3", "172.20.0.5"} {
		l.pods = append(l.pods, l.AddPod(t, "from-"+address, netip.MustParseAddr(address)))
	}
	for _, address := range []string{"10.9.9.9", "10.8.1.1", "172.16.5.5", "192.168.7.7", "8.8.8.8", "1.2.3.4", "198.51.100.7"} {
		l.destinations = append(l.destinations, netip.AddrPortFrom(netip.MustParseAddr(address), topology.EchoPort))
	}
	must(t, l.Node.Do(func() error {
		for _, name := range []string{"lan", "outside"} {
			link, err := net.InterfaceByName(name)
			if err != nil {
				return err
			}
			l.index[name] = link.Index
		}
		return nil
	}))
	return l
}

// load replaces all rules of the node.
func (l *rulesetLab) load(t *testing.T, script string) {
	t.Helper()
	c := l.Node.Command(t.Context(), "sh", "-ec", "nft flush ruleset\n"+
		"if grep -q nat /proc/self/net/ip_tables_names 2>/dev/null; then iptables-legacy -t nat -F; iptables-legacy -t nat -X; iptables-legacy -t nat -P POSTROUTING ACCEPT; fi\n"+script)
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("load: %v\n%s\n%s", err, out, script)
	}
	must(t, l.Node.FlushConntrack())
}

// judge asks about the rules of the node.
func (l *rulesetLab) judge(t *testing.T) func(from, to netip.Addr, out string) thirdparty.Verdict {
	t.Helper()
	var rules *thirdparty.Ruleset
	must(t, l.Node.Do(func() (err error) {
		rules, err = thirdparty.ReadPostrouting(policy.IPv4, func(thirdparty.Place) bool { return false })
		return err
	}))
	return func(from, to netip.Addr, out string) thirdparty.Verdict {
		p := thirdparty.Packet{Src: thirdparty.HostPrefix(from), Dst: thirdparty.HostPrefix(to), Out: out, OutIndex: l.index[out]}
		return rules.Judge(p, func(thirdparty.Place) thirdparty.Answer { return thirdparty.No })
	}
}

// outOf returns the interface behind which a destination is.
func outOf(to netip.Addr) string {
	if to.IsPrivate() {
		return "lan"
	}
	return "outside"
}

// agreesWith reports whether a verdict has the outcome that was seen, and whether it is certain that the
// source is translated, or not.
func agreesWith(v thirdparty.Verdict, own, node, seen netip.Addr) (is bool, translated thirdparty.Answer) {
	_, translated = v.Against(func(o thirdparty.Outcome) thirdparty.Answer {
		return o.TranslatesExempt(thirdparty.Packet{Src: thirdparty.HostPrefix(own)})
	})
	for _, o := range v.Outcomes {
		switch o.Fate {
		case thirdparty.Untouched:
			is = is || seen == own
		case thirdparty.Masqueraded:
			is = is || seen == node
		case thirdparty.Translated:
			is = is || !o.To.IsValid() || o.To.Contains(seen)
		case thirdparty.Dropped:
			is = is || !seen.IsValid()
		}
	}
	contradicts := translated == thirdparty.Yes && seen == own || translated == thirdparty.No && seen != own
	return is && !contradicts, translated
}

// try loads the ruleset of a seed and sends packets.
func (l *rulesetLab) try(t *testing.T, seed uint64) {
	t.Helper()
	g := rulesetGenerator{Rand: rand.New(rand.NewPCG(seed, 0))}
	script := g.script()
	l.load(t, script)
	judge := l.judge(t)
	count := &l.others
	if !g.unknown {
		count = &l.knowable
	}
	for _, pod := range l.pods {
		own := pod.Addrs[0]
		check := func(protocol string, to, source netip.Addr) {
			v := judge(own, to, outOf(to))
			is, translated := agreesWith(v, own, l.nodeAddr(to), source)
			l.packets++
			if source != own {
				l.translated++
			}
			count.answers++
			if translated == thirdparty.Perhaps {
				count.perhaps++
			}
			if !is {
				t.Errorf("-ruleset %d: %s from %s to %s was seen from %s, and the answer is %s\n%s", seed, protocol, own, to, source, answerText(v), script)
			}
		}
		var delivered []netip.AddrPort
		for _, to := range l.destinations {
			if !mayDrop(judge(own, to.Addr(), outOf(to.Addr()))) {
				delivered = append(delivered, to)
				continue
			}
			const wait = 40 * time.Millisecond // a packet that is not dropped takes less than one
			seen, err := pod.SendUDP(to, topology.Within(wait))
			if err != nil {
				l.dropped++
			}
			check("udp", to.Addr(), seen.Source.Addr()) // none if it was dropped
		}
		if len(delivered) == 0 {
			continue
		}
		seen, err := pod.SweepUDP(delivered, topology.Within(10*time.Second))
		if err != nil {
			t.Fatalf("-ruleset %d: %v, and the answer is that none is dropped\n%s", seed, err, script)
		}
		for to, source := range seen {
			check("udp", to.Addr(), source.Addr())
		}
		if g.writes { // answers do not find back to the pod
			continue
		}
		to := delivered[g.IntN(len(delivered))]
		tcp, err := pod.SendTCP(to)
		must(t, err)
		check("tcp", to.Addr(), tcp.Source.Addr())
	}
}

func mayDrop(v thirdparty.Verdict) bool {
	for _, o := range v.Outcomes {
		if o.Fate == thirdparty.Dropped {
			return true
		}
	}
	return false
}

func (l *rulesetLab) nodeAddr(to netip.Addr) netip.Addr {
	if outOf(to) == "lan" {
		return l.NodeAddr(l.LAN, to)
	}
	return l.NodeAddr(l.Outside, to)
}

func answerText(v thirdparty.Verdict) string {
	var texts []string
	for _, o := range v.Outcomes {
		text := string(o.Fate)
		if o.Rule != nil {
			text += " by " + o.Rule.String()
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", or ")
}

// rulesetGenerator writes a random ruleset.
type rulesetGenerator struct {
	*rand.Rand
	unknown bool // it has what depends on more than addresses, interface and mark
	writes  bool // it writes addresses into packets
	sets    strings.Builder
	names   int
}

func (g *rulesetGenerator) oneOf(texts ...string) string { return texts[g.IntN(len(texts))] }

// chance reports true in one of n cases.
func (g *rulesetGenerator) chance(n int) bool { return g.IntN(n) == 0 }

// script returns shell commands that load one to three tables. Tables of one priority have no order that can
// be known, so only rulesets that have something unknown anyway have them.
func (g *rulesetGenerator) script() string {
	g.unknown = g.chance(2)
	priorities := []int{90, 110, 101, -5, 300}
	g.Shuffle(len(priorities), func(i, j int) { priorities[i], priorities[j] = priorities[j], priorities[i] })
	if g.unknown {
		priorities = []int{100, 100, 110}
	}
	var script strings.Builder
	tables := g.IntN(3)
	for i := range tables {
		script.WriteString(heredoc("nft -f -", g.nftTable(fmt.Sprintf("t%d", i), priorities[i])))
	}
	if tables == 0 || g.chance(2) {
		variant := g.oneOf("nft", "nft", "legacy")
		script.WriteString(heredoc("iptables-"+variant+"-restore --noflush", g.iptablesTable("nat")))
		if g.chance(3) {
			script.WriteString(heredoc("iptables-nft-restore --noflush", g.iptablesTable("mangle")))
		}
	}
	return script.String()
}

func heredoc(command, text string) string { return command + " <<'END'\n" + text + "END\n" }

// prefix returns a prefix that has some of the addresses of pods and destinations.
func (g *rulesetGenerator) prefix() string {
	return g.oneOf("10.0.0.0/8", "10.244.0.0/16", "10.244.0.0/24", "10.244.0.2", "172.16.0.0/12", "172.20.0.5", "10.9.0.0/16", "10.8.0.0/15", "8.8.8.8",
		"0.0.0.0/1", "192.168.0.0/16", "198.51.100.0/24", "1.2.3.4", "10.9.9.9")
}

func (g *rulesetGenerator) not() string {
	if g.chance(3) {
		return "!= "
	}
	return ""
}

func (g *rulesetGenerator) out() string {
	return g.oneOf(`"lan"`, `"outside"`, `"out*"`, `"l*"`, `"wg0"`, `"eth*"`)
}

func (g *rulesetGenerator) mark() string { return g.oneOf("0x1", "0x2", "0x3", "0x4000") }

// name returns a new name, and declares a set or map of that name.
func (g *rulesetGenerator) name(kind, declaration string) string {
	g.names++
	name := fmt.Sprintf("s%d", g.names)
	fmt.Fprintf(&g.sets, "%s %s {\n%s\n}\n", kind, name, declaration)
	return name
}

// some returns up to n elements that a function writes, each once.
func (g *rulesetGenerator) some(n int, element func() string) string {
	var all []string
	known := map[string]bool{}
	for range 1 + g.IntN(n) {
		text := element()
		key, _, _ := strings.Cut(text, " : ")
		if !known[key] {
			all = append(all, text)
		}
		known[key] = true
	}
	return "{ " + strings.Join(all, ", ") + " }"
}

func (g *rulesetGenerator) address() string {
	return g.oneOf("10.244.0.2", "10.244.1.3", "172.20.0.5", "10.9.9.9", "8.8.8.8", "1.2.3.4", "192.168.7.7", "192.0.2.1")
}

func (g *rulesetGenerator) disjoint() string {
	return g.oneOf("10.0.0.0/12", "10.244.0.0/16", "172.16.0.0/12", "8.8.8.8", "192.168.7.0/24", "198.51.100.0-198.51.100.9")
}

// condition returns a condition in the syntax of nft.
func (g *rulesetGenerator) condition() string {
	side := g.oneOf("ip saddr", "ip daddr")
	if g.unknown && g.chance(4) {
		return g.oneOf("meta l4proto != udp", fmt.Sprintf("udp dport %d", topology.EchoPort), "th sport >= 1024", "iifname pod1", "ct mark 0", "numgen random mod 2 0",
			"meta pkttype unicast", "ip ttl > 3", "ct status dnat", "limit rate 1/second", "th dport 1-1024", "meta length > 40", "fib daddr type unicast", "ct id 0", "ip protocol != 17",
			"quota over 10 mbytes", "ct count over 1000", "ct original ip daddr 10.0.0.0/8", "meta priority 0", "meta skuid 0", "ip version 4", "fib saddr type unicast",
			"ct label 1", "numgen inc mod 3 != 1", side+" . meta l4proto { 10.9.9.9 . udp, 10.244.0.2 . tcp }", "ip ecn ce",
			side+" @"+g.name("set", "type ipv4_addr; flags dynamic; elements = { 10.9.9.9, 10.244.0.2 }"), "meta cpu != 63", "ip daddr != 10.9.9.9 @th,0,16 > 1023")
	}
	switch g.IntN(16) {
	case 0, 1:
		return side + " " + g.not() + g.prefix()
	case 2:
		return side + " " + g.not() + g.oneOf("10.0.0.0-10.9.9.8", "8.8.0.0-8.9.0.0", "10.244.0.3-172.30.0.0")
	case 3:
		return side + " " + g.not() + g.some(3, g.disjoint)
	case 4:
		return side + " " + g.not() + "@" + g.name("set", "type ipv4_addr; flags interval; elements = "+g.some(3, g.disjoint))
	case 5:
		return side + " " + g.not() + "@" + g.name("set", "type ipv4_addr; elements = "+g.some(3, g.address))
	case 6, 7:
		return "oifname " + g.not() + g.out()
	case 8:
		pair := func() string { return g.disjoint() + " . " + g.oneOf(`"lan"`, `"outside"`) }
		return "ip daddr . oifname " + g.not() + "@" + g.name("set", "type ipv4_addr . ifname; flags interval; elements = "+g.some(3, pair))
	case 9:
		pair := func() string { return g.address() + " . " + g.address() }
		return "ip saddr . ip daddr " + g.not() + g.some(3, pair)
	case 10:
		return g.oneOf("meta mark ", "meta mark & 0x3 == ", "meta mark != ") + g.mark()
	case 11:
		return g.oneOf("meta mark ", "meta mark != ") + g.oneOf("{ 0x0, 0x2 }", "0x1-0x3", "{ 0x0-0x1, 0x4000 }")
	case 12:
		return "oifname " + g.not() + "@" + g.name("set", "type ifname; flags interval; elements = { "+g.oneOf(`"la*"`, `"out*", "lan"`, `"wg*"`)+" }")
	case 13:
		pair := func() string {
			return g.disjoint() + " . " + g.oneOf("10.0.0.0/8", "8.8.8.8", "192.168.0.0-198.51.100.255")
		}
		return "ip saddr . ip daddr " + g.not() + g.some(3, pair)
	case 14:
		return g.oneOf("ct direction original", "meta protocol ip", side+" & 255.255.0.0 == 10.9.0.0", side+" "+g.not()+"@"+g.name("set", "type ipv4_addr; flags timeout; counter; elements = { 10.9.9.9 timeout 1h, 10.244.0.2 }"))
	case 15:
		return g.oneOf("fib daddr type != local", "fib saddr type != local", "ct state new", "ct state != established,related", "fib daddr type local")
	}
	return g.oneOf("oif lan", "oif != lan", side+" "+g.oneOf("> 10.200.0.0", "<= 10.9.9.9"), side+" & 0.0.0.3 == 0.0.0.2", "oifname "+`{ "lan", "wg1" }`)
}

// ends returns a statement that ends a rule, or none. A chain jumps to the chains that follow it.
func (g *rulesetGenerator) ends(later []string) string {
	verdict := func() string {
		if len(later) > 0 && g.chance(2) {
			return g.oneOf("jump ", "jump ", "goto ") + later[g.IntN(len(later))]
		}
		return g.oneOf("accept", "return", "continue")
	}
	switch g.IntN(15) {
	case 12:
		return "ct state vmap { new : " + verdict() + ", established : accept }"
	case 13:
		return "meta mark vmap { 0x0 : " + verdict() + ", 0x1-0x3 : " + verdict() + " }"
	case 14:
		element := func() string {
			return g.disjoint() + " . " + g.oneOf("10.0.0.0/8", "8.0.0.0/8", "172.16.0.0/12") + " : " + verdict()
		}
		return "ip saddr . ip daddr vmap " + g.some(3, element)
	case 0, 1, 2:
		return "masquerade"
	case 3:
		return "snat ip to " + g.oneOf("192.0.2.9", "10.244.0.2", "ip saddr", "198.51.100.1")
	case 4:
		element := func() string { return g.oneOf("10.244.0.2", "10.244.1.3") + " : " + g.oneOf("192.0.2.5", "10.244.0.2") }
		return "snat ip to ip saddr map " + g.some(2, element)
	case 5:
		element := func() string { return g.oneOf(`"lan"`, `"outside"`, `"wg0"`) + " : " + verdict() }
		return "oifname vmap " + g.some(2, element)
	case 6:
		element := func() string { return g.disjoint() + " : " + verdict() }
		all := g.some(3, element)
		if g.chance(3) {
			all = strings.Replace(all, " }", ", * : "+verdict()+" }", 1)
		}
		return g.oneOf("ip saddr", "ip daddr") + " vmap @" + g.name("map", "type ipv4_addr : verdict; flags interval; elements = "+all)
	case 7:
		element := func() string { return g.address() + ` . "lan" : ` + verdict() }
		return "ip daddr . oifname vmap " + g.some(3, element)
	case 8:
		return "meta mark set " + g.oneOf("0x1", "meta mark | 0x2", "meta mark ^ 0x4000", "ip daddr map { 10.9.9.9 : 0x1, 8.8.8.8 : 0x2 }")
	}
	return verdict()
}

func (g *rulesetGenerator) nftRule(later []string) string {
	var words []string
	for range g.IntN(3) {
		words = append(words, g.condition())
	}
	if g.chance(4) {
		words = append(words, "counter")
	}
	if g.chance(6) {
		words = append(words, "meta mark set "+g.mark())
	}
	if g.chance(8) {
		words = append(words, g.condition())
	}
	return strings.Join(append(words, g.ends(later)), " ")
}

// nftTable returns a table with a base chain, chains that it jumps to, and sometimes a chain that sets marks
// before.
func (g *rulesetGenerator) nftTable(name string, priority int) string {
	g.sets.Reset()
	chains := []string{"a", "b", "c"}
	var text strings.Builder
	for i := len(chains) - 1; i >= 0; i-- {
		fmt.Fprintf(&text, "chain %s {\n", chains[i])
		for range 1 + g.IntN(4) {
			text.WriteString(g.nftRule(chains[i+1:]) + "\n")
		}
		text.WriteString("}\n")
	}
	bases := []string{"base"}
	if g.chance(5) {
		bases = append(bases, "other")
	}
	for _, base := range bases {
		policy := "accept"
		if g.chance(40) {
			policy = "drop"
		}
		fmt.Fprintf(&text, "chain %s {\ntype nat hook postrouting priority %d; policy %s\n", base, priority, policy)
		for range 1 + g.IntN(4) {
			text.WriteString(g.nftRule(chains) + "\n")
		}
		text.WriteString("}\n")
	}
	if g.unknown && g.chance(6) {
		g.writes = true
		fmt.Fprintf(&text, "chain writes {\ntype filter hook postrouting priority %s\n%s ip saddr set 192.0.2.77\n}\n", g.oneOf("mangle", "300"), g.condition())
	}
	if g.chance(4) {
		fmt.Fprintf(&text, "chain marks {\ntype filter hook postrouting priority mangle\n%s meta mark set %s\n}\n", g.condition(), g.mark())
	}
	return "table " + g.oneOf("ip ", "ip ", "inet ") + name + " {\n" + g.sets.String() + text.String() + "}\n"
}

func (g *rulesetGenerator) iptablesCondition() string {
	not := ""
	if g.chance(3) {
		not = "! "
	}
	if g.unknown && g.chance(3) {
		return g.oneOf("-p tcp", "-p udp", fmt.Sprintf("-p udp -m udp --dport %d", topology.EchoPort), "-m statistic --mode random --probability 0.5",
			"-m iprange --dst-range 10.0.0.0-10.9.9.9", "-m conntrack --ctstate DNAT", "-m policy --pol none --dir out", "-m limit --limit 1/sec", "-m comment --comment x", "-m ttl --ttl-gt 3",
			"-m conntrack --ctstate NEW", "-m physdev ! --physdev-is-bridged", "! -p udp", "-p tcp -m multiport --dports 7,9", "-m connlimit --connlimit-above 1000",
			"-m addrtype --src-type UNICAST", "-m length --length 40:1500", "-m owner --uid-owner 0", "-m hashlimit --hashlimit-above 1000/sec --hashlimit-name x", "-m quota --quota 1")
	}
	switch g.IntN(5) {
	case 0:
		return not + "-s " + g.prefix()
	case 1:
		return not + "-d " + g.prefix()
	case 2:
		return not + "-o " + g.oneOf("lan", "outside", "out+", "l+", "wg0", "eth+")
	case 3:
		return "-m mark " + not + "--mark " + g.oneOf("0x1", "0x1/0x1", "0x4000/0x4000", "0/0x3", "0x3")
	}
	return g.oneOf("-m addrtype ! --dst-type LOCAL", "-m addrtype ! --src-type LOCAL", "-m addrtype --dst-type LOCAL", "-m comment --comment other")
}

// iptablesTable returns a table for iptables-restore: a chain of each table may set marks, and one of nat
// translates.
func (g *rulesetGenerator) iptablesTable(table string) string {
	chains := []string{"POSTROUTING", "A", "B", "C"}
	var text strings.Builder
	fmt.Fprintf(&text, "*%s\n:A -\n:B -\n:C -\n", table)
	if table == "nat" && g.chance(40) {
		text.WriteString(":POSTROUTING DROP\n")
	}
	for i, chain := range chains {
		for range 1 + g.IntN(4) {
			words := []string{"-A", chain}
			known := map[string]bool{}
			for range g.IntN(3) {
				condition := g.iptablesCondition()
				option, _, _ := strings.Cut(strings.TrimPrefix(condition, "! "), " ")
				if !known[option] {
					words = append(words, condition)
				}
				known[option] = true
			}
			words = append(words, g.iptablesTarget(table, chains[i+1:]))
			text.WriteString(strings.Join(words, " ") + "\n")
		}
	}
	return text.String() + "COMMIT\n"
}

func (g *rulesetGenerator) iptablesTarget(table string, later []string) string {
	switch n := g.IntN(10); {
	case table == "nat" && n < 4:
		return g.oneOf("-j MASQUERADE", "-j MASQUERADE --random-fully", "-j MASQUERADE", "-j SNAT --to-source 192.0.2.9", "-j SNAT --to-source 10.244.0.2",
			"-j SNAT --to-source 192.0.2.1-192.0.2.4", "-j NETMAP --to 192.0.2.0/24")
	case n < 6 && len(later) > 0:
		return g.oneOf("-j ", "-j ", "-g ") + later[g.IntN(len(later))]
	case n < 8:
		return g.oneOf("-j MARK --set-xmark 0x1/0x1", "-j MARK --set-xmark 0x4000/0xffffffff", "-j MARK --or-mark 0x2", "-j MARK --xor-mark 0x1",
			"-j MARK --and-mark 0x2", "-j CONNMARK --restore-mark", "-j CLASSIFY --set-class 1:1")
	}
	return g.oneOf("-j RETURN", "-j ACCEPT", "-j RETURN")
}
