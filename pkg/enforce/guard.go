// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// GuardState is the desired and the observed tables ip-masq-guard, and their difference.
type GuardState struct {
	Desired  []policy.Guard
	Observed netfilter.GuardObservation // zero if they were not read
	Diff     policy.Diff
	// Inactive lists the chains for which a key of the guard tables has no effect.
	Inactive []Inactive
	// Err is why the tables could not be read or written, or must not be changed. Rules are repaired nevertheless.
	Err error

	failed   error // that part of Err which observing again does not change
	others   bool  // the tables belong to another dataDir or a newer version, and stay
	unusable error // why the tables cannot be used on this host

	compare  func([]policy.Guard) policy.Diff // compares guards with those observed; nil if they may not be changed
	readings int                              // as of tables
	writes   int
}

// Inactive is the reason why a key has no effect for a chain of one family. No ADD fails because of it.
type Inactive struct {
	policy.ChainFamily
	Err error // names the key, the cause and the remedy
}

func (i Inactive) Error() string { return fmt.Sprintf("chain %s (%s): %v", i.Chain, i.Family, i.Err) }

// fail sets the reason for which the tables are not written, unless there is one.
func (g *GuardState) fail(err error) {
	if g.Err == nil {
		g.Err, g.failed = err, err
	}
}

func (s *State) desireGuards() {
	s.Guard.Inactive = nil
	s.Guard.Desired = policy.DesiredGuards(s.Policies(), s.node.owner)
	for i := range s.Chains {
		p := &s.Chains[i].Policy
		keys := inertKeys(p, p.StaleConnections.Value == policy.ResetConnections)
		if keys == "" {
			continue
		}
		for _, f := range p.Families() {
			if len(p.Scope(f).Sources) > 0 && len(p.PodRanges(f)) == 0 && guardOf(s.Guard.Desired, p.Chain, f) == nil {
				s.Guard.Inactive = append(s.Guard.Inactive, Inactive{policy.ChainFamily{Chain: p.Chain, Family: f},
					fmt.Errorf("%s without effect: no address of a pod is known; if pods have addresses of this family, state podCIDRs, "+
						"inside sourceCIDRs and outside nonMasqueradeSourceCIDRs", keys)})
			}
		}
	}
}

// inertKeys names the keys that are stated and have no effect.
func inertKeys(p *policy.Policy, resets bool) string {
	var keys []string
	if p.Guard.Value != policy.GuardOff {
		keys = append(keys, "guard")
	}
	if resets {
		keys = append(keys, "staleConnections")
	}
	if p.EnforceExempt.Value {
		keys = append(keys, "enforceExempt")
	}
	return strings.Join(keys, ", ")
}

// readGuard reads the guard tables, also if none is desired: a guard that the documents no longer ask for drops
// what they exempt. What was observed before stays known if they cannot be read again.
func (e *Enforcer) readGuard(ctx context.Context, s *State) {
	g := &s.Guard
	g.Err, g.compare, g.others = g.failed, nil, false
	if g.unusable != nil {
		return
	}
	tables, err := e.Drivers.GuardTables()
	if err == nil {
		var observed netfilter.GuardObservation
		if observed, err = tables.ObserveGuards(ctx); err == nil {
			g.Observed = observed
			err = s.checkGuardOwnership()
		}
	}
	// Without this a kernel that lacks an expression would refuse the same tables at each sync.
	if err == nil && g.missesTable() {
		if lacks := tables.CheckGuards(ctx, g.Desired, g.Observed); errors.Is(lacks, netfilter.ErrUnusable) {
			err = lacks
		}
	}
	switch {
	case errors.Is(err, netfilter.ErrUnusable) && !g.Observed.Exists:
		s.deactivateGuard(err)
	case err == nil:
		observed := g.Observed
		g.compare = func(want []policy.Guard) policy.Diff { return tables.CompareGuards(want, observed) }
	case len(g.Desired) > 0 || g.others || g.Observed.Exists:
		g.Err = cmp.Or(g.Err, err)
	case !errors.Is(err, fs.ErrPermission): // nothing is desired
		e.Warn(err)
	}
}

// compareGuards compares the guards with those that are desired when all is done. A chain that cannot be removed is no
// reason for an ADD to fail: beside it the guards are right that bind no packet of it.
func (s *State) compareGuards() {
	g := &s.Guard
	if g.Diff = nil; g.compare == nil {
		return
	}
	want := g.Desired
	if s.isAllWritten() {
		want = s.guards()
	}
	g.Diff = g.compare(want)
}

