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
	// Inactive has the chains for which a key of the guard tables has no effect.
	Inactive []Inactive
	// Err is why the tables could not be read or written, or must not be changed. Rules are repaired nevertheless.
	Err error

	final    bool  // observing again does not change Err
	read     bool  // and the tables may be changed
	others   bool  // the tables belong to another dataDir or a newer version, and stay
	unusable error // why the tables cannot be used on this host
}

// Inactive is why a key has no effect for a chain of one family. It fails no ADD.
type Inactive struct {
	policy.ChainFamily
	Err error // names the key, the cause and the remedy
}

func (i Inactive) Error() string { return fmt.Sprintf("chain %s (%s): %v", i.Chain, i.Family, i.Err) }

// desireGuards sets the desired guards of the policies.
func (e *Enforcer) desireGuards(s *State) {
	s.Guard.Desired = policy.DesiredGuards(s.Policies(), e.owner())
	for i := range s.Chains {
		p := &s.Chains[i].Policy
		keys := inertKeys(p, p.StaleConnections.Value == policy.ResetConnections)
		if keys == "" {
			continue
		}
		for _, f := range p.Families() {
			if len(p.Scope(f).Sources) > 0 && len(p.PodRanges(f)) == 0 {
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

// readGuard reads the guard tables and compares them, also if none is desired: a guard that the documents no
// longer ask for drops what they exempt.
func (e *Enforcer) readGuard(ctx context.Context, s *State) {
	g := &s.Guard
	if g.unusable != nil {
		return
	}
	tables, err := e.Drivers.GuardTables()
	if err == nil {
		g.Observed, err = tables.ObserveGuards(ctx)
	}
	if err == nil {
		err = e.checkGuardOwnership(g)
	}
	// Without this a kernel that lacks an expression would refuse the same tables at each sync.
	if err == nil && g.missesTable() {
		if lacks := tables.CheckGuards(ctx, g.Desired, g.Observed); errors.Is(lacks, netfilter.ErrUnusable) {
			err = lacks
		}
	}
	switch {
	case errors.Is(err, netfilter.ErrUnusable):
		s.deactivateGuard(err)
	case err == nil:
		g.read = true
		g.Diff = tables.CompareGuards(g.Desired, g.Observed)
	case len(g.Desired) > 0 || g.others:
		g.Err = cmp.Or(g.Err, err)
	case !errors.Is(err, fs.ErrPermission): // nothing is desired
		e.Warn(err)
	}
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
	g.Diff, g.unusable = nil, cause
}

// checkGuardOwnership returns why the guard tables must not be changed, or nil.
func (e *Enforcer) checkGuardOwnership(g *GuardState) error {
	for _, o := range g.Observed.Guards {
		if err := e.checkOwner(chainsOf(o)[0]); err != nil {
			g.others = true
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
	for i := range g.Desired {
		if d := &g.Desired[i]; d.Chain == c.Chain && d.Family == c.Family {
			return d
		}
	}
	return nil
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

// writable reports whether there is something to write to the tables, now or with the rules.
func (g *GuardState) writable() bool { return g.read && len(g.Desired)+len(g.Diff) > 0 }

// guards returns the desired guards. A chain that failed has the guard from the list instead. If that has none, it
// has the desired one only if repair and the kernel has one: its rules may be those of another policy.
func (s *State) guards(instead []policy.Guard, repair bool) []policy.Guard {
	var out []policy.Guard
	for _, g := range s.Guard.Desired {
		find := func(o policy.Guard) bool { return o.Chain == g.Chain && o.Family == g.Family }
		i := slices.IndexFunc(instead, find)
		switch c := s.Find(g.Chain); {
		case c == nil || c.Err == nil: // without a policy it is kept, see keepUnknown
			out = append(out, g)
		case i >= 0:
			out = append(out, instead[i])
		case repair && slices.ContainsFunc(s.Guard.Observed.Guards, find):
			out = append(out, g)
		}
	}
	return out
}

// guardsBeforeRules returns the guards that are to be in the kernel when the masquerade rules are
// written. A repair restores them first, so that no packet leaves while rules are missing.
func (s *State) guardsBeforeRules() []policy.Guard {
	desired := s.guards(nil, true)
	if s.change == nil {
		return desired
	}
	exists := func(chain string, f policy.Family) bool {
		recorded := func(o store.OwnedChain) bool { return o.Family == f }
		there := func(c Chain) bool {
			return (chain == "" || chain == c.Policy.Chain) && c.Observed.Find(f, c.Policy.Chain) != nil
		}
		return chain == "" && slices.ContainsFunc(s.record.Chains, recorded) || slices.ContainsFunc(s.Chains, there)
	}
	return policy.TransitionGuards(s.Guard.Observed.Guards, desired, exists)
}

// writeGuard writes the guards, and returns ErrChanged if the tables changed since they were observed. Another
// error is that of s.Guard. From is nil if this process may have changed them since.
func (e *Enforcer) writeGuard(ctx context.Context, s *State, guards []policy.Guard, from *netfilter.GuardObservation) error {
	tables, err := e.Drivers.GuardTables()
	if err == nil && from == nil {
		var now netfilter.GuardObservation
		now, err = tables.ObserveGuards(ctx)
		from = &now
	}
	if err == nil && len(tables.CompareGuards(guards, *from)) > 0 {
		err = tables.ApplyGuards(ctx, guards, *from)
	}
	if errors.Is(err, netfilter.ErrChanged) {
		return err
	}
	s.failGuard(err)
	return nil
}

// failGuard takes note that the guard tables could not be written. Tables that cannot be used fail nothing.
func (s *State) failGuard(err error) {
	switch {
	case err == nil:
	case errors.Is(err, netfilter.ErrUnusable):
		s.deactivateGuard(err)
	default:
		s.Guard.Err, s.Guard.final = fmt.Errorf("write the tables %s: %w", netfilter.GuardTable, err), true
	}
}

// removeGuards removes the guard tables, unless another dataDir or a newer version owns them. That is an
// error if they drop packets, which rules that are removed would have masqueraded.
func (e *Enforcer) removeGuards(ctx context.Context) (removed []netfilter.OwnedChain, err error) {
	const attempts = 3
	var g GuardState
	tables, err := e.Drivers.GuardTables()
	for attempt := 1; err == nil; attempt++ {
		if g.Observed, err = tables.ObserveGuards(ctx); err != nil || !g.Observed.Exists {
			break
		}
		if owned := e.checkGuardOwnership(&g); owned != nil {
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

// chainsOf returns the chains of an observed guard.
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
