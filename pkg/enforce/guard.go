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
	// Err is why the tables could not be read or written, or must not be changed. Rules are repaired
	// nevertheless.
	Err error

	failed   error // that part of Err which observing again does not change
	others   bool  // the tables belong to another dataDir or a newer version, and stay
	unusable error // why the tables cannot be used on this host
	unread   error // why the tables could not be read; what was observed before stays known

	handle      netfilter.GuardTables // to compare with; nil if they could not be read, or may not be changed
	asIfWritten bool                  // Observed.Guards were not read: a dry run takes them as written
	readings    int                   // as of tables
	writes      int
}

// Inactive is the reason why a key has no effect for a chain of one family. No ADD fails because of it.
type Inactive struct {
	policy.ChainFamily
	Err error // names the key, the cause and the remedy
}

func (i Inactive) Error() string { return fmt.Sprintf("chain %s (%s): %v", i.Chain, i.Family, i.Err) }

// failWrite takes note of why the tables could not be written, unless they failed before.
func (g *GuardState) failWrite(err error) {
	if g.Err == nil {
		g.Err = fmt.Errorf("write the tables %s: %w", netfilter.GuardTable, err)
		g.failed = g.Err
	}
}

// desireGuards sets the desired guards, and the chains for which a key of the guard tables has no effect, as
// no address of a pod is known. That is no error: the guard is an additional protection, and pods start
// without it.
func (s *State) desireGuards() {
	s.Guard.Inactive = nil
	s.Guard.Desired = policy.DesiredGuards(s.Policies(), s.node.owner)
	for i := range s.Chains {
		p := &s.Chains[i].Policy
		keys := inertKeys(p, p.StaleConnections.Value == policy.ResetConnections)
		for _, f := range p.Families() {
			if keys != "" && s.knowsNoPod(p, f) {
				s.Guard.deactivate(policy.ChainFamily{Chain: p.Chain, Family: f}, fmt.Errorf("%s without effect: "+
					"no address of a pod is known; if pods have addresses of this family, state podCIDRs, inside "+
					"sourceCIDRs and outside nonMasqueradeSourceCIDRs", keys))
			}
		}
	}
}

// knowsNoPod reports whether a policy is about packets of a family, and no address of a pod is known for it.
func (s *State) knowsNoPod(p *policy.Policy, f policy.Family) bool {
	isAsked := len(p.Scope(f).Sources) > 0
	hasPods := len(p.PodRanges(f)) > 0 || guardOf(s.Guard.Desired, p.Chain, f) != nil
	return isAsked && !hasPods
}

