// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func desiredOf(t testing.TB, l policy.Layout, sources ...policy.Source) policy.Ruleset {
	t.Helper()
	return policy.Desired(policy.Merge(sources), l, policy.OwnedBy("/state"))
}

// cloned returns a copy whose chains and rules can be changed.
func cloned(rs policy.Ruleset) policy.Ruleset {
	out := policy.Ruleset{Unrecognized: slices.Clone(rs.Unrecognized)}
	for _, c := range rs.Chains {
		c.Jumps, c.Rules = slices.Clone(c.Jumps), slices.Clone(c.Rules)
		out.Chains = append(out.Chains, c)
	}
	return out
}

// TestCompare writes the differences of each case into testdata/compare.txt.
func TestCompare(t *testing.T) {
	s := policy.SourcePolicy{
		NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "192.168.0.0/16"), MasqueradeCIDRs: cidrs("10.1.0.0/16"),
		NonMasqueradeSourceCIDRs: cidrs("10.7.0.0/16", "10.9.0.0/16"), OutputInterfaces: []string{"eth0", "eth1"},
	}
	forSets := s
	forSets.SourceCIDRs = cidrs("10.244.0.0/16", "10.246.0.0/16")
	unrecognized := policy.Rule{Verdict: policy.Unrecognized, Text: "-p tcp -j LOG"}
	var got strings.Builder
	// In each chain: sources 0 and 1, link-local 2, multicast 3, broadcast 4, forced 5, 10/8 6, 192.168 7, the rest 8.
	for _, tt := range []struct {
		name   string
		sets   bool
		change func(*policy.Ruleset)
	}{
		{"nothing changed", false, func(*policy.Ruleset) {}},
		{"nothing changed in sets", true, func(*policy.Ruleset) {}},
		{"comments and counters do not count", false, func(rs *policy.Ruleset) {
			rs.Chains[0].Owner = policy.Owner{Schema: policy.RulesSchema + 1}
			rs.Chains[0].Rules[2].Connections = 99
		}},
		{"a chain of another dataDir", false, func(rs *policy.Ruleset) { rs.Chains[0].Owner.DataDir = "/other" }},
		{"the order of jumps does not count", false, func(rs *policy.Ruleset) { slices.Reverse(rs.Chains[0].Jumps) }},
		{"an order without meaning", false, func(rs *policy.Ruleset) { move(rs, 2, 0) }},
		{"an order with meaning", false, func(rs *policy.Ruleset) { move(rs, 6, 0) }},
		{"the end comes first", false, func(rs *policy.Ruleset) { move(rs, 8, 0) }},
		{"no chain", false, func(rs *policy.Ruleset) { rs.Chains = nil }},
		{"another chain", false, func(rs *policy.Ruleset) {
			rs.Chains = append(rs.Chains, policy.Chain{Family: policy.IPv6, Name: "OLD"})
		}},
		{"an empty chain", false, func(rs *policy.Ruleset) { rs.Chains[0].Rules, rs.Chains[0].Jumps = nil, nil }},
		{"a jump less", false, func(rs *policy.Ruleset) { rs.Chains[0].Jumps = rs.Chains[0].Jumps[1:] }},
		{"a jump twice", false, func(rs *policy.Ruleset) { rs.Chains[0].Jumps = append(rs.Chains[0].Jumps, rs.Chains[0].Jumps[0]) }},
		{"a rule twice", false, func(rs *policy.Ruleset) { rs.Chains[0].Rules = append(rs.Chains[0].Rules, rs.Chains[0].Rules[2]) }},
		{"a rule less", false, func(rs *policy.Ruleset) { rs.Chains[0].Rules = slices.Delete(rs.Chains[0].Rules, 7, 8) }},
		{"another rule", false, func(rs *policy.Ruleset) { rs.Chains[0].Rules[7].Verdict = policy.Masquerade }},
		{"a rule for another prefix", false, func(rs *policy.Ruleset) { rs.Chains[0].Rules[7].To = ranges("192.0.2.0/24") }},
		{"rules too many, in their order", false, func(rs *policy.Ruleset) {
			extra := []policy.Rule{{Verdict: policy.Return, Match: policy.Match{Out: "b"}}, unrecognized, {Verdict: policy.Return, Match: policy.Match{Out: "a"}}}
			rs.Chains[0].Rules = slices.Concat(extra, rs.Chains[0].Rules)
		}},
		{"an unrecognized rule", false, func(rs *policy.Ruleset) { rs.Chains[0].Rules = slices.Insert(rs.Chains[0].Rules, 1, unrecognized) }},
		{"an unrecognized jump", false, func(rs *policy.Ruleset) { rs.Chains[0].Jumps = append(rs.Chains[0].Jumps, unrecognized) }},
		{"an unrecognized object", false, func(rs *policy.Ruleset) {
			rs.Unrecognized = append(rs.Unrecognized, policy.UnrecognizedObject{Family: policy.IPv6, Text: "set blocked"})
		}},
		{"elements", true, func(rs *policy.Ruleset) {
			rs.Chains[0].Rules[1].To = ranges("10.0.0.0/16", "192.168.0.0/16", "169.254.0.0/16", "203.0.113.0/24", "224.0.0.0/4", "255.255.255.255/32")
		}},
		{"elements of sources", true, func(rs *policy.Ruleset) { rs.Chains[0].Rules[0].From = ranges("10.7.0.0/16") }},
		{"an empty set", true, func(rs *policy.Ruleset) { rs.Chains[0].Rules[0].From = policy.Ranges{} }},
		{"elements of a jump", true, func(rs *policy.Ruleset) { rs.Chains[0].Jumps[1].From = ranges("10.244.0.0/16") }},
		{"a set in another rule", true, func(rs *policy.Ruleset) { rs.Chains[0].Rules[0].Verdict = policy.Masquerade }},
	} {
		asked := s
		if tt.sets {
			asked = forSets
		}
		desired := desiredOf(t, policy.Layout{Sets: tt.sets}, network("n", 1, asked))
		observed := cloned(desired)
		tt.change(&observed)
		diff := policy.Compare(desired, observed)
		fmt.Fprintf(&got, "%s:\n%s\n", tt.name, diff)
		for _, c := range diff {
			fmt.Fprintf(&got, "%s, unexpected: %t\n", c.Kind, c.Unexpected)
		}
		got.WriteByte('\n')
	}
	golden.Check(t, "testdata/compare.txt", got.String())
}

