// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// prefixGen draws prefixes of any length, near enough to each other to nest.
func prefixGen() *rapid.Generator[netip.Prefix] {
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		var a netip.Addr
		if rapid.Bool().Draw(t, "v6") {
			b := [16]byte{0: 0xfd, 15: 1}
			for i := range 3 {
				b[rapid.IntRange(0, 15).Draw(t, "at")] = rapid.Byte().Draw(t, fmt.Sprint("byte", i))
			}
			a = netip.AddrFrom16(b)
			if a.Is4In6() {
				b[0] = 0xfd
				a = netip.AddrFrom16(b)
			}
		} else {
			a = netip.AddrFrom4([4]byte{rapid.SampledFrom([]byte{10, 169, 224, 0}).Draw(t, "first"), rapid.Byte().Draw(t, "second"), 0,
				rapid.Byte().Draw(t, "last")})
		}
		p, err := a.Prefix(rapid.IntRange(0, a.BitLen()).Draw(t, "length"))
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
}

func policyGen(chain string) *rapid.Generator[policy.Policy] {
	return rapid.Custom(func(t *rapid.T) policy.Policy {
		prefixes := func(what string, most int) []netip.Prefix {
			return rapid.SliceOfNDistinct(prefixGen(), 0, most, rapid.ID[netip.Prefix]).Draw(t, what)
		}
		p := policy.Policy{Chain: chain}
		for _, d := range prefixes("destinations", 12) {
			a := rapid.SampledFrom([]policy.Action{policy.Exempt, policy.Masqueraded}).Draw(t, "action")
			p.Destinations = append(p.Destinations, policy.Entry{Prefix: d, Action: a})
		}
		for _, s := range prefixes("exempt sources", 3) {
			p.ExemptSources = append(p.ExemptSources, policy.Entry{Prefix: s, Action: policy.Exempt})
		}
		p.Sources.Value = prefixes("sources", 3)
		name := rapid.StringMatching(`[a-zA-Z0-9_.@#$%&()=,;'-]{1,14}[a-z+]`)
		p.Interfaces.Value = rapid.SliceOfNDistinct(name, 0, 3, rapid.ID[string]).Draw(t, "interfaces")
		p.Host.Value = rapid.Bool().Draw(t, "host")
		p.EnableIPv6.Value = true
		p.RandomFully.Value = rapid.Bool().Draw(t, "randomly")
		ends := rapid.SliceOfNDistinct(rapid.Uint16Min(1), 0, 6, rapid.ID[uint16]).Draw(t, "ports")
		slices.Sort(ends)
		for i := 0; i+1 < len(ends); i += 2 {
			p.ToPorts.Value = append(p.ToPorts.Value, policy.PortRange{First: ends[i], Last: ends[i+1]})
		}
		return p
	})
}

// TestApply holds both readers to what the writer wrote, and the writer to the
// whole of what is desired, from whatever was there before.
func TestApply(t *testing.T) {
	inEachVariant(t, func(n *node) {
		rapid.Check(n.T, func(t *rapid.T) {
			want := desired(policy.OwnedBy(owner), policyGen("ONE").Draw(t, "one"), policyGen("TWO").Draw(t, "two"))
			n.apply(want)
			n.holds(want)
			n.readersAgree("ONE", "TWO")
			n.idle("a second Apply", func() { n.apply(want) })
		})
	})
}

func TestApplyThousandPrefixes(t *testing.T) {
	inEachVariant(t, func(n *node) {
		p := basic("IP-MASQ-AGENT")
		for i := range 1000 {
			v4 := netip.PrefixFrom(netip.AddrFrom4([4]byte{100, byte(i >> 8), byte(i), 0}), 24)
			v6 := netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfd, 1, byte(i >> 8), byte(i)}), 32)
			p.Destinations = append(p.Destinations, policy.Entry{Prefix: v4, Action: policy.Exempt}, policy.Entry{Prefix: v6, Action: policy.Exempt})
		}
		want := desired(policy.OwnedBy(owner), p)
		n.apply(want)
		n.holds(want)
		n.readersAgree("IP-MASQ-AGENT")
		n.idle("a second Apply", func() { n.apply(want) })
	})
}