func (g *GuardState) deactivate(at policy.ChainFamily, why error) {
	g.Inactive = append(g.Inactive, Inactive{at, why})
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

// readGuard reads the guard tables, also if none is desired: a guard that the documents no longer ask for
// drops what they exempt.
func (e *Enforcer) readGuard(ctx context.Context, s *State) {
	g := &s.Guard
	g.Err, g.handle, g.asIfWritten, g.others, g.unread = g.failed, nil, false, false, nil
	if g.unusable != nil {
		return
	}
	tables, err := e.observeGuard(ctx, s)
	if err == nil {
		g.handle = tables
		return
	}
	if errors.Is(err, netfilter.ErrUnusable) && !g.Observed.Exists {
		s.deactivateGuard(err)
		return
	}
	if !g.others {
		g.unread = err
	}
	isWanted := len(g.Desired) > 0 || g.others || g.Observed.Exists
	switch {
	case isWanted:
		g.Err = cmp.Or(g.Err, err)
	case !errors.Is(err, fs.ErrPermission):
		e.Warn(err)
	}
}

// observeGuard reads the guard tables, and returns why they must not be changed, or cannot be used.
func (e *Enforcer) observeGuard(ctx context.Context, s *State) (netfilter.GuardTables, error) {
	g := &s.Guard
	tables, err := e.Drivers.GuardTables()
	if err != nil {
		return nil, err
	}
	observed, err := tables.ObserveGuards(ctx)
	if err != nil {
		return nil, err
	}
	g.Observed = observed
	if err := checkGuardOwnership(observed.Guards, s.node.owner); err != nil {
		g.others = true
		return nil, err
	}
	if !g.missesTable() {
		return tables, nil
	}
	// A kernel that lacks an expression would refuse the same tables at each sync.
	lacks := tables.CheckGuards(ctx, g.Desired, observed)
	if errors.Is(lacks, netfilter.ErrUnusable) {
		return nil, lacks
	}
	return tables, nil
}

// diff compares guards with those observed. The tables must have been read.
func (g *GuardState) diff(want []policy.Guard) policy.Diff {
	observed := g.Observed
	if g.asIfWritten {
		observed = netfilter.GuardObservation{Guards: g.Observed.Guards}
	}
	return g.handle.CompareGuards(want, observed)
}

// compareGuards compares the guards with those that are desired when all is done. If all rules are written,
// and only a chain that could not be removed is left, the guards beside that chain are right, so that no ADD
// fails because of it.
func (s *State) compareGuards() {
	g := &s.Guard
	g.Diff = nil
	if g.handle == nil {
		return
	}
	want := g.Desired
	if s.isAllWritten() {
		want = s.guardsNow()
	}
	g.Diff = g.diff(want)
}

// missesTable reports whether a family has desired guards and none in the kernel.
func (g *GuardState) missesTable() bool {
	hasTable := map[policy.Family]bool{}
	for _, o := range g.Observed.Guards {
		hasTable[o.Family] = true
	}
	for _, d := range g.Desired {
		if !hasTable[d.Family] {
			return true
		}
	}
	return false
}

// deactivateGuard takes note that the guard tables cannot be used on this host, which is no error either.
// Connections are reset without them.
func (s *State) deactivateGuard(cause error) {
	g := &s.Guard
	for _, d := range g.Desired {
		c := s.Find(d.Chain)
		if c != nil {
			g.deactivate(policy.ChainFamily{Chain: d.Chain, Family: d.Family},
				fmt.Errorf("%s without effect: %w", inertKeys(&c.Policy, false), cause))
		}
	}
	g.Diff, g.unusable, g.handle = nil, cause, nil
}

// checkGuardOwnership returns why the guard tables must not be changed, or nil.
func checkGuardOwnership(guards []policy.Guard, us policy.Owner) error {
	for _, o := range guards {
		if err := checkOwner(chainsOf(o)[0], us); err != nil {
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
func (g *GuardState) Of(at policy.ChainFamily) *policy.Guard {
	if g.Err != nil || g.IsInactive(at) {
		return nil
	}
	for _, d := range g.Diff {
		if d.Family == at.Family && (d.Chain == at.Chain || d.Chain == "") {
			return nil
		}
	}
	return guardOf(g.Desired, at.Chain, at.Family)
}

func guardOf(guards []policy.Guard, chain string, f policy.Family) *policy.Guard {
	for i := range guards {
		if guards[i].Chain == chain && guards[i].Family == f {
			return &guards[i]
		}
	}
	return nil
}

// err returns why the guard of a chain is not known to be as desired, or nil.
func (g *GuardState) err(chain string) error {
	var diff policy.Diff // that concerns the chain
	for _, c := range g.Diff {
		if c.Chain == chain || c.Chain == "" {
			diff = append(diff, c)
		}
	}
	isDesired := slices.ContainsFunc(g.Desired, func(d policy.Guard) bool { return d.Chain == chain })
	if g.Err != nil && (g.others || isDesired || len(diff) > 0) {
		return fmt.Errorf("guard of chain %s: %w", chain, g.Err)
	}
	if len(diff) > 0 {
		return &DriftError{diff}
	}
	return nil
}

// guardsNow returns the guards that are right for the rules in the kernel: the desired ones when all rules
// are the desired ones.
func (s *State) guardsNow() []policy.Guard {
	unwanted := s.unwanted()
	t := policy.Transition{
		NoRules:    !s.mayHaveRules(),
		AllWritten: len(unwanted) == 0 && s.isAllWritten(),
	}
	var guards []policy.Guard
	for _, desired := range s.Guard.Desired {
		c := s.Find(desired.Chain)
		stays := c == nil // see keepWhatExists
		t.ChainWritten = stays || s.isWritten(c)
		before := guardOf(s.Guard.Observed.Guards, desired.Chain, desired.Family)
		if before == nil && !t.ChainWritten && s.hasNoRules(c, desired.Family, unwanted) {
			before = s.guardOfFormerName(desired.Family)
		}
		now, is := desired.During(t, before)
		if is {
			guards = append(guards, now)
		}
	}
	return guards
}

// hasNoRules reports whether a chain that can be written is known to have no rules in a family, in any
// backend.
func (s *State) hasNoRules(c *Chain, f policy.Family, unwanted []store.OwnedChain) bool {
	if c.Err != nil || c.Observed.Find(f, c.Policy.Chain) != nil {
		return false
	}
	for _, o := range unwanted {
		if o.Chain == c.Policy.Chain {
			return false
		}
	}
	return true
}

// guardOfFormerName returns the guard in the kernel of a chain without a policy, or nil. A chain without
// rules may be that chain with another name: its guard replaces the former one before the rules do, so that a
// guard is never absent. A chain that has rules is not, as these may exempt more.
func (s *State) guardOfFormerName(f policy.Family) *policy.Guard {
	observed := s.Guard.Observed.Guards
	for i := range observed {
		if observed[i].Family == f && s.Find(observed[i].Chain) == nil {
			return &observed[i]
		}
	}
	return nil
}

// mayHaveRules reports whether the kernel may have a masquerade chain of the node.
func (s *State) mayHaveRules() bool {
	if s.node.keepsAll || len(s.unwanted()) > 0 {
		return true
	}
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Err != nil || len(c.Observed.Chains) > 0 {
			return true
		}
	}
	return false
}

// guardDiffers reports whether the guard tables differ from what they should be now, and may be written.
func (s *State) guardDiffers() bool {
	g := &s.Guard
	return g.Err == nil && g.handle != nil && len(g.diff(s.guardsNow())) > 0
}

// guardForbids returns why no rules may be written: a guard that could not be written would drop what they
// exempt, or bind what they masquerade, or it is not known whether one would. A repair is right for the guard
// that is there.
func (s *State) guardForbids() error {
	sourcesChange := !samePolicies(s.documents.before, s.documents.after)
	policyChanges := sourcesChange || s.ExemptionChanges() || s.mayExemptPods()
	guardIsAsked := len(s.Guard.Desired) > 0 || hadGuard(s.documents.before)
	if s.Guard.unread != nil && policyChanges && guardIsAsked {
		return fmt.Errorf("the guards cannot be read before this change: %w", s.Guard.unread)
	}
	now := s.guardsNow()
	for _, o := range s.Guard.Observed.Guards {
		if !o.Within(guardOf(now, o.Chain, o.Family)) {
			return fmt.Errorf("the guard of chain %s (%s) cannot be changed before the rules: %w",
				o.Chain, o.Family, cmp.Or(s.Guard.Err, netfilter.ErrChanged))
		}
	}
	return nil
}

// mayExemptPods reports whether a repair may be a change of exempt pods: a process that was killed recorded
// them, and wrote no more.
func (s *State) mayExemptPods() bool {
	for i := range s.Chains {
		c := &s.Chains[i]
		if len(c.Policy.Namespaces) > 0 && len(c.Diff) > 0 && c.hasRules() {
			return true
		}
	}
	return false
}

// hasRules reports whether the kernel has rules of the chain.
func (c *Chain) hasRules() bool {
	for _, o := range c.Observed.Chains {
		if len(o.Rules) > 0 {
			return true
		}
	}
	return false
}

// hadGuard reports whether sources asked for guards.
func hadGuard(sources []policy.Source) bool {
	for _, p := range policy.Merge(sources) {
		if len(p.GuardedFamilies()) > 0 {
			return true
		}
	}
	return false
}

// removeGuards removes the guard tables, unless another dataDir or a newer version owns them. That is an
// error if they drop packets, which rules that are removed would have masqueraded.
func (e *Enforcer) removeGuards(ctx context.Context) (removed []netfilter.OwnedChain, err error) {
	const attempts = 3
	tables, err := e.Drivers.GuardTables()
	if err != nil {
		return nil, guardsLeft(err)
	}
	for attempt := 1; ; attempt++ {
		observed, err := tables.ObserveGuards(ctx)
		if err != nil {
			return nil, guardsLeft(err)
		}
		if !observed.Exists {
			return nil, nil
		}
		if notOurs := checkGuardOwnership(observed.Guards, e.owner()); notOurs != nil {
			return nil, e.leaveGuards(observed.Guards, notOurs)
		}
		err = tables.ApplyGuards(ctx, nil, observed)
		if err == nil {
			return chainsOfGuards(observed.Guards), nil
		}
		if !errors.Is(err, netfilter.ErrChanged) || attempt == attempts {
			return nil, guardsLeft(err)
		}
	}
}

// guardsLeft returns why the guard tables could not be removed, nil if this host can have none.
func guardsLeft(err error) error {
	if errors.Is(err, netfilter.ErrUnusable) {
		return nil
	}
	return fmt.Errorf("remove the tables ip-masq-guard: %w", err)
}

// leaveGuards warns of guards that belong to others. It returns an error if one of them drops packets.
func (e *Enforcer) leaveGuards(guards []policy.Guard, notOurs error) error {
	for _, o := range guards {
		if o.Mode == policy.GuardDrop {
			return fmt.Errorf("%w; it drops packets and is not removed", notOurs)
		}
	}
	e.Warn(fmt.Errorf("%w; it is not removed", notOurs))
	return nil
}

func chainsOfGuards(guards []policy.Guard) (chains []netfilter.OwnedChain) {
	for _, o := range guards {
		chains = append(chains, chainsOf(o)...)
	}
	return chains
}

// chainsOf returns the chains of the guard tables that a guard has.
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
