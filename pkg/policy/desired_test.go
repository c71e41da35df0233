// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"testing"

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
		statement  policy.SourcePolicy
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
				for _, j := range chainOf(t, tt.statement, l, tt.family).Jumps {
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
		{nil, policy.Layout{NoRandomFully: true}, false}, {ptr(true), policy.Layout{Sets: true, NoRandomFully: true}, false},
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
