// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// agentUnion makes one statement of what several documents state.
type agentUnion struct {
	docs      []*agentDoc // the reconciler's own first, then the files by name
	statement policy.SourcePolicy
	places    policy.Places
	conflicts []error
}

// unite judges the documents together and returns the mistakes of all.
func (u *agentUnion) unite() []error {
	u.places = policy.Places{}
	ipv6 := slices.ContainsFunc(u.docs, (*agentDoc).mayEnableIPv6)
	var mistakes []error
	for _, d := range u.docs {
		d.Validate(&d.Document, ipv6)
		mistakes = append(mistakes, d.Mistakes...)
	}
	u.scalars()
	u.lists()
	u.prefixesInBothLists()
	if len(mistakes) == 0 {
		for _, err := range u.statement.Bounds() {
			mistakes = append(mistakes, fmt.Errorf("the agent files together: %w", err))
		}
	}
	return append(mistakes, u.conflicts...)
}

// mayEnableIPv6 also holds for a document of which that is not known: what
// follows from a mistake is no mistake of its own.
func (a *agentDoc) mayEnableIPv6() bool {
	return a.unread || a.Flawed["enableIPv6"] || a.Policy.EnableIPv6 != nil && *a.Policy.EnableIPv6
}

func (u *agentUnion) lists() {
	s := &u.statement
	s.NonMasqueradeCIDRs = united(u, "nonMasqueradeCIDRs", func(s *policy.SourcePolicy) []netip.Prefix { return s.NonMasqueradeCIDRs })
	s.MasqueradeCIDRs = united(u, "masqueradeCIDRs", func(s *policy.SourcePolicy) []netip.Prefix { return s.MasqueradeCIDRs })
	s.SourceCIDRs = united(u, "sourceCIDRs", func(s *policy.SourcePolicy) []netip.Prefix { return s.SourceCIDRs })
	s.NonMasqueradeSourceCIDRs = united(u, "nonMasqueradeSourceCIDRs", func(s *policy.SourcePolicy) []netip.Prefix { return s.NonMasqueradeSourceCIDRs })
	s.OutputInterfaces = united(u, "outputInterfaces", func(s *policy.SourcePolicy) []string { return s.OutputInterfaces })
}

// united returns the items of all the lists, each once, and nil where nobody
// has the list.
func united[T comparable](u *agentUnion, key string, get func(*policy.SourcePolicy) []T) []T {
	var all []T
	seen := map[T]bool{}
	for _, d := range u.docs {
		items := get(&d.Policy)
		if items != nil && all == nil {
			all = []T{}
		}
		for i, item := range items {
			if !seen[item] {
				seen[item] = true
				all = append(all, item)
				u.places.Note(key, d.File, d.indexOf(key, i))
			}
		}
	}
	return all
}

// indexOf returns where an item that was kept of a list stands in the document.
func (a *agentDoc) indexOf(key string, kept int) int {
	if places := a.Indexes[key]; kept < len(places) {
		return places[kept]
	}
	return kept
}

func (u *agentUnion) scalars() {
	s := &u.statement
	same := func(a, b bool) bool { return a == b }
	s.MasqLinkLocal = u.anyTrue("masqLinkLocal", func(s *policy.SourcePolicy) *bool { return s.MasqLinkLocal })
	s.MasqLinkLocalIPv6 = u.anyTrue("masqLinkLocalIPv6", func(s *policy.SourcePolicy) *bool { return s.MasqLinkLocalIPv6 })
	s.NomasqAllReservedRanges = agreed(u, "nomasqAllReservedRanges", same, func(s *policy.SourcePolicy) *bool { return s.NomasqAllReservedRanges })
	s.EnableIPv6 = agreed(u, "enableIPv6", same, func(s *policy.SourcePolicy) *bool { return s.EnableIPv6 })
	s.MasqueradeHost = agreed(u, "masqueradeHost", same, func(s *policy.SourcePolicy) *bool { return s.MasqueradeHost })
	s.RandomFully = agreed(u, "randomFully", same, func(s *policy.SourcePolicy) *bool { return s.RandomFully })
	s.ToPorts = agreed(u, "toPorts", samePorts, func(s *policy.SourcePolicy) *policy.Ports { return s.ToPorts })

	s.Chain = policy.DefaultChain
	equal := func(a, b string) bool { return a == b }
	if chain := agreed(u, "masqChain", equal, func(s *policy.SourcePolicy) *string { return unlessZero(&s.Chain) }); chain != nil {
		s.Chain = *chain
	}
	u.backend()
}