// move takes a rule of the first chain from one place to another.
func move(rs *policy.Ruleset, from, to int) {
	rules := rs.Chains[0].Rules
	r := rules[from]
	rs.Chains[0].Rules = slices.Insert(slices.Delete(rules, from, from+1), to, r)
}

// Rules that are not equal are not taken for one another, however alike they
// look, and each is found in its place.
func TestCompareTellsRulesApart(t *testing.T) {
	for i, r := range differing() {
		for j, s := range differing() {
			desired := policy.Chain{Family: policy.IPv4, Name: "C", Rules: []policy.Rule{r}}
			observed := policy.Chain{Family: policy.IPv4, Name: "C", Rules: []policy.Rule{s}}
			if diff := policy.CompareChain(&desired, &observed); (len(diff) == 0) != (i == j) {
				t.Errorf("%d %s and %d %s: %q", i, r, j, s, diff)
			}
		}
	}
}

// An unrecognized rule is a difference even from itself: its effect is not known.
func TestUnrecognizedRulesAreDifferences(t *testing.T) {
	c := policy.Chain{Family: policy.IPv4, Name: "C", Rules: []policy.Rule{{Verdict: policy.Unrecognized, Text: "x"}}}
	assert.Equal(t, "differences", policy.CompareChain(&c, &c).String(), "ipv4 C: missing rule: x\nipv4 C: unexpected rule: x")
}

func TestDiffSummary(t *testing.T) {
	desired := desiredOf(t, policy.Layout{}, network("n", 1, policy.SourcePolicy{}))
	diff := policy.Compare(desired, policy.Ruleset{Chains: []policy.Chain{{Family: policy.IPv4, Name: policy.DefaultChain}}})
	all := strings.Split(diff.String(), "\n")
	if len(all) != 8 || len(diff) != 8 {
		t.Fatalf("%d lines of %d changes, want 8:\n%s", len(all), len(diff), diff)
	}
	for most, want := range map[int]string{
		0: "and 8 more", 1: all[0] + "\nand 7 more", 7: strings.Join(all[:7], "\n") + "\nand 1 more", 8: diff.String(), 99: diff.String(),
	} {
		assert.Equal(t, fmt.Sprintf("Summary(%d)", most), diff.Summary(most), want)
	}
	assert.Equal(t, "no difference", (policy.Diff{}).String(), "")
}

