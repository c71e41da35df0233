// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"strings"
	"testing"
	"unicode"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Each sort of conflict, between each pair of parties: who holds is named last.
func TestConflicts(t *testing.T) {
	const scopes = " or give one of them another masqChain"
	type pair struct{ holds, yields policy.SourcePolicy }
	kinds := []struct {
		key, holdsKey string // of what yields; of what holds, where it is another
		pair
		holdsValue, yieldsValue string
		remedy                  string
		// The agent files agree with any scope if they state none.
		notOfAgents bool
	}{
		{key: "backend", pair: pair{policy.SourcePolicy{Backend: policy.IPTables}, policy.SourcePolicy{Backend: policy.NFTables}}, holdsValue: "iptables", yieldsValue: "nftables"},
		{key: "enableIPv6", pair: pair{policy.SourcePolicy{EnableIPv6: ptr(false)}, policy.SourcePolicy{EnableIPv6: ptr(true)}}, holdsValue: "false", yieldsValue: "true"},
		{key: "randomFully", pair: pair{policy.SourcePolicy{RandomFully: ptr(true)}, policy.SourcePolicy{RandomFully: ptr(false)}}, holdsValue: "true", yieldsValue: "false"},
		{key: "masqueradeHost", pair: pair{policy.SourcePolicy{MasqueradeHost: ptr(false)}, policy.SourcePolicy{MasqueradeHost: ptr(true)}}, holdsValue: "false", yieldsValue: "true"},
		{key: "nomasqAllReservedRanges", pair: pair{policy.SourcePolicy{NomasqAllReservedRanges: ptr(false)}, policy.SourcePolicy{NomasqAllReservedRanges: ptr(true)}}, holdsValue: "false", yieldsValue: "true"},
		{key: "toPorts", pair: pair{policy.SourcePolicy{ToPorts: ports(t, "1-2,5")}, policy.SourcePolicy{ToPorts: ports(t, "1-2")}}, holdsValue: "1-2,5", yieldsValue: "1-2"},
		{key: "toPorts", pair: pair{policy.SourcePolicy{ToPorts: ports(t, "1-2")}, policy.SourcePolicy{ToPorts: ports(t, "")}}, holdsValue: "1-2", yieldsValue: "empty"},
		{
			key: "sourceCIDRs", pair: pair{policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16")}, policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16", "10.245.0.0/16")}},
			holdsValue: "10.244.0.0/16", yieldsValue: `"10.244.0.0/16 10.245.0.0/16"`, remedy: scopes,
		},
		{
			key: "sourceCIDRs", pair: pair{policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16")}, policy.SourcePolicy{}},
			holdsValue: "10.244.0.0/16", yieldsValue: "any", remedy: scopes, notOfAgents: true,
		},
		{
			key: "outputInterfaces", pair: pair{policy.SourcePolicy{}, policy.SourcePolicy{OutputInterfaces: []string{"eth0"}}},
			holdsValue: "any", yieldsValue: "eth0", remedy: scopes,
		},
		{
			key: "masqueradeCIDRs", holdsKey: "nonMasqueradeCIDRs",
			pair:       pair{policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")}, policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8"), NonMasqueradeCIDRs: cidrs()}},
			holdsValue: "10.0.0.0/8", yieldsValue: "10.0.0.0/8",
		},
		{
			key: "nonMasqueradeCIDRs", holdsKey: "masqueradeCIDRs",
			pair:       pair{policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8")}, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")}},
			holdsValue: "10.0.0.0/8", yieldsValue: "10.0.0.0/8",
		},
	}
	parties := []struct {
		name          string
		holds, yields func(policy.SourcePolicy) policy.Source
		holdsName     string
		yieldsName    string
	}{
		{
			"a network and the agent files",
			func(s policy.SourcePolicy) policy.Source { return network("z", 9, s) }, agentFiles,
			`network "z"`, "the agent files",
		},
		{
			"a network that yields, and the agent files",
			func(s policy.SourcePolicy) policy.Source { return yielding(network("z", 9, s)) }, agentFiles,
			`network "z"`, "the agent files",
		},
		{
			"the first network and the second",
			func(s policy.SourcePolicy) policy.Source { return network("z", 1, s) },
			func(s policy.SourcePolicy) policy.Source { return network("a", 2, s) },
			`network "z"`, `network "a"`,
		},
		{
			"a newcomer and a network that yields",
			func(s policy.SourcePolicy) policy.Source { return network("z", 2, s) },
			func(s policy.SourcePolicy) policy.Source { return yielding(network("a", 1, s)) },
			`network "z"`, `network "a"`,
		},
		{
			"two networks that came at once: by name",
			func(s policy.SourcePolicy) policy.Source { return network("a", 1, s) },
			func(s policy.SourcePolicy) policy.Source { return network("z", 1, s) },
			`network "a"`, `network "z"`,
		},
	}
	for _, kind := range kinds {
		for _, party := range parties {
			if kind.notOfAgents && party.yieldsName == "the agent files" {
				continue
			}
			t.Run(kind.key+"/"+party.name, func(t *testing.T) {
				holdsKey := kind.holdsKey
				if holdsKey == "" {
					holdsKey = kind.key
				}
				holds, yields := party.holds(kind.holds), party.yields(kind.yields)
				want := "chain IP-MASQ-AGENT: " + kind.key + " of " + party.yieldsName + " is " + kind.yieldsValue +
					", which conflicts with " + holdsKey + " of " + party.holdsName + ", " + kind.holdsValue +
					"; the latter is in force: make them agree" + kind.remedy
				p := mergeOne(t, yields, holds)
				var got []string
				for _, c := range p.Conflicts {
					got = append(got, c.Error())
					if c.InForce.Source != holds.ID || c.Superseded.Source != yields.ID || c.Scope != (kind.remedy != "") {
						t.Errorf("%+v does not name its parties or its sort", c)
					}
				}
				wantEqual(t, "conflicts", got, []string{want})
				checkHolds(t, p, holds)
			})
		}
	}
}