// TestTampering sees each thing that can be done to our rules, and repairs it
// without a touch to the rules of others.
func TestTampering(t *testing.T) {
	const chain = "IP-MASQ-AGENT"
	for name, tc := range map[string]struct {
		do   []string // of table nat
		load []string // as iptables-restore
		want []string // the differences, without the family and the chain
	}{
		"jump deleted": {do: []string{"-D POSTROUTING 2"}, want: []string{"missing jump: to non-local jump"}},
		"jump twice": {load: []string{"-I POSTROUTING -m addrtype ! --dst-type LOCAL -j " + chain},
			want: []string{"unexpected jump: to non-local jump"}},
		"jump wider":           {do: []string{"-A POSTROUTING -j " + chain}, want: []string{"unexpected jump: jump"}},
		"jump that is no jump": {do: []string{"-A POSTROUTING -g " + chain}, want: []string{"unexpected jump: -A POSTROUTING -g " + chain}},
		"jump with a mark": {do: []string{"-A POSTROUTING -m mark --mark 0x1/0x3 -j " + chain},
			want: []string{"unexpected jump: -A POSTROUTING -m mark --mark 0x1/0x3 -j " + chain}},
		"jump with an odd comment": {load: []string{`-I POSTROUTING -o lo -m comment --comment "\"a\" \\ 'b' -j ACCEPT" -j ` + chain},
			want: []string{"unexpected jump: out lo jump"}},
		"flushed":           {do: []string{"-F " + chain}, want: []string{"missing rule: to 10.0.0.0/8 return", "missing rule: masquerade random-fully"}},
		"table flushed":     {do: []string{"-F"}, want: []string{"missing rule: to 10.0.0.0/8 return", "missing jump: to non-local jump"}},
		"chain gone":        {do: []string{"-F", "-X " + chain}, want: []string{"missing chain", "missing jump: to non-local jump"}},
		"rule added":        {do: []string{"-A " + chain + " -p tcp -j RETURN"}, want: []string{"unexpected rule: tcp return"}},
		"rule deleted":      {do: []string{"-D " + chain + " 1"}, want: []string{"missing rule: to 169.254.0.0/16 return"}},
		"return to accept":  {do: []string{"-R " + chain + " 1 -j ACCEPT"}, want: []string{"unexpected rule: -A " + chain + " -j ACCEPT"}},
		"inverted":          {do: []string{"-I " + chain + " ! -p tcp -j RETURN"}, want: []string{"unexpected rule: -A " + chain + " ! -p tcp -j RETURN"}},
		"jump onwards":      {do: []string{"-N OTHER", "-I " + chain + " -j OTHER"}, want: []string{"unexpected rule: -A " + chain + " -j OTHER"}},
		"no target":         {do: []string{"-I " + chain}, want: []string{"unexpected rule: -A " + chain}},
		"not random":        {do: []string{"-R " + chain + " 5 -j MASQUERADE"}, want: []string{"missing rule: masquerade random-fully", "unexpected rule: masquerade"}},
		"masquerade first":  {load: []string{":" + chain + " -", "-A " + chain + " -j MASQUERADE --random-fully"}, want: []string{"missing rule: to 10.0.0.0/8 return"}},
		"order":             {do: []string{"-D " + chain + " 5", "-I " + chain + " -j MASQUERADE --random-fully"}, want: []string{"rule out of order: masquerade random-fully"}},
		"somebody's target": {do: []string{"-R " + chain + " 5 -p tcp -j LOG --log-prefix x"}, want: []string{"unexpected rule: -A " + chain + " -p tcp -j LOG --log-prefix x"}},
	} {
		t.Run(name, func(t *testing.T) {
			inEachVariant(t, func(n *node) {
				p := basic(chain) // five rules in each family
				p.Destinations = append(p.Destinations, entriesOf(policy.Exempt, "2001:db8::/32", "3fff::/20")...)
				want := desired(policy.OwnedBy(owner), p)
				for _, f := range policy.Families() {
					n.load(f, ":FOREIGN -", "-A POSTROUTING -p udp -j FOREIGN")
				}
				n.apply(want)
				saved := map[policy.Family]string{}
				for _, f := range policy.Families() {
					saved[f] = n.save(f)
					for _, c := range tc.do {
						n.iptables(f, c)
					}
					if len(tc.load) > 0 {
						n.load(f, tc.load...)
					}
				}
				n.readersAgree(chain)
				diff := policy.Compare(want, n.observe(refs(want))).String()
				for _, w := range tc.want {
					if !strings.Contains(diff, ": "+w) {
						n.Errorf("difference is not seen: %s in\n%s", w, diff)
					}
				}
				n.apply(want)
				n.holds(want)
				n.idle("a second Apply", func() { n.apply(want) })
				if name == "table flushed" || name == "flushed" || name == "chain gone" || name == "jump onwards" {
					return // others' rules went too, or came
				}
				for _, f := range policy.Families() {
					if diff := cmp.Diff(sortedLines(saved[f]), sortedLines(n.save(f))); diff != "" {
						n.Errorf("%s: not as before (-before +after):\n%s", f, diff)
					}
				}
			})
		})
	}
}

