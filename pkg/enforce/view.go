// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"fmt"
	"maps"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// State is what one reading of documents and kernel found.
type State struct {
	Policies []policy.Policy
	// Groups are the chains by the form in which they are kept.
	Groups []Group
	// Failed has, by chain, why its rules cannot be judged or may not be
	// touched.
	Failed map[string]error
	// Stale is what we own and no policy wants any more.
	Stale []store.OwnedChain
	// Unrecorded is why nothing was written: the record could not be. The rules may be
	// right all the same.
	RecordErr error
	// Elsewhere is where a chain bears the name of one of ours, in another form.
	// Only who is Thorough looks for it.
	Duplicates []Duplicate
	// Others are the chains that name another dataDir. Replaces tells that they are
	// to go, because the node's files state this one. Only who is Thorough looks.
	OtherDataDirs        []netfilter.OwnedChain
	ReplaceOtherDataDirs bool
}

// Place is where a chain stands.
type Duplicate struct {
	Chain  string
	Choice netfilter.Choice
}

// Group is the chains that are kept in one form.
type Group struct {
	Choice            netfilter.Choice
	Recorded          bool // the choice stands in the record of this boot
	Desired, Observed policy.Ruleset
	Diff              policy.Diff
	observation       netfilter.Observation // what Observed and Diff are of
}

// InSync reports whether nothing is left to do.
func (v *State) InSync() bool {
	unrecorded := func(g Group) bool { return !g.Recorded }
	return len(v.Failed) == 0 && !v.Differs() && !slices.ContainsFunc(v.Groups, unrecorded)
}

// Differs reports whether there are rules to write or to remove.
func (v *State) Differs() bool {
	return len(v.Diff()) > 0 || len(v.Stale) > 0 || len(v.Duplicates) > 0 || v.ReplaceOtherDataDirs && len(v.OtherDataDirs) > 0
}

// Diff returns how the kernel differs from what is desired, in all forms.
func (v *State) Diff() policy.Diff {
	var all policy.Diff
	for _, g := range v.Groups {
		all = append(all, g.Diff...)
	}
	return all
}

// Err returns why the rules of a chain cannot be vouched for: nil if they are
// as desired.
func (v *State) Err(chain string) error {
	if err := v.Failed[chain]; err != nil {
		return err
	}
	for _, g := range v.Groups {
		if g.holds(chain) && len(g.Diff) > 0 {
			return &DriftError{g.Diff}
		}
	}
	return nil
}

// Stands reports whether the chain is in the kernel, whatever its rules, with a
// jump that leads to it, in every family that is desired.
func (v *State) Exists(chain string) bool {
	found := false
	for _, g := range v.Groups {
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

// Slow returns the chains whose every new connection walks through more prefixes
// than a list without sets should have, with their number in one family.
func (v *State) LinearChains() map[string]int {
	slow := map[string]int{}
	for _, p := range v.Policies {
		count := map[policy.Family]int{}
		for _, e := range p.Destinations {
			if f := policy.FamilyOf(e.Prefix.Addr()); e.Prefix != f.LinkLocal() {
				count[f]++
			}
		}
		most := max(count[policy.IPv4], count[policy.IPv6])
		for _, g := range v.Groups {
			if most > policy.DefaultCIDRLimit && g.Choice.Backend == policy.IPTables && g.holds(p.Chain) {
				slow[p.Chain] = most
			}
		}
	}
	return slow
}

// SlowWarnings says of each of the Slow chains what that costs, and what helps.
func (v *State) LinearWarnings() []error {
	slow := v.LinearChains()
	var warnings []error
	for _, chain := range slices.Sorted(maps.Keys(slow)) {
		warnings = append(warnings, fmt.Errorf("chain %s has %d prefixes, and iptables compares each new connection with one after the other; "+
			"with backend nftables their number costs nothing", chain, slow[chain]))
	}
	return warnings
}

// asWritten returns the view as it is once all is written but what failed.
func (v *State) asWritten(failed map[string]error) *State {
	for i := range v.Groups {
		v.Groups[i].Diff = nil
	}
	for chain, err := range failed {
		v.fail(chain, err)
	}
	return v
}

func (v *State) fail(chain string, err error) {
	if v.Failed == nil {
		v.Failed = map[string]error{}
	}
	if v.Failed[chain] == nil {
		v.Failed[chain] = err
	}
}

func (g *Group) holds(chain string) bool {
	return slices.ContainsFunc(g.Desired.Chains, func(c policy.Chain) bool { return c.Name == chain })
}

// differing returns the families in which something differs.
func (g *Group) differing() []policy.Family {
	return slices.DeleteFunc(policy.Families(), func(f policy.Family) bool {
		return !slices.ContainsFunc(g.Diff, func(c policy.Change) bool { return c.Family == f })
	})
}

// chains returns the names of the group's chains, each once.
func (g *Group) chains() []string {
	var names []string
	seen := map[string]bool{}
	for _, c := range g.Desired.Chains {
		if !seen[c.Name] {
			seen[c.Name] = true
			names = append(names, c.Name)
		}
	}
	return names
}

// withoutChains returns the ruleset less the chains that failed.
func withoutChains(rs policy.Ruleset, failed map[string]error) policy.Ruleset {
	out := policy.Ruleset{Unrecognized: rs.Unrecognized}
	for _, c := range rs.Chains {
		if failed[c.Name] == nil {
			out.Chains = append(out.Chains, c)
		}
	}
	return out
}

// leftOut returns why one of the group's chains that is desired or stands is not to be
// written, or nil.
func (g *Group) leftOut(failed ...map[string]error) error {
	for _, c := range slices.Concat(g.Desired.Chains, g.Observed.Chains) {
		for _, why := range failed {
			if err := why[c.Name]; err != nil {
				return err
			}
		}
	}
	return nil
}

func (g *Group) refs() []netfilter.ChainRef {
	var refs []netfilter.ChainRef
	for _, c := range g.Desired.Chains {
		refs = append(refs, netfilter.ChainRef{Family: c.Family, Name: c.Name})
	}
	return refs
}