// missesTable reports whether a family has desired guards and none in the kernel.
func (g *GuardState) missesTable() bool {
	return slices.ContainsFunc(g.Desired, func(d policy.Guard) bool {
		return !slices.ContainsFunc(g.Observed.Guards, func(o policy.Guard) bool { return o.Family == d.Family })
	})
}

// deactivateGuard takes note that the guard tables cannot be used. Connections are reset without them.
func (s *State) deactivateGuard(cause error) {
	g := &s.Guard
	for _, d := range g.Desired {
		if c := s.Find(d.Chain); c != nil {
			g.Inactive = append(g.Inactive, Inactive{policy.ChainFamily{Chain: d.Chain, Family: d.Family},
				fmt.Errorf("%s without effect: %w", inertKeys(&c.Policy, false), cause)})
		}
	}
	g.Diff, g.unusable, g.compare = nil, cause, nil
}

// checkGuardOwnership returns why the guard tables must not be changed, or nil.
func (s *State) checkGuardOwnership() error {
	for _, o := range s.Guard.Observed.Guards {
		if err := checkOwner(chainsOf(o)[0], s.node.owner); err != nil {
			s.Guard.others = true
			return err
		}
	}
	return nil
}

// IsInactive reports whether the keys have no effect for a chain of a family.
func (g *GuardState) IsInactive(c policy.ChainFamily) bool {
	return slices.ContainsFunc(g.Inactive, func(i Inactive) bool { return i.ChainFamily == c })
}

// Of returns the guard of a chain and family that is in force, or nil.
func (g *GuardState) Of(c policy.ChainFamily) *policy.Guard {
	differs := func(d policy.Change) bool { return d.Family == c.Family && (d.Chain == c.Chain || d.Chain == "") }
	if g.Err != nil || g.IsInactive(c) || slices.ContainsFunc(g.Diff, differs) {
		return nil
	}
	return guardOf(g.Desired, c.Chain, c.Family)
}

func guardOf(guards []policy.Guard, chain string, f policy.Family) *policy.Guard {
	i := slices.IndexFunc(guards, func(g policy.Guard) bool { return g.Chain == chain && g.Family == f })
	if i < 0 {
		return nil
	}
	return &guards[i]
}

// err returns why the guard of a chain is not known to be as desired, or nil.
func (g *GuardState) err(chain string) error {
	concerns := func(c policy.Change) bool { return c.Chain == chain || c.Chain == "" }
	desired := slices.ContainsFunc(g.Desired, func(d policy.Guard) bool { return d.Chain == chain })
	if g.Err != nil && (g.others || desired || slices.ContainsFunc(g.Diff, concerns)) {
		return fmt.Errorf("guard of chain %s: %w", chain, g.Err)
	}
	if d := slices.DeleteFunc(slices.Clone(g.Diff), func(c policy.Change) bool { return !concerns(c) }); len(d) > 0 {
		return &DriftError{d}
	}
	return nil
}

// isUnknown reports whether the guard tables could not be read.
func (g *GuardState) isUnknown() bool { return g.compare == nil && g.unusable == nil && !g.others }

// guards returns the guards for the rules that are in the kernel: those that are desired when all rules are.
func (s *State) guards() []policy.Guard {
	surplus := s.surplus()
	t := policy.Transition{First: !s.hasRules(), All: len(surplus) == 0 && s.isAllWritten()}
	var out []policy.Guard
	for _, g := range s.Guard.Desired {
		c := s.Find(g.Chain)
		elsewhere := slices.ContainsFunc(surplus, func(o store.OwnedChain) bool { return o.Chain == g.Chain })
		t.Settled = c == nil || s.isWritten(c) // without a policy it stays, see keepWhatExists
		observed := guardOf(s.Guard.Observed.Guards, g.Chain, g.Family)
		if observed == nil && !t.Settled && !elsewhere && c.Err == nil && c.Observed.Find(g.Family, g.Chain) == nil {
			observed = s.predecessor(g.Family)
		}
		if now, is := g.During(t, observed); is {
			out = append(out, now)
		}
	}
	return out
}

