// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// outcomeOf returns whether the rules of a chain masquerade a packet, and the rule that decides.
func outcomeOf(rs policy.Ruleset, p policy.Packet) (masquerade bool, by *policy.Rule) {
	v, rule := decided(rs, policy.DefaultChain, p)
	return v == masqueraded, rule
}

// Decide agrees with the rules in either layout. If source or interface are not
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
			d := p.Decide(asked)
			for _, l := range []policy.Layout{{}, {Sets: true}} {
				rs := policy.Desired([]policy.Policy{p}, l, policy.OwnedBy("/state"))
				if got, rule := outcomeOf(rs, pkt); got != (d.Action == policy.ActionMasquerade) {
					t.Fatalf("layout %+v: %+v is said to be %s (%s), but %v decides; rules:\n%s", l, pkt, d.Action, d.Reason, rule, render(rs))
				}
				// What is in scope reaches a rule of the chain, and nothing else does.
				if _, rule := outcomeOf(rs, pkt); (rule == nil) != (d.Action == policy.ActionOutOfScope) {
					t.Fatalf("layout %+v: %+v is said to be %s (%s), but %v decides; rules:\n%s", l, pkt, d.Action, d.Reason, rule, render(rs))
				}
			}
			if want := oracle.decide(pkt); (want == masqueraded) != (d.Action == policy.ActionMasquerade) {
				t.Fatalf("%+v is said to be %s (%s), but the sources say %s", pkt, d.Action, d.Reason, want)
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
	if !bySource && !byDestination || d.Action == policy.ActionOutOfScope {
		t.Fatalf("%+v is %s by %s, which is not about it", pkt, d.Action, decides.Prefix)
	}
	if want := decides.Action == policy.ActionMasquerade; want != (d.Action == policy.ActionMasquerade) {
		t.Fatalf("%+v is %s by %s, which says %s", pkt, d.Action, decides.Prefix, decides.Action)
	}
	if len(d.Origins) == 0 {
		t.Fatalf("%+v is %s by %s, which no source stated", pkt, d.Action, decides.Prefix)
	}
}

func TestDecideByExample(t *testing.T) {
	scoped := policy.SourcePolicy{
		EnableIPv6: ptr(true), SourceCIDRs: cidrs("10.244.0.0/16"), NonMasqueradeSourceCIDRs: cidrs("10.244.7.0/24"),
		OutputInterfaces: []string{"eth+", "wg0"}, MasqueradeHost: ptr(false),
		NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.1.2.0/24"), MasqueradeCIDRs: cidrs("10.1.0.0/16"),
	}
	exemptAll := policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16"), NonMasqueradeSourceCIDRs: cidrs("10.0.0.0/8")}
	from := func(src, dst string) policy.Packet { return policy.Packet{Src: addr(src), Dst: addr(dst), Out: "eth0"} }
	for _, tt := range []struct {
		name    string
		policy  policy.SourcePolicy
		packet  policy.Packet
		outcome policy.Action
		entry   string
		reason  string
	}{
		{
			"nothing covers it", policy.SourcePolicy{}, from("10.244.0.2", "8.8.8.8"), policy.ActionMasquerade, "",
			"no prefix covers 8.8.8.8, so it is masqueraded by default",
		},
		{
			"a default", policy.SourcePolicy{}, policy.Packet{Dst: addr("10.9.9.9")}, policy.ActionExempt, "10.0.0.0/8",
			"10.0.0.0/8 in nonMasqueradeCIDRs (built in) is the longest prefix that covers 10.9.9.9",
		},
		{
			"a hole", scoped, from("10.244.0.2", "10.1.9.9"), policy.ActionMasquerade, "10.1.0.0/16",
			`10.1.0.0/16 in masqueradeCIDRs of network "podnet" is the longest prefix that covers 10.1.9.9`,
		},
		{
			"an island, source and interface unknown", scoped, policy.Packet{Dst: addr("10.1.2.3")}, policy.ActionExempt, "10.1.2.0/24",
			`10.1.2.0/24 in nonMasqueradeCIDRs of network "podnet" is the longest prefix that covers 10.1.2.3, ` +
				"for any source in {10.244.0.0-10.244.6.255, 10.244.8.0-10.244.255.255}, out of eth+, wg0",
		},
		{
			"a source out of scope", scoped, from("10.245.0.2", "8.8.8.8"), policy.ActionOutOfScope, "",
			`the source 10.245.0.2 is not in sourceCIDRs of network "podnet" (10.244.0.0/16)`,
		},
		{
			"an interface out of scope", scoped, policy.Packet{Src: addr("10.244.0.2"), Dst: addr("8.8.8.8"), Out: "lo"}, policy.ActionOutOfScope, "",
			`the interface lo is not in outputInterfaces of network "podnet" (eth+, wg0)`,
		},
		{
			"the node", scoped, policy.Packet{Src: addr("10.244.0.1"), SrcLocal: true, Dst: addr("8.8.8.8"), Out: "eth0"}, policy.ActionOutOfScope, "",
			`the source 10.244.0.1 is the node itself, and masqueradeHost of network "podnet" is false`,
		},
		{
			"an exempt source", scoped, from("10.244.7.2", "8.8.8.8"), policy.ActionExempt, "10.244.7.0/24",
			`the source 10.244.7.2 is in 10.244.7.0/24, which nonMasqueradeSourceCIDRs of network "podnet" exempts`,
		},
		{
			"every source exempt", exemptAll, policy.Packet{Dst: addr("8.8.8.8")}, policy.ActionExempt, "10.0.0.0/8",
			`every source in scope is exempt: 10.244.0.0 is in 10.0.0.0/8, which nonMasqueradeSourceCIDRs of network "podnet" exempts, ` +
				"for any source in 10.244.0.0/16",
		},
		{
			"a scope of the other family", scoped, policy.Packet{Dst: addr("2001:db8::1")}, policy.ActionOutOfScope, "",
			`sourceCIDRs of network "podnet" names no ipv6 prefix`,
		},
		{
			"a family that is not managed", policy.SourcePolicy{}, from("fd00::2", "2001:db8::1"), policy.ActionOutOfScope, "",
			"ipv6 is not managed: enableIPv6 (built in) is false",
		},
		{
			"the node as destination", policy.SourcePolicy{}, policy.Packet{Dst: addr("192.0.2.1"), DstLocal: true}, policy.ActionOutOfScope, "",
			"192.0.2.1 is an address of the node itself",
		},
		{
			"two families", policy.SourcePolicy{EnableIPv6: ptr(true)}, from("10.244.0.2", "2001:db8::1"), policy.ActionOutOfScope, "",
			"no packet goes from 10.244.0.2 to 2001:db8::1: they are of two families",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := mergeOne(t, network("podnet", 1, tt.policy)).Decide(tt.packet)
			entry := ""
			if d.PrefixAction != nil {
				entry = d.PrefixAction.Prefix.String()
			}
			if d.Action != tt.outcome || entry != tt.entry || d.Reason != tt.reason {
				t.Errorf("got %s by %q:\n  %s\nwant %s by %q:\n  %s", d.Action, entry, d.Reason, tt.outcome, tt.entry, tt.reason)
			}
		})
	}
}

