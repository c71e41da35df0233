// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func chainOf(t testing.TB, s policy.SourcePolicy, l policy.Layout, f policy.Family) policy.Chain {
	t.Helper()
	rs := policy.Desired([]policy.Policy{mergeOne(t, network("n", 1, s))}, l, policy.OwnedBy("/state"))
	c := rs.Find(f, policy.DefaultChain)
	if c == nil {
		t.Fatalf("no %s chain", f)
	}
	return *c
}

func TestDesiredChain(t *testing.T) {
	s := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8"), MasqueradeCIDRs: cidrs("10.1.0.0/16")}
	last := policy.Rule{Verdict: policy.Masquerade, RandomFully: true}
	forced := last
	forced.To = ranges("10.1.0.0/16")
	want := policy.Chain{
		Family: policy.IPv4, Name: policy.DefaultChain, Owner: policy.Owner{Schema: policy.RulesSchema, DataDir: "/state"},
		Jumps: []policy.Rule{{NotToLocal: true, Verdict: policy.Jump}},
		Rules: []policy.Rule{
			{To: ranges("169.254.0.0/16"), Verdict: policy.Return}, forced, {To: ranges("10.0.0.0/8"), Verdict: policy.Return}, last,
		},
	}
	wantEqual(t, "without sets", chainOf(t, s, policy.Layout{}, policy.IPv4), want)
	want.Rules = []policy.Rule{{To: ranges("10.0.0.0/16", "10.2.0.0/15", "10.4.0.0/14", "10.8.0.0/13", "10.16.0.0/12", "10.32.0.0/11", "10.64.0.0/10", "10.128.0.0/9", "169.254.0.0/16"), Verdict: policy.Return}, last}
	wantEqual(t, "with sets", chainOf(t, s, policy.Layout{Sets: true}, policy.IPv4), want)
}

func TestDesiredJumps(t *testing.T) {
	for _, tt := range []struct {
		name       string
		policy     policy.SourcePolicy
		family     policy.Family
		each, sets []string
	}{
		{"no scope", policy.SourcePolicy{}, policy.IPv4, []string{"to non-local jump"}, []string{"to non-local jump"}},
		{
			"not the host", policy.SourcePolicy{MasqueradeHost: ptr(false)}, policy.IPv4,
			[]string{"from non-local to non-local jump"}, []string{"from non-local to non-local jump"},
		},
		{
			"one jump for each source and interface",
			policy.SourcePolicy{SourceCIDRs: cidrs("10.1.0.0/16", "10.3.0.0/16"), OutputInterfaces: []string{"eth0", "wg+"}}, policy.IPv4,
			[]string{
				"from 10.1.0.0/16 to non-local out eth0 jump", "from 10.1.0.0/16 to non-local out wg+ jump",
				"from 10.3.0.0/16 to non-local out eth0 jump", "from 10.3.0.0/16 to non-local out wg+ jump",
			},
			[]string{"from {10.1.0.0/16, 10.3.0.0/16} to non-local out eth0 jump", "from {10.1.0.0/16, 10.3.0.0/16} to non-local out wg+ jump"},
		},
		{
			"sources of both families, each its own",
			policy.SourcePolicy{EnableIPv6: ptr(true), SourceCIDRs: cidrs("10.1.0.0/16", "fd00::/64")}, policy.IPv6,
			[]string{"from fd00::/64 to non-local jump"}, []string{"from fd00::/64 to non-local jump"},
		},
		{"sources of IPv4 alone: no IPv6", policy.SourcePolicy{EnableIPv6: ptr(true), SourceCIDRs: cidrs("10.1.0.0/16")}, policy.IPv6, nil, nil},
		{"sources of IPv6 alone: no IPv4", policy.SourcePolicy{EnableIPv6: ptr(true), SourceCIDRs: cidrs("fd00::/64")}, policy.IPv4, nil, nil},
		{
			"interfaces are of both families", policy.SourcePolicy{EnableIPv6: ptr(true), OutputInterfaces: []string{"eth0"}}, policy.IPv6,
			[]string{"to non-local out eth0 jump"}, []string{"to non-local out eth0 jump"},
		},
		{
			"every source, as a prefix", policy.SourcePolicy{SourceCIDRs: cidrs("0.0.0.0/0")}, policy.IPv4,
			[]string{"to non-local jump"}, []string{"to non-local jump"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			jumps := func(l policy.Layout) (out []string) {
				for _, j := range chainOf(t, tt.policy, l, tt.family).Jumps {
					out = append(out, j.String())
				}
				return out
			}
			wantEqual(t, "without sets", jumps(policy.Layout{}), tt.each)
			wantEqual(t, "with sets", jumps(policy.Layout{Sets: true}), tt.sets)
		})
	}
}

