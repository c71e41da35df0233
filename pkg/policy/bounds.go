// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"slices"
)

// How many rules configuration can ask for. Each pair of a source and an output
// interface is a jump, and in a backend without sets each exempt source is a rule.
const (
	MaxScopePairs    = 4096
	MaxExemptSources = 4096
	MaxPortRanges    = 64
	MaxRules         = 65536 // of one chain and family, in a backend without sets
)

// Bounds returns what the statement has more of than is possible, as FieldErrors.
func (s SourcePolicy) Bounds() []error {
	var errs []error
	from, out := len(s.SourceCIDRs), len(s.OutputInterfaces)
	if pairs := scopePairs(from, out); pairs > MaxScopePairs {
		key, problem := "sourceCIDRs", fmt.Sprintf("has %d entries", max(from, out))
		switch {
		case from == 0:
			key = "outputInterfaces"
		case out > 0:
			problem = fmt.Sprintf("has %d entries, which with the %d of outputInterfaces make %d pairs", from, out, pairs)
		}
		errs = append(errs, &FieldError{key, -1, "", fmt.Sprintf("%s, more than the %d possible; remove some", problem, MaxScopePairs)})
	}
	if n := len(s.NonMasqueradeSourceCIDRs); n > MaxExemptSources {
		errs = append(errs, &FieldError{"nonMasqueradeSourceCIDRs", -1, "",
			fmt.Sprintf("has %d entries, more than the %d possible; remove some, or write wider prefixes", n, MaxExemptSources)})
	}
	return errs
}

// scopePairs returns the number of jumps that a scope takes: an empty list is one
// item, which matches everything.
func scopePairs(from, out int) int64 { return int64(max(1, from)) * int64(max(1, out)) }

// BoundError tells that the sources of a chain ask together for more rules than
// it can have.
type BoundError struct{ Chain, Problem string }

// Error names the chain, the keys, the numbers, the sources and the remedy.
func (e *BoundError) Error() string { return fmt.Sprintf("chain %s: %s", e.Chain, e.Problem) }

// CheckBounds returns a BoundError if the rules of the policy are too many for
// its chain.
func (p Policy) CheckBounds(l Layout) error {
	if n := len(p.ExemptSources); n > MaxExemptSources {
		return p.exceeds("write wider prefixes", p.ExemptSources,
			"nonMasqueradeSourceCIDRs has %d entries, more than the %d possible", n, MaxExemptSources)
	}
	if l.Sets {
		return nil
	}
	for _, f := range p.Families() {
		sources, exempt, masqueraded := count(p.ExemptSources, f, Exempt), count(p.Destinations, f, Exempt), count(p.Destinations, f, Masqueraded)
		each := 1 + len(Protocols())*len(p.ToPorts.Value)
		if n := sources + exempt + (masqueraded+1)*each; n > MaxRules {
			return p.exceeds("set backend to nftables", slices.Concat(p.Destinations, p.ExemptSources),
				"%d nonMasqueradeSourceCIDRs, %d nonMasqueradeCIDRs and %d masqueradeCIDRs with %d ranges of toPorts make %d %s rules in iptables, more than the %d possible",
				sources, exempt, masqueraded, len(p.ToPorts.Value), n, f, MaxRules)
		}
	}
	return nil
}

func count(list []Entry, f Family, a Action) int {
	n := 0
	for i := range list {
		if list[i].Action == a && FamilyOf(list[i].Prefix.Addr()) == f {
			n++
		}
	}
	return n
}

func (p Policy) exceeds(remedy string, by []Entry, format string, args ...any) error {
	sources := map[string]bool{}
	for _, e := range by {
		for _, o := range e.Origins {
			if o.Source.Kind != BuiltIn {
				sources[o.Source.String()] = true
			}
		}
	}
	return &BoundError{p.Chain, fmt.Sprintf("%s, stated by %s; remove some, %s, or give a network another masqChain",
		fmt.Sprintf(format, args...), anyOf(slices.Sorted(maps.Keys(sources))), remedy)}
}