// predecessor returns a guard in the kernel of a chain that no policy is about, or nil: that of a chain before it got
// another name, whose place the new one takes before the rules do. A chain that has rules has none: they may exempt more.
func (s *State) predecessor(f policy.Family) *policy.Guard {
	for i := range s.Guard.Observed.Guards {
		if o := &s.Guard.Observed.Guards[i]; o.Family == f && s.Find(o.Chain) == nil {
			return o
		}
	}
	return nil
}

// hasRules reports whether the kernel may have a masquerade chain of the node.
func (s *State) hasRules() bool {
	exists := func(c Chain) bool { return c.Err != nil || len(c.Observed.Chains) > 0 }
	return len(s.surplus()) > 0 || s.node.keepsAll || slices.ContainsFunc(s.Chains, exists)
}

// guardDiffers reports whether the guard tables differ from what they should be now, and may be written.
func (s *State) guardDiffers() bool {
	g := &s.Guard
	return g.Err == nil && g.compare != nil && len(g.compare(s.guards())) > 0
}

// guardForbids returns why no rules may be written: a guard that could not be written would drop what they exempt, or
// bind what they masquerade, or it is not known whether one would. A repair is right for the guard that is there, unless a
// process that was killed recorded a change of the exempt pods and wrote no more.
func (s *State) guardForbids() error {
	guarded := func(p policy.Policy) bool { return len(p.GuardedFamilies()) > 0 }
	hasRules := func(o policy.Chain) bool { return len(o.Rules) > 0 }
	mayExempt := func(c Chain) bool {
		return len(c.Policy.Namespaces) > 0 && len(c.Diff) > 0 && slices.ContainsFunc(c.Observed.Chains, hasRules)
	}
	if g := &s.Guard; g.isUnknown() && (s.ExemptionChanges() || slices.ContainsFunc(s.Chains, mayExempt) || !samePolicies(s.documents.before, s.documents.after)) &&
		(len(g.Desired) > 0 || slices.ContainsFunc(policy.Merge(s.documents.before), guarded)) {
		return fmt.Errorf("the guards cannot be read before: %w", g.Err)
	}
	now := s.guards()
	for _, o := range s.Guard.Observed.Guards {
		if !o.Within(guardOf(now, o.Chain, o.Family)) {
			return fmt.Errorf("the guard of chain %s (%s) cannot be changed before: %w", o.Chain, o.Family, cmp.Or(s.Guard.Err, netfilter.ErrChanged))
		}
	}
	return nil
}

// removeGuards removes the guard tables, unless another dataDir or a newer version owns them. That is an
// error if they drop packets, which rules that are removed would have masqueraded.
func (e *Enforcer) removeGuards(ctx context.Context) (removed []netfilter.OwnedChain, err error) {
	const attempts = 3
	s := State{node: node{owner: e.owner()}}
	g := &s.Guard
	tables, err := e.Drivers.GuardTables()
	for attempt := 1; err == nil; attempt++ {
		if g.Observed, err = tables.ObserveGuards(ctx); err != nil || !g.Observed.Exists {
			break
		}
		if owned := s.checkGuardOwnership(); owned != nil {
			drops := func(o policy.Guard) bool { return o.Mode == policy.GuardDrop }
			if slices.ContainsFunc(g.Observed.Guards, drops) {
				return nil, fmt.Errorf("%w; it drops packets and is not removed", owned)
			}
			e.Warn(fmt.Errorf("%w; it is not removed", owned))
			return nil, nil
		}
		if err = tables.ApplyGuards(ctx, nil, g.Observed); err == nil {
			break
		}
		if errors.Is(err, netfilter.ErrChanged) && attempt < attempts {
			err = nil
		}
	}
	if errors.Is(err, netfilter.ErrUnusable) { // there are none
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("remove the tables ip-masq-guard: %w", err)
	}
	for _, o := range g.Observed.Guards {
		removed = append(removed, chainsOf(o)...)
	}
	return removed, nil
}

func chainsOf(o policy.Guard) (chains []netfilter.OwnedChain) {
	kinds := []string{"guard-", "enforce-"}
	if o.Bound == nil {
		kinds = kinds[:1]
	} else if o.Mode == policy.GuardOff {
		kinds = kinds[1:]
	}
	for _, kind := range kinds {
		chains = append(chains, netfilter.OwnedChain{
			ChainFamily: policy.ChainFamily{Chain: kind + o.Chain, Family: o.Family},
			Choice:      netfilter.Choice{Backend: policy.NFTables}, Guard: true, Owner: o.Owner,
		})
	}
	return chains
}
