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
func (m *Mark) UnmarshalText(text []byte) error {
	mark, err := ParseMark(string(text))
	if err != nil {
		return fmt.Errorf("%s %w", Quote(string(text)), err)
	}
	*m = mark
	return nil
}

// Guard is the rules of one chain and family in the tables ip-masq-guard, which are
// evaluated beside the masquerade chain whichever backend that is in. A packet of a
// pod to a destination that is not Exempt must have been translated when it leaves;
// a packet of a pod to one that is Bound, or that one of MoreBindings has, keeps its source.
type Guard struct {
	Chain  string // the masquerade chain
	Family Family
	Owner  Owner

	Scope        Scope     // that of the policy, narrowed to the addresses of pods; nil Sources are none
	Mode         GuardMode // GuardOff for enforceExempt alone
	Exempt       Ranges    // destinations that the chain does not masquerade; nil is none
	Bound        Ranges    // destinations that no chain masquerades for any pod; nil without enforceExempt
	MoreBindings []Binding // what else is bound, for some pods
	BypassMark   Mark      // packets with one of these bits are not bound
}

// DesiredGuards returns the guards that the policies ask for. A policy without a pod
// range for a family has none there.
func DesiredGuards(policies []Policy, o Owner) []Guard {
	var guards []Guard
	for i := range policies {
		p := &policies[i]
		for _, f := range p.GuardedFamilies() {
			if len(ofFamily(p.PodPrefixes, f)) == 0 {
				continue
			}
			g := p.desiredGuard(f, policies)
			g.Owner = o
			if len(g.Scope.Sources)+len(g.MoreBindings) > 0 {
				guards = append(guards, g)
			}
		}
	}
	return guards
}

// desiredGuard returns the guard of a policy, which is one of these, in a family.
func (p *Policy) desiredGuard(f Family, policies []Policy) Guard {
	scope := p.Scope(f)
	scope.Sources, scope.Host = p.PodRanges(f), false
	g := Guard{Chain: p.Chain, Family: f, Scope: scope, Mode: p.Guard.Value, Exempt: p.DestinationsExempt(f)}
	if p.EnforceExempt.Value {
		g.BypassMark = p.BypassMark.Value
		g.setBindings(p.bindingsOf(&g, policies))
	}
	return g
}

// GuardedFamilies returns the families in which the policy asks for rules in the tables
// ip-masq-guard.
func (p Policy) GuardedFamilies() []Family {
	if p.Guard.Value == GuardOff && !p.EnforceExempt.Value {
		return nil
	}
	return p.Families()
}

// PodRanges returns the addresses of pods that the keys guard, staleConnections and
// enforceExempt are about: those of all sources, without what is out of scope and
// without exempt sources.
func (p Policy) PodRanges(f Family) Ranges {
	return RangesOf(ofFamily(p.PodPrefixes, f)...).Intersect(p.masqueradeScope(f).Sources)
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

// Transition is what is known of the rules in the kernel while the guard of a chain is written.
type Transition struct {
	NoRules      bool // the kernel has no masquerade chain
	ChainWritten bool // the chain has the desired rules
	AllWritten   bool // so have all chains, and no chain is left that no policy wants
}

// During returns the guard that is right for the rules in the kernel, and whether there is one. Observed is
// the guard in the kernel, or nil. If it drops or binds packets, the caller has made sure that it is right
// for these rules.
//
// Neither before the rules change nor after it may a guard drop what they exempt, or bind what they
// masquerade. So the guards of a change are written twice, before the NAT rules and after them. If the
// desired guards were written once, they would drop packets that the present rules exempt, or bind
// connections that the present rules masquerade, until the rules follow. Without guards meanwhile, packets
// that no rule translates would leave.
func (g Guard) During(t Transition, observed *Guard) (Guard, bool) {
	switch {
	case t.ChainWritten && t.AllWritten:
		return g, true
	case observed == nil:
		return g.beginning(t)
	default:
		return g.changing(t, observed)
	}
}

// beginning returns a guard that is not in the kernel yet. On a node without rules it begins before the first
// ones, else after those of its chain, and it begins to bind when all chains are written.
func (g Guard) beginning(t Transition) (Guard, bool) {
	if t.NoRules {
		return g, true
	}
	g.Bound, g.MoreBindings = nil, nil
	return g, t.ChainWritten && g.Mode != GuardOff
}

// changing returns a guard between the one in the kernel and the desired one. While its chain changes it
// matches what both policies masquerade. While any chain changes it binds what neither policy masquerades: a
// pod that one policy alone exempts by its namespace counts as any other pod meanwhile.
func (g Guard) changing(t Transition, observed *Guard) (Guard, bool) {
	if observed.Bound == nil {
		g.Bound, g.MoreBindings = nil, nil
	}
	if t.ChainWritten && g.Bound == nil {
		return g, g.Mode != GuardOff
	}
	if !t.ChainWritten {
		g.Exempt = Normalize(slices.Concat(g.Exempt, observed.Exempt))
		g.Mode = modeDuring(g.Mode, observed.Mode)
	}
	return g.common(observed)
}

// modeDuring returns the mode while the rules of a chain change. A guard that does not drop packets may not
// be right for the rules that are there, so it does not begin to drop.
func modeDuring(desired, observed GuardMode) GuardMode {
	beginsToDrop := desired == GuardDrop && observed != GuardDrop
	if observed == GuardOff || beginsToDrop {
		return observed
	}
	return desired
}

// common returns the guard with the packets that are in the scope of both, and binds what both bind, also
// pods that one policy alone exempts. It returns false if no interface is in both scopes, or if the guard has
// nothing to do. If both scopes have no source in common, it returns a guard that matches no packet.
func (g Guard) common(observed *Guard) (Guard, bool) {
	old := *observed
	old.Scope.Sources = orEmpty(old.Scope.Sources)
	scope, haveInterface := g.Scope.common(old.Scope)
	both := g
	both.Scope = scope
	if g.Bound != nil {
		both.Bound = g.Bound.Intersect(old.Bound)
		both.MoreBindings = g.allBindings().intersect(old.allBindings()).beyond(&both)
	}
	hasWork := both.Mode != GuardOff || both.Bound != nil
	return both, haveInterface && hasWork
}

// Within reports whether another guard drops and binds all that this one does.
func (g *Guard) Within(other *Guard) bool {
	if !g.HasEffect() {
		return true
	}
	if other == nil {
		return false
	}
	scope, otherScope := g.Scope, other.Scope
	scope.Sources, otherScope.Sources = orEmpty(scope.Sources), orEmpty(otherScope.Sources)
	return scope.within(otherScope) && g.dropsNoMoreThan(other) && g.bindsNoMoreThan(other)
}

func (g *Guard) dropsNoMoreThan(other *Guard) bool {
	if g.Mode != GuardDrop {
		return true
	}
	return other.Mode == GuardDrop && len(other.Exempt.Without(orEmpty(g.Exempt))) == 0
}

func (g *Guard) bindsNoMoreThan(other *Guard) bool {
	if g.Bound == nil {
		return true
	}
	return other.Bound != nil && g.allBindings().within(other.allBindings())
}

func orEmpty(r Ranges) Ranges {
	if r == nil {
		return Ranges{}
	}
	return r
}
