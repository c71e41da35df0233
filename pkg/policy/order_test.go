// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

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

func TestOrderByExample(t *testing.T) {
	for _, tt := range []struct {
		name      string
		statement policy.SourcePolicy
		want      []netip.Prefix
	}{
		{
			"as written, link-local first",
			policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("192.168.0.0/16", "10.0.0.0/8", "192.0.2.0/24")},
			cidrs("169.254.0.0/16", "192.168.0.0/16", "10.0.0.0/8", "192.0.2.0/24"),
		},
		{
			"nested, with one action",
			policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.1.0.0/16", "10.1.1.0/24", "0.0.0.0/0")},
			cidrs("169.254.0.0/16", "10.0.0.0/8", "10.1.0.0/16", "10.1.1.0/24", "0.0.0.0/0"),
		},
		{
			"a prefix with another action than a wider one comes right before it",
			policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("172.16.0.0/12", "10.0.0.0/8", "192.168.0.0/16", "10.1.2.0/24", "172.17.0.0/16"), MasqueradeCIDRs: cidrs("10.1.0.0/16", "203.0.113.0/24")},
			cidrs("169.254.0.0/16", "172.16.0.0/12", "10.1.2.0/24", "10.1.0.0/16", "10.0.0.0/8", "192.168.0.0/16", "172.17.0.0/16", "203.0.113.0/24"),
		},
		{
			"of the same length they stay as written",
			policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.9.0.0/16"), MasqueradeCIDRs: cidrs("10.8.0.0/16", "10.7.0.0/16")},
			cidrs("169.254.0.0/16", "10.9.0.0/16", "10.8.0.0/16", "10.7.0.0/16", "10.0.0.0/8"),
		},
		{
			"everything is one group below a prefix for everything",
			policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("0.0.0.0/0"), MasqueradeCIDRs: cidrs("203.0.113.0/24", "192.0.0.0/8")},
			cidrs("169.254.0.0/16", "203.0.113.0/24", "192.0.0.0/8", "0.0.0.0/0"),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantEqual(t, "order", destinationOrder(mergeOne(t, network("n", 1, tt.statement)), policy.IPv4), tt.want)
		})
	}
}

// written returns what the sources list, in the order in which they do, once
// each: what is built in, then networks by name, then agent files. Where two
// name a prefix to opposite ends, the one whose word holds counts.
func written(sources []policy.Source, p policy.Policy, f policy.Family) []netip.Prefix {
	byName := slices.SortedFunc(slices.Values(sources), func(a, b policy.Source) int {
		return cmp.Or(strings.Compare(string(b.ID.Kind), string(a.ID.Kind)), strings.Compare(a.ID.Name, b.ID.Name))
	})
	var out []netip.Prefix
	note := func(prefix netip.Prefix, holds func(policy.Entry) bool) {
		ofPrefix := func(e policy.Entry) bool { return e.Prefix == prefix && holds(e) }
		if policy.FamilyOf(prefix.Addr()) == f && !slices.Contains(out, prefix) && slices.ContainsFunc(p.Destinations, ofPrefix) {
			out = append(out, prefix)
		}
	}
	for _, prefix := range append([]netip.Prefix{f.LinkLocal()}, policy.DefaultNonMasqueradeCIDRs(true)...) {
		note(prefix, func(e policy.Entry) bool { return e.Origins[0].Source.Kind == policy.BuiltIn })
	}
	for _, c := range byName {
		for _, prefix := range c.Policy.NonMasqueradeCIDRs {
			note(prefix, func(e policy.Entry) bool { return e.Action == policy.ActionExempt })
		}
		for _, prefix := range c.Policy.MasqueradeCIDRs {
			note(prefix, func(e policy.Entry) bool { return e.Action == policy.ActionMasquerade })
		}
	}
	return out
}

// inConflict reports whether a wider prefix covers this one, and any prefix of
// the action that is not its own.
func inConflict(entries []policy.Entry, prefix netip.Prefix) bool {
	within := func(p, q netip.Prefix) bool { return q.Bits() < p.Bits() && q.Overlaps(p) }
	return slices.ContainsFunc(entries, func(around policy.Entry) bool {
		return within(prefix, around.Prefix) && slices.ContainsFunc(entries, func(e policy.Entry) bool {
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
			got, want := destinationOrder(p, f), written(sources, p, f)
			if diff := gocmp.Diff(byText(want), byText(got), equatable); diff != "" {
				t.Fatalf("%s: prefixes with rules (-want +got):\n%s", f, diff)
			}
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
