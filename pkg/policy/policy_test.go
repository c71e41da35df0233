// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestOrigin(t *testing.T) {
	podnet := policy.SourceID{Kind: policy.Network, Name: "podnet"}
	for _, tt := range []struct {
		origin policy.Origin
		want   string
	}{
		{policy.Origin{Source: podnet, Key: "nonMasqueradeCIDRs", Index: 2}, `nonMasqueradeCIDRs[2] of network "podnet"`},
		{policy.Origin{Source: podnet, Key: "randomFully", Index: -1}, `randomFully (network "podnet")`},
		{policy.Origin{Source: policy.SourceID{Kind: policy.BuiltIn}, Key: "masqLinkLocal", Index: -1}, "masqLinkLocal (built in)"},
	} {
		if got := tt.origin.String(); got != tt.want {
			t.Errorf("%+v is called %s, want %s", tt.origin, got, tt.want)
		}
	}
}

func TestConflictError(t *testing.T) {
	a, b := policy.SourceID{Kind: policy.Network, Name: "a"}, policy.SourceID{Kind: policy.Network, Name: "b"}
	conflict := &policy.ConflictError{
		Chain: "C", InForce: policy.Origin{Source: a, Key: "sourceCIDRs", Index: -1}, InForceValue: "any",
		Superseded: policy.Origin{Source: b, Key: "sourceCIDRs", Index: -1}, SupersededValue: "10.0.0.0/8", Scope: true,
	}
	wantError(t, "scope", conflict, `chain C: sourceCIDRs of network "b" is 10.0.0.0/8, which conflicts with sourceCIDRs of network "a", any; `+
		"the latter is in force: make them agree or give one of them another masqChain")
	var back *policy.ConflictError
	if !errors.As(fmt.Errorf("add: %w", conflict), &back) || back != conflict {
		t.Error("a wrapped conflict cannot be found")
	}
}

func TestPolicyFamilies(t *testing.T) {
	for _, tt := range []struct {
		enabled *bool
		want    []policy.Family
	}{
		{nil, []policy.Family{policy.IPv4}},
		{ptr(false), []policy.Family{policy.IPv4}},
		{ptr(true), []policy.Family{policy.IPv4, policy.IPv6}},
	} {
		p := mergeOne(t, network("n", 1, policy.SourcePolicy{EnableIPv6: tt.enabled}))
		wantEqual(t, "Families", p.Families(), tt.want)
	}
}

// However many prefixes two sources dispute, a message has a few of them. Each can
// be found.
func TestManyConflicts(t *testing.T) {
	disputed := many(1000)
	p := mergeOne(t, network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: disputed}), network("b", 2, policy.SourcePolicy{MasqueradeCIDRs: disputed}))
	lines := strings.Split(p.Conflicts.Error(), "\n")
	wantEqual(t, "lines", len(lines), 9)
	wantEqual(t, "last line", lines[8], "chain IP-MASQ-AGENT: and 992 more conflicts")
	wantEqual(t, "errors", len(p.Conflicts.Unwrap()), 1000)
	var conflict *policy.ConflictError
	if !errors.As(error(p.Conflicts), &conflict) {
		t.Error("it is no ConflictError")
	}
}
