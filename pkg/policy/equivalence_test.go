// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func genRuleset() *rapid.Generator[policy.Ruleset] {
	return rapid.Custom(func(t *rapid.T) policy.Ruleset {
		l := rapid.SampledFrom(defaultLayouts()).Draw(t, "layout")
		return policy.Desired(policy.Merge(genSources().Draw(t, "sources")), l, policy.OwnedBy("/state"))
	})
}

func TestCompareWithItself(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rs := genRuleset().Draw(t, "ruleset")
		if diff := policy.Compare(rs, cloned(rs)); len(diff) > 0 {
			t.Fatalf("%s\ndiffers from itself:\n%s", render(rs), diff)
		}
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

// Rules that change places only with such as no packet can tell from them, step
// by step and however far, make no difference.
func TestOrderWithoutMeaning(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a := genRuleset().Draw(t, "ruleset")
		b := cloned(a)
		for i := range b.Chains {
			c := &b.Chains[i]
			for range rapid.IntRange(0, 60).Draw(t, "swaps") {
				if len(c.Rules) < 2 {
					break
				}
				at := rapid.IntRange(0, len(c.Rules)-2).Draw(t, "at")
				if noPacketTells(c.Rules[at], c.Rules[at+1]) {
					c.Rules[at], c.Rules[at+1] = c.Rules[at+1], c.Rules[at]
				}
			}
		}
		if diff := policy.Compare(a, b); len(diff) > 0 {
			t.Fatalf("%s\nand\n%sdo the same, but the difference is\n%s", render(a), render(b), diff)
		}
	})
}

// What is reported of an order is each rule that stands before one which it has
// to come after, and nothing else.
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

// A swap that changes what becomes of a packet is reported as that: as an order,
// with no rule missing and none too many. One of neighbors that no packet can tell
// apart is not.
func TestSwaps(t *testing.T) {
	s := policy.SourcePolicy{
		NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.1.2.0/24", "192.168.0.0/16"), MasqueradeCIDRs: cidrs("10.1.0.0/16", "203.0.113.0/24"),
		NonMasqueradeSourceCIDRs: cidrs("10.7.0.0/16"), ToPorts: ports(t, "1-2,5-9"),
	}
	meaningful, without := 0, 0
	for _, l := range []policy.Layout{{}, {Sets: true}} {
		want := chainOf(t, s, l, policy.IPv4)
		for i := range want.Rules {
			for j := range i {
				swapped := want
				swapped.Rules = slices.Clone(want.Rules)
				swapped.Rules[i], swapped.Rules[j] = swapped.Rules[j], swapped.Rules[i]
				diff := policy.CompareChain(&want, &swapped)
				if slices.ContainsFunc(diff, func(c policy.Change) bool { return c.Kind != policy.OrderChange }) {
					t.Errorf("swapping %s and %s is not taken for an order: %s", want.Rules[j], want.Rules[i], diff)
				}
				p := differ(&want, &swapped)
				if p != nil && len(diff) == 0 {
					t.Errorf("swapping %s and %s changes what becomes of %+v, and is not reported", want.Rules[j], want.Rules[i], *p)
				}
				if i == j+1 && noPacketTells(want.Rules[i], want.Rules[j]) && len(diff) > 0 {
					t.Errorf("swapping %s and %s changes nothing, but %s", want.Rules[j], want.Rules[i], diff)
				}
				if p != nil {
					meaningful++
				} else if len(diff) == 0 {
					without++
				}
			}
		}
	}
	if meaningful == 0 || without == 0 {
		t.Errorf("%d swaps with a meaning and %d without: the cases tell nothing", meaningful, without)
	}
}
