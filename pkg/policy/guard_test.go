// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestParseMark(t *testing.T) {
	for _, c := range []struct {
		text string
		want policy.Mark
		ok   bool
	}{
		{"0x6000", 0x6000, true},
		{"0xFFFFFFFF", 0xffffffff, true},
		{"0X6000", 0x6000, true},
		{"24576", 0x6000, true},
		{"0", 0, true},
		{"0x100000000", 0, false},
		{"-1", 0, false},
		{"", 0, false},
		{"0b11", 0, false},
		{"0x60_00", 0, false},
		{"0x6000/0x6000", 0, false},
	} {
		got, err := policy.ParseMark(c.text)
		if got != c.want || (err == nil) != c.ok {
			t.Errorf("ParseMark(%q) = %s, %v; want %s, valid %t", c.text, got, err, c.want, c.ok)
		}
		if c.ok {
			again, err := policy.ParseMark(got.String())
			if again != got || err != nil {
				t.Errorf("%s does not read back: %s, %v", got, again, err)
			}
		}
	}
}

func TestResetsConnections(t *testing.T) {
	for _, tt := range []struct {
		guard policy.GuardMode
		stale policy.StaleConnections
		want  bool
	}{
		{"", "", false},
		{policy.GuardCount, "", false},
		{policy.GuardDrop, "", true},
		{policy.GuardDrop, policy.KeepConnections, false},
		{"", policy.ResetConnections, true},
	} {
		p := mergeOne(t, network("a", 1, policy.SourcePolicy{Guard: tt.guard, StaleConnections: tt.stale}))
		wantEqual(t, fmt.Sprintf("guard %q, staleConnections %q", tt.guard, tt.stale), p.ResetsConnections(), tt.want)
	}
}

// The guard of a chain catches exactly the packets of pods that the chain masquerades.
// Packets that are bound are masqueraded by no chain, and all are bound that go where
// no chain masquerades any packet.
func TestGuardsAreWhatPoliciesSay(t *testing.T) {
	chains := []string{"A", "B", "C"}
	rapid.Check(t, func(t *rapid.T) {
		sources := genSources().Draw(t, "sources")
		byChain := map[string][]policy.Source{}
		for i := range sources {
			s := &sources[i]
			s.Policy.Chain = rapid.SampledFrom(chains).Draw(t, "chain")
			byChain[s.Policy.Chain] = append(byChain[s.Policy.Chain], *s)
		}
		oracles := map[string]oracle{}
		for chain, list := range byChain {
			oracles[chain] = newOracle(list)
		}
		guards := policy.DesiredGuards(merge(sources), policy.OwnedBy("/state"))
		for _, g := range guards {
			for _, set := range []policy.Ranges{g.Scope.Sources, g.Exempt, g.Bound, g.ExemptPods} {
				if !policy.Normalize(set).Equal(append(policy.Ranges{}, set...)) {
					t.Fatalf("%v is not in its normal form", set)
				}
			}
		}
		for range 20 {
			p := genPacket(sources).Draw(t, "packet")
			if policy.FamilyOf(p.Src) != policy.FamilyOf(p.Dst) {
				continue
			}
			masquerades, somewhere := false, false // by any chain: the packet, or some packet to its destination
			for _, o := range oracles {
				masquerades = masquerades || o.decide(p) == masqueraded
				somewhere = somewhere || o.manages(p.Dst) && o.destination(p.Dst) == masqueraded
			}
			for chain, o := range oracles {
				g := guardOf(guards, chain, p)
				matches := g != nil && g.Scope.Contains(p)
				mode := saidFirst(o, policy.GuardOff, func(s policy.SourcePolicy) *policy.GuardMode { return statedMode(s.Guard) })
				isPod := o.isPod(p.Src) && !p.SrcLocal
				caught := matches && g.Mode != policy.GuardOff && !g.Exempt.Contains(p.Dst)
				if want := mode != policy.GuardOff && isPod && o.decide(p) == masqueraded; caught != want || g != nil && g.Mode != mode {
					t.Fatalf("chain %s, %+v: caught %v (%+v), want %v", chain, p, caught, g, want)
				}
				enforced := saidFirst(o, false, func(s policy.SourcePolicy) *bool { return s.EnforceExempt }) &&
					o.manages(p.Dst) && (isPod || g != nil && o.exemptPod(p.Src) && !p.SrcLocal) && o.inScope(p)
				mark := saidFirst(o, 0x6000, func(s policy.SourcePolicy) *policy.Mark { return s.BypassMark })
				switch bound := g != nil && g.Binds(p); {
				case bound && (!enforced || masquerades || g.BypassMark != mark),
					!bound && enforced && (isPod && !somewhere || len(oracles) == 1 && !masquerades):
					t.Fatalf("chain %s, %+v: bound %v (%+v)", chain, p, bound, g)
				}
			}
		}
	})
}

func statedMode(m policy.GuardMode) *policy.GuardMode {
	if m == "" {
		return nil
	}
	return &m
}

func guardOf(guards []policy.Guard, chain string, p policy.Packet) *policy.Guard {
	for i := range guards {
		if guards[i].Chain == chain && guards[i].Family == policy.FamilyOf(p.Dst) {
			return &guards[i]
		}
	}
	return nil
}
