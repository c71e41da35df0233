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
		return p.boundError("", []PrefixAction{{Origins: p.Namespaces[n-1].Origins}},
			"nonMasqueradeNamespaces has %d entries, more than the %d possible", n, MaxNamespaces)
	}
	if l.Sets {
		return nil
	}
	if n := len(p.ExemptPods); n > MaxExemptPods {
		return p.boundError("set backend to nftables", p.ExemptPods, "the pods of nonMasqueradeNamespaces "+
			"have %d addresses, more than the %d possible in iptables", n, MaxExemptPods)
	}
	for _, f := range p.Families() {
		if err := p.checkRules(f); err != nil {
			return err
		}
	}
	return nil
}

// checkRules returns a BoundError if a backend without sets would have too many rules of a family: each rule
// has one prefix there.
func (p Policy) checkRules(f Family) error {
	sources, pods := len(prefixActionsOf(p.ExemptSources, f)), len(prefixActionsOf(p.ExemptPods, f))
	exempt, masqueraded := 0, 0
	multicast := f.Multicast()
	for _, e := range prefixActionsOf(p.Destinations, f) {
		switch {
		case e.Action == ActionMasquerade:
			masqueraded++
		case !slices.Contains(multicast, e.Prefix):
			exempt++
		}
	}
	outputs := 0
	for _, o := range p.Outputs {
		if FamilyOf(o.Address) == f {
			outputs++
		}
	}
	ranges := len(p.ToPorts.Value)
	each := (1 + outputs) * (1 + len(Protocols())*ranges) // rules that masquerade the same
	n := sources + pods + exempt + (masqueraded+1)*each
	if n <= MaxRules {
		return nil
	}
	podsText, outputsText := "", ""
	if pods > 0 {
		podsText = fmt.Sprintf("%d addresses of pods of nonMasqueradeNamespaces, ", pods)
	}
	if outputs > 0 {
		outputsText = fmt.Sprintf(" and %d addresses of outputAddresses", outputs)
	}
	return p.boundError("set backend to nftables", slices.Concat(p.Destinations, p.ExemptSources),
		"%d nonMasqueradeSourceCIDRs, %s%d nonMasqueradeCIDRs and %d masqueradeCIDRs with %d ranges of toPorts%s "+
			"make %d %s rules in iptables, more than the %d possible",
		sources, podsText, exempt, masqueraded, ranges, outputsText, n, f, MaxRules)
}

// ScopeErrors returns FieldErrors if the merged lists of the scope, of exempt sources
// or of pods are too long.
func (p Policy) ScopeErrors() []error {
	var errs fieldErrors
	errs.checkCounts(len(p.Sources.Value), len(p.Interfaces.Value), len(p.ExemptSources), len(p.PodCIDRs.Value))
	return errs
}

// boundError names the sources of these prefixes, and a remedy besides the two that always help, if there is
// one.
func (p Policy) boundError(remedy string, by []PrefixAction, format string, args ...any) error {
	sources := map[string]bool{}
	for _, e := range by {
		for _, o := range e.Origins {
			if o.Source.Kind != BuiltIn {
				sources[o.Source.String()] = true
			}
		}
	}
	problem := fmt.Sprintf(format, args...)
	names := firstOf(slices.Sorted(maps.Keys(sources)))
	remedies := "remove some or give a network another masqChain"
	if remedy != "" {
		remedies = fmt.Sprintf("remove some, %s, or give a network another masqChain", remedy)
	}
	return &BoundError{p.Chain, fmt.Sprintf("%s, stated by %s; %s", problem, names, remedies)}
}