func genRuleset() *rapid.Generator[policy.Ruleset] {
	return rapid.Custom(func(t *rapid.T) policy.Ruleset {
		l := rapid.SampledFrom(defaultLayouts()).Draw(t, "layout")
		return policy.Desired(merge(genSources().Draw(t, "sources")), l, policy.OwnedBy("/state"))
	})
}

// tampered changes a ruleset a little, in some way that a node could see.
func tampered(t *rapid.T, rs policy.Ruleset) policy.Ruleset {
	rs = cloned(rs)
	for range rapid.IntRange(1, 3).Draw(t, "changes") {
		if len(rs.Chains) == 0 {
			return rs
		}
		at := rapid.IntRange(0, len(rs.Chains)-1).Draw(t, "chain")
		c := &rs.Chains[at]
		place := func(list []policy.Rule) int { return rapid.IntRange(0, len(list)-1).Draw(t, "place") }
		switch rapid.SampledFrom([]string{"swap", "swap", "shuffle", "delete", "double", "edit", "jumps", "drop"}).Draw(t, "change") {
		case "swap":
			if i := place(c.Rules); i+1 < len(c.Rules) {
				c.Rules[i], c.Rules[i+1] = c.Rules[i+1], c.Rules[i]
			}
		case "shuffle":
			c.Rules = rapid.Permutation(c.Rules).Draw(t, "rules")
		case "delete":
			if len(c.Rules) > 1 {
				i := place(c.Rules)
				c.Rules = slices.Delete(c.Rules, i, i+1)
			}
		case "double":
			c.Rules = slices.Insert(c.Rules, place(c.Rules), c.Rules[place(c.Rules)])
		case "edit":
			edit(t, c.Family, &c.Rules[place(c.Rules)])
		case "jumps":
			if len(c.Jumps) > 0 {
				c.Jumps = rapid.Permutation(c.Jumps).Draw(t, "jumps")
				if rapid.Bool().Draw(t, "edit one") {
					edit(t, c.Family, &c.Jumps[place(c.Jumps)])
				}
			}
		case "drop":
			rs.Chains = slices.Delete(rs.Chains, at, at+1)
		}
	}
	return rs
}

func edit(t *rapid.T, f policy.Family, r *policy.Rule) {
	switch rapid.IntRange(0, 7).Draw(t, "field") {
	case 0:
		r.To = policy.RangesOf(genPrefix(f).Draw(t, "to"))
	case 1:
		r.From = policy.RangesOf(genPrefix(f).Draw(t, "from"))
	case 2:
		r.To = nil
	case 3:
		r.Out = rapid.SampledFrom([]string{"", "eth0", "eth+"}).Draw(t, "out")
	case 4:
		r.NotFromLocal = !r.NotFromLocal
	case 5:
		r.Protocol = rapid.SampledFrom([]policy.Protocol{"", "tcp", "udp"}).Draw(t, "protocol")
	case 6:
		r.RandomFully = !r.RandomFully
	case 7:
		if r.Verdict != policy.Jump {
			r.Verdict = rapid.SampledFrom([]policy.Verdict{policy.Return, policy.Masquerade}).Draw(t, "verdict")
		}
	}
}

// outcome is all that a chain can do with a packet: the rules that may decide,
// each with its share, up to the first that decides about all that is left.
func outcome(c *policy.Chain, p policy.Packet) string {
	if c == nil || !slices.ContainsFunc(c.Jumps, func(j policy.Rule) bool { return j.Matches(p) }) {
		return "nothing"
	}
	out := ""
	for _, r := range c.Rules {
		if r.Matches(p) {
			out += fmt.Sprintf("%d/2^31 %s %s %v; ", r.Probability, r.Verdict, r.Ports, r.RandomFully)
			if r.Probability == 0 {
				return out
			}
		}
	}
	return out
}

