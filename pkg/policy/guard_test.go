// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The guard of a chain catches exactly the packets of pods that the chain masquerades.
// Packets that are bound are masqueraded by no chain. All are bound that their chain exempts and for which no other one
// counts, whatever its outputInterfaces and nonMasqueradeSourceCIDRs.
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
			sets := []policy.Ranges{g.Scope.Sources, g.Exempt, g.Bound}
			for _, b := range g.MoreBindings {
				sets = append(sets, b.Sources)
				if b.Destinations != nil {
					sets = append(sets, b.Destinations)
				}
			}
			for _, set := range sets {
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
			masquerades := false // by any chain
			for _, o := range oracles {
				masquerades = masquerades || o.decide(p) == masqueraded
			}
			for chain, o := range oracles {
				counts := false // another chain
				for of, other := range oracles {
					counts = counts || of != chain && other.counts(p)
				}
				g := guardOf(guards, chain, p)
				matches := g != nil && g.Scope.Contains(p)
				mode := saidFirst(o, policy.GuardOff, func(s policy.SourcePolicy) *policy.GuardMode { return statedMode(s.Guard) })
				isPod := o.isPod(p.Src) && !p.SrcLocal
				caught := matches && g.Mode != policy.GuardOff && !g.Exempt.Contains(p.Dst)
				if want := mode != policy.GuardOff && isPod && o.decide(p) == masqueraded; caught != want || g != nil && g.Mode != mode {
					t.Fatalf("chain %s, %+v: caught %v (%+v), want %v", chain, p, caught, g, want)
				}
				enforced := saidFirst(o, false, func(s policy.SourcePolicy) *bool { return s.EnforceExempt }) &&
					o.manages(p.Dst) && (isPod || g != nil && o.exemptPod(p.Src)) && o.inScope(p)
				mark := saidFirst(o, 0x6000, func(s policy.SourcePolicy) *policy.Mark { return s.BypassMark })
				switch bound := g != nil && g.Binds(p); {
				case p.SrcLocal: // the rules do not ask whether it is
					if g != nil && bound != g.Binds(ofPod(p)) {
						t.Fatalf("chain %s, %+v: bound %v, unlike a packet of a pod", chain, p, bound)
					}
				case bound && (masquerades || g.BypassMark != mark), bound != (enforced && !counts && o.decide(p) != masqueraded):
					t.Fatalf("chain %s, %+v: bound %v (%+v)", chain, p, bound, g)
				}
			}
		}
	})
}

// TestBindingsBesideOtherChains: what a guard binds depends on the sources of the other chains, and not on their interfaces.
func TestBindingsBesideOtherChains(t *testing.T) {
	own := network("own", 1, policy.SourcePolicy{
		Chain: "OWN", EnforceExempt: new(true), PodCIDRs: cidrsOf("10.1.0.0/16"), NonMasqueradeCIDRs: cidrsOf("10.0.0.0/8", "192.0.2.0/24"),
	})
	other := func(chain string, sources []netip.Prefix, interfaces ...string) policy.Source {
		return network(chain, 2, policy.SourcePolicy{
			Chain: chain, SourceCIDRs: sources, OutputInterfaces: interfaces, NonMasqueradeCIDRs: cidrsOf("10.0.0.0/8"),
		})
	}
	var pairs []policy.Source
	for i := range 31 {
		pairs = append(pairs, other(fmt.Sprintf("N%d", i), nil, fmt.Sprintf("a%d", i), fmt.Sprintf("b%d", i)))
	}
	for name, c := range map[string]struct {
		others        []policy.Source
		first, second bool   // packets of two pods to what the other chains masquerade are bound
		unbound       string // the first of Pods, Destinations and By
		chains        int    // that are named
	}{
		"none":               {nil, true, true, "", 0},
		"other sources":      {[]policy.Source{other("O", cidrsOf("10.2.0.0/16"))}, true, true, "", 0},
		"any source":         {[]policy.Source{other("O", nil)}, false, false, "10.1.0.0/16 192.0.2.0/24 O", 1},
		"any, one interface": {[]policy.Source{other("O", nil, "eth9")}, false, false, "10.1.0.0/16 192.0.2.0/24 O", 1},
		"31 with two":        {pairs, false, false, "10.1.0.0/16 192.0.2.0/24 N0", len(pairs)},
		"the second pod":     {[]policy.Source{other("O", cidrsOf("10.1.0.2/32"), "eth9")}, true, false, "10.1.0.2/32 192.0.2.0/24 O", 1},
	} {
		t.Run(name, func(t *testing.T) {
			policies := policy.Merge(append([]policy.Source{own}, c.others...))
			guards := policy.DesiredGuards(policies, policy.OwnedBy("/state"))
			if len(guards) != 1 || len(guards[0].MoreBindings) > 1 {
				t.Fatalf("%+v", guards)
			}
			for src, want := range map[string]bool{"10.1.0.1": c.first, "10.1.0.2": c.second} {
				pkt := policy.Packet{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr("10.9.9.9"), Out: "eth0"}
				if !guards[0].Binds(pkt) {
					t.Errorf("%s to %s is not bound, and every chain exempts it", src, pkt.Dst)
				}
				pkt.Dst = netip.MustParseAddr("192.0.2.1")
				if got := guards[0].Binds(pkt); got != want {
					t.Errorf("%s to %s is bound: %t, want %t", src, pkt.Dst, got, want)
				}
			}
			found, first := policy.UnboundTraffic(policies), ""
			if len(found) > 0 {
				first = fmt.Sprint(found[0].Pods, " ", found[0].Destinations, " ", found[0].By)
			}
			if first != c.unbound || len(found) != c.chains {
				t.Errorf("%d chains are named, the first is %q; want %d, %q", len(found), first, c.chains, c.unbound)
			}
		})
	}
}

