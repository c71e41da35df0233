// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestMergeScope writes the sourceCIDRs of several sources, with their origins and the conflicts, into testdata/scope.txt.
func TestMergeScope(t *testing.T) {
	of := func(list ...string) policy.SourcePolicy { return policy.SourcePolicy{SourceCIDRs: cidrs(list...)} }
	var got strings.Builder
	var none policy.SourcePolicy
	for _, sources := range [][]policy.Source{
		{agentFiles(none)},
		{agentFiles(of("10.244.0.0/16"))},
		{agentFiles(none), network("a", 1, of("10.244.0.0/16"))},
		{agentFiles(of()), network("a", 1, of("10.244.0.0/16"))},
		{agentFiles(of("10.244.0.0/16")), network("a", 1, none)},
		{network("a", 1, of()), network("b", 2, none)},
		{network("a", 2, none), network("b", 1, of("10.244.0.0/16"))},
		{network("a", 1, none), network("b", 2, of("10.244.0.0/16"))},
		{network("a", 1, of("10.244.0.0/16")), network("b", 2, of("10.245.0.0/16")), agentFiles(of("10.245.0.0/16"))},
	} {
		for _, s := range sources {
			fmt.Fprintf(&got, "%s: %v\n", s.ID, s.Policy.SourceCIDRs)
		}
		p := mergeOne(t, sources...)
		fmt.Fprintf(&got, "in force: %v", p.Sources.Value)
		for _, o := range p.Sources.Origins {
			fmt.Fprintf(&got, " %s", o.Source)
		}
		fmt.Fprintf(&got, "; %d conflicts\n\n", len(p.Conflicts))
	}
	golden.Check(t, "testdata/scope.txt", got.String())
}

// The order in which sources are read has no influence on anything.
func TestMergeIsIndependentOfOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		for i := range sources {
			sources[i].Policy.Chain = rapid.SampledFrom([]string{"A", "B"}).Draw(t, "chain")
		}
		shuffled := rapid.Permutation(sources).Draw(t, "shuffled")
		assert.Equal(t, "policies in another order", policy.Merge(shuffled), policy.Merge(sources))
	})
}

// Merge does not write into what it is given.
func TestMergeLeavesItsInputAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		before := fmt.Sprintf("%#v", sources)
		policy.Desired(policy.Merge(sources), policy.Layout{}, policy.Owner{})
		policy.Desired(policy.Merge(sources), policy.Layout{Sets: true}, policy.Owner{})
		assert.Equal(t, "sources", fmt.Sprintf("%#v", sources), before)
	})
}

