// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Packets is the set of the packets that have all of the stated properties. The zero
// value is the set of all packets.
type Packets struct {
	From, To policy.Ranges // nil: every address
	Out      string        // output interface; a trailing + is a wildcard; "": any
	NotOut   []string      // the output interface is none of these

	notProtocols, notOrigins uint8 // excluded
	unsure                   uint8 // what may have been decided about them before
}

// Bits of notProtocols: those of policy.Protocols by index, then all others.
const (
	otherProtocol uint8 = 1 << 3
	allProtocols  uint8 = otherProtocol<<1 - 1
)

// Bits of notOrigins.
const (
	fromNode uint8 = 1 << iota
	fromOthers
	allOrigins = fromNode | fromOthers
)

// Bits of unsure: what a rule that was not decoded in full may have decided.
const (
	maybeAccepted uint8 = 1 << iota
	maybeTranslated
)

// Leaves reports whether packets of the set can leave through an interface of the
// pattern; "" is any.
func (p Packets) Leaves(pattern string) bool {
	_, some := p.intersect(Packets{Out: pattern})
	return some
}

// intersect returns the packets that are in both sets, and whether there are any.
func (p Packets) intersect(q Packets) (Packets, bool) {
	p.From, p.To = p.From.Intersect(q.From), p.To.Intersect(q.To)
	if p.From != nil && len(p.From) == 0 || p.To != nil && len(p.To) == 0 {
		return p, false
	}
	p.notProtocols, p.notOrigins = p.notProtocols|q.notProtocols, p.notOrigins|q.notOrigins
	p.unsure |= q.unsure
	switch {
	case q.Out == "" || p.Out != "" && policy.InterfaceWithin(p.Out, q.Out):
	case p.Out == "" || policy.InterfaceWithin(q.Out, p.Out):
		p.Out = q.Out
	default:
		return p, false
	}
	for _, not := range q.NotOut {
		if !slices.Contains(p.NotOut, not) {
			p.NotOut = append(slices.Clip(p.NotOut), not)
		}
	}
	none := p.notProtocols == allProtocols || p.notOrigins == allOrigins ||
		slices.ContainsFunc(p.NotOut, func(not string) bool { return not == "+" || p.Out != "" && policy.InterfaceWithin(p.Out, not) })
	return p, !none
}

// half divides packets by one property of a set.
type half struct{ in, out Packets }

func (p Packets) halves(f policy.Family) (halves []half) {
	every := policy.RangesOf(f.All())
	if p.From != nil {
		halves = append(halves, half{Packets{From: p.From}, Packets{From: every.Without(p.From)}})
	}
	if p.To != nil {
		halves = append(halves, half{Packets{To: p.To}, Packets{To: every.Without(p.To)}})
	}
	halves = append(halves, half{Packets{notProtocols: p.notProtocols}, Packets{notProtocols: allProtocols &^ p.notProtocols}},
		half{Packets{notOrigins: p.notOrigins}, Packets{notOrigins: allOrigins &^ p.notOrigins}})
	if p.Out != "" {
		halves = append(halves, half{Packets{Out: p.Out}, Packets{NotOut: []string{p.Out}}})
	}
	for _, not := range p.NotOut {
		halves = append(halves, half{Packets{NotOut: []string{not}}, Packets{Out: not}})
	}
	return halves
}

// without returns the packets of p that are not in the set with these halves, as disjoint sets.
func (p Packets) without(halves []half) []Packets {
	var pieces []Packets
	rest := p
	for _, h := range halves {
		if piece, some := rest.intersect(h.out); some {
			pieces = append(pieces, piece)
		}
		var some bool
		if rest, some = rest.intersect(h.in); !some {
			return []Packets{p}
		}
	}
	return pieces
}

// intersect returns the packets that are in a set of each list.
func intersect(a, b []Packets) []Packets {
	var out []Packets
	for _, p := range a {
		for _, q := range b {
			if both, some := p.intersect(q); some {
				out = append(out, both)
			}
		}
	}
	return out
}

// without returns the packets that are in a set of the first list and in none of the
// second one.
func without(a, b []Packets, f policy.Family) []Packets {
	for _, q := range b {
		halves := q.halves(f)
		var rest []Packets
		for _, p := range a {
			if p.From.Overlaps(q.From) && p.To.Overlaps(q.To) {
				rest = append(rest, p.without(halves)...)
			} else {
				rest = append(rest, p)
			}
		}
		a = rest
	}
	return a
}

// withUnsure returns the sets with bits of unsure added.
func withUnsure(all []Packets, unsure uint8) []Packets {
	out := slices.Clone(all)
	for i := range out {
		out[i].unsure |= unsure
	}
	return out
}

// merge joins the sets that differ in the sources alone, or in the destinations alone.
// More sets than can be followed become one that is unsure.
func merge(all []Packets) []Packets {
	const most = 64
	var out []Packets
next:
	for _, p := range all {
		for i, q := range out {
			if p.notProtocols != q.notProtocols || p.notOrigins != q.notOrigins || p.unsure != q.unsure ||
				p.Out != q.Out || !slices.Equal(p.NotOut, q.NotOut) {
				continue
			}
			switch {
			case p.To.Equal(q.To):
				out[i].From = union(p.From, q.From)
				continue next
			case p.From.Equal(q.From):
				out[i].To = union(p.To, q.To)
				continue next
			}
		}
		if out = append(out, p); len(out) > most {
			var from, to []policy.Ranges
			for _, p := range all {
				from, to = append(from, p.From), append(to, p.To)
			}
			return []Packets{{unsure: maybeAccepted | maybeTranslated, From: union(from...), To: union(to...)}}
		}
	}
	return out
}

func union(sets ...policy.Ranges) policy.Ranges {
	if slices.ContainsFunc(sets, func(s policy.Ranges) bool { return s == nil }) {
		return nil
	}
	return policy.Normalize(slices.Concat(sets...))
}
