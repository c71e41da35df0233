// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// State is the desired and the observed rules of a node, and their difference.
type State struct {
	Policies []policy.Policy
	// Groups are the chains by backend.
	Groups []Group
	// Guard is the tables ip-masq-guard.
	Guard GuardState
	// Failed has, by chain, why its rules are not known to be right or must not be changed.
	Failed map[string]error
	// Stale are the owned chains that no policy wants any more.
	Stale []store.OwnedChain
	// RecordErr is why nothing was written: the record could not be. The rules may be right
	// nevertheless.
	RecordErr error
	// Duplicates are chains of the same names in other backends (AllBackends).
	Duplicates []Duplicate
	// OtherDataDirs are the chains and guard tables that name another dataDir (AllBackends).
	OtherDataDirs []netfilter.OwnedChain

	record    store.Record     // of this boot
	undesired map[string]error // why chains are in no group
	change    *policyChange    // nil: the rules are repaired
	keep      bool             // nothing is removed, see keepExisting
}

// Duplicate is a chain of the same name in another backend.
type Duplicate struct {
	Chain  string
	Choice netfilter.Choice
}

// Group is the chains of one backend.
type Group struct {
	Choice            netfilter.Choice
	Recorded          bool // the chains are in the record of this boot
	Desired, Observed policy.Ruleset
	Diff              policy.Diff
	observation       netfilter.Observation // what Observed is of
}

// InSync reports whether nothing is left to do.
func (s *State) InSync() bool {
	unrecorded := func(g Group) bool { return !g.Recorded }
	return len(s.Failed) == 0 && s.Guard.Err == nil && !s.Differs() && !slices.ContainsFunc(s.Groups, unrecorded)
}

// Differs reports whether there are rules to write or to remove.
func (s *State) Differs() bool {
	return len(s.Diff()) > 0 || len(s.Stale) > 0 || len(s.Duplicates) > 0
}

// differsFromWritten reports whether rules differ that were written before.
func (s *State) differsFromWritten() bool {
	return s.Guard.Observed.Exists && len(s.Guard.Diff) > 0 || slices.ContainsFunc(s.Groups, func(g Group) bool {
		return slices.ContainsFunc(g.Diff, func(c policy.Change) bool { return owns(s.record, c.Family, c.Chain, g.Choice) })
	})
}

// Diff returns how the kernel differs from what is desired, in all backends and the guard tables.
func (s *State) Diff() policy.Diff {
	return append(s.rulesDiff(), s.Guard.Diff...)
}

// rulesDiff is Diff without the guard tables.
func (s *State) rulesDiff() policy.Diff {
	var all policy.Diff
	for _, g := range s.Groups {
		all = append(all, g.Diff...)
	}
	return all
}

// Err returns why the rules of a chain are not known to be as desired, or nil.
func (s *State) Err(chain string) error {
	if err := s.Failed[chain]; err != nil {
		return err
	}
	for _, g := range s.Groups {
		if slices.Contains(g.chains(), chain) && len(g.Diff) > 0 {
			return &DriftError{g.Diff}
		}
	}
	return s.Guard.err(chain)
}

// DriftError is a difference that remains after a sync, or that a caller must not repair.
type DriftError struct{ Diff policy.Diff }

// Error lists the difference, rule by rule.
func (e *DriftError) Error() string {
	const most = 50
	return "rules differ from what is desired:\n" + e.Diff.Summary(most)
}

// Exists reports whether the kernel has the chain, whatever its rules, and a jump to it, in every
// family that is desired.
func (s *State) Exists(chain string) bool {
	found := false
	for _, g := range s.Groups {
		for _, want := range g.Desired.Chains {
			if want.Name != chain {
				continue
			}
			have := g.Observed.Find(want.Family, chain)
			if have == nil || len(have.Jumps) == 0 && len(want.Jumps) > 0 {
				return false
			}
			found = true
		}
	}
	return found
}

