// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"encoding/json"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// What a source left out stays left out in a stored document, and an empty list
// stays an empty list: only the latter says that there are none.
func TestStatementInJSON(t *testing.T) {
	for _, tt := range []struct {
		name      string
		statement policy.SourcePolicy
		want      string
	}{
		{"nothing stated", policy.SourcePolicy{Chain: "C"}, `{"masqChain":"C"}`},
		{
			"everything stated, as empty as can be",
			policy.SourcePolicy{
				Chain: "C", Backend: policy.Auto, NonMasqueradeCIDRs: cidrs(), MasqueradeCIDRs: cidrs(),
				NomasqAllReservedRanges: ptr(false), MasqLinkLocal: ptr(false), MasqLinkLocalIPv6: ptr(false), EnableIPv6: ptr(false),
				SourceCIDRs: cidrs(), NonMasqueradeSourceCIDRs: cidrs(), OutputInterfaces: []string{}, MasqueradeHost: ptr(false),
				RandomFully: ptr(false), ToPorts: &policy.Ports{},
			},
			`{"masqChain":"C","backend":"auto","nonMasqueradeCIDRs":[],"masqueradeCIDRs":[],"nomasqAllReservedRanges":false,` +
				`"masqLinkLocal":false,"masqLinkLocalIPv6":false,"enableIPv6":false,"sourceCIDRs":[],"nonMasqueradeSourceCIDRs":[],` +
				`"outputInterfaces":[],"masqueradeHost":false,"randomFully":false,"toPorts":""}`,
		},
		{
			"values",
			policy.SourcePolicy{
				Chain: "C", Backend: policy.IPTables, NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "fd00::/8"), MasqueradeCIDRs: cidrs("10.1.0.0/16"),
				EnableIPv6: ptr(true), OutputInterfaces: []string{"eth+"}, ToPorts: ports(t, "1024-2047,7"),
			},
			`{"masqChain":"C","backend":"iptables","nonMasqueradeCIDRs":["10.0.0.0/8","fd00::/8"],"masqueradeCIDRs":["10.1.0.0/16"],` +
				`"enableIPv6":true,"outputInterfaces":["eth+"],"toPorts":"1024-2047,7"}`,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			text, err := json.Marshal(tt.statement)
			if err != nil {
				t.Fatal(err)
			}
			wantEqual(t, "JSON", string(text), tt.want)
			var back policy.SourcePolicy
			if err := json.Unmarshal(text, &back); err != nil {
				t.Fatal(err)
			}
			wantEqual(t, "read back", back, tt.statement)
		})
	}
}

func TestSourceRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		for _, c := range genSources().Draw(t, "sources") {
			text, err := json.Marshal(c)
			if err != nil {
				t.Fatal(err)
			}
			var back policy.Source
			if err := json.Unmarshal(text, &back); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
			if !back.Policy.Equal(c.Policy) || back.ID != c.ID || back.Superseded != c.Superseded || back.Order != c.Order {
				t.Fatalf("%+v reads back from %s as %+v", c, text, back)
			}
		}
	})
}

func TestStatementEqual(t *testing.T) {
	full := func() policy.SourcePolicy {
		return policy.SourcePolicy{Chain: "C", NonMasqueradeCIDRs: cidrs("10.0.0.0/8"), RandomFully: ptr(true), ToPorts: ports(t, "1-2")}
	}
	if !full().Equal(full()) {
		t.Error("a statement is not equal to its copy")
	}
	for name, change := range map[string]func(*policy.SourcePolicy){
		"an empty list beside none":    func(s *policy.SourcePolicy) { s.MasqueradeCIDRs = cidrs() },
		"a list beside an empty one":   func(s *policy.SourcePolicy) { s.NonMasqueradeCIDRs = cidrs() },
		"a stated default beside none": func(s *policy.SourcePolicy) { s.MasqueradeHost = ptr(true) },
		"another value":                func(s *policy.SourcePolicy) { s.RandomFully = ptr(false) },
		"other ports":                  func(s *policy.SourcePolicy) { s.ToPorts = ports(t, "1-3") },
		"no ports":                     func(s *policy.SourcePolicy) { s.ToPorts = nil },
		"another chain":                func(s *policy.SourcePolicy) { s.Chain = "D" },
	} {
		changed := full()
		change(&changed)
		if changed.Equal(full()) || full().Equal(changed) {
			t.Errorf("%s: equal", name)
		}
	}
}

func TestSource(t *testing.T) {
	sources := []policy.SourceID{
		{Kind: policy.Network, Name: "a"}, {Kind: policy.Network, Name: "b"}, {Kind: policy.AgentFiles},
	}
	for i, a := range sources {
		for j, b := range sources {
			if got := a.Compare(b); (got < 0) != (i < j) || (got > 0) != (i > j) {
				t.Errorf("%s compares to %s as %d", a, b, got)
			}
		}
	}
	for _, tt := range []struct {
		source policy.SourceID
		want   string
	}{
		{policy.SourceID{Kind: policy.Network, Name: "podnet"}, `network "podnet"`},
		{policy.SourceID{Kind: policy.Network, Name: "a\nb"}, `network "a\nb"`},
		{policy.SourceID{Kind: policy.AgentFiles}, "the agent files"},
		{policy.SourceID{Kind: policy.BuiltIn}, "built in"},
	} {
		if got := tt.source.String(); got != tt.want {
			t.Errorf("%+v is called %s, want %s", tt.source, got, tt.want)
		}
	}
}
