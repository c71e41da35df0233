// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"strings"
	"testing"
	"unicode"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Each kind of conflict, between each pair of sources: the one in force is named last.
func TestConflicts(t *testing.T) {
	const scopes = " or give one of them another masqChain"
	type pair struct{ inForce, superseded policy.SourcePolicy }
	kinds := []struct {
		key, inForceKey string // of the superseded source; of the one in force, where it is another
		pair
		inForceValue, supersededValue string
		remedy                        string
		// The agent files agree with any scope if they state none.
		notOfAgents bool
	}{
		{key: "backend", pair: pair{policy.SourcePolicy{Backend: policy.IPTables}, policy.SourcePolicy{Backend: policy.NFTables}}, inForceValue: "iptables", supersededValue: "nftables"},
		{key: "enableIPv6", pair: pair{policy.SourcePolicy{EnableIPv6: ptr(false)}, policy.SourcePolicy{EnableIPv6: ptr(true)}}, inForceValue: "false", supersededValue: "true"},
		{key: "randomFully", pair: pair{policy.SourcePolicy{RandomFully: ptr(true)}, policy.SourcePolicy{RandomFully: ptr(false)}}, inForceValue: "true", supersededValue: "false"},
		{key: "masqueradeHost", pair: pair{policy.SourcePolicy{MasqueradeHost: ptr(false)}, policy.SourcePolicy{MasqueradeHost: ptr(true)}}, inForceValue: "false", supersededValue: "true"},
		{key: "nomasqAllReservedRanges", pair: pair{policy.SourcePolicy{NomasqAllReservedRanges: ptr(false)}, policy.SourcePolicy{NomasqAllReservedRanges: ptr(true)}}, inForceValue: "false", supersededValue: "true"},
		{key: "toPorts", pair: pair{policy.SourcePolicy{ToPorts: ports(t, "1-2,5")}, policy.SourcePolicy{ToPorts: ports(t, "1-2")}}, inForceValue: "1-2,5", supersededValue: "1-2"},
		{key: "toPorts", pair: pair{policy.SourcePolicy{ToPorts: ports(t, "1-2")}, policy.SourcePolicy{ToPorts: ports(t, "")}}, inForceValue: "1-2", supersededValue: "empty"},
		{
			key: "sourceCIDRs", pair: pair{policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16")}, policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16", "10.245.0.0/16")}},
			inForceValue: "10.244.0.0/16", supersededValue: `"10.244.0.0/16 10.245.0.0/16"`, remedy: scopes,
		},
		{
			key: "sourceCIDRs", pair: pair{policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16")}, policy.SourcePolicy{}},
			inForceValue: "10.244.0.0/16", supersededValue: "any", remedy: scopes, notOfAgents: true,
		},
		{
			key: "outputInterfaces", pair: pair{policy.SourcePolicy{}, policy.SourcePolicy{OutputInterfaces: []string{"eth0"}}},
			inForceValue: "any", supersededValue: "eth0", remedy: scopes,
		},
		{
			key: "masqueradeCIDRs", inForceKey: "nonMasqueradeCIDRs",
			pair:         pair{policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")}, policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8"), NonMasqueradeCIDRs: cidrs()}},
			inForceValue: "10.0.0.0/8", supersededValue: "10.0.0.0/8",
		},
		{
			key: "nonMasqueradeCIDRs", inForceKey: "masqueradeCIDRs",
			pair:         pair{policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8")}, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")}},
			inForceValue: "10.0.0.0/8", supersededValue: "10.0.0.0/8",
		},
	}
	parties := []struct {
		name                string
		inForce, superseded func(policy.SourcePolicy) policy.Source
		inForceName         string
		supersededName      string
	}{
		{
			"a network and the agent files",
			func(s policy.SourcePolicy) policy.Source { return network("z", 9, s) }, agentFiles,
			`network "z"`, "the agent files",
		},
		{
			"a superseded network, and the agent files",
			func(s policy.SourcePolicy) policy.Source { return markSuperseded(network("z", 9, s)) }, agentFiles,
			`network "z"`, "the agent files",
		},
		{
			"the first network and the second",
			func(s policy.SourcePolicy) policy.Source { return network("z", 1, s) },
			func(s policy.SourcePolicy) policy.Source { return network("a", 2, s) },
			`network "z"`, `network "a"`,
		},
		{
			"a new network and a superseded one",
			func(s policy.SourcePolicy) policy.Source { return network("z", 2, s) },
			func(s policy.SourcePolicy) policy.Source { return markSuperseded(network("a", 1, s)) },
			`network "z"`, `network "a"`,
		},
		{
			"two networks with one order: by name",
			func(s policy.SourcePolicy) policy.Source { return network("a", 1, s) },
			func(s policy.SourcePolicy) policy.Source { return network("z", 1, s) },
			`network "a"`, `network "z"`,
		},
	}
	for _, kind := range kinds {
		for _, party := range parties {
			if kind.notOfAgents && party.supersededName == "the agent files" {
				continue
			}
			t.Run(kind.key+"/"+party.name, func(t *testing.T) {
				inForceKey := kind.inForceKey
				if inForceKey == "" {
					inForceKey = kind.key
				}
				inForce, superseded := party.inForce(kind.inForce), party.superseded(kind.superseded)
				want := "chain IP-MASQ-AGENT: " + kind.key + " of " + party.supersededName + " is " + kind.supersededValue +
					", which conflicts with " + inForceKey + " of " + party.inForceName + ", " + kind.inForceValue +
					"; the latter is in force: make them agree" + kind.remedy
				p := mergeOne(t, superseded, inForce)
				var got []string
				for _, c := range p.Conflicts {
					got = append(got, c.Error())
					if c.InForce.Source != inForce.ID || c.Superseded.Source != superseded.ID || c.Scope != (kind.remedy != "") {
						t.Errorf("%+v does not name its sources or its kind", c)
					}
				}
				wantEqual(t, "conflicts", got, []string{want})
				checkInForce(t, p, inForce)
			})
		}
	}
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