func sortedLines(s string) []string {
	return slices.Sorted(strings.Lines(s))
}

// TestApplyWritesOnlyWhatDiffers looks at the text given to iptables-restore.
func TestApplyWritesOnlyWhatDiffers(t *testing.T) {
	inEachVariant(t, func(n *node) {
		const chain = "IP-MASQ-AGENT"
		want := desired(policy.OwnedBy(owner), basic(chain))
		want.Chains = want.Chains[:1]
		n.apply(want)
		plan := func() string {
			tx, err := n.plan(n.Context(), policy.IPv4, want.Chains, []string{chain})
			if err != nil {
				n.Fatal(err)
			}
			return string(tx.restore())
		}
		jump := "-A POSTROUTING -m comment --comment \"" + agentJumpComment(chain) + "\" -m addrtype ! --dst-type LOCAL -j " + chain + "\n"
		n.iptables(policy.IPv4, "-D POSTROUTING 1")
		if diff := cmp.Diff("*nat\n"+jump+"COMMIT\n", plan()); diff != "" {
			n.Errorf("jump missing (-want +got):\n%s", diff)
		}
		n.apply(want)
		n.iptables(policy.IPv4, "-D "+chain+" 2")
		if got := plan(); strings.Contains(got, "POSTROUTING") || !strings.Contains(got, ":"+chain+" - [0:0]\n") {
			n.Errorf("rule missing: %s", got)
		}
		n.apply(want)
		// Of three jumps that do the same the last stays, whatever its comment.
		n.load(policy.IPv4, strings.TrimSpace(jump), `-A POSTROUTING -m comment --comment "an agent's" -m addrtype ! --dst-type LOCAL -j `+chain)
		if diff := cmp.Diff("*nat\n"+strings.Repeat(strings.Replace(jump, "-A", "-D", 1), 2)+"COMMIT\n", plan()); diff != "" {
			n.Errorf("jump thrice (-want +got):\n%s", diff)
		}
		n.apply(want)
		n.holds(want)
		if got := n.save(policy.IPv4); !strings.Contains(got, "an agent") || strings.Contains(got, agentJumpComment(chain)) {
			n.Errorf("the wrong one was deleted:\n%s", got)
		}
		// Another owner alone is a reason to write.
		other := desired(policy.OwnedBy("/elsewhere"), basic(chain))
		n.apply(other)
		n.holds(other)
	})
}

// TestAgentFindsOurJump runs what ip-masq-agent runs to see if its jump is there.
func TestAgentFindsOurJump(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.apply(desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT")))
		for _, f := range policy.Families() {
			out, err := n.command(f, "", "", "-w", "-t", "nat", "-C", "POSTROUTING", "-m", "comment", "--comment",
				"ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain",
				"-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", "IP-MASQ-AGENT")
			if err != nil {
				n.Errorf("%s: %v: %s", f, err, out)
			}
		}
	})
}

