// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// GuardMode is the value of the key guard: what happens to packets that should have
// been masqueraded and were not.
type GuardMode string

// The values of guard.
const (
	GuardOff   GuardMode = "off"
	GuardCount GuardMode = "count"
	GuardDrop  GuardMode = "drop"
)

// StaleConnections is the value of the key staleConnections: what happens to
// connections whose verdict a change of the policy altered.
type StaleConnections string

// The values of staleConnections.
const (
	KeepConnections  StaleConnections = "keep"
	ResetConnections StaleConnections = "reset"
)

// Mark is a mask of the bits of packet marks, written as 0x6000.
type Mark uint32

// DefaultBypassMark has the bits by which kube-proxy (0x4000) and portmap (0x2000)
// select the traffic that they masquerade.
const DefaultBypassMark Mark = 0x6000

// ParseMark reads a decimal or hexadecimal number: 24576, 0x6000.
func ParseMark(s string) (Mark, error) {
	if s == "" {
		return 0, errors.New("is empty; write a mask such as 0x6000, or 0 for none")
	}
	digits, isHex := strings.CutPrefix(strings.ToLower(s), "0x")
	base := 10
	if isHex {
		base = 16
	}
	n, err := strconv.ParseUint(digits, base, 32)
	if err != nil {
		return 0, errors.New("is not a 32-bit mask; write a hexadecimal number such as 0x6000, or 0 for none")
	}
	return Mark(n), nil
}

// String writes the mask in hexadecimal, and 0 for none.
func (m Mark) String() string {
	if m == 0 {
		return "0"
	}
	return fmt.Sprintf("%#x", uint32(m))
}

// MarshalText implements encoding.TextMarshaler.
func (m Mark) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with ParseMark.
func (m *Mark) UnmarshalText(text []byte) (err error) {
	if *m, err = ParseMark(string(text)); err != nil {
		return fmt.Errorf("%s %w", Quote(string(text)), err)
	}
	return nil
}

// Guard is the rules of one chain and family in the tables ip-masq-guard, which are
// evaluated beside the masquerade chain whichever backend that is in. A packet of a
// pod to a destination that is not Exempt must have been translated when it leaves;
// a packet of a pod to one that is Bound, or that one of Bindings has, keeps its source.
type Guard struct {
	Chain  string // the masquerade chain
	Family Family
	Owner  Owner

	Scope      Scope     // that of the policy, narrowed to the addresses of pods
	Mode       GuardMode // GuardOff for enforceExempt alone
	Exempt     Ranges    // destinations that the chain does not masquerade
	Bound      Ranges    // destinations that no chain masquerades; nil without enforceExempt
	Bindings   []Binding // more that is bound: pods that the chain exempts, and on some interfaces all; nil without Bound
	BypassMark Mark      // packets with one of these bits are not bound
}

// Binding is sources whose packets to destinations no chain masquerades.
type Binding struct {
	Sources      Ranges
	Destinations Ranges   // nil is every one
	NotOut       []string // output interfaces on which that is not so, sorted
}

// isNot reports whether a pattern matches only interfaces of NotOut.
func (b Binding) isNot(out string) bool {
	return slices.ContainsFunc(b.NotOut, func(n string) bool { return InterfaceWithin(out, n) })
}

// Binds reports whether the packet keeps its source, unless it has a bit of BypassMark.
func (g *Guard) Binds(p Packet) bool {
	bound := g.Scope
	bound.Sources, bound.Host = g.BoundSources(p), true // also an address of the node in a pod range, which keeps its source anyway
	return bound.Contains(p)
}

// BoundSources returns the sources in scope whose packets to the destination and interface of this one are bound.
func (g *Guard) BoundSources(p Packet) Ranges {
	bound := Ranges{}
	if g.Bound.Contains(p.Dst) {
		bound = g.Scope.Sources
	}
	for _, b := range g.Bindings {
		known := len(b.NotOut) == 0 || p.Out != "" && !b.isNot(p.Out)
		if known && (b.Destinations == nil || b.Destinations.Contains(p.Dst)) {
			bound = Normalize(slices.Concat(bound, b.Sources))
		}
	}
	return bound
}

// DesiredGuards returns the guards that the policies ask for. A policy without a pod
// range for a family has none there.
func DesiredGuards(policies []Policy, o Owner) []Guard {
	var guards []Guard
	for i := range policies {
		p := &policies[i]
		for _, f := range p.GuardedFamilies() {
			if len(ofFamily(p.Pods, f)) == 0 {
				continue
			}
			scope := p.Scope(f)
			scope.Sources, scope.Host = p.PodRanges(f), false
			g := Guard{Chain: p.Chain, Family: f, Owner: o, Scope: scope, Mode: p.Guard.Value, Exempt: p.DestinationsExempt(f)}
			if p.EnforceExempt.Value {
				g.Bound, g.BypassMark = exemptEverywhere(&g, policies), p.BypassMark.Value
				g.Bindings = p.bindExemptPods(&g, policies)
				g.Bindings = append(g.Bindings, p.bindElsewhere(&g, policies)...)
			}
			if len(scope.Sources)+len(g.Bindings) > 0 {
				guards = append(guards, g)
			}
		}
	}
	return guards
}

