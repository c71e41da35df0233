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
// a packet of a pod to one that is Bound keeps its source.
type Guard struct {
	Chain  string // the masquerade chain
	Family Family
	Owner  Owner

	Interfaces []string  // the output interfaces in scope; none is any
	Mode       GuardMode // GuardOff for enforceExempt alone
	Pods       Ranges    // sources in scope that are not exempt
	Exempt     Ranges    // destinations that the chain does not masquerade
	Bound      Ranges    // destinations that no chain masquerades; nil without enforceExempt
	BypassMark Mark      // packets with one of these bits are not bound
}

// DesiredGuards returns the guards that the policies ask for. A policy without a pod
// range for a family has none there.
func DesiredGuards(policies []Policy, o Owner) []Guard {
	var guards []Guard
	for i := range policies {
		p := &policies[i]
		for _, f := range p.GuardedFamilies() {
			pods := p.PodRanges(f)
			if len(pods) == 0 {
				continue
			}
			g := Guard{
				Chain: p.Chain, Family: f, Owner: o, Interfaces: p.Interfaces.Value, Mode: p.Guard.Value, Pods: pods,
				Exempt: p.DestinationsExempt(f),
			}
			if p.EnforceExempt.Value {
				g.Bound, g.BypassMark = exemptEverywhere(p, pods, f, policies), p.BypassMark.Value
			}
			guards = append(guards, g)
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

// exemptEverywhere returns the destinations that neither the policy nor another one that
// may apply to the same packets masquerades.
func exemptEverywhere(p *Policy, pods Ranges, f Family, policies []Policy) Ranges {
	exempt := p.DestinationsExempt(f)
	for i := range policies {
		q := &policies[i]
		sources := q.SourcesInScope(f).Without(q.SourcesExempt(f))
		if q.Chain != p.Chain && sources.Overlaps(pods) && mayShareInterface(p.Interfaces.Value, q.Interfaces.Value) {
			exempt = exempt.Intersect(q.DestinationsExempt(f))
		}
	}
	return exempt
}

// mayShareInterface reports whether an interface can match both lists, of which an
// empty one matches all.
func mayShareInterface(a, b []string) bool {
	return len(a) == 0 || len(b) == 0 || slices.ContainsFunc(a, func(x string) bool {
		return slices.ContainsFunc(b, func(y string) bool { return InterfaceWithin(x, y) || InterfaceWithin(y, x) })
	})
}

// PodRanges returns the addresses of pods that the keys guard, staleConnections and
// enforceExempt are about: those of all sources, without what is out of scope and
// without exempt sources.
func (p Policy) PodRanges(f Family) Ranges {
	return RangesOf(ofFamily(p.Pods, f)...).Intersect(p.SourcesInScope(f)).Without(p.SourcesExempt(f))
}

// ResetsConnections reports whether stale connections are reset: guard "drop" would
// drop their packets for as long as they last.
func (p Policy) ResetsConnections() bool {
	if p.StaleConnections.Value == "" {
		return p.Guard.Value == GuardDrop
	}
	return p.StaleConnections.Value == ResetConnections
}
