// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// Binding is sources whose packets to destinations no chain masquerades.
type Binding struct {
	Sources      Ranges // never nil
	Destinations Ranges // nil is every address
}

// Binds reports whether the packet keeps its source, unless it has a bit of BypassMark.
func (g *Guard) Binds(p Packet) bool {
	bound := g.Scope
	bound.Sources = g.BoundSources(p.Dst)
	bound.Host = true // also an address of the node in a pod range, which keeps its source anyway
	return bound.Contains(p)
}

// BoundSources returns the sources in scope whose packets to a destination are bound.
func (g *Guard) BoundSources(to netip.Addr) Ranges {
	bound := Ranges{}
	for _, b := range g.allBindings() {
		if b.Destinations == nil || b.Destinations.Contains(to) {
			bound = Normalize(slices.Concat(bound, b.Sources))
		}
	}
	return bound
}

// takenForMasqueraded returns the sources whose packets the guards of other chains take for masqueraded by
// this chain, if it does not exempt the destination: all sources in its scope, but not pods that it exempts
// by namespace.
//
// Neither outputInterfaces nor nonMasqueradeSourceCIDRs take a source away, although the chain masquerades
// less then. To bind on the interfaces that no other chain names needs a rule with all those names, and the
// kernel refuses a rule of more than 128 expressions; for the overlaps of interface lists it needs a rule for
// each combination of them.
func (p *Policy) takenForMasqueraded(f Family) Ranges {
	return p.Scope(f).Sources.Without(exemptAddresses(prefixActionsOf(p.ExemptPods, f)))
}

// bindingsOf returns what the guard of the policy binds: traffic of its pods that neither it nor another
// policy masquerades.
func (p *Policy) bindingsOf(g *Guard, policies []Policy) bindings {
	f := g.Family
	exemptPods := p.Scope(f).Sources.Intersect(exemptAddresses(prefixActionsOf(p.ExemptPods, f)))
	var all bindings
	all = all.with(Binding{Sources: g.Scope.Sources, Destinations: g.Exempt})
	all = all.with(Binding{Sources: exemptPods})
	for i := range policies {
		if q := &policies[i]; q.Chain != p.Chain {
			all = all.narrow(q.takenForMasqueraded(f), q.DestinationsExempt(f))
		}
	}
	return all
}

// setBindings makes the guard bind these, and nothing else.
func (g *Guard) setBindings(all bindings) {
	g.Bound = all.common(orEmpty(g.Scope.Sources))
	g.MoreBindings = all.beyond(g)
}

// Beside returns the guard of a chain that stays as it is, beside chains that are added: it binds nothing
// that they masquerade.
func (g Guard) Beside(added []Policy) Guard {
	if g.Bound == nil {
		return g
	}
	all := g.allBindings()
	for i := range added {
		all = all.narrow(added[i].takenForMasqueraded(g.Family), added[i].DestinationsExempt(g.Family))
	}
	g.setBindings(all)
	return g
}

// allBindings returns all that the guard binds, in scope: Bound and MoreBindings.
func (g *Guard) allBindings() bindings {
	ofScope := Binding{Sources: orEmpty(g.Scope.Sources), Destinations: orEmpty(g.Bound)}
	return append(bindings{ofScope}, g.MoreBindings...)
}

// bindings have different destinations.
type bindings []Binding

// with adds a binding, unless it has no packet.
func (all bindings) with(b Binding) bindings {
	if len(b.Sources) == 0 || b.Destinations != nil && len(b.Destinations) == 0 {
		return all
	}
	for i := range all {
		if all[i].Destinations.Equal(b.Destinations) {
			all[i].Sources = Normalize(slices.Concat(all[i].Sources, b.Sources))
			return all
		}
	}
	return append(all, b)
}

// narrow limits what is bound of these sources to these destinations. The bindings of other sources stay as
// they are.
func (all bindings) narrow(sources, destinations Ranges) bindings {
	var narrowed bindings
	for _, b := range all {
		if !b.Sources.Overlaps(sources) {
			narrowed = narrowed.with(b)
			continue
		}
		both := b.Destinations.Intersect(destinations)
		narrowed = narrowed.with(Binding{b.Sources.Without(sources), b.Destinations})
		narrowed = narrowed.with(Binding{b.Sources.Intersect(sources), both})
	}
	return narrowed
}

// common returns the destinations that are bound for each of these sources.
func (all bindings) common(sources Ranges) Ranges {
	common, rest := Ranges(nil), sources
	for _, b := range all {
		if b.Sources.Overlaps(sources) {
			common, rest = common.Intersect(b.Destinations), rest.Without(b.Sources)
		}
	}
	if len(rest) > 0 {
		return Ranges{}
	}
	return orEmpty(common)
}