func yielding(c policy.Source) policy.Source {
	c.Superseded = true
	return c
}

// checkHolds compares with the policy that there is without the weaker party,
// in all that is not a list to be united.
func checkHolds(t *testing.T, got policy.Policy, holds policy.Source) {
	t.Helper()
	want := mergeOne(t, holds)
	wantEqual(t, "backend", got.Backend.Value, want.Backend.Value)
	wantEqual(t, "enableIPv6", got.EnableIPv6.Value, want.EnableIPv6.Value)
	wantEqual(t, "randomFully", got.RandomFully.Value, want.RandomFully.Value)
	wantEqual(t, "masqueradeHost", got.Host.Value, want.Host.Value)
	wantEqual(t, "toPorts", got.ToPorts.Value, want.ToPorts.Value)
	wantEqual(t, "sourceCIDRs", got.Sources.Value, want.Sources.Value)
	wantEqual(t, "outputInterfaces", got.Interfaces.Value, want.Interfaces.Value)
	for _, e := range want.Destinations {
		for _, g := range got.Destinations {
			if g.Prefix == e.Prefix && g.Action != e.Action {
				t.Errorf("%s is %s, want %s", g.Prefix, g.Action, e.Action)
			}
		}
	}
}

// No conflict: what is left out agrees with everything, in every scalar.
func TestLeftOutAgrees(t *testing.T) {
	p := mergeOne(t, network("a", 1, policy.SourcePolicy{}), network("b", 2, policy.SourcePolicy{
		Backend: policy.NFTables, EnableIPv6: ptr(true), RandomFully: ptr(false), MasqueradeHost: ptr(false),
		NomasqAllReservedRanges: ptr(true), ToPorts: ports(t, "1-2"), MasqLinkLocal: ptr(true), MasqLinkLocalIPv6: ptr(true),
		NonMasqueradeCIDRs: cidrs("10.0.0.0/8"), MasqueradeCIDRs: cidrs("10.1.0.0/16"), NonMasqueradeSourceCIDRs: cidrs("10.2.0.0/16"),
	}), network("c", 3, policy.SourcePolicy{Backend: policy.Auto, MasqLinkLocal: ptr(false)}))
	for _, c := range p.Conflicts {
		t.Errorf("conflict: %v", c)
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
