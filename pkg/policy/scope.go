// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Scope is the packets of one family that a policy applies to. Jumps and guards match them, and Decide, the
// judge of stale connections and explain ask it.
type Scope struct {
	Sources    Ranges   // all of the family if the policy names none
	Interfaces []string // output interfaces; none is any
	Host       bool     // packets of the node itself too
}

// Scope returns the scope of the policy in a family, which has no sources if the policy does not manage that.
func (p Policy) Scope(f Family) Scope {
	s := Scope{Sources: Ranges{}, Interfaces: p.Interfaces.Value, Host: p.Host.Value}
	if !slices.Contains(p.Families(), f) {
		return s
	}
	if len(p.Sources.Value) == 0 {
		s.Sources = RangesOf(f.All())
	} else {
		s.Sources = RangesOf(ofFamily(p.Sources.Value, f)...)
	}
	return s
}

// masqueradeScope returns the scope without the sources that are never masqueraded.
func (p *Policy) masqueradeScope(f Family) Scope {
	s := p.Scope(f)
	s.Sources = s.Sources.Without(p.SourcesExempt(f))
	return s
}

// InterfaceMatches returns one match for each output interface, or one that matches all. Sources and Host are
// not in them: the jumps of a chain and those of a guard match these by themselves.
func (s Scope) InterfaceMatches() []Match {
	if len(s.Interfaces) == 0 {
		return []Match{{}}
	}
	matches := make([]Match, len(s.Interfaces))
	for i, name := range s.Interfaces {
		matches[i].Out = name
	}
	return matches
}

// Contains reports whether a packet is in scope.
func (s Scope) Contains(pkt Packet) bool {
	isLocal := pkt.DstLocal || pkt.SrcLocal && !s.Host
	return !isLocal && s.Sources.Contains(pkt.Src) && s.leaves(pkt.Out)
}

// leaves reports whether an interface, or all of a pattern, are in scope.
func (s Scope) leaves(out string) bool {
	if len(s.Interfaces) == 0 {
		return true
	}
	for _, pattern := range s.Interfaces {
		if InterfaceWithin(out, pattern) {
			return true
		}
	}
	return false
}

// within reports whether t has all packets of s, apart from those of the node itself. Host is not compared:
// guards do not match such packets, and the judge of connections keeps the node's own.
func (s Scope) within(t Scope) bool {
	if len(s.Sources.Without(t.Sources)) > 0 {
		return false
	}
	for _, m := range s.InterfaceMatches() {
		if !t.leaves(m.Out) {
			return false
		}
	}
	return true
}

// Overlaps reports whether a packet can be in both scopes.
func (s Scope) Overlaps(t Scope) bool {
	_, overlap := s.commonInterfaces(t)
	return overlap && s.Sources.Overlaps(t.Sources)
}

// common returns the scope of the packets that are in both scopes, and whether an interface can be.
func (s Scope) common(t Scope) (both Scope, overlap bool) {
	both.Sources = s.Sources.Intersect(t.Sources)
	both.Host = s.Host && t.Host
	both.Interfaces, overlap = s.commonInterfaces(t)
	return both, overlap
}

// commonInterfaces returns the interfaces of both scopes, where an empty list means any, and whether there
// are some.
func (s Scope) commonInterfaces(t Scope) (common []string, overlap bool) {
	for _, m := range s.InterfaceMatches() {
		for _, n := range t.InterfaceMatches() {
			switch {
			case InterfaceWithin(m.Out, n.Out):
				common = append(common, m.Out)
			case InterfaceWithin(n.Out, m.Out):
				common = append(common, n.Out)
			}
		}
	}
	if slices.Contains(common, "") {
		return nil, true
	}
	slices.Sort(common)
	common = slices.Compact(common)
	return common, len(common) > 0
}

// outOfScope returns why a packet is out of scope, "" if it is not, and the origins of the key.
func (p *Policy) outOfScope(pkt Packet) (reason string, by []Origin) {
	f := FamilyOf(pkt.Dst)
	s := p.Scope(f)
	if s.Contains(pkt) {
		return "", nil
	}
	if pkt.DstLocal {
		return fmt.Sprintf("%s is an address of the node itself", pkt.Dst), nil
	}
	sources, interfaces, host := p.Sources.Origins, p.Interfaces.Origins, p.Host.Origins
	switch {
	case len(s.Sources) == 0:
		return fmt.Sprintf("%s names no %s prefix", keyOf(sources), f), sources
	case !s.Sources.Contains(pkt.Src):
		return fmt.Sprintf("the source %s is not in %s (%s)", pkt.Src, keyOf(sources), s.Sources), sources
	case !s.leaves(pkt.Out):
		return fmt.Sprintf("the interface %s is not in %s (%s)",
			quoteUnlessWord(pkt.Out), keyOf(interfaces), firstOf(s.Interfaces)), interfaces
	}
	return fmt.Sprintf("the source %s is the node itself, and %s is false", pkt.Src, keyOf(host)), host
}

// condition returns for which sources and interfaces a decision is true, if they are
// not known and the policy limits them.
func (p *Policy) condition(asked Packet) (text string) {
	f := FamilyOf(asked.Dst)
	sources := p.Candidates(f)
	isAny := coversAll(f, sources)
	if !asked.Src.IsValid() && !isAny {
		text = ", for any source in " + sources.String()
	}
	if asked.Out == "" && len(p.Interfaces.Value) > 0 {
		text += ", out of " + firstOf(p.Interfaces.Value)
	}
	return text
}

// Representative replaces what is not known of a packet, its source (the zero Addr) or its output interface
// (""), by the first one in scope. If all interfaces are in scope it leaves "".
func (s Scope) Representative(pkt Packet) Packet {
	if !pkt.Src.IsValid() && len(s.Sources) > 0 {
		pkt.Src, pkt.SrcLocal = s.Sources[0].From(), false
	}
	if pkt.Out == "" {
		prefix, isWildcard := strings.CutSuffix(s.InterfaceMatches()[0].Out, "+")
		pkt.Out = prefix
		if isWildcard {
			pkt.Out += "0"
		}
	}
	return pkt
}

// Representative is Scope.Representative, with a source of Candidates.
func (p Policy) Representative(pkt Packet) Packet {
	s := p.Scope(FamilyOf(pkt.Dst))
	s.Sources = p.Candidates(FamilyOf(pkt.Dst))
	return s.Representative(pkt)
}

// Candidates returns the sources that Decide assumes if the source is not known: those
// in scope that are not exempt, else those in scope, else all.
func (p Policy) Candidates(f Family) Ranges {
	for _, sources := range []Ranges{p.masqueradeScope(f).Sources, p.Scope(f).Sources} {
		if len(sources) > 0 {
			return sources
		}
	}
	return RangesOf(f.All())
}
