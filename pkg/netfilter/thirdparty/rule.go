// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Order tells whether a rule gets to see packets before the rules of ours do.
type Order string

// The orders. Where two base chains have the same priority, or none of ours
// stands in the kernel, nobody knows.
const (
	Before       Order = "before"
	After        Order = "after"
	UnknownOrder Order = ""
)

// Place is a chain in the kernel.
type Place struct {
	Backend policy.Backend
	Variant string // of iptables
	Family  policy.Family

	Table, Chain string
	// Owner is what a comment in the chain says of its writer, the zero Owner where
	// there is none or nobody has looked for it.
	Owner policy.Owner
}

// Action is what a rule does with packets.
type Action string

// The actions, as rules are written for people.
const (
	Masquerades Action = "masquerade"
	Translates  Action = "snat" // to a stated address, rather than to the interface's
	Accepts     Action = "accept"
	Returns     Action = "return"
	Drops       Action = "drop"
)

// Rule is a third party's rule.
type Rule struct {
	Place  // where it stands
	Action Action
	Order  Order

	// Rule is what the rule and the jumps that lead to it match, as far as it
	// could be read. Its verdict is Masquerade for source NAT too.
	Rule policy.Rule
	// NotOut are output interfaces that the rule is not about. A trailing + is
	// a wildcard.
	NotOut []string
	// Spared are rules before it, read in full, that keep packets from it.
	Spared []policy.Rule

	// Marked tells that the rule is only about packets that bear a mark, which
	// some rule elsewhere puts on what it wants masqueraded.
	Marked bool
	// Exact tells that all of it could be read. Otherwise it may match less.
	Exact bool
	// Unread is what could not be read of it, or of what stands before it.
	Unread []string

	Comment string // of the rule
	Text    string // for people, on one line
}

// Destinations returns where the rule masquerades what one of the sources sends,
// nil being any source: a set that is empty where it does not. It supposes what
// it takes to match otherwise: the output interface, the protocol, and what is
// Unread.
func (r Rule) Destinations(from policy.Ranges) policy.Ranges {
	return area(r.Family, r.Rule, r.Spared, from)
}

func area(f policy.Family, r policy.Rule, spared []policy.Rule, from policy.Ranges) policy.Ranges {
	every := policy.RangesOf(f.All())
	sources, destinations := every.Intersect(r.From).Intersect(from), every.Intersect(r.To)
	for _, s := range spared {
		if len(destinations.Without(s.To)) == 0 {
			sources = sources.Without(s.From)
		}
	}
	for _, s := range spared {
		if len(sources.Without(s.From)) == 0 {
			destinations = destinations.Without(s.To)
		}
	}
	if len(sources) == 0 {
		return policy.Ranges{}
	}
	return destinations
}

// Leaves reports whether the rule can be about what leaves through an interface
// of the pattern (a trailing + is a wildcard); "" is any.
func (r Rule) Leaves(pattern string) bool {
	if pattern == "" {
		return true
	}
	for _, not := range r.NotOut {
		if within(pattern, not) {
			return false
		}
	}
	return r.Rule.Out == "" || within(pattern, r.Rule.Out) || within(r.Rule.Out, pattern)
}

// within reports whether all the interfaces of a pattern are among those of
// another.
func within(pattern, other string) bool {
	prefix, wild := strings.CutSuffix(other, "+")
	return pattern == other || wild && strings.HasPrefix(pattern, prefix)
}
