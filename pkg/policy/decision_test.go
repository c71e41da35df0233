// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Decide agrees with the rules in either layout, and with the words of the sources. If source or interface are not
// known, it agrees with what the rules do with the representative packet.
func TestDecideAgreesWithTheRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		p := merge(sources)[0]
		oracle := newOracle(sources)
		for range 40 {
			asked := genPacket(sources).Draw(t, "packet")
			if rapid.IntRange(0, 3).Draw(t, "out unknown") == 0 {
				asked.Out = ""
			}
			if rapid.IntRange(0, 3).Draw(t, "source unknown") == 0 {
				asked.Src, asked.SrcLocal = netip.Addr{}, false
			}
			pkt := p.Representative(asked)
			if asked.Src.IsValid() && pkt.Src != asked.Src || asked.Out != "" && pkt.Out != asked.Out {
				t.Fatalf("%+v stands for %+v, of which it changes what is known", pkt, asked)
			}
			d, want := p.Decide(asked), oracle.decide(pkt)
			for _, l := range []policy.Layout{{}, {Sets: true}} {
				rs := policy.Desired([]policy.Policy{p}, l, policy.OwnedBy("/state"))
				// What is in scope reaches a rule of the chain, and nothing else does.
				got, rule := decided(rs, policy.DefaultChain, pkt)
				if got != want || (got == masqueraded) != (d.Action == policy.ActionMasquerade) || (rule == nil) != (d.Action == policy.ActionOutOfScope) {
					t.Fatalf("layout %+v: %+v is said to be %s (%s), the sources say %s, but %v decides; rules:\n%s", l, pkt, d.Action, d.Reason, want, rule, render(rs))
				}
				if got == masqueraded {
					checkMasqueradeRule(t, p, pkt, *rule)
				}
			}
			checkEntry(t, p, pkt, d)
		}
	})
}

// TestPacketsHaveEveryField: properties over random packets are about all that a rule can match.
func TestPacketsHaveEveryField(t *testing.T) {
	values := map[string]map[any]bool{}
	rapid.Check(t, func(t *rapid.T) {
		p := reflect.ValueOf(genPacket(genSources().Draw(t, "sources")).Draw(t, "packet"))
		for i := range p.NumField() {
			name := p.Type().Field(i).Name
			if values[name] == nil {
				values[name] = map[any]bool{}
			}
			values[name][p.Field(i).Interface()] = true
		}
	})
	for name, drawn := range values {
		if len(drawn) < 2 {
			t.Errorf("genPacket does not draw %s", name)
		}
	}
}

// checkEntry checks that the entry of a decision is in the policy and covers the packet.
func checkEntry(t *rapid.T, p policy.Policy, pkt policy.Packet, d policy.Decision) {
	if d.Reason == "" {
		t.Fatalf("%+v is %s without a reason", pkt, d.Action)
	}
	decides := d.PrefixAction
	if decides == nil {
		if d.Action == policy.ActionExempt {
			t.Fatalf("%+v is exempt by nothing", pkt)
		}
		return
	}
	is := func(e policy.PrefixAction) bool { return e.Prefix == decides.Prefix && e.Action == decides.Action }
	bySource := decides.Prefix.Contains(pkt.Src) && slices.ContainsFunc(slices.Concat(p.ExemptSources, p.ExemptPods), is)
	byDestination := decides.Prefix.Contains(pkt.Dst) && slices.ContainsFunc(p.Destinations, is)
	longer := func(e policy.PrefixAction) bool {
		return e.Prefix.Contains(pkt.Dst) && e.Prefix.Bits() > decides.Prefix.Bits()
	}
	if !bySource && (!byDestination || slices.ContainsFunc(p.Destinations, longer)) || d.Action == policy.ActionOutOfScope {
		t.Fatalf("%+v is %s by %s, which is not about it", pkt, d.Action, decides.Prefix)
	}
	if want := decides.Action == policy.ActionMasquerade; want != (d.Action == policy.ActionMasquerade) {
		t.Fatalf("%+v is %s by %s, which says %s", pkt, d.Action, decides.Prefix, decides.Action)
	}
	if len(d.Origins) == 0 {
		t.Fatalf("%+v is %s by %s, which no source stated", pkt, d.Action, decides.Prefix)
	}
}

