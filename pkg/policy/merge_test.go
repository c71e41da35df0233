// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// withOrigins writes what a policy does with each prefix, with the origins.
func withOrigins(entries []policy.Entry) []string {
	var out []string
	for _, e := range entries {
		line := fmt.Sprintf("%s %s", e.Prefix, e.Action)
		for _, o := range e.Origins {
			line += "; " + o.String()
		}
		out = append(out, line)
	}
	return out
}

func TestMergeDestinations(t *testing.T) {
	const (
		ll       = "169.254.0.0/16 exempt; masqLinkLocal (built in)"
		ll6      = "fe80::/10 exempt; masqLinkLocalIPv6 (built in)"
		ten      = "10.0.0.0/8 exempt; nonMasqueradeCIDRs (built in)"
		twelve   = "172.16.0.0/12 exempt; nonMasqueradeCIDRs (built in)"
		sixteen  = "192.168.0.0/16 exempt; nonMasqueradeCIDRs (built in)"
		podnet   = ` of network "podnet"`
		othernet = ` of network "othernet"`
		agents   = " of the agent files"
	)
	for _, tt := range []struct {
		name    string
		sources []policy.Source
		want    []string
	}{
		{"defaults", []policy.Source{network("podnet", 1, policy.SourcePolicy{})}, []string{ll, ten, twelve, sixteen}},
		{"defaults of agent files that state nothing", []policy.Source{agentFiles(policy.SourcePolicy{})}, []string{ll, ten, twelve, sixteen}},
		{
			"one names the list, another does not", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{}), agentFiles(policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("192.0.2.0/24")}),
			},
			[]string{ll, "192.0.2.0/24 exempt; nonMasqueradeCIDRs[0]" + agents},
		},
		{
			"an empty list is a list", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs()}), agentFiles(policy.SourcePolicy{}),
			},
			[]string{ll},
		},
		{
			"the other list does not name it", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{MasqueradeCIDRs: cidrs("192.0.2.0/24")}),
			},
			[]string{ll, ten, twelve, sixteen, "192.0.2.0/24 masquerade; masqueradeCIDRs[0]" + podnet},
		},
		{
			"lists are united: networks by name, then agent files; each prefix where it first comes", []policy.Source{
				agentFiles(policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("192.168.0.0/16", "10.0.0.0/8")}),
				network("podnet", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.0.0.0/8", "198.51.100.0/24")}),
				network("othernet", 2, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("192.0.2.0/24"), MasqueradeCIDRs: cidrs("10.1.0.0/16")}),
			},
			[]string{
				ll, "192.0.2.0/24 exempt; nonMasqueradeCIDRs[0]" + othernet, "10.1.0.0/16 masquerade; masqueradeCIDRs[0]" + othernet,
				"10.0.0.0/8 exempt; nonMasqueradeCIDRs[0]" + podnet + "; nonMasqueradeCIDRs[1]" + podnet + "; nonMasqueradeCIDRs[1]" + agents,
				"198.51.100.0/24 exempt; nonMasqueradeCIDRs[2]" + podnet,
				"192.168.0.0/16 exempt; nonMasqueradeCIDRs[0]" + agents,
			},
		},
		{
			"link-local switches are united", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{EnableIPv6: ptr(true), MasqLinkLocal: ptr(false), MasqLinkLocalIPv6: ptr(true), NonMasqueradeCIDRs: cidrs()}),
				agentFiles(policy.SourcePolicy{MasqLinkLocal: ptr(true), MasqLinkLocalIPv6: ptr(false)}),
			},
			nil,
		},
		{
			"each switch is for its family", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{EnableIPv6: ptr(true), MasqLinkLocal: ptr(true), NonMasqueradeCIDRs: cidrs()}),
			},
			[]string{ll6},
		},
		{
			"IPv6 link-local comes with IPv6", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{EnableIPv6: ptr(true), NonMasqueradeCIDRs: cidrs()}),
			},
			[]string{ll, ll6},
		},
		{
			"what is stated beats what is built in", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{MasqueradeCIDRs: cidrs("169.254.0.0/16", "172.16.0.0/12")}),
			},
			[]string{
				ten, sixteen, "169.254.0.0/16 masquerade; masqueradeCIDRs[0]" + podnet, "172.16.0.0/12 masquerade; masqueradeCIDRs[1]" + podnet,
			},
		},
		{
			"agent files beat what is built in too", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{}), agentFiles(policy.SourcePolicy{MasqueradeCIDRs: cidrs("169.254.0.0/16")}),
			},
			[]string{ten, twelve, sixteen, "169.254.0.0/16 masquerade; masqueradeCIDRs[0]" + agents},
		},
		{
			"stated as it is built in: both are named", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "169.254.0.0/16")}),
			},
			[]string{ll + "; nonMasqueradeCIDRs[1]" + podnet, "10.0.0.0/8 exempt; nonMasqueradeCIDRs[0]" + podnet},
		},
		{
			"the switch takes away the built-in exemption alone", []policy.Source{
				network("podnet", 1, policy.SourcePolicy{MasqLinkLocal: ptr(true), NonMasqueradeCIDRs: cidrs("169.254.0.0/16")}),
			},
			[]string{"169.254.0.0/16 exempt; nonMasqueradeCIDRs[0]" + podnet},
		},
		{
			"a network beats the agent files", []policy.Source{
				agentFiles(policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.1.0.0/16")}),
				network("podnet", 9, policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8")}),
			},
			[]string{ll, "10.0.0.0/8 masquerade; masqueradeCIDRs[0]" + podnet, "10.1.0.0/16 exempt; nonMasqueradeCIDRs[1]" + agents},
		},
		{
			"the network that came first beats the other", []policy.Source{
				network("othernet", 2, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")}),
				network("podnet", 1, policy.SourcePolicy{MasqueradeCIDRs: cidrs("10.0.0.0/8"), NonMasqueradeCIDRs: cidrs()}),
			},
			[]string{ll, "10.0.0.0/8 masquerade; masqueradeCIDRs[0]" + podnet},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantEqual(t, "destinations", withOrigins(mergeOne(t, tt.sources...).Destinations), tt.want)
		})
	}
}