// everyPacket returns packets of which each rule of the chains that matches
// some but not all of a kind tells at least two apart.
func everyPacket(chains ...*policy.Chain) []policy.Packet {
	src, dst := map[netip.Addr]bool{}, map[netip.Addr]bool{}
	var f policy.Family
	note := func(to map[netip.Addr]bool, set policy.Ranges) {
		for _, x := range set {
			for _, a := range []netip.Addr{x.From(), x.To(), x.From().Prev(), x.To().Next()} {
				if a.IsValid() {
					to[a] = true
				}
			}
		}
	}
	for _, c := range chains {
		if c == nil {
			continue
		}
		f = c.Family
		for _, r := range slices.Concat(c.Jumps, c.Rules) {
			note(src, r.From)
			note(dst, r.To)
		}
	}
	src[lowAddress(f, 3)], dst[lowAddress(f, 3)] = true, true
	var out []policy.Packet
	for s := range src {
		for d := range dst {
			for _, proto := range []policy.Protocol{"tcp", "udp", "sctp", "icmp"} {
				for _, ifname := range []string{"eth0", "eth1", "lo"} {
					for _, local := range []bool{false, true} {
						out = append(out, policy.Packet{Src: s, Dst: d, Out: ifname, SrcLocal: local, Protocol: proto})
					}
				}
			}
		}
	}
	return out
}

// differ returns a packet with which the chains do different things, or nil.
func differ(a, b *policy.Chain) *policy.Packet {
	for _, p := range everyPacket(a, b) {
		if outcome(a, p) != outcome(b, p) {
			return &p
		}
	}
	return nil
}

// Where there is no difference to report, every packet fares the same; so a
// change that makes any packet fare differently is always reported.
func TestNoDifferenceMeansTheSameDecisions(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := genRuleset().Draw(t, "ruleset")
		b := tampered(t, a)
		if len(policy.Compare(a, b)) > 0 {
			return
		}
		for i := range a.Chains {
			c := &a.Chains[i]
			if p := differ(c, b.Find(c.Family, c.Name)); p != nil {
				t.Fatalf("no difference is reported between\n%sand\n%sbut %+v fares differently", render(a), render(b), *p)
			}
		}
	})
}

// Compare reports as out of order each rule that stands before a rule that it must
// follow, and no other rule.
func TestOrderIsReportedRuleByRule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rs := genRuleset().Draw(t, "ruleset")
		for i := range rs.Chains {
			want := &rs.Chains[i]
			have := &policy.Chain{Family: want.Family, Name: want.Name, Jumps: want.Jumps, Rules: rapid.Permutation(want.Rules).Draw(t, "rules")}
			var place []int // of equal rules the first is the first
			for _, r := range have.Rules {
				place = append(place, slices.IndexFunc(indices(len(want.Rules)), func(j int) bool { return want.Rules[j].Equal(r) && !slices.Contains(place, j) }))
			}
			var out []string
			for i, r := range have.Rules {
				before := func(j int) bool { return place[j] < place[i] && !noPacketTells(r, have.Rules[j]) }
				if slices.ContainsFunc(indices(len(place))[i+1:], before) {
					out = append(out, r.String())
				}
			}
			var reported []string
			for _, c := range policy.CompareChain(want, have) {
				reported = append(reported, c.Text)
			}
			if !slices.Equal(out, reported) {
				t.Fatalf("reported are %q, want %q", reported, out)
			}
		}
	})
}

func indices(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// noPacketTells reports whether no packet fares differently when the two rules
// change places: they decide the same, or no address or protocol is in both.
func noPacketTells(r, s policy.Rule) bool {
	if r.Verdict == s.Verdict && r.Ports == s.Ports && r.RandomFully == s.RandomFully && r.Probability == 0 && s.Probability == 0 {
		return true
	}
	apart := func(a, b policy.Ranges) bool {
		return a != nil && b != nil && !slices.ContainsFunc(a, func(x netipx.IPRange) bool {
			return slices.ContainsFunc(b, func(y netipx.IPRange) bool { return x.From().Compare(y.To()) <= 0 && y.From().Compare(x.To()) <= 0 })
		})
	}
	return apart(r.From, s.From) || apart(r.To, s.To) || r.Protocol != "" && s.Protocol != "" && r.Protocol != s.Protocol
}