// LinearChainError is a chain in iptables that has more prefixes in one family than a list without
// sets should have.
type LinearChainError struct {
	Chain    string
	Prefixes int
}

func (e LinearChainError) Error() string {
	return fmt.Sprintf("chain %s has %d prefixes, and iptables evaluates these rules one by one for each new connection; "+
		"use backend nftables", e.Chain, e.Prefixes)
}

// LinearChains returns the chains that iptables evaluates slowly.
func (s *State) LinearChains() []LinearChainError {
	var slow []LinearChainError
	for _, p := range s.Policies {
		count := map[policy.Family]int{}
		for _, e := range p.Destinations {
			if f := policy.FamilyOf(e.Prefix.Addr()); e.Prefix != f.LinkLocal() {
				count[f]++
			}
		}
		most := max(count[policy.IPv4], count[policy.IPv6])
		inIPTables := func(g Group) bool { return g.Choice.Backend == policy.IPTables && slices.Contains(g.chains(), p.Chain) }
		if most > policy.DefaultCIDRLimit && slices.ContainsFunc(s.Groups, inIPTables) {
			slow = append(slow, LinearChainError{p.Chain, most})
		}
	}
	return slow
}

func (s *State) fail(chain string, err error) {
	if s.Failed[chain] == nil {
		s.Failed[chain] = err
	}
}

// differing returns the families in which the group has a difference.
func (g *Group) differing() []policy.Family {
	return slices.DeleteFunc(policy.Families(), func(f policy.Family) bool {
		return !slices.ContainsFunc(g.Diff, func(c policy.Change) bool { return c.Family == f })
	})
}

// chains returns the names of the desired chains, each once.
func (g *Group) chains() []string {
	var names []string
	for _, c := range g.Desired.Chains {
		if !slices.Contains(names, c.Name) {
			names = append(names, c.Name)
		}
	}
	return names
}

// withoutChains returns the ruleset without the chains that failed.
func withoutChains(rs policy.Ruleset, failed map[string]error) policy.Ruleset {
	rs.Chains = slices.DeleteFunc(slices.Clone(rs.Chains), func(c policy.Chain) bool { return failed[c.Name] != nil })
	return rs
}

func (g *Group) refs() []netfilter.ChainRef {
	var refs []netfilter.ChainRef
	for _, c := range g.Desired.Chains {
		refs = append(refs, netfilter.ChainRef{Family: c.Family, Name: c.Name})
	}
	return refs
}

// inEachFamily names the chains in every family.
func inEachFamily(chains ...string) []netfilter.ChainRef {
	var refs []netfilter.ChainRef
	for _, chain := range chains {
		for _, f := range policy.Families() {
			refs = append(refs, netfilter.ChainRef{Family: f, Name: chain})
		}
	}
	return refs
}

func ownedChain(c *policy.Chain, in netfilter.Choice) netfilter.OwnedChain {
	return netfilter.OwnedChain{ChainRef: netfilter.ChainRef{Family: c.Family, Name: c.Name}, Choice: in, Owner: c.Owner}
}

func choiceOf(o store.OwnedChain) netfilter.Choice {
	return netfilter.Choice{Backend: o.Backend, Variant: o.Variant}
}

func owns(rec store.Record, f policy.Family, chain string, c netfilter.Choice) bool {
	return slices.ContainsFunc(rec.Chains, func(o store.OwnedChain) bool {
		return o.Family == f && o.Chain == chain && choiceOf(o).SameBackend(c)
	})
}

// stale returns the chains on record that no group wants. A chain that failed is not stale: nothing
// has replaced it. Nor is one whose removal failed: the reconciler tries that again.
func stale(s *State) []store.OwnedChain {
	if s.keep {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(s.record.Chains), func(o store.OwnedChain) bool {
		return o.Stuck || s.Failed[o.Chain] != nil || slices.ContainsFunc(s.Groups, func(g Group) bool {
			return g.Choice.SameBackend(choiceOf(o)) && g.Desired.Find(o.Family, o.Chain) != nil
		})
	})
}
