// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"cmp"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Packets is the set of packets with all of the stated properties. The zero value has all packets.
type Packets struct {
	From, To policy.Ranges // nil: every address
	Out      string        // output interface; a trailing + is a wildcard; "": any
	NotOut   []string      // the output interface is none of these

	protocol   policy.Protocol // "": any
	notOrigins uint8           // excluded
	before     uint8           // what became of them before
}

// Bits of notOrigins.
const (
	fromNode uint8 = 1 << iota
	fromOthers
	allOrigins = fromNode | fromOthers
)

// Bits of before.
const (
	maybeAccepted uint8 = 1 << iota // a rule that was not decoded in full may have decided about them
	kept                            // a rule kept them from the rest of the base chain
)

// Leaves reports whether packets can leave through an interface of the pattern; "" is any.
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
	if p.protocol = cmp.Or(p.protocol, q.protocol); q.protocol != "" && q.protocol != p.protocol {
		return p, false
	}
	p.notOrigins |= q.notOrigins
	p.before |= q.before
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
	none := p.notOrigins == allOrigins ||
		slices.ContainsFunc(p.NotOut, func(not string) bool { return not == "+" || p.Out != "" && policy.InterfaceWithin(p.Out, not) })
	return p, !none
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

// without returns the packets that are in a set of the list and not in the other set. If that is of some
// interfaces, a protocol or origins only, the packets with its addresses stay: some are not in it.
func without(all []Packets, not Packets, f policy.Family) []Packets {
	outside := func(r, not policy.Ranges) policy.Ranges { return policy.RangesOf(f.All()).Intersect(r).Without(not) }
	var rest []Packets
	for _, p := range all {
		both, some := p.intersect(not)
		if !some || !p.differsInPlace(both) {
			rest = append(rest, p)
			continue
		}
		if part := p; not.From != nil {
			if part.From = outside(p.From, not.From); len(part.From) > 0 {
				rest = append(rest, part)
			}
		}
		if part := p; not.To != nil {
			part.From = both.From
			if part.To = outside(p.To, not.To); len(part.To) > 0 {
				rest = append(rest, part)
			}
		}
		if p.Out != both.Out {
			part := both
			part.Out, part.NotOut = "", append(slices.Clip(p.NotOut), both.Out)
			rest = append(rest, part)
		}
	}
	return rest
}

// differsInPlace reports whether a part of packets differs in addresses, or by an interface, alone.
func (p Packets) differsInPlace(part Packets) bool {
	return p.protocol == part.protocol && p.notOrigins == part.notOrigins && (p.Out == part.Out || p.Out == "") && slices.Equal(p.NotOut, part.NotOut)
}

// having returns the sets that have the bit of before, or that do not have it.
func having(all []Packets, bit uint8, has bool) []Packets {
	return slices.DeleteFunc(slices.Clone(all), func(p Packets) bool { return p.before&bit != 0 != has })
}

func with(all []Packets, bits uint8) []Packets {
	out := slices.Clone(all)
	for i := range out {
		out[i].before |= bits
	}
	return out
}

// merge joins the sets that differ in the sources alone, or in the destinations alone. More sets
// than can be followed become one of which less is known.
func merge(all []Packets) []Packets {
	const most = 64
	var out []Packets
next:
	for _, p := range all {
		for i, q := range out {
			if p.before != q.before || p.Out != q.Out || !p.differsInPlace(q) {
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
			return []Packets{{before: maybeAccepted, From: union(from...), To: union(to...)}}
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