// backend takes the one that is stated, with which auto agrees.
func (u *agentUnion) backend() {
	stated := func(s *policy.SourcePolicy) *policy.Backend {
		if s.Backend == policy.Auto {
			return nil
		}
		return unlessZero(&s.Backend)
	}
	equal := func(a, b policy.Backend) bool { return a == b }
	b := agreed(u, "backend", equal, stated)
	if b == nil {
		b = agreed(u, "backend", equal, func(s *policy.SourcePolicy) *policy.Backend { return unlessZero(&s.Backend) })
	}
	if b != nil {
		u.statement.Backend = *b
	}
}

func unlessZero[T comparable](value *T) *T {
	var zero T
	if *value == zero {
		return nil
	}
	return value
}

// samePorts compares the sets: the order of ranges has no meaning.
func samePorts(a, b policy.Ports) bool {
	order := func(a, b policy.PortRange) int { return cmp.Compare(a.First, b.First) }
	return slices.Equal(slices.SortedFunc(slices.Values(a), order), slices.SortedFunc(slices.Values(b), order))
}

// anyTrue returns true where anybody states it, and otherwise what is stated.
func (u *agentUnion) anyTrue(key string, get func(*policy.SourcePolicy) *bool) *bool {
	var holds *bool
	by := ""
	for _, d := range u.docs {
		if b := get(&d.Policy); b != nil && (holds == nil || *b && !*holds) {
			holds, by = b, d.File
		}
	}
	if holds != nil {
		u.places.Note(key, by, -1)
	}
	return holds
}

// agreed returns what is stated, which has to be the same with all who state it.
func agreed[T any](u *agentUnion, key string, equal func(a, b T) bool, get func(*policy.SourcePolicy) *T) *T {
	var holds *T
	by := ""
	for _, d := range u.docs {
		value := get(&d.Policy)
		switch {
		case value == nil:
		case holds == nil:
			holds, by = value, d.File
			u.places.Note(key, by, -1)
		case !equal(*holds, *value):
			u.conflict(d, key, -1, fmt.Sprintf("%s contradicts %s in %s; write the same in both, or leave it out of one",
				inWords(*value), inWords(*holds), policy.Printable(by)))
		}
	}
	return holds
}

func inWords(value any) string {
	if text := fmt.Sprint(value); text != "" {
		return policy.Printable(text)
	}
	return "empty"
}

func (u *agentUnion) conflict(d *agentDoc, key string, index int, problem string) {
	line := d.LineOf(key, index, d.Lines[key].Line)
	u.conflicts = append(u.conflicts, d.Locate(line, &policy.FieldError{Key: key, Index: index, Problem: problem}))
}

// prefixesInBothLists finds those that one document exempts and another has
// masqueraded. What one document says of both kinds was found when it was judged.
func (u *agentUnion) prefixesInBothLists() {
	const exempt, masqueraded = "nonMasqueradeCIDRs", "masqueradeCIDRs"
	type place struct {
		doc   *agentDoc
		index int
	}
	exempts := map[netip.Prefix]place{}
	for _, d := range u.docs {
		for i, p := range d.Policy.NonMasqueradeCIDRs {
			if _, known := exempts[p]; !known {
				exempts[p] = place{d, d.indexOf(exempt, i)}
			}
		}
	}
	for _, d := range u.docs {
		inBoth := map[netip.Prefix]bool{}
		for _, p := range d.Policy.NonMasqueradeCIDRs {
			inBoth[p] = true
		}
		for i, p := range d.Policy.MasqueradeCIDRs {
			at, both := exempts[p]
			if !both || inBoth[p] {
				continue
			}
			u.conflict(d, masqueraded, d.indexOf(masqueraded, i), fmt.Sprintf("%s is %s[%d] of %s too; remove one of the two",
				p, exempt, at.index, policy.Printable(at.doc.File)))
		}
	}
}

// interval returns the shortest that a document states, 0 where none does.
func (u *agentUnion) interval() time.Duration {
	var shortest time.Duration
	for _, d := range u.docs {
		if d.resync > 0 && (shortest == 0 || d.resync < shortest) {
			shortest = d.resync
		}
	}
	return shortest
}