func TestMergeReservedRanges(t *testing.T) {
	p := mergeOne(t, network("podnet", 1, policy.SourcePolicy{}), agentFiles(policy.SourcePolicy{NomasqAllReservedRanges: ptr(true)}))
	wantEqual(t, "entries", len(p.Destinations), 12)
	wantEqual(t, "the last", withOrigins(p.Destinations[11:]), []string{"240.0.0.0/4 exempt; nonMasqueradeCIDRs (built in)"})
	p = mergeOne(t, network("podnet", 1, policy.SourcePolicy{NomasqAllReservedRanges: ptr(true), NonMasqueradeCIDRs: cidrs()}))
	wantEqual(t, "a named list leaves no defaults to grow", len(p.Destinations), 1)
}

func TestMergeExemptSources(t *testing.T) {
	p := mergeOne(t,
		agentFiles(policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("10.244.9.0/24", "10.244.7.0/24")}),
		network("podnet", 1, policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("10.244.7.0/24", "10.244.8.0/24")}))
	wantEqual(t, "sources", withOrigins(p.ExemptSources), []string{
		`10.244.7.0/24 exempt; nonMasqueradeSourceCIDRs[0] of network "podnet"; nonMasqueradeSourceCIDRs[1] of the agent files`,
		`10.244.8.0/24 exempt; nonMasqueradeSourceCIDRs[1] of network "podnet"`,
		"10.244.9.0/24 exempt; nonMasqueradeSourceCIDRs[0] of the agent files",
	})
	wantEqual(t, "conflicts", len(p.Conflicts), 0)
}

