// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Sync applies the difference that an observation found and returns the state after it. The caller
// observed with the lock held, and not for the first time: a dump can be torn, so a difference is
// repaired only if two observations have it. Errors are reported per chain, in the State.
func (e *Enforcer) Sync(ctx context.Context, before *State, lock *store.Lock) *State {
	if before.InSync() {
		return before
	}
	return e.run(ctx, before.clone(), lock)
}

// CheckSync returns the state that a Sync would leave, and writes nothing: it asks the kernel whether it accepts the rules,
// and takes what it accepts as written. It does not ask whether files can be written.
func (e *Enforcer) CheckSync(ctx context.Context, before *State) *State {
	if before.InSync() {
		return before
	}
	return e.check(ctx, before.clone())
}

// Apply stores the documents of a proposal, if the kernel accepts what they ask for, and syncs the rules. With an error the
// documents and the rules are as before: it is why the kernel refuses the rules, or an UnwritableError. What fails after
// that is in the State, and repaired by any later sync.
func (e *Enforcer) Apply(ctx context.Context, lock *store.Lock, stored store.State, p *Proposal) (*State, error) {
	s := e.observeChange(ctx, stored, p)
	if len(p.Changed) == 0 && s.InSync() {
		return s, nil
	}
	s = e.run(ctx, s, lock)
	return s, cmp.Or(s.run.refused, s.RecordErr)
}

// CheckApply returns the state that an Apply would leave, as CheckSync does.
func (e *Enforcer) CheckApply(ctx context.Context, stored store.State, p *Proposal) *State {
	s := e.observeChange(ctx, stored, p)
	if len(p.Changed) == 0 && s.InSync() {
		return s
	}
	return e.check(ctx, s)
}

// observeChange observes what a proposal asks for, whose documents are to be stored.
func (e *Enforcer) observeChange(ctx context.Context, stored store.State, p *Proposal) *State {
	s := e.ObserveProposal(ctx, p, stored.Record)
	s.changes(stored.Sources, p)
	return s
}

// changes makes the documents of a proposal those that are to be stored.
func (s *State) changes(before []policy.Source, p *Proposal) {
	s.documents.before, s.documents.after, s.documents.unstored = append([]policy.Source{}, before...), p.Sources, p.Changed
}

// run takes the steps from an observation.
func (e *Enforcer) run(ctx context.Context, s *State, lock *store.Lock) *State {
	if len(s.onRecord.now.Chains) == 0 {
		namespace, err := e.checkFirstWrite(ctx)
		if namespace != nil {
			defer func() { _ = namespace.Close() }()
		}
		if err != nil {
			for i := range s.Chains {
				s.Chains[i].fail(err)
			}
			return s
		}
	}
	s.begin(store.BootTime())
	s = run(ctx, s, does{e, lock})
	if s.RecordErr == nil && s.run.refused == nil && !s.node.keepsAll {
		e.removeDuplicates(ctx, s, lock)
	}
	return s
}

// check takes the steps from an observation, and writes nothing.
func (e *Enforcer) check(ctx context.Context, s *State) *State {
	s.run.asked = true
	s.begin(store.BootTime())
	s = run(ctx, s, asks{e})
	guardDiff := s.Guard.Diff
	s.discardDiff()
	if s.Guard.Err != nil { // it says which chains that is about
		s.Guard.Diff = guardDiff
	}
	return s
}

// begin takes what was observed as read with the lock held.
func (s *State) begin(now int64) {
	s.run.began, s.onRecord.before = now, s.onRecord.now
	for i := range s.observed.tables {
		s.observed.tables[i].readings = enoughReadings
	}
	s.plan()
}

// plan decides what is to be on record before anything is written: the chains that are about to be owned, besides those
// that are, and the resets that are due then.
func (s *State) plan() {
	rec := s.onRecord.now
	rec.Chains = nil
	for i := range s.Chains {
		c := &s.Chains[i]
		c.failed = c.Err // also if it can be read later
		if c.Err != nil {
			continue
		}
		for _, d := range c.Desired.Chains { // first, as choose takes the first
			o := store.OwnedChain{Chain: d.Name, Family: d.Family, Backend: c.Choice.Backend, Variant: c.Choice.Variant, Stuck: true}
			o.Stuck = slices.Contains(s.onRecord.now.Chains, o) // until it is written
			rec.Chains = append(rec.Chains, o)
		}
	}
	for _, o := range s.onRecord.now.Chains {
		if !owns(rec, o.Family, o.Chain, ChoiceOf(o)) {
			rec.Chains = append(rec.Chains, o)
		}
	}
	rec.Outputs, rec.ExemptPods = s.outputs(s.onRecord.now), s.node.exempt.ExemptPods
	rec.Former = s.former(rec.Outputs)
	rec.Resets = s.resets(s.run.began)
	s.onRecord.planned = rec
}

// removeDuplicates removes chains of the same names in other backends, once the desired rules are in place.
func (e *Enforcer) removeDuplicates(ctx context.Context, s *State, lock *store.Lock) {
	for _, d := range e.duplicates(ctx, s) {
		if s.Err(d.Chain) != nil {
			continue
		}
		_, err := e.removeIf(ctx, d.Choice, lock, []string{d.Chain}, func(c *policy.Chain) (bool, error) {
			if c.Name != d.Chain {
				return false, nil
			}
			if err := checkOwnership(c, d.Choice, e.owner(), false); err != nil {
				return false, fmt.Errorf("in %s: %w", d.Choice, err)
			}
			return true, nil
		})
		if errors.Is(err, ErrOtherDataDir) {
			s.Find(d.Chain).fail(err) // one chain would masquerade what the other exempts
		} else {
			e.Warn(err)
		}
	}
	e.findOtherChains(ctx, s)
}