// TestAdoption reads chains as the agents write them, and takes them over.
func TestAdoption(t *testing.T) {
	const (
		local = `-m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" `
		last  = `-m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" `
	)
	for name, comment := range map[string]string{
		"v1": `"` + agentJumpComment("IP-MASQ-AGENT") + `"`,
		"v2": `"\"` + agentJumpComment("IP-MASQ-AGENT") + `\""`,
	} {
		t.Run(name, func(t *testing.T) {
			inEachVariant(t, func(n *node) {
				for _, f := range policy.Families() {
					private := map[policy.Family]string{policy.IPv4: "10.0.0.0/8", policy.IPv6: "fd00::/8"}[f]
					n.load(f, ":IP-MASQ-AGENT -",
						"-A POSTROUTING -m comment --comment "+comment+" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT",
						"-A IP-MASQ-AGENT "+local+"-d "+f.LinkLocal().String()+" -j RETURN",
						"-A IP-MASQ-AGENT "+local+"-d "+private+" -j RETURN",
						"-A IP-MASQ-AGENT -p tcp -m statistic --mode random --probability 0.40000000000 "+last+"-j MASQUERADE --to-ports 1024-29999 --random-fully",
						"-A IP-MASQ-AGENT -p tcp "+last+"-j MASQUERADE --to-ports 32768-65535 --random-fully",
						"-A IP-MASQ-AGENT "+last+"-j MASQUERADE --random-fully")
				}
				n.readersAgree("IP-MASQ-AGENT")
				got := n.observe(bothFamilies("IP-MASQ-AGENT"))
				for _, c := range got.Chains {
					if !c.HoldsOnly(policy.Return, policy.Masquerade) || len(c.Rules) != 5 || c.Owner != (policy.Owner{}) {
						n.Errorf("%s reads as %+v", c.Family, c)
					}
					if share := float64(c.Rules[2].Share) / policy.ShareUnit; share < 0.3999 || share > 0.4001 {
						n.Errorf("%s: share %v", c.Family, share)
					}
				}
				want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
				n.apply(want)
				n.holds(want)
				for _, f := range policy.Families() {
					out, err := n.command(f, "", "", "-t", "nat", "-S", "POSTROUTING")
					if err != nil || strings.Count(out, "-j IP-MASQ-AGENT") != 1 || !strings.Contains(out, "--comment "+comment) {
						n.Errorf("the agent's jump did not stay: %v\n%s", err, out)
					}
				}
			})
		})
	}
}

func TestRemove(t *testing.T) {
	inEachVariant(t, func(n *node) {
		before := map[policy.Family]string{}
		for _, f := range policy.Families() {
			n.load(f, ":FOREIGN -", "-A POSTROUTING -p udp -j FOREIGN", "-A FOREIGN -j RETURN")
			before[f] = n.save(f)
		}
		scoped := basic("TWO")
		scoped.Sources.Value = prefixList("10.0.0.0/8", "fd00::/8")
		scoped.Interfaces.Value = []string{"eth0", "wl+"}
		n.apply(desired(policy.OwnedBy(owner), basic("ONE"), scoped))
		for _, f := range policy.Families() {
			n.load(f, "-A ONE -p icmp -j ACCEPT", "-A TWO -j ONE",
				`-A POSTROUTING -m mark --mark 0x1/0x2 -m comment --comment "\"odd\" it's" -j ONE`, "-A POSTROUTING -g TWO", "-A POSTROUTING -j ONE")
		}
		all := bothFamilies("ONE", "TWO", "NEVER-THERE")
		if err := n.Remove(n.Context(), all, nil); err != nil {
			n.Fatal(err)
		}
		for _, f := range policy.Families() {
			if diff := cmp.Diff(before[f], n.save(f)); diff != "" {
				n.Errorf("%s: not as before (-before +after):\n%s", f, diff)
			}
		}
		n.idle("Remove of what is not there", func() {
			if err := n.Remove(n.Context(), all, nil); err != nil {
				n.Error(err)
			}
		})
	})
}

