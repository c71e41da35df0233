// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"slices"

	"go4.org/netipx"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// condition is what a packet has to be for a rule to be about it.
type condition struct {
	rule      policy.Rule // without a verdict
	notOut    []string
	unread    []string // what else narrows it
	mark      markNeed
	fromLocal bool // only what the node itself sends
	never     bool // nothing is so
	comment   string
}

// markNeed tells of a match of the packet's mark what it says of a packet that
// has none.
type markNeed int

const (
	noMark     markNeed = iota // marks are not looked at
	markAbsent                 // matches packets without one
	markNeeded                 // does not
)

// and returns the condition that a packet meets if it meets both.
func (c condition) and(d condition) condition {
	out := d
	out.never = c.never || d.never
	out.mark = max(c.mark, d.mark)
	out.notOut = append(slices.Clone(c.notOut), d.notOut...)
	out.unread = append(slices.Clone(c.unread), d.unread...)
	out.from(c.rule.From)
	out.to(c.rule.To)
	out.out(c.rule.Out)
	out.protocol(c.rule.Protocol)
	out.share(c.rule.Share)
	out.rule.NotFromLocal = c.rule.NotFromLocal || d.rule.NotFromLocal
	out.rule.NotToLocal = c.rule.NotToLocal || d.rule.NotToLocal
	out.fromLocal = c.fromLocal || d.fromLocal
	out.never = out.never || out.fromLocal && out.rule.NotFromLocal || out.rule.Out != "" && slices.ContainsFunc(out.notOut, func(not string) bool { return within(out.rule.Out, not) })
	return out
}

func (c *condition) from(r policy.Ranges) { c.narrow(&c.rule.From, r) }
func (c *condition) to(r policy.Ranges)   { c.narrow(&c.rule.To, r) }

func (c *condition) narrow(side *policy.Ranges, r policy.Ranges) {
	*side = side.Intersect(r)
	c.never = c.never || *side != nil && len(*side) == 0
}

// out notes the output interface, "" being any.
func (c *condition) out(name string) {
	switch {
	case name == "" || name == "+" || c.rule.Out != "" && within(c.rule.Out, name):
	case c.rule.Out == "" || within(name, c.rule.Out):
		c.rule.Out = name
	default:
		c.never = true
	}
}

// protocol notes the protocol, "" being any.
func (c *condition) protocol(p policy.Protocol) {
	switch {
	case p == "" || p == c.rule.Protocol:
	case c.rule.Protocol == "":
		c.rule.Protocol = p
	default:
		c.never = true
	}
}

// share notes a random choice among packets, 0 being none.
func (c *condition) share(share uint32) {
	switch {
	case share == 0:
	case c.rule.Share == 0:
		c.rule.Share = share
	default:
		c.unread = append(c.unread, "a second random choice")
	}
}

func (c *condition) refuse(part string) { c.unread = append(c.unread, part) }

// covers reports whether it holds for all packets for which d does, but for what
// depends on addresses and on marks. (A destination of the node itself is of no
// interest: nothing leaves for it.)
func (c condition) covers(d condition) bool {
	for _, not := range c.notOut {
		if !slices.Contains(d.notOut, not) {
			return false
		}
	}
	r, s := c.rule, d.rule
	return r.Share == 0 && (!c.fromLocal || d.fromLocal) && (!r.NotFromLocal || s.NotFromLocal) &&
		(r.Out == "" || s.Out != "" && within(s.Out, r.Out)) && (r.Protocol == "" || r.Protocol == s.Protocol)
}

// apart reports whether no packet meets both, by their addresses.
func (c condition) apart(d condition) bool {
	return c.never || d.never || c.fromLocal && d.rule.NotFromLocal || c.rule.NotFromLocal && d.fromLocal || !c.rule.From.Overlaps(d.rule.From) || !c.rule.To.Overlaps(d.rule.To)
}

// without returns the condition less what meets d, in pieces. Of what may or may
// not meet it nobody can tell: that piece is not read in full.
func (c condition) without(d condition, f policy.Family) []condition {
	if d.mark == markNeeded || c.apart(d) {
		return []condition{c}
	}
	every := policy.RangesOf(f.All())
	var pieces []condition
	add := func(p condition) {
		if !p.never {
			pieces = append(pieces, p)
		}
	}
	elsewhere := c
	elsewhere.from(every.Without(d.rule.From))
	add(elsewhere)
	c.from(d.rule.From)
	others := c
	others.to(every.Without(d.rule.To))
	add(others)
	if len(d.unread) > 0 || !d.covers(c) {
		c.to(d.rule.To)
		c.unread = append(slices.Clone(c.unread), spares)
		add(c)
	}
	return pieces
}

// coalesce makes one of the conditions that are about destinations alone, of
// which an agent's chain has as many as its list is long.
func coalesce(conditions []condition) []condition {
	var to []netipx.IPRange
	var rest []condition
	for _, c := range conditions {
		plain := c.rule.From == nil && c.rule.To != nil && c.covers(condition{}) && len(c.unread) == 0 && c.mark == noMark && !c.never
		if plain {
			to = append(to, c.rule.To...)
		} else {
			rest = append(rest, c)
		}
	}
	if len(to) > 0 {
		rest = append(rest, condition{rule: policy.Rule{To: policy.Normalize(to)}})
	}
	return rest
}

// spared returns the addresses as a rule that keeps them from those behind it.
func (c condition) spared() policy.Rule {
	return policy.Rule{From: c.rule.From, To: c.rule.To, Verdict: policy.Return}
}