// The shares are those that ip-masq-agent writes as --probability, in the units
// in which the kernel keeps them.
func TestDesiredPorts(t *testing.T) {
	for _, tt := range []struct {
		ports string
		want  []string
	}{
		{"", nil},
		{"1024-29999", []string{"1024-29999 0"}},
		{"1024-29999,32768-65535", []string{"1024-29999 1007798105", "32768-65535 0"}},                                       // 0.469292562840114
		{"32768-65535,1024-29999", []string{"32768-65535 1139685543", "1024-29999 0"}},                                       // as written, not sorted
		{"1024-29999,32768-49151,61000-65535", []string{"1024-29999 1247103699", "32768-49151 1681853350", "61000-65535 0"}}, // 0.5807279140612474, 0.7831739961759082
		{"1024,65535", []string{"1024 1073741824", "65535 0"}},                                                               // 0.5
		{"7,8,9", []string{"7 715827883", "8 1073741824", "9 0"}},                                                            // 1/3, rounded up
	} {
		t.Run(tt.ports, func(t *testing.T) {
			s := policy.SourcePolicy{ToPorts: ports(t, tt.ports), NonMasqueradeCIDRs: cidrs(), MasqLinkLocal: ptr(true)}
			rules := chainOf(t, s, policy.Layout{}, policy.IPv4).Rules
			var want, got []string
			for _, proto := range policy.Protocols() {
				for _, line := range tt.want {
					want = append(want, string(proto)+" "+line)
				}
			}
			for _, r := range rules[:len(rules)-1] {
				got = append(got, fmt.Sprintf("%s %s %d", r.Protocol, r.Ports, r.Probability))
			}
			wantEqual(t, "shares", got, want)
			wantEqual(t, "the rest", rules[len(rules)-1].String(), "masquerade random-fully")
		})
	}
}

func TestDesiredRandomFully(t *testing.T) {
	for _, tt := range []struct {
		stated *bool
		layout policy.Layout
		want   bool
	}{
		{nil, policy.Layout{}, true}, {ptr(true), policy.Layout{Sets: true}, true}, {ptr(false), policy.Layout{}, false},
		{nil, policy.Layout{Sets: true}, true}, {ptr(false), policy.Layout{Sets: true}, false},
	} {
		c := chainOf(t, policy.SourcePolicy{RandomFully: tt.stated, ToPorts: ports(t, "1-2,4-5"), MasqueradeCIDRs: cidrs("10.1.0.0/16")}, tt.layout, policy.IPv4)
		for _, r := range c.Rules {
			if r.Verdict == policy.Masquerade && r.RandomFully != tt.want {
				t.Errorf("%+v: %s, want fully random %v", tt, r, tt.want)
			}
		}
	}
}

// A prefix that covers everything is a rule that matches everything: iptables
// would not show -d 0.0.0.0/0 again.
func TestDesiredMatchesNothingForEverything(t *testing.T) {
	for _, l := range defaultLayouts() {
		for _, f := range policy.Families() {
			all := f.All()
			s := policy.SourcePolicy{EnableIPv6: ptr(true), NonMasqueradeCIDRs: cidrs(), NonMasqueradeSourceCIDRs: cidrs(all.String()), SourceCIDRs: cidrs(all.String())}
			s.NonMasqueradeCIDRs = append(s.NonMasqueradeCIDRs, all)
			c := chainOf(t, s, l, f)
			for _, r := range append(append([]policy.Rule{}, c.Jumps...), c.Rules...) {
				if r.From != nil || r.To != nil && r.To.Equal(policy.RangesOf(all)) {
					t.Errorf("layout %+v: %s", l, r)
				}
			}
		}
	}
}