func TestRemoveNamesWhoStillJumps(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.apply(desired(policy.OwnedBy(owner), basic("ONE")))
		n.load(policy.IPv4, ":FOREIGN -", "-A FOREIGN -p udp -j ONE")
		before := n.save(policy.IPv4)
		err := n.Remove(n.Context(), bothFamilies("ONE"), nil)
		if err == nil || !strings.Contains(err.Error(), `chain ONE is still used by "-A FOREIGN -p udp -j ONE"`) {
			n.Errorf("got %v", err)
		}
		if diff := cmp.Diff(before, n.save(policy.IPv4)); diff != "" {
			n.Errorf("half removed (-before +after):\n%s", diff)
		}
		if got := n.save(policy.IPv6); strings.Contains(got, "ONE") {
			n.Errorf("the failure of one family kept the other:\n%s", got)
		}
	})
}

// TestObserveEmpty reads where nothing is, and leaves it at that.
func TestObserveEmpty(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.idle("reading", func() {
			if got := n.observe(bothFamilies("IP-MASQ-AGENT")); len(got.Chains) > 0 {
				n.Errorf("got %+v", got)
			}
			if err := n.Remove(n.Context(), bothFamilies("IP-MASQ-AGENT"), nil); err != nil {
				n.Error(err)
			}
		})
		for _, f := range policy.Families() {
			if used, err := legacyInUse(f, natTable); err != nil || used {
				n.Errorf("%s: reading made the table: %v, %v", f, used, err)
			}
		}
	})
}

// TestProgramMissing has the rules but no program: they are read, not written.
func TestProgramMissing(t *testing.T) {
	inEachVariant(t, func(n *node) {
		want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
		n.apply(want)
		n.iptables(policy.IPv4, "-A IP-MASQ-AGENT -p icmp -j RETURN")
		bare := New(Options{Path: "/nowhere"})
		opened, err := bare.Open(n.choice)
		if err != nil {
			n.Fatal(err)
		}
		got, err := opened.Observe(n.Context(), refs(want))
		if err != nil {
			n.Fatal(err)
		}
		d := policy.Compare(want, got)
		if len(d) != 1 || !strings.Contains(d.String(), "unexpected rule: return with a protocol without ports") {
			n.Errorf("got %s", d)
		}
		err = opened.Apply(n.Context(), want, nil)
		if err == nil || !strings.Contains(err.Error(), "find iptables-"+n.choice.Variant+" or iptables: not in /nowhere (absent)") {
			n.Errorf("got %v", err)
		}
	})
}

// TestNativeExpressions has rules that nft wrote into the table of iptables.
// iptables shows some of them as rules that match more.
func TestNativeExpressions(t *testing.T) {
	n := newNode(t, "nft")
	want := desired(policy.OwnedBy(owner), basic("IP-MASQ-AGENT"))
	n.apply(want)
	for _, tc := range []struct{ rule, want string }{
		{"insert rule ip nat IP-MASQ-AGENT ip daddr @s return",
			"-A IP-MASQ-AGENT -j RETURN (and what iptables does not show: return with lookup)"},
		{"insert rule ip nat IP-MASQ-AGENT ip daddr 10.0.0.0/8 ip ttl 64 return", "-A IP-MASQ-AGENT -d 10.0.0.0/8 -m ttl --ttl-eq 64 -j RETURN"},
		{"insert rule ip nat IP-MASQ-AGENT ip daddr 10.0.0.0-10.0.0.7 return",
			"-A IP-MASQ-AGENT -d 10.0.0.7/32 -j RETURN (and what iptables does not show: return with cmp, cmp)"},
		{"insert rule ip nat POSTROUTING ip saddr @s jump IP-MASQ-AGENT",
			"-A POSTROUTING -j IP-MASQ-AGENT (and what iptables does not show: jump IP-MASQ-AGENT with lookup)"},
	} {
		shell(t, "nft 'add set ip nat s { type ipv4_addr; }'", "nft '"+tc.rule+"'")
		d := policy.Compare(want, n.observe(refs(want)))
		if len(d) != 1 || !d[0].Unexpected || d[0].Text != tc.want {
			t.Errorf("%s: %s", tc.rule, d)
		}
		n.apply(want)
		n.holds(want)
	}
	// What is the same in its native form is the same.
	shell(t, "nft insert rule ip nat POSTROUTING fib daddr type != local jump IP-MASQ-AGENT")
	if d := policy.Compare(want, n.observe(refs(want))); d.String() != "ipv4 IP-MASQ-AGENT: unexpected jump: to non-local jump" {
		t.Errorf("got %s", d)
	}
}