// beyond returns what the guard does not bind by Bound.
func (all bindings) beyond(g *Guard) (left bindings) {
	for _, b := range all {
		if b.Destinations != nil && len(b.Destinations.Without(g.Bound)) == 0 {
			b.Sources = b.Sources.Without(orEmpty(g.Scope.Sources))
		}
		left = left.with(b)
	}
	return left
}

// intersect returns what both bind.
func (all bindings) intersect(others bindings) (both bindings) {
	for _, b := range all {
		for _, o := range others {
			destinations := b.Destinations.Intersect(o.Destinations)
			both = both.with(Binding{b.Sources.Intersect(o.Sources), destinations})
		}
	}
	return both
}

// within reports whether others bind all that these do.
func (all bindings) within(others bindings) bool {
	for _, b := range all {
		left := b.Sources
		for _, o := range others {
			if hasAll(o.Destinations, b.Destinations) {
				left = left.Without(o.Sources)
			}
		}
		if len(left) > 0 {
			return false
		}
	}
	return true
}

// hasAll reports whether a set has all of another, where nil is every address.
func hasAll(set, other Ranges) bool {
	if set == nil {
		return true
	}
	return other != nil && len(other.Without(set)) == 0
}

// Unbound is traffic of pods that the chain of a policy with enforceExempt exempts and its guard does not
// bind, because the guard takes it for masqueraded by another chain.
type Unbound struct {
	ChainFamily
	By           string // the other chain
	Pods         Ranges // never nil, nor are Destinations
	Destinations Ranges
	Prefixes     []netip.Prefix // those that the chain exempts and that have some of the destinations
}

// UnboundTraffic returns what the policies exempt and do not bind, without link-local prefixes and those that
// no key states, such as multicast.
func UnboundTraffic(policies []Policy) []Unbound {
	var all []Unbound
	for i := range policies {
		p := &policies[i]
		if !p.EnforceExempt.Value {
			continue
		}
		for _, f := range p.Families() {
			for j := range policies {
				u := p.unboundBecauseOf(&policies[j], f)
				if len(u.Prefixes) > 0 {
					all = append(all, u)
				}
			}
		}
	}
	return all
}

// unboundBecauseOf returns what the guard of the policy does not bind because of another chain, in a family.
func (p *Policy) unboundBecauseOf(q *Policy, f Family) Unbound {
	pods := p.PodRanges(f)
	if q.Chain == p.Chain || !pods.Overlaps(q.takenForMasqueraded(f)) {
		return Unbound{}
	}
	u := Unbound{
		ChainFamily: ChainFamily{p.Chain, f}, By: q.Chain, Pods: pods.Intersect(q.takenForMasqueraded(f)),
		Destinations: p.DestinationsExempt(f).Without(q.DestinationsExempt(f)),
	}
	u.Prefixes = p.exemptPrefixesIn(f, u.Destinations)
	return u
}

// exemptPrefixesIn returns the exempt prefixes that have one of these destinations, without link-local
// prefixes and those that no key states.
func (p *Policy) exemptPrefixesIn(f Family, destinations Ranges) []netip.Prefix {
	var found []netip.Prefix
	for _, e := range prefixActionsOf(p.Destinations, f) {
		first := e.Prefix.Addr()
		isOrdinary := !first.IsLinkLocalUnicast() && e.HasKey()
		if e.Action == ActionExempt && isOrdinary && destinations.overlapsPrefix(e.Prefix) {
			found = append(found, e.Prefix)
		}
	}
	return found
}

// Has reports whether a packet of a pod is among the traffic. A source that is not known may be any pod.
func (u *Unbound) Has(p Packet) bool {
	isPod := !p.Src.IsValid() || u.Pods.Contains(p.Src)
	return isPod && u.Destinations.Contains(p.Dst)
}

// Error says what is not bound, because of which chain, and what to do about it.
func (u Unbound) Error() string {
	var prefixes []string
	for _, p := range u.Prefixes {
		prefixes = append(prefixes, p.String())
	}
	return fmt.Sprintf("chain %s (%s): enforceExempt does not protect the traffic of pods in %s to %s, because "+
		"chain %s does not exempt it; its outputInterfaces and nonMasqueradeSourceCIDRs do not matter here: "+
		"exempt it in both chains, or state other sourceCIDRs for chain %s",
		u.Chain, u.Family, u.Pods, firstOf(prefixes), u.By, u.By)
}