// Each kind of conflict, between each pair of sources: the one in force is named last. The messages are in
// testdata/conflicts.txt.
func TestConflicts(t *testing.T) {
	var none policy.SourcePolicy
	kinds := []struct {
		key                 string // of the superseded source
		inForce, superseded policy.SourcePolicy
		scope               bool
		// The agent files agree with any scope if they state none.
		notOfAgents bool
	}{
		{key: "backend", inForce: policy.SourcePolicy{Backend: policy.IPTables}, superseded: policy.SourcePolicy{Backend: policy.NFTables}},
		{key: "toPorts", inForce: policy.SourcePolicy{ToPorts: ports(t, "1-2")}, superseded: policy.SourcePolicy{ToPorts: ports(t, "")}},
		{
			key: "sourceCIDRs", inForce: policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16")},
			superseded: policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16", "10.245.0.0/16")}, scope: true,
		},
		{key: "sourceCIDRs", inForce: policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16")}, scope: true, notOfAgents: true},
		{key: "outputInterfaces", superseded: policy.SourcePolicy{OutputInterfaces: []string{"eth0"}}, scope: true},
		{
			key: "masqueradeCIDRs", inForce: policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")},
			superseded: policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8"), NonMasqueradeCIDRs: cidrs()},
		},
		{
			key: "nonMasqueradeCIDRs", inForce: policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8")},
			superseded: policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")},
		},
	}
	parties := []struct {
		name                string
		inForce, superseded policy.Source
	}{
		{"a network and the agent files", network("z", 9, none), agentFiles(none)},
		{"a superseded network, and the agent files", markSuperseded(network("z", 9, none)), agentFiles(none)},
		{"the first network and the second", network("z", 1, none), network("a", 2, none)},
		{"a new network and a superseded one", network("z", 2, none), markSuperseded(network("a", 1, none))},
		{"two networks with one order: by name", network("a", 1, none), network("z", 1, none)},
	}
	var got strings.Builder
	for _, kind := range kinds {
		for _, party := range parties {
			inForce, superseded := party.inForce, party.superseded
			ofAgents := superseded.ID.Kind == policy.AgentFiles
			if kind.notOfAgents && ofAgents {
				continue
			}
			inForce.Policy, superseded.Policy = onDefaultChain(kind.inForce), onDefaultChain(kind.superseded)
			t.Run(kind.key+"/"+party.name, func(t *testing.T) {
				p := mergeOne(t, superseded, inForce)
				fmt.Fprintf(&got, "%s:\n%s\n\n", party.name, p.Conflicts.Error())
				for _, c := range p.Conflicts {
					if c.InForce.Source != inForce.ID || c.Superseded.Source != superseded.ID || c.Scope != kind.scope {
						t.Errorf("%+v does not name its sources or its kind", c)
					}
				}
				checkInForce(t, p, inForce)
				if p.Conflicts = nil; !ofAgents { // as a whole
					assert.Equal(t, "policy", p, mergeOne(t, inForce))
				}
			})
		}
	}
	golden.Check(t, "testdata/conflicts.txt", got.String())
}

func markSuperseded(c policy.Source) policy.Source {
	c.Superseded = true
	return c
}

// checkInForce compares with the policy that there is without the superseded source,
// in all that is not a list to be united.
func checkInForce(t *testing.T, got policy.Policy, holds policy.Source) {
	t.Helper()
	want := mergeOne(t, holds)
	assert.Equal(t, "in force", got, want, valuesOnly(), cmpopts.IgnoreFields(policy.Policy{}, "Destinations", "NomasqAllReservedRanges"))
	for _, e := range want.Destinations {
		for _, g := range got.Destinations {
			if g.Prefix == e.Prefix && g.Action != e.Action {
				t.Errorf("%s is %s, want %s", g.Prefix, g.Action, e.Action)
			}
		}
	}
}

// A long value is cut, and one that could break the line is quoted.
func TestConflictIsBounded(t *testing.T) {
	var many []string
	for range 200 {
		many = append(many, "interface-"+string(rune('a'+len(many)%26))+string(rune('a'+len(many)/26)))
	}
	p := mergeOne(t, network("a\nb", 1, policy.SourcePolicy{}), network("b", 2, policy.SourcePolicy{OutputInterfaces: many}))
	if len(p.Conflicts) != 1 {
		t.Fatalf("%d conflicts, want 1", len(p.Conflicts))
	}
	c := p.Conflicts[0]
	if len(c.InForceValue) > 256 || len(c.SupersededValue) > 256 || strings.ContainsFunc(c.Error(), unicode.IsControl) {
		t.Errorf("the message is not one line, or repeats too much: %q", c)
	}
}

// However many prefixes two sources dispute, a message has a few of them. Each can
// be found.
func TestManyConflicts(t *testing.T) {
	disputed := many(1000)
	p := mergeOne(t, network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: disputed}), network("b", 2, policy.SourcePolicy{MasqueradeCIDRs: disputed}))
	lines := strings.Split(p.Conflicts.Error(), "\n")
	assert.Equal(t, "lines", len(lines), 9)
	assert.Equal(t, "last line", lines[8], "chain IP-MASQ-AGENT: and 992 more conflicts")
	assert.Equal(t, "errors", len(p.Conflicts.Unwrap()), 1000)
	var conflict *policy.ConflictError
	if !errors.As(error(p.Conflicts), &conflict) {
		t.Error("it is no ConflictError")
	}
}