// TestDecideByExample writes each decision into testdata/decisions.txt, and the packet that stands for all that are asked for.
func TestDecideByExample(t *testing.T) {
	scoped := policy.SourcePolicy{
		EnableIPv6: ptr(true), SourceCIDRs: cidrs("10.244.0.0/16"), NonMasqueradeSourceCIDRs: cidrs("10.244.7.0/24"),
		OutputInterfaces: []string{"eth+", "wg0"}, MasqueradeHost: ptr(false),
		NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.1.2.0/24"), MasqueradeCIDRs: cidrs("10.1.0.0/16"),
	}
	exempt := func(sources ...string) policy.SourcePolicy {
		return policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs(sources...)}
	}
	exemptAll, exemptFirst := exempt("10.0.0.0/8"), exempt("10.244.0.0/24")
	exemptAll.SourceCIDRs, exemptFirst.SourceCIDRs = cidrs("10.244.0.0/16"), cidrs("10.244.0.0/16")
	from := func(src, dst string) policy.Packet { return policy.Packet{Src: addr(src), Dst: addr(dst), Out: "eth0"} }
	to := func(dst string) policy.Packet { return policy.Packet{Dst: addr(dst)} }
	var none policy.SourcePolicy
	var got strings.Builder
	for _, tt := range []struct {
		name   string
		policy policy.SourcePolicy
		packet policy.Packet
	}{
		{"nothing covers it", none, from("10.244.0.2", "8.8.8.8")},
		{"a default", none, to("10.9.9.9")},
		{"a hole", scoped, from("10.244.0.2", "10.1.9.9")},
		{"an island, source and interface unknown", scoped, to("10.1.2.3")},
		{"a source out of scope", scoped, from("10.245.0.2", "8.8.8.8")},
		{"an interface out of scope", scoped, policy.Packet{Src: addr("10.244.0.2"), Dst: addr("8.8.8.8"), Out: "lo"}},
		{"the node", scoped, policy.Packet{Src: addr("10.244.0.1"), SrcLocal: true, Dst: addr("8.8.8.8"), Out: "eth0"}},
		{"an exempt source", scoped, from("10.244.7.2", "8.8.8.8")},
		{"every source in scope exempt", exemptAll, to("8.8.8.8")},
		{"a scope of the other family", scoped, to("2001:db8::1")},
		{"a family that is not managed", none, from("fd00::2", "2001:db8::1")},
		{"the node as destination", none, policy.Packet{Dst: addr("192.0.2.1"), DstLocal: true}},
		{"two families", policy.SourcePolicy{EnableIPv6: ptr(true)}, from("10.244.0.2", "2001:db8::1")},
		{"no scope", none, to("8.8.8.8")},
		{"no scope, IPv6", policy.SourcePolicy{EnableIPv6: ptr(true)}, to("2001:db8::1")},
		{"a scope", policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16"), OutputInterfaces: []string{"wg0"}}, to("8.8.8.8")},
		{"a wildcard", policy.SourcePolicy{OutputInterfaces: []string{"eth+"}}, to("8.8.8.8")},
		{"the first of the scope is exempt", exemptFirst, to("8.8.8.8")},
		{"most sources are exempt", exempt("0.0.0.0/1", "128.0.0.0/2", "192.0.0.0/3"), to("8.8.8.8")},
		{"every source is exempt", exempt("0.0.0.0/0"), to("8.8.8.8")},
	} {
		p := mergeOne(t, network("podnet", 1, tt.policy))
		d, stands := p.Decide(tt.packet), p.Representative(tt.packet)
		fmt.Fprintf(&got, "%s:\n%s: %s\n", tt.name, d.Action, d.Reason)
		if d.PrefixAction != nil {
			fmt.Fprintf(&got, "by %s\n", d.PrefixAction.Prefix)
		}
		fmt.Fprintf(&got, "%s out of %q stands for all\n\n", stands.Src, stands.Out)
	}
	golden.Check(t, "testdata/decisions.txt", got.String())
}
