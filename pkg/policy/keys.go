// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"slices"
	"strings"
)

// Key is a row of the table of keys. Decoding, validation, the schema of documents, help, documentation and
// the generators of tests follow from the rows. What a key means is in merger.merge and in the desired
// rules.
type Key struct {
	Name    string
	Schema  int    // of the first documents that could have the key
	Default string // in words
	Help    string // what the key says, without a full stop
	Sources string // how the values of several sources become one, in words

	// Field is a **bool, **Ports, **Mark, *string, *[]netip.Prefix, *AddressItems, *[]string, *Namespaces, or
	// a Word.
	Field any
}

// Word is a field with one of a few words, or "" if the key is left out.
type Word interface {
	String() string
	Set(string) error
	Choices() []string
}

// How the values of several sources become one.
const (
	agreed   = "must agree"
	united   = "united"
	trueWins = "`true` wins" // false says nothing
)

// Keys is the table of the keys that state policy, bound to the fields of s. For another key see "Add a key"
// in CONTRIBUTING.md.
func Keys(s *SourcePolicy) []Key {
	return []Key{
		{"nonMasqueradeCIDRs", 2, "the private ranges of RFC 1918",
			"destinations that are not masqueraded; an empty list for none", united, &s.NonMasqueradeCIDRs},
		{"masqueradeCIDRs", 2, "none",
			"destinations to masquerade inside wider exempt ones", united, &s.MasqueradeCIDRs},
		{"nomasqAllReservedRanges", 2, "false",
			"extend the default of nonMasqueradeCIDRs to every range that an RFC reserves",
			agreed, &s.NomasqAllReservedRanges},
		{"masqLinkLocal", 2, "false", "masquerade 169.254.0.0/16 too", trueWins, &s.MasqLinkLocal},
		{"masqLinkLocalIPv6", 2, "false", "masquerade fe80::/10 too", trueWins, &s.MasqLinkLocalIPv6},
		{"enableIPv6", 2, "false", "manage IPv6 too", agreed, &s.EnableIPv6},
		{"sourceCIDRs", 2, "any", "only traffic from these is in scope", agreed, &s.SourceCIDRs},
		{"outputInterfaces", 2, "any",
			"only traffic that leaves through these is in scope; a final + is a wildcard",
			agreed, &s.OutputInterfaces},
		{exemptSourcesKey, 2, "none", "sources that are never masqueraded", united, &s.NonMasqueradeSourceCIDRs},
		{"masqueradeHost", 2, "true", "masquerade the node's own traffic too", agreed, &s.MasqueradeHost},
		{"randomFully", 2, "true", "choose source ports at random, where the kernel can", agreed, &s.RandomFully},
		{"toPorts", 2, "any", "source ports to use", agreed, &s.ToPorts},
		{"guard", 3, "off", "what happens to packets of pods that NAT rules miss",
			agreed, WordOf(&s.Guard, GuardOff, GuardCount, GuardDrop)},
		{"staleConnections", 3, "keep, or reset if guard is drop",
			"what happens to connections that a policy change affects",
			agreed, WordOf(&s.StaleConnections, KeepConnections, ResetConnections)},
		{"enforceExempt", 3, "false", "keep exempt traffic of pods exempt despite third-party rules",
			agreed, &s.EnforceExempt},
		{"bypassMark", 3, "0x6000", "mark bits of packets that enforceExempt ignores; 0 for none",
			agreed, &s.BypassMark},
		{"podCIDRs", 3, "sourceCIDRs, else the pods' subnets",
			"addresses of pods, for guard, staleConnections and enforceExempt", united, &s.PodCIDRs},
		{"outputAddresses", 6, "none",
			"pods leave with the node's address in the first of these prefixes that has one",
			agreed, &s.OutputAddresses},
		{namespacesKey, 7, "none", "Kubernetes namespaces whose pods are never masqueraded",
			united, &s.NonMasqueradeNamespaces},
		{"masqChain", 2, DefaultChain, "name of the chain; sources with the same chain are merged",
			"each chain on its own", &s.Chain},
		{"backend", 2, "auto", "what holds the rules of the chain in the kernel",
			agreed, WordOf(&s.Backend, Auto, IPTables, NFTables)},
	}
}

// Schema returns the greatest number in the table.
func Schema() int {
	greatest := 0
	for _, k := range Keys(new(SourcePolicy)) {
		greatest = max(greatest, k.Schema)
	}
	return greatest
}

// WordOf makes a field with these choices a Word.
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
	if slices.Contains(w.choices, T(s)) {
		*w.to = T(s)
		return nil
	}
	write := "write " + JoinOr(w.Choices())
	if s == "" {
		return errors.New("is empty; " + write + ", or leave the key out")
	}
	return errors.New("is not one of the choices; " + write)
}

// JoinOr joins words with commas and "or".
func JoinOr(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}