// statedIn returns the scalars and scopes of a policy with who states them.
func statedIn(p policy.Policy) map[string]string {
	out := map[string]string{}
	note := func(value any, origins []policy.Origin) {
		out[origins[0].Key] = fmt.Sprint(value)
		for _, o := range origins {
			out[o.Key] += " " + o.Source.String()
			if o.Index != -1 || o.Key != origins[0].Key {
				out[o.Key] += fmt.Sprintf(" (%+v)", o)
			}
		}
	}
	note(p.Backend.Value, p.Backend.Origins)
	note(p.EnableIPv6.Value, p.EnableIPv6.Origins)
	note(p.RandomFully.Value, p.RandomFully.Origins)
	note(p.Host.Value, p.Host.Origins)
	note(p.ToPorts.Value, p.ToPorts.Origins)
	note(p.Sources.Value, p.Sources.Origins)
	note(p.Interfaces.Value, p.Interfaces.Origins)
	return out
}

func TestMergeScalars(t *testing.T) {
	builtIn := map[string]string{
		"backend": "auto built in", "enableIPv6": "false built in", "randomFully": "true built in", "masqueradeHost": "true built in",
		"toPorts": " built in", "sourceCIDRs": "[] built in", "outputInterfaces": "[] built in",
	}
	wantEqual(t, "no source states anything", statedIn(mergeOne(t, agentFiles(policy.SourcePolicy{}))), builtIn)

	all := policy.SourcePolicy{
		Backend: policy.NFTables, EnableIPv6: ptr(true), RandomFully: ptr(false), MasqueradeHost: ptr(false),
		ToPorts: ports(t, "5-9,1-2"), SourceCIDRs: cidrs("10.2.0.0/16", "10.1.0.0/16", "10.2.0.0/16"), OutputInterfaces: []string{"b", "a", "b"},
	}
	wantEqual(t, "one states all", statedIn(mergeOne(t, agentFiles(all), network("podnet", 1, policy.SourcePolicy{
		Backend: policy.Auto, SourceCIDRs: cidrs("10.1.0.0/16", "10.2.0.0/16"), OutputInterfaces: []string{"a", "b"},
	}))), map[string]string{
		"backend": "nftables the agent files", "enableIPv6": "true the agent files", "randomFully": "false the agent files",
		"masqueradeHost": "false the agent files", "toPorts": "5-9,1-2 the agent files",
		"sourceCIDRs":      `[10.1.0.0/16 10.2.0.0/16] network "podnet" the agent files`,
		"outputInterfaces": `[a b] network "podnet" the agent files`,
	})

	same := all
	same.ToPorts = ports(t, "1-2,5-9")
	p := mergeOne(t, network("a", 2, all), network("b", 1, same), agentFiles(all))
	wantEqual(t, "conflicts among those that agree", len(p.Conflicts), 0)
	who := ` network "b" network "a" the agent files`
	wantEqual(t, "three state all", statedIn(p), map[string]string{
		"backend": "nftables" + who, "enableIPv6": "true" + who, "randomFully": "false" + who, "masqueradeHost": "false" + who,
		"toPorts": "1-2,5-9" + who, "sourceCIDRs": "[10.1.0.0/16 10.2.0.0/16]" + who, "outputInterfaces": "[a b]" + who,
	})
}