// What a backend is to hold is well-formed: ranges normal and of the chain's
// family, a verdict that we write, ports where a protocol has them, and at the
// end one rule that decides about whatever is left.
func TestDesiredIsWellFormed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := rapid.SampledFrom(defaultLayouts()).Draw(t, "layout")
		owner := policy.OwnedBy("/state")
		for _, c := range policy.Desired(policy.Merge(genSources().Draw(t, "sources")), l, owner).Chains {
			if c.Owner != owner || !c.HoldsOnly(policy.Return, policy.Masquerade) {
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

func TestOrderByExample(t *testing.T) {
	for _, tt := range []struct {
		name   string
		policy policy.SourcePolicy
		want   []netip.Prefix
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
			wantEqual(t, "order", destinationOrder(mergeOne(t, network("n", 1, tt.policy)), policy.IPv4), tt.want)
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
	note := func(prefix netip.Prefix, holds func(policy.PrefixAction) bool) {
		ofPrefix := func(e policy.PrefixAction) bool { return e.Prefix == prefix && holds(e) }
		if policy.FamilyOf(prefix.Addr()) == f && !slices.Contains(out, prefix) && slices.ContainsFunc(p.Destinations, ofPrefix) {
			out = append(out, prefix)
		}
	}
	for _, prefix := range append([]netip.Prefix{f.LinkLocal()}, policy.DefaultNonMasqueradeCIDRs(true)...) {
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

// Whatever sources state, and in either layout, the rules do with a packet what
// the documentation says: the longest prefix wins, within the scope.
func TestRulesDecideAsTheSourcesSay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		oracle := newOracle(sources)
		merged := policy.Merge(sources)
		var rulesets []policy.Ruleset
		for _, l := range defaultLayouts() {
			rulesets = append(rulesets, policy.Desired(merged, l, policy.OwnedBy("/state")))
		}
		for range 40 {
			p := genPacket(sources).Draw(t, "packet")
			want := oracle.decide(p)
			for i, rs := range rulesets {
				got, rule := decided(rs, policy.DefaultChain, p)
				if got != want {
					t.Fatalf("layout %+v: %+v is %s by %v, want %s; rules:\n%s", defaultLayouts()[i], p, got, rule, want, render(rs))
				}
				if got == masqueraded {
					checkMasqueradeRule(t, merged[0], p, *rule)
				}
			}
		}
	})
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

// Decisions that depend on several keys, one packet each.
func TestDecisionsByExample(t *testing.T) {
	onlyThese := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("0.0.0.0/0"), MasqueradeCIDRs: cidrs("203.0.113.0/24")}
	vpnHole := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.1.2.0/24"), MasqueradeCIDRs: cidrs("10.1.0.0/16")}
	v4Sources := policy.SourcePolicy{EnableIPv6: ptr(true), SourceCIDRs: cidrs("10.244.0.0/16")}
	for _, tt := range []struct {
		name   string
		policy policy.SourcePolicy
		packet policy.Packet
		want   verdict
	}{
		{"the internet", policy.SourcePolicy{}, packet("10.244.0.2", "8.8.8.8"), masqueraded},
		{"a default", policy.SourcePolicy{}, packet("10.244.0.2", "10.9.9.9"), notMasqueraded},
		{"link-local", policy.SourcePolicy{}, packet("10.244.0.2", "169.254.169.254"), notMasqueraded},
		{"link-local, masquerade wanted", policy.SourcePolicy{MasqLinkLocal: ptr(true)}, packet("10.244.0.2", "169.254.169.254"), masqueraded},
		{
			"the switch takes only the built-in exemption away",
			policy.SourcePolicy{MasqLinkLocal: ptr(true), NonMasqueradeCIDRs: cidrs("169.254.0.0/16")},
			packet("10.244.0.2", "169.254.169.254"), notMasqueraded,
		},
		{
			"a stated link-local prefix beats the built-in one",
			policy.SourcePolicy{MasqueradeCIDRs: cidrs("169.254.0.0/16")}, packet("10.244.0.2", "169.254.1.1"), masqueraded,
		},
		{
			"a longer one within link-local",
			policy.SourcePolicy{MasqueradeCIDRs: cidrs("169.254.169.254/32")}, packet("10.244.0.2", "169.254.169.254"), masqueraded,
		},
		{
			"link-local is longer than a wide masqueraded one",
			policy.SourcePolicy{MasqueradeCIDRs: cidrs("169.0.0.0/8")}, packet("10.244.0.2", "169.254.1.1"), notMasqueraded,
		},
		{
			"a stated prefix beats a default",
			policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8")}, packet("10.244.0.2", "10.1.1.1"), masqueraded,
		},
		{
			"the other defaults still hold",
			policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8")}, packet("10.244.0.2", "192.168.1.1"), notMasqueraded,
		},
		{"an explicit empty list is none", policy.SourcePolicy{NonMasqueradeCIDRs: cidrs()}, packet("10.244.0.2", "10.1.1.1"), masqueraded},
		{"a hole", vpnHole, packet("10.244.0.2", "10.1.1.1"), masqueraded},
		{"around the hole", vpnHole, packet("10.244.0.2", "10.2.1.1"), notMasqueraded},
		{"an island in the hole", vpnHole, packet("10.244.0.2", "10.1.2.3"), notMasqueraded},
		{"only these: one of them", onlyThese, packet("10.244.0.2", "203.0.113.9"), masqueraded},
		{"only these: another", onlyThese, packet("10.244.0.2", "8.8.8.8"), notMasqueraded},
		{"reserved", policy.SourcePolicy{NomasqAllReservedRanges: ptr(true)}, packet("10.244.0.2", "100.64.0.1"), notMasqueraded},
		{"not reserved", policy.SourcePolicy{}, packet("10.244.0.2", "100.64.0.1"), masqueraded},
		{"local destination", policy.SourcePolicy{}, policy.Packet{Src: addr("10.244.0.2"), Dst: addr("8.8.8.8"), DstLocal: true}, notMasqueraded},
		{"the node itself", policy.SourcePolicy{}, policy.Packet{Src: addr("192.0.2.1"), Dst: addr("8.8.8.8"), SrcLocal: true}, masqueraded},
		{
			"the node itself, not masqueraded",
			policy.SourcePolicy{MasqueradeHost: ptr(false)}, policy.Packet{Src: addr("192.0.2.1"), Dst: addr("8.8.8.8"), SrcLocal: true}, notMasqueraded,
		},
		{"IPv6, not managed", policy.SourcePolicy{}, packet("fd00::2", "2001:db8::1"), notManaged},
		{"IPv6", policy.SourcePolicy{EnableIPv6: ptr(true)}, packet("fd00::2", "2001:db8::1"), masqueraded},
		{"IPv6 has no defaults but link-local", policy.SourcePolicy{EnableIPv6: ptr(true)}, packet("fd00::2", "fd00::3"), masqueraded},
		{"IPv6 link-local", policy.SourcePolicy{EnableIPv6: ptr(true)}, packet("fd00::2", "fe80::1"), notMasqueraded},
		{
			"the switches are for one family each",
			policy.SourcePolicy{EnableIPv6: ptr(true), MasqLinkLocal: ptr(true)}, packet("fd00::2", "fe80::1"), notMasqueraded,
		},
		{"a source in scope", v4Sources, packet("10.244.0.2", "8.8.8.8"), masqueraded},
		{"a source out of scope", v4Sources, packet("10.245.0.2", "8.8.8.8"), notMasqueraded},
		{"a scope of the other family alone", v4Sources, packet("fd00::2", "2001:db8::1"), notMasqueraded},
		{
			"an exempt source",
			policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("10.244.7.0/24")}, packet("10.244.7.2", "8.8.8.8"), notMasqueraded,
		},
		{
			"an exempt source, a destination that is forced",
			policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("10.244.7.0/24"), MasqueradeCIDRs: cidrs("10.0.0.0/8")},
			packet("10.244.7.2", "10.1.1.1"), notMasqueraded,
		},
		{
			"an interface by wildcard",
			policy.SourcePolicy{OutputInterfaces: []string{"eth+"}}, policy.Packet{Src: addr("10.244.0.2"), Dst: addr("8.8.8.8"), Out: "eth7"}, masqueraded,
		},
		{
			"another interface",
			policy.SourcePolicy{OutputInterfaces: []string{"eth0"}}, policy.Packet{Src: addr("10.244.0.2"), Dst: addr("8.8.8.8"), Out: "eth01"}, notMasqueraded,
		},
		{"everything, said as a prefix", policy.SourcePolicy{SourceCIDRs: cidrs("0.0.0.0/0")}, packet("10.244.0.2", "8.8.8.8"), masqueraded},
		{"every source exempt", policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("0.0.0.0/0")}, packet("10.244.0.2", "8.8.8.8"), notMasqueraded},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sources := []policy.Source{network("podnet", 1, tt.policy)}
			if got := newOracle(sources).decide(tt.packet); got != tt.want {
				t.Errorf("the oracle says %s, want %s", got, tt.want)
			}
			for _, l := range defaultLayouts() {
				rs := policy.Desired(policy.Merge(sources), l, policy.OwnedBy("/state"))
				if got, rule := decided(rs, policy.DefaultChain, tt.packet); got != tt.want {
					t.Errorf("layout %+v: %s by %v, want %s; rules:\n%s", l, got, rule, tt.want, render(rs))
				}
			}
		})
	}
}

func packet(src, dst string) policy.Packet {
	return policy.Packet{Src: addr(src), Dst: addr(dst), Out: "eth0", Protocol: "tcp"}
}
