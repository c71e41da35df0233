// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"slices"
	"strings"
)

// Key is a row of the table of keys. Decoding, merging, the schema of documents, help, documentation and
// the generators of tests follow from the rows.
type Key struct {
	Name    string
	Schema  int    // of the first documents that could have the key
	Default string // in words
	Help    string // what the key says, without a full stop
	Combination
}

// Combination is a key's field, and how the values of several sources become one.
type Combination struct {
	Sources string // in words

	Field any // a **bool, **Ports, **Mark, *string, *[]netip.Prefix, *[]string, or a Word

	// merge adds the value of the field, which has this origin, to that of sources with a higher precedence.
	// It is nil if merger.merge does that.
	merge func(m *merger, o Origin)
}

// Word is a field with one of a few words, or "" if the key is left out.
type Word interface {
	String() string
	Set(string) error
	Choices() []string
}

// Keys is the table of the keys that state policy, bound to the fields of s. For another key see "Add a key"
// in CONTRIBUTING.md.
func Keys(s *SourcePolicy) []Key { return keys(s, new(Policy)) }

// keys binds the table also to the policy that the sources are merged into.
func keys(s *SourcePolicy, p *Policy) []Key {
	const agreed, united = "must agree", "united"
	list := func(sources string, field any) Combination { return Combination{Sources: sources, Field: field} }
	return []Key{
		{"nonMasqueradeCIDRs", 2, "the private ranges of RFC 1918", "destinations that are not masqueraded; an empty list for none",
			list(united, &s.NonMasqueradeCIDRs)},
		{"masqueradeCIDRs", 2, "none", "destinations to masquerade inside wider exempt ones", list(united, &s.MasqueradeCIDRs)},
		{"nomasqAllReservedRanges", 2, "false", "extend the default of nonMasqueradeCIDRs to every range that an RFC reserves",
			agree(&s.NomasqAllReservedRanges, &p.NomasqAllReservedRanges, false)},
		{"masqLinkLocal", 2, "false", "masquerade 169.254.0.0/16 too", trueWins(&s.MasqLinkLocal, &p.MasqLinkLocal)},
		{"masqLinkLocalIPv6", 2, "false", "masquerade fe80::/10 too", trueWins(&s.MasqLinkLocalIPv6, &p.MasqLinkLocalIPv6)},
		{"enableIPv6", 2, "false", "manage IPv6 too", agree(&s.EnableIPv6, &p.EnableIPv6, false)},
		{"sourceCIDRs", 2, "any", "only traffic from these is in scope", list(agreed, &s.SourceCIDRs)},
		{"outputInterfaces", 2, "any", "only traffic that leaves through these is in scope; a final + is a wildcard",
			list(agreed, &s.OutputInterfaces)},
		{exemptSourcesKey, 2, "none", "sources that are never masqueraded", list(united, &s.NonMasqueradeSourceCIDRs)},
		{"masqueradeHost", 2, "true", "masquerade the node's own traffic too", agree(&s.MasqueradeHost, &p.Host, true)},
		{"randomFully", 2, "true", "choose source ports at random, where the kernel can", agree(&s.RandomFully, &p.RandomFully, true)},
		{"toPorts", 2, "any", "source ports to use", agreeFunc(&s.ToPorts, &p.ToPorts, Ports{}, Ports.sameSet)},
		{"guard", 3, "off", "what happens to packets of pods that NAT rules miss",
			agreeWord(&s.Guard, &p.Guard, GuardOff, "", GuardOff, GuardCount, GuardDrop)},
		{"staleConnections", 3, "keep, or reset if guard is drop",
			"what happens to connections that a policy change affects", agreeWord(&s.StaleConnections, &p.StaleConnections, "", "", KeepConnections, ResetConnections)},
		{"enforceExempt", 3, "false", "keep exempt traffic of pods exempt beside third-party rules",
			agree(&s.EnforceExempt, &p.EnforceExempt, false)},
		{"bypassMark", 3, "0x6000", "mark bits of packets that enforceExempt ignores; 0 for none",
			agree(&s.BypassMark, &p.BypassMark, DefaultBypassMark)},
		{"podCIDRs", 3, "sourceCIDRs, else the pods' subnets", "addresses of pods, for guard, staleConnections and enforceExempt",
			list(united, &s.PodCIDRs)},
		{"masqChain", 2, DefaultChain, "name of the chain; sources with the same chain are merged",
			Combination{Sources: "each chain on its own", Field: &s.Chain}},
		{"backend", 2, "auto", "what holds the rules of the chain in the kernel",
			agreeWord(&s.Backend, &p.Backend, Auto, Auto, Auto, IPTables, NFTables)},
	}
}

// Schema returns the greatest number in the table.
func Schema() int {
	return slices.MaxFunc(Keys(new(SourcePolicy)), func(a, b Key) int { return a.Schema - b.Schema }).Schema
}

// agree is for values that must be the same in all sources that have the key.
func agree[T comparable](field **T, merged *WithOrigins[T], otherwise T) Combination {
	return agreeFunc(field, merged, otherwise, func(a, b T) bool { return a == b })
}

func agreeFunc[T any](field **T, merged *WithOrigins[T], otherwise T, equal func(a, b T) bool) Combination {
	return Combination{Sources: "must agree", Field: field, merge: func(m *merger, o Origin) { merged.agree(m, *field, o, otherwise, equal) }}
}

// agreeWord is agree for words, of which one may agree with all others.
func agreeWord[T ~string](field *T, merged *WithOrigins[T], otherwise, neutral T, choices ...T) Combination {
	return Combination{Sources: "must agree", Field: WordOf(field, choices...), merge: func(m *merger, o Origin) {
		value := field
		if *field == "" || *field == neutral {
			value = nil
		}
		merged.agree(m, value, o, otherwise, func(a, b T) bool { return a == b })
	}}
}

func (w *WithOrigins[T]) agree(m *merger, value *T, o Origin, otherwise T, equal func(a, b T) bool) {
	if w.Origins == nil {
		*w = WithOrigins[T]{otherwise, builtIn(o.Key)}
	}
	switch {
	case value == nil:
	case w.Origins[0].Source.Kind == BuiltIn:
		*w = WithOrigins[T]{*value, []Origin{o}}
	case equal(w.Value, *value):
		w.Origins = append(w.Origins, o)
	default:
		m.conflict(w.Origins[0], w.Value, o, *value)
	}
}

// trueWins is for booleans of which false says nothing.
func trueWins(field **bool, merged *WithOrigins[bool]) Combination {
	return Combination{Sources: "`true` wins", Field: field, merge: func(m *merger, o Origin) {
		value := *field
		if !isTrue(value) {
			value = nil
		}
		merged.agree(m, value, o, false, func(a, b bool) bool { return a == b })
	}}
}

// WordOf returns the word in a field.
func WordOf[T ~string](field *T, choices ...T) Word { return word[T]{field, choices} }

type word[T ~string] struct {
	to      *T
	choices []T
}

func (w word[T]) String() string { return string(*w.to) }

func (w word[T]) Choices() (all []string) {
	for _, c := range w.choices {
		all = append(all, string(c))
	}
	return all
}

func (w word[T]) Set(s string) error {
	write := "write " + JoinOr(w.Choices())
	switch {
	case slices.Contains(w.choices, T(s)):
		*w.to = T(s)
		return nil
	case s == "":
		return errors.New("is empty; " + write + ", or leave the key out")
	}
	return errors.New("is not one of the choices; " + write)
}

// JoinOr joins words with commas and "or".
func JoinOr(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}
