// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

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
					checkMasqueradeRule(t, merged[0], defaultLayouts()[i], p, *rule)
				}
			}
		}
	})
}

func checkMasqueradeRule(t *rapid.T, p policy.Policy, l policy.Layout, packet policy.Packet, r policy.Rule) {
	wantPorts := len(p.ToPorts.Value) > 0 && slices.Contains(policy.Protocols(), packet.Protocol)
	if got := !r.Ports.IsZero(); got != wantPorts {
		t.Fatalf("%v chooses ports for %s: %v, want %v", r, packet.Protocol, got, wantPorts)
	}
	if want := p.RandomFully.Value && !l.NoRandomFully; r.RandomFully != want {
		t.Fatalf("%v is fully random: %v, want %v", r, r.RandomFully, want)
	}
}

// The decisions that need a whole story to be told, one packet each.
func TestDecisionsByExample(t *testing.T) {
	onlyThese := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("0.0.0.0/0"), MasqueradeCIDRs: cidrs("203.0.113.0/24")}
	vpnHole := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.1.2.0/24"), MasqueradeCIDRs: cidrs("10.1.0.0/16")}
	v4Sources := policy.SourcePolicy{EnableIPv6: ptr(true), SourceCIDRs: cidrs("10.244.0.0/16")}
	for _, tt := range []struct {
		name      string
		statement policy.SourcePolicy
		packet    policy.Packet
		want      verdict
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
			"the node itself, left alone",
			policy.SourcePolicy{MasqueradeHost: ptr(false)}, policy.Packet{Src: addr("192.0.2.1"), Dst: addr("8.8.8.8"), SrcLocal: true}, notMasqueraded,
		},
		{"IPv6, not managed", policy.SourcePolicy{}, packet("fd00::2", "2001:db8::1"), notItsAffair},
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
			sources := []policy.Source{network("podnet", 1, tt.statement)}
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