func TestMergeScope(t *testing.T) {
	one, other := cidrs("10.244.0.0/16"), cidrs("10.245.0.0/16")
	for _, tt := range []struct {
		name      string
		sources   []policy.Source
		want      string // what holds
		conflicts int
	}{
		{"no network, no source states it", []policy.Source{agentFiles(policy.SourcePolicy{})}, "[] built in", 0},
		{"agent files alone state it", []policy.Source{agentFiles(policy.SourcePolicy{SourceCIDRs: one})}, "[10.244.0.0/16] the agent files", 0},
		{
			"agent files that state none take the network's",
			[]policy.Source{agentFiles(policy.SourcePolicy{}), network("a", 1, policy.SourcePolicy{SourceCIDRs: one})},
			`[10.244.0.0/16] network "a"`, 0,
		},
		{
			"an empty list of agent files is none stated",
			[]policy.Source{agentFiles(policy.SourcePolicy{SourceCIDRs: cidrs()}), network("a", 1, policy.SourcePolicy{SourceCIDRs: one})},
			`[10.244.0.0/16] network "a"`, 0,
		},
		{
			"agent files against a network that means any",
			[]policy.Source{agentFiles(policy.SourcePolicy{SourceCIDRs: one}), network("a", 1, policy.SourcePolicy{})},
			`[] network "a"`, 1,
		},
		{
			"two networks that mean any, one by an empty list",
			[]policy.Source{network("a", 1, policy.SourcePolicy{SourceCIDRs: cidrs()}), network("b", 2, policy.SourcePolicy{})},
			`[] network "a" network "b"`, 0,
		},
		{
			"a network that means any after one that does not",
			[]policy.Source{network("a", 2, policy.SourcePolicy{}), network("b", 1, policy.SourcePolicy{SourceCIDRs: one})},
			`[10.244.0.0/16] network "b"`, 1,
		},
		{
			"a network that means any before one that does not",
			[]policy.Source{network("a", 1, policy.SourcePolicy{}), network("b", 2, policy.SourcePolicy{SourceCIDRs: one})},
			`[] network "a"`, 1,
		},
		{
			"three that differ",
			[]policy.Source{
				network("a", 1, policy.SourcePolicy{SourceCIDRs: one}), network("b", 2, policy.SourcePolicy{SourceCIDRs: other}),
				agentFiles(policy.SourcePolicy{SourceCIDRs: other}),
			},
			`[10.244.0.0/16] network "a"`, 2,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := mergeOne(t, tt.sources...)
			wantEqual(t, "sourceCIDRs", statedIn(p)["sourceCIDRs"], tt.want)
			wantEqual(t, "conflicts", len(p.Conflicts), tt.conflicts)
		})
	}
}

func TestMergeByChain(t *testing.T) {
	merged := policy.Merge([]policy.Source{
		network("c", 3, policy.SourcePolicy{Chain: "B"}), network("a", 1, policy.SourcePolicy{Chain: "B", RandomFully: ptr(false)}),
		network("b", 2, policy.SourcePolicy{Chain: "A", RandomFully: ptr(true)}),
	})
	var got []string
	for _, p := range merged {
		got = append(got, fmt.Sprintf("%s %v %d", p.Chain, p.RandomFully.Value, len(p.Conflicts)))
	}
	wantEqual(t, "policies", got, []string{"A true 0", "B false 0"})
	if got := policy.Merge(nil); len(got) != 0 {
		t.Errorf("Merge(nil) = %v", got)
	}
}

// The order in which sources are read has no influence on anything.
func TestMergeIsIndependentOfOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		for i := range sources {
			sources[i].Policy.Chain = rapid.SampledFrom([]string{"A", "B"}).Draw(t, "chain")
		}
		shuffled := rapid.Permutation(sources).Draw(t, "shuffled")
		if diff := cmp.Diff(policy.Merge(sources), policy.Merge(shuffled), equatable); diff != "" {
			t.Fatalf("another order gives another policy:\n%s", diff)
		}
	})
}

// Merge does not write into what it is given.
func TestMergeLeavesItsInputAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		before := fmt.Sprintf("%#v", sources)
		policy.Desired(policy.Merge(sources), policy.Layout{}, policy.Owner{})
		policy.Desired(policy.Merge(sources), policy.Layout{Sets: true}, policy.Owner{})
		if after := fmt.Sprintf("%#v", sources); after != before {
			t.Fatalf("before: %s\nafter: %s", before, after)
		}
	})
}