// TestNothingIsBoundForAPod: a chain that exempts nothing leaves nothing bound for its sources, and all for the others.
func TestNothingIsBoundForAPod(t *testing.T) {
	own := network("own", 1, policy.SourcePolicy{
		Chain: "OWN", EnforceExempt: new(true), PodCIDRs: cidrsOf("10.1.0.0/16"), NonMasqueradeCIDRs: cidrsOf("10.0.0.0/8"),
	})
	agents := policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}, Policy: policy.SourcePolicy{
		Chain: "O", SourceCIDRs: cidrsOf("10.1.0.2/32"), NonMasqueradeCIDRs: []netip.Prefix{}, MasqLinkLocal: new(true),
	}}
	guards := policy.DesiredGuards(policy.Merge([]policy.Source{own, agents}), policy.OwnedBy("/state"))
	if len(guards) != 1 {
		t.Fatalf("%+v", guards)
	}
	for src, want := range map[string]bool{"10.1.0.1": true, "10.1.0.2": false} {
		pkt := policy.Packet{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr("10.9.9.9"), Out: "eth0"}
		if got := guards[0].Binds(pkt); got != want {
			t.Errorf("%s is bound: %t, want %t (%+v)", src, got, want, guards[0])
		}
	}
}

// ofPod returns the packet as one from elsewhere than the node itself.
func ofPod(p policy.Packet) policy.Packet {
	p.SrcLocal = false
	return p
}

