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

	Field any // a **bool, **Ports, **Mark, *string, *[]netip.Prefix, *AddressItems, *[]string, *Namespaces, or a Word

	// merge adds the value of the field, which has this origin, to that of sources with a higher precedence.
	// It is nil if merger.merge does that.
	merge func(o Origin)
}

// Word is a field with one of a few words, or "" if the key is left out.
type Word interface {
	String() string
	Set(string) error
	Choices() []string
}

// Keys is the table of the keys that state policy, bound to the fields of s. For another key see "Add a key"
// in CONTRIBUTING.md.
func Keys(s *SourcePolicy) []Key { return new(merger).keys(s) }

// keys binds the table also to the policy that the sources, if there are any, are merged into.
func (m *merger) keys(s *SourcePolicy) []Key {
	p := &m.policy
	const agreed, united = "must agree", "united"
	list := func(sources string, field any) Combination { return Combination{Sources: sources, Field: field} }
	return []Key{
		{"nonMasqueradeCIDRs", 2, "the private ranges of RFC 1918", "destinations that are not masqueraded; an empty list for none",
			list(united, &s.NonMasqueradeCIDRs)},
		{"masqueradeCIDRs", 2, "none", "destinations to masquerade inside wider exempt ones", list(united, &s.MasqueradeCIDRs)},
		{"nomasqAllReservedRanges", 2, "false", "extend the default of nonMasqueradeCIDRs to every range that an RFC reserves",
			agree(m, &s.NomasqAllReservedRanges, &p.NomasqAllReservedRanges, false, nil)},
		{"masqLinkLocal", 2, "false", "masquerade 169.254.0.0/16 too", trueWins(m, &s.MasqLinkLocal, &p.MasqLinkLocal)},
		{"masqLinkLocalIPv6", 2, "false", "masquerade fe80::/10 too", trueWins(m, &s.MasqLinkLocalIPv6, &p.MasqLinkLocalIPv6)},
		{"enableIPv6", 2, "false", "manage IPv6 too", agree(m, &s.EnableIPv6, &p.EnableIPv6, false, nil)},
		{"sourceCIDRs", 2, "any", "only traffic from these is in scope", list(agreed, &s.SourceCIDRs)},
		{"outputInterfaces", 2, "any", "only traffic that leaves through these is in scope; a final + is a wildcard",
			list(agreed, &s.OutputInterfaces)},
		{exemptSourcesKey, 2, "none", "sources that are never masqueraded", list(united, &s.NonMasqueradeSourceCIDRs)},
		{"masqueradeHost", 2, "true", "masquerade the node's own traffic too", agree(m, &s.MasqueradeHost, &p.Host, true, nil)},
		{"randomFully", 2, "true", "choose source ports at random, where the kernel can", agree(m, &s.RandomFully, &p.RandomFully, true, nil)},
		{"toPorts", 2, "any", "source ports to use", agree(m, &s.ToPorts, &p.ToPorts, Ports{}, Ports.sameSet)},
		{"guard", 3, "off", "what happens to packets of pods that NAT rules miss",
			agreeWord(m, &s.Guard, &p.Guard, GuardOff, "", GuardOff, GuardCount, GuardDrop)},
		{"staleConnections", 3, "keep, or reset if guard is drop",
			"what happens to connections that a policy change affects", agreeWord(m, &s.StaleConnections, &p.StaleConnections, "", "", KeepConnections, ResetConnections)},
		{"enforceExempt", 3, "false", "keep exempt traffic of pods exempt despite third-party rules",
			agree(m, &s.EnforceExempt, &p.EnforceExempt, false, nil)},
		{"bypassMark", 3, "0x6000", "mark bits of packets that enforceExempt ignores; 0 for none",
			agree(m, &s.BypassMark, &p.BypassMark, DefaultBypassMark, nil)},
		{"podCIDRs", 3, "sourceCIDRs, else the pods' subnets", "addresses of pods, for guard, staleConnections and enforceExempt",
			list(united, &s.PodCIDRs)},
		{"outputAddresses", 6, "none", "pods leave with the node's address in the first of these prefixes that has one",
			agreeItems(m, &s.OutputAddresses, &p.OutputAddresses)},
		{namespacesKey, 7, "none", "Kubernetes namespaces whose pods are never masqueraded", list(united, &s.NonMasqueradeNamespaces)},
		{"masqChain", 2, DefaultChain, "name of the chain; sources with the same chain are merged",
			Combination{Sources: "each chain on its own", Field: &s.Chain}},
		{"backend", 2, "auto", "what holds the rules of the chain in the kernel",
			agreeWord(m, &s.Backend, &p.Backend, Auto, Auto, Auto, IPTables, NFTables)},
	}
}

// Schema returns the greatest number in the table.
func Schema() int {
	return slices.MaxFunc(Keys(new(SourcePolicy)), func(a, b Key) int { return a.Schema - b.Schema }).Schema
}

// agree is for values that must be the same in all sources that have the key.
func agree[T any](m *merger, field **T, merged *WithOrigins[T], otherwise T, equal func(a, b T) bool) Combination {
	return combine(m, "must agree", field, *field, merged, otherwise, equal)
}

// agreeWord is agree for words, of which one may agree with all others.
func agreeWord[T ~string](m *merger, field *T, merged *WithOrigins[T], otherwise, neutral T, choices ...T) Combination {
	return combine(m, "must agree", WordOf(field, choices...), unless(*field == "" || *field == neutral, field), merged, otherwise, nil)
}

// agreeItems is agree for a list whose order has a meaning.
func agreeItems(m *merger, field *AddressItems, merged *WithOrigins[AddressItems]) Combination {
	return combine(m, "must agree", field, unless(*field == nil, field), merged, nil, slices.Equal[AddressItems])
}

// trueWins is for booleans of which false says nothing.
func trueWins(m *merger, field **bool, merged *WithOrigins[bool]) Combination {
	return combine(m, "`true` wins", field, unless(!isTrue(*field), *field), merged, false, nil)
}

func unless[T any](saysNothing bool, value *T) *T {
	if saysNothing {
		return nil
	}
	return value
}

// combine returns how the value of a field, nil for none, is added to the merged one.
func combine[T any](
	m *merger, sources string, field any, value *T, merged *WithOrigins[T], otherwise T, equal func(a, b T) bool,
) Combination {
	c := Combination{Sources: sources, Field: field}
	if len(m.sources) > 0 { // a closure is made only where it is called: each ADD reads and validates policies
		c.merge = func(o Origin) { merged.agree(m, value, o, otherwise, equal) }
	}
	return c
}

// agree merges the value of a source, nil for none. Without a function values are compared by ==.
func (w *WithOrigins[T]) agree(m *merger, value *T, o Origin, otherwise T, equal func(a, b T) bool) {
	if w.Origins == nil {
		*w = WithOrigins[T]{otherwise, builtIn(o.Key)}
	}
	switch {
	case value == nil:
	case w.Origins[0].Source.Kind == BuiltIn:
		*w = WithOrigins[T]{*value, []Origin{o}}
	case equal != nil && equal(w.Value, *value), equal == nil && any(w.Value) == any(*value):
		w.Origins = append(w.Origins, o)
	default:
		m.conflict(w.Origins[0], w.Value, o, *value)
	}
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
