// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"slices"
)

// BoundError reports that the sources together ask for more rules than a chain can have.
type BoundError struct{ Chain, Problem string }

// Error names the chain, the keys, the numbers, the sources and the remedy.
func (e *BoundError) Error() string { return fmt.Sprintf("chain %s: %s", e.Chain, e.Problem) }

// CountDestinations returns how many prefixes of a family the policy has, without link-local, multicast and
// broadcast.
func (p *Policy) CountDestinations(f Family) int {
	always := append(f.Multicast(), f.LinkLocal())
	count := 0
	for i := range p.Destinations {
		prefix := p.Destinations[i].Prefix
		if FamilyOf(prefix.Addr()) == f && !slices.Contains(always, prefix) {
			count++
		}
	}
	return count
}

// CheckBounds returns a BoundError if the policy has too many rules for its chain. Those that
// exempt multicast and broadcast do not count.
func (p Policy) CheckBounds(l Layout) error {
	if n := len(p.ExemptSources); n > MaxExemptSources {
		return p.boundError("write wider prefixes", p.ExemptSources,
			"nonMasqueradeSourceCIDRs has %d entries, more than the %d possible", n, MaxExemptSources)
	}
	if n := len(p.PodCIDRs.Value); n > MaxPodCIDRs {
		return p.boundError("write wider prefixes", []PrefixAction{{Origins: p.PodCIDRs.Origins}},
			"podCIDRs has %d entries, more than the %d possible", n, MaxPodCIDRs)
	}
	if n := len(p.Namespaces); n > MaxNamespaces {
		return p.boundError("remove some", []PrefixAction{{Origins: p.Namespaces[n-1].Origins}},
			"nonMasqueradeNamespaces has %d entries, more than the %d possible", n, MaxNamespaces)
	}
	if l.Sets {
		return nil
	}
	if n := len(p.ExemptPods); n > MaxExemptPods {
		return p.boundError("set backend to nftables", p.ExemptPods,
			"the pods of nonMasqueradeNamespaces have %d addresses, more than the %d possible in iptables", n, MaxExemptPods)
	}
	for _, f := range p.Families() {
		sources, destinations := len(entriesOf(p.ExemptSources, f))+len(entriesOf(p.ExemptPods, f)), entriesOf(p.Destinations, f)
		exempt, masqueraded, multicast := 0, 0, f.Multicast()
		for _, e := range destinations {
			switch {
			case e.Action == ActionMasquerade:
				masqueraded++
			case !slices.Contains(multicast, e.Prefix):
				exempt++
			}
		}
		each := (1 + len(p.Outputs)) * (1 + len(Protocols())*len(p.ToPorts.Value))
		if n := sources + exempt + (masqueraded+1)*each; n > MaxRules {
			return p.boundError("set backend to nftables", slices.Concat(p.Destinations, p.ExemptSources),
				"%d nonMasqueradeSourceCIDRs, %d nonMasqueradeCIDRs and %d masqueradeCIDRs with %d ranges of toPorts "+
					"make %d %s rules in iptables, more than the %d possible",
				sources, exempt, masqueraded, len(p.ToPorts.Value), n, f, MaxRules)
		}
	}
	return nil
}

// ScopeErrors returns FieldErrors if the merged lists of the scope, of exempt sources
// or of pods are too long.
func (p Policy) ScopeErrors() []error {
	var errs fieldErrors
	errs.checkCounts(len(p.Sources.Value), len(p.Interfaces.Value), len(p.ExemptSources), len(p.PodCIDRs.Value))
	return errs
}

func (p Policy) boundError(remedy string, by []PrefixAction, format string, args ...any) error {
	sources := map[string]bool{}
	for _, e := range by {
		for _, o := range e.Origins {
			if o.Source.Kind != BuiltIn {
				sources[o.Source.String()] = true
			}
		}
	}
	return &BoundError{p.Chain, fmt.Sprintf("%s, stated by %s; remove some, %s, or give a network another masqChain",
		fmt.Sprintf(format, args...), firstOf(slices.Sorted(maps.Keys(sources))), remedy)}
}