func TestRepresentative(t *testing.T) {
	for _, tt := range []struct {
		name             string
		policy           policy.SourcePolicy
		dst, src, ifname string
	}{
		{"no scope", policy.SourcePolicy{}, "8.8.8.8", "0.0.0.0", ""},
		{"no scope, IPv6", policy.SourcePolicy{EnableIPv6: ptr(true)}, "2001:db8::1", "::", ""},
		{"a scope", policy.SourcePolicy{SourceCIDRs: cidrs("10.244.0.0/16"), OutputInterfaces: []string{"wg0"}}, "8.8.8.8", "10.244.0.0", "wg0"},
		{"a wildcard", policy.SourcePolicy{OutputInterfaces: []string{"eth+"}}, "8.8.8.8", "0.0.0.0", "eth0"},
		{"the first of the scope is exempt", policy.SourcePolicy{
			SourceCIDRs: cidrs("10.244.0.0/16"), NonMasqueradeSourceCIDRs: cidrs("10.244.0.0/24"),
		}, "8.8.8.8", "10.244.1.0", ""},
		{"most sources are exempt", policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("0.0.0.0/1", "128.0.0.0/2", "192.0.0.0/3")}, "8.8.8.8", "224.0.0.0", ""},
		{"every source is exempt", policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("0.0.0.0/0")}, "8.8.8.8", "0.0.0.0", ""},
		{"another family's scope", policy.SourcePolicy{EnableIPv6: ptr(true), SourceCIDRs: cidrs("10.244.0.0/16")}, "2001:db8::1", "::", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := mergeOne(t, network("podnet", 1, tt.policy)).Representative(policy.Packet{Dst: addr(tt.dst)})
			if got.Src != addr(tt.src) || got.Out != tt.ifname {
				t.Errorf("%s out of %q stands for all, want %s out of %q", got.Src, got.Out, tt.src, tt.ifname)
			}
		})
	}
}

// The entry that is said to decide is the one by which the rules do.
func TestLongestPrefixAgreesWithTheOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		p := policy.Merge(sources)[0]
		p.ExemptSources = nil
		stated := newOracle(sources).destinations()
		for _, f := range p.Families() {
			for _, dst := range edges(destinationsOf(sources), f) {
				longest, want := -1, masqueraded
				for prefix, v := range stated {
					if prefix.Contains(dst) && prefix.Bits() > longest {
						longest, want = prefix.Bits(), v
					}
				}
				got, bits := masqueraded, -1
				d := p.Decide(policy.Packet{Dst: dst})
				if d.Action == policy.ActionOutOfScope {
					continue
				}
				if e := d.PrefixAction; e != nil {
					bits = e.Prefix.Bits()
					if e.Action == policy.ActionExempt {
						got = notMasqueraded
					}
				}
				if got != want || bits != longest {
					t.Fatalf("%s is %s by a /%d, want %s by a /%d", dst, got, bits, want, longest)
				}
			}
		}
	})
}