// TestReadersFailOver has a connection to nf_tables that does not work.
func TestReadersFailOver(t *testing.T) {
	n := newNode(t, netfilter.VariantNFT)
	want := desired(policy.OwnedBy(owner), basic("X"))
	n.apply(want)
	n.load(policy.IPv4, "-A POSTROUTING -j X")
	cut := func() {
		n.Helper()
		n.generation() // connects
		if err := n.link.conn.Close(); err != nil {
			n.Fatal(err)
		}
	}
	cut()
	d := policy.Compare(want, n.observe(refs(want)))
	if len(d) != 1 || d.String() != "ipv4 X: unexpected jump: jump" {
		n.Errorf("got %s", d)
	}
	cut()
	n.apply(want)
	n.holds(want)
	cut()
	if got, err := n.driver.Uses(n.Context(), "X"); err != nil || len(got) != 1 { // IPv4 failed, IPv6 did not
		n.Errorf("got %v, %v", got, err)
	}
	cut()
	if err := n.Remove(n.Context(), refs(want), nil); err != nil {
		n.Error(err)
	}
	for _, f := range policy.Families() {
		if got := n.save(f); strings.Contains(got, "X") {
			n.Errorf("%s: not removed:\n%s", f, got)
		}
	}
	cut()
	nowhere := &backend{choice: n.choice, programs: newPrograms("/nowhere"), link: n.link}
	if _, err := nowhere.Observe(n.Context(), refs(want)); err == nil || !strings.Contains(err.Error(), "not in /nowhere") {
		n.Errorf("got %v", err)
	}
}

// TestMergeBelievesTheUnsure has an extension of a form to come.
func TestMergeBelievesTheUnsure(t *testing.T) {
	shown, err := parseListing([]string{"-N X", "-P POSTROUTING ACCEPT", "-A POSTROUTING -j SNAT --to-source 1.2.3.4",
		"-A POSTROUTING -m addrtype ! --dst-type LOCAL -j X", "-A X -d 10.0.0.0/8 -j RETURN", "-A X -j MASQUERADE"})
	if err != nil {
		t.Fatal(err)
	}
	kernel := func(unsure bool) table {
		newer := reading{}
		newer.rule.To = to("10.0.0.0/8")
		newer.rule.Connections = 9
		newer.verdict(policy.Return)
		newer.ask(extension{name: "comment", revision: 1}, errors.New("revision 1, not 0"))
		if !unsure {
			newer.refuse("lookup")
		}
		masquerade := entry{rule: policy.Rule{Verdict: policy.Masquerade}}
		jump := entry{rule: policy.Rule{NotToLocal: true, Verdict: policy.Jump}, target: "X"}
		return table{postrouting: {{rule: policy.Rule{Verdict: policy.Alien}}, jump}, "X": {newer.done(""), masquerade}}
	}
	for unsure, want := range map[bool]policy.Rule{
		true: {To: to("10.0.0.0/8"), Verdict: policy.Return, Connections: 9},
		false: {Verdict: policy.Alien, Connections: 9, Text: "-A X -d 10.0.0.0/8 -j RETURN (and what iptables does not show: " +
			"to 10.0.0.0/8 return with comment (revision 1): revision 1, not 0, lookup)"},
	} {
		merged, same := merge(kernel(unsure), shown, []string{"X"})
		if !same {
			t.Fatalf("unsure %v: not merged", unsure)
		}
		if diff := cmp.Diff(want, merged["X"][0].rule, compareRules()); diff != "" {
			t.Errorf("unsure %v (-want +got):\n%s", unsure, diff)
		}
		if merged.jumps("X")[0].Verdict != policy.Jump {
			t.Errorf("jumps %v", merged.jumps("X"))
		}
	}
	// What was read at different times does not go together.
	for name, spoil := range map[string]func(table){
		"a rule more":         func(k table) { k["X"] = append(k["X"], k["X"]...) },
		"no chain":            func(k table) { delete(k, "X") },
		"another rule":        func(k table) { k["X"][1].rule.RandomFully = true },
		"jump at other place": func(k table) { k[postrouting][0], k[postrouting][1] = k[postrouting][1], k[postrouting][0] },
	} {
		k := kernel(true)
		spoil(k)
		if _, same := merge(k, shown, []string{"X"}); same {
			t.Errorf("%s: merged", name)
		}
	}
}

