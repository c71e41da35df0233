// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// What a backend is to hold is well-formed: ranges normal and of the chain's
// family, a verdict that we write, ports where a protocol has them, and at the
// end one rule that decides about whatever is left.
func TestDesiredIsWellFormed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := rapid.SampledFrom(defaultLayouts()).Draw(t, "layout")
		owner := policy.OwnedBy("/state")
		for _, c := range policy.Desired(merge(genSources().Draw(t, "sources")), l, owner).Chains {
			if c.Owner != owner {
				t.Fatalf("chain %+v", c)
			}
			for _, r := range c.Rules {
				checkWellFormed(t, c, r, l)
			}
			for _, j := range c.Jumps {
				checkWellFormed(t, c, j, l)
				if j.Verdict != policy.Jump || !j.NotToLocal || j.To != nil {
					t.Fatalf("jump %s", j)
				}
			}
			last := c.Rules[len(c.Rules)-1]
			last.RandomFully = false
			if !last.Equal(policy.Rule{Verdict: policy.Masquerade}) {
				t.Fatalf("the last rule is %s", last)
			}
		}
	})
}

func checkWellFormed(t *rapid.T, c policy.Chain, r policy.Rule, l policy.Layout) {
	for _, set := range []policy.Ranges{r.From, r.To} {
		if set != nil && len(set) == 0 {
			t.Fatalf("%s matches nothing", r)
		}
		if !policy.Normalize(set).Equal(append(policy.Ranges{}, set...)) {
			t.Fatalf("%s: %v is not in its normal form", r, set)
		}
		if set.Equal(policy.RangesOf(c.Family.All())) && set != nil { // iptables would not show -d 0.0.0.0/0 again
			t.Fatalf("%s states every address", r)
		}
		for _, x := range set {
			if policy.FamilyOf(x.From()) != c.Family || policy.FamilyOf(x.To()) != c.Family {
				t.Fatalf("%s in an %s chain", r, c.Family)
			}
			if _, isPrefix := x.Prefix(); !l.Sets && (!isPrefix || len(set) > 1) {
				t.Fatalf("%s takes more than a prefix", r)
			}
		}
	}
	if (r.Probability != 0 || !r.Ports.IsZero()) && (r.Protocol == "" || r.Ports.IsZero() || r.Verdict != policy.Masquerade || r.Probability >= policy.ProbabilityScale) {
		t.Fatalf("%s: ports without protocol, or a share of none", r)
	}
}

// destinationOrder returns the prefixes of one family in the order of the rules
// of the layout without sets. Ports, which make several rules of a prefix, are
// left to other tests.
func destinationOrder(p policy.Policy, f policy.Family) []netip.Prefix {
	p.ToPorts.Value = nil
	p.ExemptSources = nil
	rs := policy.Desired([]policy.Policy{p}, policy.Layout{}, policy.Owner{})
	rules := rs.Find(f, p.Chain).Rules
	var out []netip.Prefix
	for _, r := range rules[:len(rules)-1] {
		if r.To == nil {
			out = append(out, f.All())
			continue
		}
		prefix, ok := r.To[0].Prefix()
		if !ok || len(r.To) != 1 {
			panic("a rule of the layout without sets matches more than a prefix: " + r.String())
		}
		out = append(out, prefix)
	}
	return out
}

// written returns what the sources list, in the order in which they do, once
// each: what is built in, then networks by name, then agent files. Where two
// name a prefix to opposite ends, the one whose word holds counts.
func written(sources []policy.Source, p policy.Policy, f policy.Family) []netip.Prefix {
	byName := slices.SortedFunc(slices.Values(sources), func(a, b policy.Source) int {
		return cmp.Or(strings.Compare(string(b.ID.Kind), string(a.ID.Kind)), strings.Compare(a.ID.Name, b.ID.Name))
	})
	var out []netip.Prefix
	note := func(prefix netip.Prefix, holds func(policy.PrefixAction) bool) {
		ofPrefix := func(e policy.PrefixAction) bool { return e.Prefix == prefix && holds(e) }
		if policy.FamilyOf(prefix.Addr()) == f && !slices.Contains(out, prefix) && slices.ContainsFunc(p.Destinations, ofPrefix) {
			out = append(out, prefix)
		}
	}
	always := append([]netip.Prefix{f.LinkLocal()}, f.Multicast()...)
	for _, prefix := range append(always, policy.DefaultNonMasqueradeCIDRs(true)...) {
		note(prefix, func(e policy.PrefixAction) bool { return e.Origins[0].Source.Kind == policy.BuiltIn })
	}
	for _, c := range byName {
		for _, prefix := range c.Policy.NonMasqueradeCIDRs {
			note(prefix, func(e policy.PrefixAction) bool { return e.Action == policy.ActionExempt })
		}
		for _, prefix := range c.Policy.MasqueradeCIDRs {
			note(prefix, func(e policy.PrefixAction) bool { return e.Action == policy.ActionMasquerade })
		}
	}
	return out
}

// inConflict reports whether a wider prefix covers this one, and any prefix of
// the action that is not its own.
func inConflict(entries []policy.PrefixAction, prefix netip.Prefix) bool {
	within := func(p, q netip.Prefix) bool { return q.Bits() < p.Bits() && q.Overlaps(p) }
	return slices.ContainsFunc(entries, func(around policy.PrefixAction) bool {
		return within(prefix, around.Prefix) && slices.ContainsFunc(entries, func(e policy.PrefixAction) bool {
			return within(e.Prefix, around.Prefix) && e.Action != around.Action
		})
	})
}

// Where order has no meaning it is the written one: a prefix comes before others
// that are written before it only if there is a dispute about it. Each has one
// rule.
func TestWrittenOrderIsKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		p := policy.Merge(sources)[0]
		for _, f := range p.Families() {
			got, want := destinationOrder(p, f), written(newOracle(sources).strongestFirst, p, f)
			assert.Equal(t, string(f)+": prefixes with rules", byText(got), byText(want))
			place := map[netip.Prefix]int{}
			for i, prefix := range got {
				place[prefix] = i
			}
			for i, later := range want {
				for _, earlier := range want[:i] {
					if place[later] < place[earlier] && !inConflict(p.Destinations, later) {
						t.Fatalf("%s: %s comes before %s; written %s, rules %s", f, later, earlier, want, got)
					}
				}
			}
		}
	})
}

func byText(list []netip.Prefix) []string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	return slices.Sorted(slices.Values(out))
}

func checkMasqueradeRule(t *rapid.T, p policy.Policy, packet policy.Packet, r policy.Rule) {
	wantPorts := len(p.ToPorts.Value) > 0 && slices.Contains(policy.Protocols(), packet.Protocol)
	if got := !r.Ports.IsZero(); got != wantPorts {
		t.Fatalf("%v chooses ports for %s: %v, want %v", r, packet.Protocol, got, wantPorts)
	}
	if want := p.RandomFully.Value; r.RandomFully != want {
		t.Fatalf("%v is fully random: %v, want %v", r, r.RandomFully, want)
	}
}