func (e *Enforcer) remove(ctx context.Context, c netfilter.Choice, lock *store.Lock, chains ...policy.ChainFamily) error {
	b, err := e.Drivers.Open(c)
	if err == nil {
		err = b.Remove(ctx, chains, lock.File())
	}
	if err == nil {
		return nil
	}
	var names []string
	for _, ref := range chains {
		names = append(names, fmt.Sprintf("%s (%s)", ref.Chain, ref.Family))
	}
	what := "what an interrupted write left"
	if len(names) > 0 {
		what = "chain " + strings.Join(names, ", ")
	}
	return fmt.Errorf("remove %s from %s: %w", what, c, err)
}

// removeIf removes the chains of these names, and of the owned tables all chains, for which a
// function returns true. Its errors are joined to that of the removal.
func (e *Enforcer) removeIf(
	ctx context.Context, c netfilter.Choice, lock *store.Lock, names []string, ok func(*policy.Chain) (bool, error),
) (removed []policy.ChainFamily, err error) {
	b, err := e.Drivers.Open(c)
	if err != nil {
		return nil, err
	}
	var refs []policy.ChainFamily
	for _, name := range names {
		for _, f := range policy.Families() {
			refs = append(refs, policy.ChainFamily{Chain: name, Family: f})
		}
	}
	observed, err := b.Observe(ctx, refs)
	if err != nil {
		return nil, fmt.Errorf("read chain %s in %s: %w", strings.Join(names, ", "), c, err)
	}
	var errs []error
	for i := range observed.Rules.Chains {
		chain := &observed.Rules.Chains[i]
		remove, err := ok(chain)
		errs = append(errs, err)
		if remove {
			removed = append(removed, policy.ChainFamily{Chain: chain.Name, Family: chain.Family})
		}
	}
	if len(removed) > 0 {
		if err := e.remove(ctx, c, lock, removed...); err != nil {
			errs, removed = append(errs, err), nil
		}
	}
	return removed, errors.Join(errs...)
}

// RemoveAll removes the owned chains of these names, and those whose comment names this dataDir, in
// every backend. Other chains of these names stay, with a warning.
func (e *Enforcer) RemoveAll(ctx context.Context, chains []string, rec store.Record, lock *store.Lock) ([]netfilter.OwnedChain, error) {
	rec = e.currentBoot(rec)
	chains = slices.Clone(chains)
	owned, err := e.Drivers.Owned(ctx)
	e.Warn(err)
	for _, c := range owned {
		if c.Owner == e.owner() && !slices.Contains(chains, c.Chain) {
			chains = append(chains, c.Chain)
		}
	}
	removed, err := e.removeGuards(ctx) // first, or it drops what is not masqueraded any more
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, choice := range e.choicesOf(ctx, chains, rec) {
		gone, err := e.removeIf(ctx, choice, lock, chains, func(c *policy.Chain) (bool, error) {
			onRecord := choice.Backend == policy.NFTables || // whose tables are owned whole
				owns(rec, c.Family, c.Name, choice)
			switch {
			case c.Owner == e.owner() || c.Owner == (policy.Owner{}) && onRecord:
				return true, nil
			case slices.Contains(chains, c.Name) && c.Owner == (policy.Owner{}):
				e.Warn(fmt.Errorf("chain %s (%s) in %s is not owned by ip-masq and is not removed", c.Name, c.Family, choice))
			}
			return false, nil
		})
		for _, ref := range gone {
			removed = append(removed, netfilter.OwnedChain{ChainFamily: ref, Choice: choice})
		}
		errs = append(errs, err)
	}
	e.removeUnused(ctx, lock)
	return removed, errors.Join(errs...)
}

// RemoveLeftovers removes from the owned tables everything that no chain uses, which interrupted writes left, and the
// guard tables.
func (e *Enforcer) RemoveLeftovers(ctx context.Context, lock *store.Lock) {
	_, err := e.removeGuards(ctx)
	e.Warn(err)
	e.removeUnused(ctx, lock)
}

func (e *Enforcer) removeUnused(ctx context.Context, lock *store.Lock) {
	for _, d := range e.Drivers {
		b, err := d.Open(netfilter.Choice{Backend: d.Backend()}) // iptables owns no table, and needs a variant
		if err != nil || !b.OwnsTables() {
			continue
		}
		if _, err := d.Probe(ctx, ""); err != nil {
			continue
		}
		e.Warn(e.remove(ctx, netfilter.Choice{Backend: d.Backend()}, lock))
	}
}

// choicesOf returns the backends that have one of the chains or are on record for one.
func (e *Enforcer) choicesOf(ctx context.Context, chains []string, rec store.Record) []netfilter.Choice {
	var choices []netfilter.Choice
	add := func(c netfilter.Choice) {
		if !slices.Contains(choices, c) {
			choices = append(choices, c)
		}
	}
	for _, o := range rec.Chains {
		add(ChoiceOf(o))
	}
	for _, d := range e.Drivers {
		for _, chain := range chains {
			used, err := d.FindChain(ctx, chain)
			if err != nil && !errors.Is(err, netfilter.ErrUnusable) {
				e.Warn(fmt.Errorf("look for chain %s in %s: %w", chain, d.Backend(), err))
			}
			for _, c := range used {
				add(c)
			}
		}
	}
	return choices
}