// CheckBounds counts exactly the rules that Desired returns. Its errors are in testdata/bounds.txt.
func TestCheckBounds(t *testing.T) {
	var got strings.Builder
	ports := ports(t, "1,3,5,7")
	for _, tt := range []struct {
		name    string
		sources []policy.Source
		rules   int // without the one more, and without multicast, which does not count
		more    policy.Source
	}{{
		name:    "exempt prefixes",
		sources: []policy.Source{network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: many(policy.MaxRules - 2)})},
		rules:   policy.MaxRules,
		more:    network("b", 2, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")}),
	}, {
		name: "ports of one and prefixes of another", // 13 rules each, and for all else
		sources: []policy.Source{
			network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), NonMasqueradeSourceCIDRs: many(1), ToPorts: ports}),
			agentFiles(policy.SourcePolicy{MasqueradeCIDRs: many(5039)}),
		},
		rules: 13*5040 + 2,
		more:  network("b", 2, policy.SourcePolicy{MasqueradeCIDRs: many(5041)}),
	}, {
		name:    "exempt sources",
		sources: []policy.Source{network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), NonMasqueradeSourceCIDRs: many(4096)})},
		rules:   4096 + 2,
		more:    agentFiles(policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("10.0.0.0/8")}),
	}, {
		name: "pod ranges",
		sources: []policy.Source{
			network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), PodCIDRs: many(4096)}), network("c", 3, policy.SourcePolicy{PodCIDRs: many(4096)}),
		},
		rules: 2,
		more:  network("b", 2, policy.SourcePolicy{PodCIDRs: cidrs("10.0.0.0/8")}),
	}, {
		name:    "namespaces",
		sources: []policy.Source{network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), NonMasqueradeNamespaces: names(policy.MaxNamespaces)})},
		rules:   2,
		more:    network("b", 2, policy.SourcePolicy{NonMasqueradeNamespaces: []string{"another"}}),
	}} {
		t.Run(tt.name, func(t *testing.T) {
			p := policy.Merge(tt.sources)[0]
			assert.NoError(t, p.CheckBounds(policy.Layout{}))
			rules := len(policy.Desired([]policy.Policy{p}, policy.Layout{}, policy.Owner{}).Chains[0].Rules)
			assert.Equal(t, "rules", rules, tt.rules+len(policy.IPv4.Multicast()))
			err := policy.Merge(append(tt.sources, tt.more))[0].CheckBounds(policy.Layout{})
			fmt.Fprintf(&got, "%s:\n%v\n\n", tt.name, err)
			var bound *policy.BoundError
			if !errors.As(err, &bound) {
				t.Errorf("%T is no BoundError", err)
			}
		})
	}
	full := policy.Merge([]policy.Source{network("a", 1, policy.SourcePolicy{
		NonMasqueradeNamespaces: []string{"prod"}, NonMasqueradeCIDRs: many(policy.MaxRules - 4),
	})})[0]
	full.Outputs = []policy.OutputAddress{{Address: addr("192.0.2.1")}}
	full.SetExemptPods([]policy.ExemptPod{{Address: addr("10.88.0.1"), Namespace: "prod"}})
	assert.NoError(t, full.CheckBounds(policy.Layout{}))
	full.SetExemptPods([]policy.ExemptPod{
		{Address: addr("10.88.0.1"), Namespace: "prod"}, {Address: addr("10.88.0.2"), Namespace: "prod"},
	})
	fmt.Fprintf(&got, "pods and outputAddresses:\n%v\n\n", full.CheckBounds(policy.Layout{}))
	golden.Check(t, "testdata/bounds.txt", got.String())
	// Addresses of one family make no rules of the other.
	fits := policy.Merge([]policy.Source{
		network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), MasqueradeCIDRs: many(5000), ToPorts: ports}),
	})[0]
	for _, a := range []string{"2001:db8::1", "2001:db8::2"} {
		fits.Outputs = append(fits.Outputs, policy.OutputAddress{Address: netip.MustParseAddr(a)})
	}
	assert.NoError(t, fits.CheckBounds(policy.Layout{}))
	sets := policy.Merge([]policy.Source{network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: many(policy.MaxRules), ToPorts: ports})})[0]
	if err := sets.CheckBounds(policy.Layout{Sets: true}); err != nil {
		t.Errorf("with sets: %v", err)
	}
}