// TestDeleteRefusesLineFeeds has a jump that iptables-restore would not delete
// but read as two commands, the second of somebody's choice.
func TestDeleteRefusesLineFeeds(t *testing.T) {
	inEachVariant(t, func(n *node) {
		want := desired(policy.OwnedBy(owner), basic("X"))
		n.apply(want)
		out, err := n.command(policy.IPv4, "", "", "-t", "nat", "-A", "POSTROUTING", "-m", "comment", "--comment", "a\n-F OTHER", "-j", "X")
		if err != nil {
			n.Fatal(err, out)
		}
		before := n.save(policy.IPv4)
		for what, err := range map[string]error{"Apply": n.Apply(n.Context(), want, nil), "Remove": n.Remove(n.Context(), refs(want), nil)} {
			if err == nil || !strings.Contains(err.Error(), "delete it with iptables -D") {
				n.Errorf("%s: %v", what, err)
			}
		}
		if diff := cmp.Diff(before, n.save(policy.IPv4)); diff != "" {
			n.Errorf("something was written (-before +after):\n%s", diff)
		}
	})
}

// TestContextEnds gives no time at all.
func TestContextEnds(t *testing.T) {
	inEachVariant(t, func(n *node) {
		ctx, cancel := context.WithCancel(n.Context())
		cancel()
		want := desired(policy.OwnedBy(owner), basic("X"))
		if err := n.Apply(ctx, want, nil); !errors.Is(err, context.Canceled) {
			n.Errorf("Apply: %v", err)
		}
		n.apply(want)
		n.load(policy.IPv4, "-A POSTROUTING -j X") // whose deletion has to be looked up
		if err := n.Apply(ctx, want, nil); !errors.Is(err, context.Canceled) {
			n.Errorf("second Apply: %v", err)
		}
	})
}

func BenchmarkObserve(b *testing.B) {
	for _, variant := range variants() {
		b.Run(variant, func(b *testing.B) {
			runtime.LockOSThread()
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				b.Fatal(err)
			}
			d := New(Options{})
			opened, err := d.Open(netfilter.Choice{Backend: policy.IPTables, Variant: variant})
			if err != nil {
				b.Fatal(err)
			}
			p := basic("X")
			p.EnableIPv6.Value = false
			for i := range 60 {
				p.Destinations = append(p.Destinations, policy.Entry{Prefix: netip.PrefixFrom(netip.AddrFrom4([4]byte{100, 64, byte(i)}), 24), Action: policy.Exempt})
			}
			want := desired(policy.OwnedBy(owner), p)
			if err := opened.Apply(b.Context(), want, nil); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				rs, err := opened.Observe(b.Context(), refs(want))
				if err != nil || len(policy.Compare(want, rs)) > 0 {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestSavedByNFT loads what nft printed of our rules, as at the next boot. Some
// versions of nft lose part of a rule on the way; that has to be seen.
func TestSavedByNFT(t *testing.T) {
	n := newNode(t, "nft")
	scoped := basic("SCOPED")
	scoped.Sources.Value = prefixList("10.0.0.0/8", "fd00::/11")
	scoped.Interfaces.Value = []string{"eth0", "wl+"}
	scoped.RandomFully.Value = false
	scoped.EnableIPv6.Value = false
	want := desired(policy.Owner{}, scoped)
	n.apply(want)
	shell(t, "nft list ruleset >/run/saved", "nft flush ruleset", "nft -f /run/saved")
	n.holds(want)
}
