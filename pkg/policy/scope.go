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
	switch {
	case !slices.Contains(p.Families(), f):
	case len(p.Sources.Value) == 0:
		s.Sources = RangesOf(f.All())
	default:
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

// Matches returns the matches of rules for the packets in scope: such a packet meets one of them, has a
// source of the scope, and is not to the node itself nor, without Host, from it.
func (s Scope) Matches() []Match {
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
	return !pkt.DstLocal && (s.Host || !pkt.SrcLocal) && s.Sources.Contains(pkt.Src) &&
		slices.ContainsFunc(s.Matches(), func(m Match) bool { return m.matches(&pkt) })
}

// within reports whether t has all packets of s.
func (s Scope) within(t Scope) bool {
	return len(s.Sources.Without(t.Sources)) == 0 && !slices.ContainsFunc(s.Matches(), func(m Match) bool {
		return !slices.ContainsFunc(t.Matches(), func(n Match) bool {
			if InterfaceWithin(m.Out, n.Out) {
				n.Out = m.Out
			}
			return m == n
		})
	})
}

// Overlaps reports whether a packet can be in both scopes.
func (s Scope) Overlaps(t Scope) bool {
	_, some := s.commonInterfaces(t)
	return some && s.Sources.Overlaps(t.Sources)
}

// common returns the scope of the packets that are in both scopes, and whether there is one.
func (s Scope) common(t Scope) (both Scope, some bool) {
	both.Sources, both.Host = s.Sources.Intersect(t.Sources), s.Host && t.Host
	both.Interfaces, some = s.commonInterfaces(t)
	return both, some
}

// commonInterfaces returns the interfaces of both scopes, of which none is any, and whether there are some.
func (s Scope) commonInterfaces(t Scope) (common []string, some bool) {
	for _, m := range s.Matches() {
		for _, n := range t.Matches() {
			switch {
			case InterfaceWithin(m.Out, n.Out):
				common = append(common, m.Out)
			case InterfaceWithin(n.Out, m.Out):
				common = append(common, n.Out)
			}
		}
	}
	if some = len(common) > 0; slices.Contains(common, "") {
		return nil, true
	}
	slices.Sort(common)
	return slices.Compact(common), some
}

// outOfScope returns why a packet is out of scope, "" if it is not, and the origins of the key.
func (p *Policy) outOfScope(pkt Packet) (reason string, by []Origin) {
	f := FamilyOf(pkt.Dst)
	s := p.Scope(f)
	switch sources, interfaces, host := p.Sources.Origins, p.Interfaces.Origins, p.Host.Origins; {
	case s.Contains(pkt):
		return "", nil
	case pkt.DstLocal:
		return fmt.Sprintf("%s is an address of the node itself", pkt.Dst), nil
	case len(s.Sources) == 0:
		return fmt.Sprintf("%s names no %s prefix", keyOf(sources), f), sources
	case !s.Sources.Contains(pkt.Src):
		return fmt.Sprintf("the source %s is not in %s (%s)", pkt.Src, keyOf(sources), s.Sources), sources
	case !slices.ContainsFunc(s.Matches(), func(m Match) bool { return InterfaceWithin(pkt.Out, m.Out) }):
		return fmt.Sprintf("the interface %s is not in %s (%s)", quoteUnlessWord(pkt.Out), keyOf(interfaces), firstOf(s.Interfaces)), interfaces
	default:
		return fmt.Sprintf("the source %s is the node itself, and %s is false", pkt.Src, keyOf(host)), host
	}
}

// condition returns for which sources and interfaces a decision is true, if they are
// not known and the policy limits them.
func (p *Policy) condition(asked Packet) (text string) {
	f := FamilyOf(asked.Dst)
	if sources := p.Candidates(f); !asked.Src.IsValid() && f.match(sources) != nil {
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
		pkt.Out = s.Matches()[0].Out
		if prefix, wildcard := strings.CutSuffix(pkt.Out, "+"); wildcard {
			pkt.Out = prefix + "0"
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