// TestExemptPodIsTheWholeRange: enforceExempt binds exempt pods also where a policy has no other ones.
func TestExemptPodIsTheWholeRange(t *testing.T) {
	s := network("a", 1, policy.SourcePolicy{
		EnforceExempt: ptr(true), PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.3/32")}, NonMasqueradeNamespaces: []string{"prod"},
	})
	policies := policy.Merge([]policy.Source{s})
	policies[0].SetExemptPods([]policy.ExemptPod{{Address: netip.MustParseAddr("10.0.0.3"), Namespace: "prod"}})
	guards := policy.DesiredGuards(policies, policy.OwnedBy("/state"))
	pkt := policy.Packet{Src: netip.MustParseAddr("10.0.0.3"), Dst: netip.MustParseAddr("203.0.113.1"), Out: "eth0"}
	if len(guards) != 1 || !guards[0].Binds(pkt) {
		t.Errorf("%+v", guards)
	}
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

// guards decide what the guard tables do with a packet that NAT did not translate.
type guards []policy.Guard

// matches returns the guard that counts or drops the packet, or nil.
func (gs guards) matches(p policy.Packet) *policy.Guard {
	return gs.find(p, func(g *policy.Guard) bool {
		return g.Scope.Contains(p) && g.Mode != policy.GuardOff && !g.Exempt.Contains(p.Dst)
	})
}

// binds returns the guard that keeps the packet's source, or nil.
func (gs guards) binds(p policy.Packet) *policy.Guard {
	return gs.find(p, func(g *policy.Guard) bool { return g.Binds(p) })
}

func (gs guards) find(p policy.Packet, rule func(*policy.Guard) bool) *policy.Guard {
	for i := range gs {
		g := &gs[i]
		if g.Family == policy.FamilyOf(p.Dst) && rule(g) {
			return g
		}
	}
	return nil
}

func (gs guards) of(chain string, f policy.Family) *policy.Guard {
	if i := slices.IndexFunc(gs, func(g policy.Guard) bool { return g.Chain == chain && g.Family == f }); i >= 0 {
		return &gs[i]
	}
	return nil
}

// TestTransitionOfGuards: while masquerade rules change, no guard matches a packet that neither policy
// masquerades, nor one that its chain does not masquerade before and after; and none binds a packet that
// either of them masquerades. What the guard of a chain binds before and after, it binds meanwhile. Before and after the
// change the guards match only what is masqueraded.
func TestTransitionOfGuards(t *testing.T) {
	matched, bound := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		gen := func(name string) ([]policy.Source, []policy.Policy, guards) {
			sources := genSources().Draw(t, name)
			for i := range sources {
				s := &sources[i].Policy
				s.Chain = rapid.SampledFrom([]string{"A", "A", "B"}).Draw(t, "chain")
				s.Guard = rapid.SampledFrom([]policy.GuardMode{policy.GuardDrop, policy.GuardDrop, policy.GuardCount, policy.GuardOff}).Draw(t, "guard")
				s.EnforceExempt = ptr(rapid.Bool().Draw(t, "enforceExempt"))
				for _, f := range policy.Families() {
					s.PodCIDRs = append(s.PodCIDRs, genPrefix(f).Draw(t, "podCIDRs"))
				}
			}
			policies := merge(sources)
			return sources, policies, policy.DesiredGuards(policies, policy.Owner{})
		}
		oldSources, old, observed := gen("before")
		nowSources, now, desired := gen("after")
		if rapid.IntRange(0, 4).Draw(t, "first rules") == 0 {
			old, observed = nil, nil
		}
		if rapid.IntRange(0, 4).Draw(t, "guard lost") == 0 {
			observed = observed[:len(observed)/2]
		}
		var transition guards
		for _, g := range desired {
			if now, is := g.During(policy.Transition{NoRules: len(old) == 0}, observed.of(g.Chain, g.Family)); is {
				transition = append(transition, now)
			}
		}
		action := func(p *policy.Policy, pkt policy.Packet) bool { return p.Decide(pkt).Action == policy.ActionMasquerade }
		masquerades := func(policies []policy.Policy, pkt policy.Packet) bool {
			return slices.ContainsFunc(policies, func(p policy.Policy) bool { return action(&p, pkt) })
		}
		for range 20 {
			pkt := genPacket(append(slices.Clone(oldSources), nowSources...)).Draw(t, "packet")
			pkt.SrcLocal, pkt.DstLocal = false, false
			if pkt.Out == "" || rapid.Bool().Draw(t, "pod") {
				pkt.Src, pkt.Out = lowAddress(policy.FamilyOf(pkt.Dst), rapid.IntRange(0, 15).Draw(t, "low")), "eth0"
			}
			before, after := masquerades(old, pkt), masquerades(now, pkt)
			if g := transition.matches(pkt); g != nil {
				matched++
				if !before && !after {
					t.Fatalf("%+v: neither policy masquerades it, and the transition matches it: %+v", pkt, g)
				}
				if observed.of(g.Chain, g.Family) != nil {
					for _, policies := range [][]policy.Policy{old, now} {
						i := slices.IndexFunc(policies, func(p policy.Policy) bool { return p.Chain == g.Chain })
						if !action(&policies[i], pkt) {
							t.Fatalf("%+v: chain %s does not masquerade it before and after, and the transition matches it: %+v", pkt, g.Chain, g)
						}
					}
				}
			}
			if g := transition.binds(pkt); g != nil {
				if bound++; before || after {
					t.Fatalf("%+v: masqueraded before %t, after %t, and the transition binds it: %+v", pkt, before, after, g)
				}
			}
			for _, g := range desired {
				b, meanwhile := observed.of(g.Chain, g.Family), transition.of(g.Chain, g.Family)
				if g.Family == policy.FamilyOf(pkt.Dst) && b != nil && b.Binds(pkt) && g.Binds(pkt) && (meanwhile == nil || !meanwhile.Binds(pkt)) {
					t.Fatalf("%+v: the guard of %s binds it before and after the change, and not meanwhile: %+v", pkt, g.Chain, meanwhile)
				}
			}
			if g := desired.matches(pkt); g != nil && !after {
				t.Fatalf("%+v: not masqueraded, and the guard matches it: %+v", pkt, g)
			}
			if g := desired.binds(pkt); g != nil && after {
				t.Fatalf("%+v: masqueraded, and the guard binds it: %+v", pkt, g)
			}
		}
	})
	if matched < 5 || bound < 5 { // of random packets
		t.Errorf("%d packets were matched and %d bound during transitions", matched, bound)
	}
}

func cidrsOf(list ...string) (prefixes []netip.Prefix) {
	for _, p := range list {
		prefixes = append(prefixes, netip.MustParsePrefix(p))
	}
	return prefixes
}

// TestGuardDoesNotBeginToDropMeanwhile: a guard that only counts may not be right for the rules in the kernel, as no rule waits
// for it. While they change it does not begin to drop.
func TestGuardDoesNotBeginToDropMeanwhile(t *testing.T) {
	pods := policy.Scope{Sources: policy.RangesOf(cidrsOf("10.1.0.0/16")...)}
	counts := policy.Guard{Chain: "A", Family: policy.IPv4, Scope: pods, Mode: policy.GuardCount, Exempt: policy.Ranges{}}
	drops := counts
	drops.Mode = policy.GuardDrop
	for _, c := range []struct {
		observed policy.Guard
		settled  bool
		want     policy.GuardMode
	}{
		{counts, false, policy.GuardCount}, {drops, false, policy.GuardDrop}, {counts, true, policy.GuardDrop},
	} {
		g, is := drops.During(policy.Transition{ChainWritten: c.settled}, &c.observed)
		if !is || g.Mode != c.want {
			t.Errorf("observed %s, settled %t: %s, want %s", c.observed.Mode, c.settled, g.Mode, c.want)
		}
	}
}