// GuardedFamilies returns the families in which the policy asks for rules in the tables
// ip-masq-guard.
func (p Policy) GuardedFamilies() []Family {
	if p.Guard.Value == GuardOff && !p.EnforceExempt.Value {
		return nil
	}
	return p.Families()
}

// exemptEverywhere returns the destinations of a guard that neither its policy nor another one that may apply to
// the same packets masquerades.
func exemptEverywhere(g *Guard, policies []Policy) Ranges {
	exempt := g.Exempt
	for i := range policies {
		if q := &policies[i]; q.Chain != g.Chain && q.masqueradeScope(g.Family).Overlaps(g.Scope) {
			exempt = exempt.Intersect(q.DestinationsExempt(g.Family))
		}
	}
	return exempt
}

// Beside returns the guard of a chain that stays as it is, beside chains that are added: it binds nothing that they
// masquerade.
func (g Guard) Beside(added []Policy) Guard {
	for i := range added {
		q := &added[i]
		scope, exempt := q.masqueradeScope(g.Family), q.DestinationsExempt(g.Family)
		if g.Bound != nil && scope.Overlaps(g.Scope) {
			g.Bound = g.Bound.Intersect(exempt)
		}
		g.Bindings = bindings(g.Bindings).split(scope.Sources, exempt)
	}
	return g
}

// bindExemptPods returns the pods in scope that the policy exempts by namespace, and those in its pod ranges that another one
// does, with the destinations to which no policy masquerades them, unless the guard binds these anyway.
func (p *Policy) bindExemptPods(g *Guard, policies []Policy) []Binding {
	f := g.Family
	exempt := exemptAddresses(entriesOf(p.ExemptPods, f))
	for i := range policies {
		if q := &policies[i]; q.Chain != p.Chain && len(q.ExemptPods) > 0 {
			exempt = Normalize(slices.Concat(exempt, exemptAddresses(entriesOf(q.ExemptPods, f)).Intersect(g.Scope.Sources)))
		}
	}
	if len(exempt) == 0 {
		return nil
	}
	pods := p.Scope(f)
	pods.Sources = pods.Sources.Intersect(exempt)
	all := bindings{{Sources: pods.Sources}}
	for i := range policies {
		if q := &policies[i]; q.Chain == p.Chain || q.masqueradeScope(f).Overlaps(pods) {
			all = all.split(q.masqueradeScope(f).Sources, q.DestinationsExempt(f))
		}
	}
	return all.beyond(g)
}

// bindElsewhere returns what is bound besides on the interfaces that no policy names with which others are in scope.
func (p *Policy) bindElsewhere(g *Guard, policies []Policy) (more bindings) {
	var named []string
	others := slices.DeleteFunc(slices.Clone(policies), func(q Policy) bool {
		limited := q.Chain != p.Chain && len(q.Interfaces.Value) > 0
		if limited && q.masqueradeScope(g.Family).Overlaps(p.Scope(g.Family)) {
			named = append(named, q.Interfaces.Value...)
		}
		return limited
	})
	slices.Sort(named)
	there := *g
	there.Bound = exemptEverywhere(g, others)
	all := append(bindings{{Sources: g.Scope.Sources, Destinations: there.Bound}}, p.bindExemptPods(&there, others)...)
	for _, b := range all {
		b.NotOut = slices.Compact(named)
		some := slices.ContainsFunc(g.Scope.Matches(), func(m Match) bool { return !b.isNot(m.Out) })
		if some && !(bindings{b}).within(g.bindings()) {
			more = append(more, b)
		}
	}
	return more
}

func (g *Guard) bindings() bindings {
	return append(bindings{{Sources: g.Scope.Sources, Destinations: orEmpty(g.Bound)}}, g.Bindings...)
}

// bindings have different sources, different destinations, or different interfaces.
type bindings []Binding

// with adds a binding, unless it has no packet.
func (all bindings) with(b Binding) bindings {
	if len(b.Sources) == 0 || b.Destinations != nil && len(b.Destinations) == 0 {
		return all
	}
	for i := range all {
		if all[i].Destinations.Equal(b.Destinations) && slices.Equal(all[i].NotOut, b.NotOut) {
			all[i].Sources = Normalize(slices.Concat(all[i].Sources, b.Sources))
			return all
		}
	}
	return append(all, b)
}

// split leaves these sources the destinations alone that are among these, too.
func (all bindings) split(sources, destinations Ranges) (split bindings) {
	for _, b := range all {
		split = split.with(Binding{b.Sources.Without(sources), b.Destinations, b.NotOut})
		split = split.with(Binding{b.Sources.Intersect(sources), b.Destinations.Intersect(destinations), b.NotOut})
	}
	return split
}

