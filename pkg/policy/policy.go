// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// Action is what a policy does with a destination.
type Action string

// The actions, as metrics and explanations name them.
const (
	Exempt      Action = "exempt"
	Masqueraded Action = "masquerade"
)

// Origin is where a prefix or a scalar comes from.
type Origin struct {
	Source SourceID
	Key    string
	Index  int // of the item in a list; -1 for a scalar and for what is built in
}

// String writes nonMasqueradeCIDRs[2] of network "podnet".
func (o Origin) String() string {
	if o.Index < 0 {
		return fmt.Sprintf("%s (%s)", o.Key, o.Source)
	}
	return fmt.Sprintf("%s[%d] of %s", o.Key, o.Index, o.Source)
}

// Stated is a value with everybody who states it. What nobody states is built
// in, and has an origin that says so.
type Stated[T any] struct {
	Value   T
	Origins []Origin
}

// Policy is what holds for one chain once all its sources are merged.
type Policy struct {
	Chain   string
	Backend Stated[Backend]

	// Destinations holds each prefix once, in the order in which rules list
	// them: link-local first, then as written.
	Destinations []Entry
	// ExemptSources are never masqueraded, whatever the destination.
	ExemptSources []Entry

	// Sources and Interfaces narrow what the policy is about; empty is all.
	Sources    Stated[[]netip.Prefix]
	Interfaces Stated[[]string]
	Host       Stated[bool]

	EnableIPv6  Stated[bool]
	RandomFully Stated[bool]
	ToPorts     Stated[Ports]

	// Conflicts are what the sources contradict each other in. The policy
	// has of each the side that holds.
	Conflicts ConflictErrors
}

// Entry is a prefix with what happens to the packets it covers, unless a longer
// one covers them too.
type Entry struct {
	Prefix  netip.Prefix
	Action  Action
	Origins []Origin
}

// Families returns the families that the policy manages.
func (p Policy) Families() []Family {
	if p.EnableIPv6.Value {
		return Families()
	}
	return []Family{IPv4}
}

// ConflictError is a contradiction between two sources of one chain.
type ConflictError struct {
	Chain               string
	InForce, Superseded Origin
	// The two values, as they are written.
	InForceValue, SupersededValue string
	Scope                         bool // the key narrows the scope: chains can be kept apart
}

// Error names both sources, the key and the remedy.
func (e *ConflictError) Error() string {
	remedy := "make them agree"
	if e.Scope {
		remedy += " or give one of them another masqChain"
	}
	return fmt.Sprintf("chain %s: %s of %s is %s, which contradicts %s of %s, %s; the latter is in force: %s",
		e.Chain, e.Superseded.Key, e.Superseded.Source, e.SupersededValue,
		e.InForce.Key, e.InForce.Source, e.InForceValue, remedy)
}

// ConflictErrors are several conflicts: one for each prefix that two sources
// dispute, and there can be a million.
type ConflictErrors []*ConflictError

// Error writes one line for each of those that Summary returns.
func (e ConflictErrors) Error() string { return errors.Join(e.Summary()...).Error() }

// Unwrap returns all of them.
func (e ConflictErrors) Unwrap() []error { return e.errors(len(e)) }

// Summary returns the first conflicts, and an error that counts the others.
func (e ConflictErrors) Summary() []error {
	const most = 8
	shown := e.errors(min(most, len(e)))
	if more := len(e) - most; more > 0 {
		shown = append(shown, fmt.Errorf("chain %s: and %d more conflicts", e[0].Chain, more))
	}
	return shown
}

func (e ConflictErrors) errors(n int) []error {
	list := make([]error, n)
	for i, c := range e[:n] {
		list[i] = c
	}
	return list
}

// inForce orders contributions by the weight of their word: a network that does
// not yield, in the order in which they came into force, one that does, and
// last the agent files.
func inForce(a, b Source) int {
	rank := func(c Source) int {
		switch {
		case c.ID.Kind != Network:
			return 2
		case c.Superseded:
			return 1
		}
		return 0
	}
	if d := rank(a) - rank(b); d != 0 {
		return d
	}
	if a.Order != b.Order {
		if a.Order < b.Order {
			return -1
		}
		return 1
	}
	return a.ID.Compare(b.ID)
}

// sorted returns a copy in the given order.
func sorted[T any](s []T, by func(a, b T) int) []T {
	out := slices.Clone(s)
	slices.SortStableFunc(out, by)
	return out
}