// beyond returns what the guard does not bind without them.
func (all bindings) beyond(g *Guard) (left bindings) {
	for _, b := range all {
		if b.Destinations != nil && len(b.Destinations.Without(g.Bound)) == 0 {
			b.Sources = b.Sources.Without(g.Scope.Sources)
		}
		left = left.with(b)
	}
	return left
}

// intersect returns what both bind.
func (all bindings) intersect(others bindings) (both bindings) {
	for _, b := range all {
		for _, o := range others {
			names := slices.Concat(b.NotOut, o.NotOut)
			slices.Sort(names)
			both = both.with(Binding{b.Sources.Intersect(o.Sources), b.Destinations.Intersect(o.Destinations), slices.Compact(names)})
		}
	}
	return both
}

// within reports whether others bind all that these do.
func (all bindings) within(others bindings) bool {
	return !slices.ContainsFunc(all, func(b Binding) bool {
		left := b.Sources
		for _, o := range others {
			where := !slices.ContainsFunc(o.NotOut, func(name string) bool { return !b.isNot(name) })
			if where && (o.Destinations == nil || b.Destinations != nil && len(b.Destinations.Without(o.Destinations)) == 0) {
				left = left.Without(o.Sources)
			}
		}
		return len(left) > 0
	})
}

// PodRanges returns the addresses of pods that the keys guard, staleConnections and
// enforceExempt are about: those of all sources, without what is out of scope and
// without exempt sources.
func (p Policy) PodRanges(f Family) Ranges {
	return RangesOf(ofFamily(p.Pods, f)...).Intersect(p.masqueradeScope(f).Sources)
}

// ResetsConnections reports whether stale connections are reset: guard "drop" would
// drop their packets for as long as they last.
func (p Policy) ResetsConnections() bool {
	if p.StaleConnections.Value == "" {
		return p.Guard.Value == GuardDrop
	}
	return p.StaleConnections.Value == ResetConnections
}

// HasEffect reports whether the guard drops packets or binds connections, rather than only counting.
func (g *Guard) HasEffect() bool { return g.Mode == GuardDrop || g.Bound != nil }

// Transition is what is known of the rules in the kernel while a guard is written.
type Transition struct {
	First   bool // the kernel has no masquerade chain
	Settled bool // the rules of the guard's chain are those that are desired, and the only ones
	All     bool // so are those of every chain
}

// During returns the guard for the rules that are in the kernel, and whether there is one: it must not drop what they
// exempt, nor bind what they masquerade, before a change nor after it. Observed is that in the kernel, or nil. If it drops or
// binds packets it is right for the rules that are there.
//
// While the chain changes, a guard matches what both policies masquerade. One that is not there begins before the first
// rules of the node, else after those of its chain. While any chain changes, it binds what neither policy masquerades.
func (g Guard) During(t Transition, observed *Guard) (Guard, bool) {
	switch {
	case t.Settled && t.All, observed == nil && t.First:
		return g, true
	case observed == nil && !t.Settled:
		return g, false
	case observed == nil:
		g.Bound, g.Bindings = nil, nil
		return g, g.Mode != GuardOff
	}
	old := *observed
	old.Scope.Sources = orEmpty(old.Scope.Sources)
	if !t.Settled {
		g.Exempt = Normalize(slices.Concat(g.Exempt, old.Exempt))
		if old.Mode == GuardOff || g.Mode == GuardDrop && old.Mode != GuardDrop { // it may not be right for the rules that are there
			g.Mode = old.Mode
		}
	}
	if old.Bound == nil {
		g.Bound, g.Bindings = nil, nil
	}
	if t.Settled && g.Bound == nil {
		return g, g.Mode != GuardOff
	}
	scope, some := g.Scope.common(old.Scope)
	both := g
	both.Scope = scope
	if g.Bound != nil {
		both.Bound = g.Bound.Intersect(old.Bound)
		both.Bindings = g.bindings().intersect(old.bindings()).beyond(&both) // also pods that one policy alone exempts
	}
	return both, some && (both.Mode != GuardOff || both.Bound != nil)
}

// Within reports whether another guard drops and binds all that this one does.
func (g *Guard) Within(other *Guard) bool {
	if !g.HasEffect() {
		return true
	}
	if other == nil {
		return false
	}
	scope, of := g.Scope, other.Scope
	scope.Sources, of.Sources = orEmpty(scope.Sources), orEmpty(of.Sources)
	drops := g.Mode != GuardDrop || other.Mode == GuardDrop && len(other.Exempt.Without(orEmpty(g.Exempt))) == 0
	binds := g.Bound == nil || other.Bound != nil && g.bindings().within(other.bindings())
	return scope.within(of) && drops && binds
}

func orEmpty(r Ranges) Ranges {
	if r == nil {
		return Ranges{}
	}
	return r
}
