// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"reflect"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Sync applies the difference that an observation found and returns the state after it. The caller
// observed with the lock held, and not for the first time: a dump can be torn, so a difference is
// repaired only if two observations have it. Errors are reported per chain, in the State.
//
// Chains are recorded before they are created, so that an interrupted sync leaves nothing that is
// not on record. A dry run finds the errors, and takes the rules as written.
func (e *Enforcer) Sync(ctx context.Context, before *State, lock *store.Lock) *State {
	return e.sync(ctx, before, nil, lock)
}

// sync is Sync after the policies of some sources changed.
func (e *Enforcer) sync(ctx context.Context, before *State, changed []policy.Source, lock *store.Lock) *State {
	if before.InSync() {
		return before
	}
	copied := *before
	s := &copied
	s.Chains = slices.Clone(before.Chains)
	if len(s.record.Chains) == 0 && !lock.DryRun() {
		namespace, err := e.checkFirstWrite(ctx)
		defer func() { _ = namespace.Close() }()
		if err != nil {
			for i := range s.Chains {
				s.Chains[i].fail(err)
			}
			return s
		}
	}
	e.failUnwritable(ctx, s, changed)
	owned, err := e.putRecord(s, s.record, lock)
	if err == nil {
		s = e.write(ctx, s, lock)
		if e.chooseAgain(ctx, s) {
			if owned, err = e.putRecord(s, owned, lock); err == nil {
				s = e.write(ctx, e.ObserveAgain(ctx, s), lock)
			}
		}
	}
	if err != nil {
		s.RecordErr = &UnwritableError{fmt.Errorf("record the chains to be written: %w", err)}
		for i := range s.Chains {
			if c := &s.Chains[i]; s.Err(c.Policy.Chain) != nil {
				c.fail(s.RecordErr)
			}
		}
		return s
	}
	if lock.DryRun() {
		return s
	}
	failed := func(c Chain) bool {
		return (c.Policy.ResetsConnections() || c.changed) && s.Err(c.Policy.Chain) != nil
	}
	owned.Outputs = s.outputs(before.record)
	if slices.ContainsFunc(s.Chains, failed) && !reflect.DeepEqual(owned.Resets, before.record.Resets) {
		owned.Resets = resetsOf(before, s.Err) // nothing translates what a reset of those would delete
	}
	e.removeUnwanted(ctx, s, &owned, lock)
	e.Warn(lock.TakeAddresses(s.exempt.taken))
	s.exempt.taken = nil
	if err := lock.PutRecord(owned); err != nil {
		e.Warn(fmt.Errorf("record the owned chains: %w", err))
	}
	return s
}

// failUnwritable fails the chains that are not to be written at all: those whose policy changed and whose guard cannot
// change with it, and those that are new or changed and cannot be written in all of their families. A repair
// does what it can.
func (e *Enforcer) failUnwritable(ctx context.Context, s *State, changed []policy.Source) {
	for i := range s.Chains {
		c := &s.Chains[i]
		if s.change != nil && s.Guard.Err != nil {
			c.fail(s.Guard.err(c.Policy.Chain))
		}
		states := func(src policy.Source) bool { return src.Policy.Chain == c.Policy.Chain }
		if len(c.Diff) > 0 && (!c.Recorded || slices.ContainsFunc(changed, states)) {
			c.fail(e.CanWrite(ctx, c))
		}
	}
}

// putRecord records the chains that are about to be owned, besides those that are, and the resets that are due
// then. If the record cannot be written with new resets, because the disk is full or they are too long, it is
// written without: rules do not wait for that.
func (e *Enforcer) putRecord(s *State, owned store.Record, lock *store.Lock) (store.Record, error) {
	rec := owned
	rec.Chains = nil
	for _, c := range s.Chains {
		if c.Err != nil {
			continue
		}
		for _, d := range c.Desired.Chains { // first, as choose takes the first
			rec.Chains = append(rec.Chains, store.OwnedChain{Chain: d.Name, Family: d.Family, Backend: c.Choice.Backend, Variant: c.Choice.Variant})
		}
	}
	for _, o := range owned.Chains {
		if !owns(rec, o.Family, o.Chain, choiceOf(o)) {
			rec.Chains = append(rec.Chains, o)
		}
	}
	rec.Outputs, rec.Namespaces, rec.Pods = s.outputs(owned), s.exempt.namespaces, s.exempt.pods
	rec.Resets = resetsOf(s, func(chain string) error { return s.Find(chain).Err })
	err := lock.PutRecord(rec)
	for _, resets := range [][]store.Reset{s.record.Resets, nil} {
		if err == nil || len(rec.Resets) == 0 {
			break
		}
		without := rec
		if without.Resets = resets; lock.PutRecord(without) == nil {
			e.Warn(fmt.Errorf("connections are not reset: %w", err))
			rec, err = without, nil
		}
	}
	if err == nil {
		s.record = rec
	}
	return rec, err
}

// write writes until an observation finds no difference: again if the rules changed since they were read, and
// once more if another program changed them since.
func (e *Enforcer) write(ctx context.Context, s *State, lock *store.Lock) *State {
	const attempts, writes = 6, 2
	for attempt, written := 1, 0; ; attempt++ {
		failed, overtaken := e.writeOnce(ctx, s, lock)
		if lock.DryRun() {
			s.DiscardDiff()
			return s
		}
		s = e.ObserveAgain(ctx, s)
		if s.unwritten() {
			s = e.ObserveAgain(ctx, s) // the dump may have been torn
		}
		if overtaken == nil {
			written++
		} else if attempt == attempts && s.unwritten() {
			s.failWrite(overtaken)
		}
		if !s.unwritten() || overtaken == nil && (failed || written == writes) {
			return s
		}
	}
}

// unwritten reports whether there are differences that can be written.
func (s *State) unwritten() bool {
	if s.Guard.Err == nil && len(s.Guard.Diff) > 0 {
		return true
	}
	return slices.ContainsFunc(s.tables, func(t tables) bool {
		return slices.ContainsFunc(s.in(t.choice), func(c *Chain) bool { return c.Err == nil && len(c.Diff)+len(t.diff) > 0 })
	})
}

// failWrite fails what is still to be written.
func (s *State) failWrite(err error) {
	if len(s.Guard.Diff) > 0 {
		s.failGuard(err)
	}
	for _, t := range s.tables {
		s.failTables(t, err)
	}
}

// failTables fails the chains of a backend that differ, or that lack what belongs to no chain.
func (s *State) failTables(t tables, err error) {
	for _, c := range s.in(t.choice) {
		if len(c.Diff)+len(t.diff) > 0 {
			c.fail(writeError(c.Policy.Chain, t.choice, err))
		}
	}
}

// writeOnce writes the guard tables as they have to be before the rules, the rules, and the guard tables as
// they have to be then. It reports whether something failed, and whether other programs changed the rules
// since they were observed.
func (e *Enforcer) writeOnce(ctx context.Context, s *State, lock *store.Lock) (failed bool, overtaken error) {
	defer func(before bool) { failed = failed || s.Guard.final && !before }(s.Guard.final)
	if !s.Guard.writable() || lock.DryRun() {
		if s.Guard.writable() && len(s.Guard.Diff) > 0 {
			s.failGuard(e.canWrite(ctx, netfilter.Choice{Backend: policy.NFTables}, policy.Families()))
		}
		return e.writeRules(ctx, s, lock)
	}
	if len(s.rulesDiff(false)) == 0 && (s.change == nil || !s.Failed()) {
		return false, e.writeGuard(ctx, s, s.guards(nil, true), &s.Guard.Observed)
	}
	first := s.guardsBeforeRules()
	guardOvertaken := e.writeGuard(ctx, s, first, &s.Guard.Observed)
	if s.change != nil { // the guard in the kernel would drop what becomes exempt
		if guardOvertaken != nil {
			return false, guardOvertaken
		}
		if s.Guard.Err != nil {
			for i := range s.Chains {
				s.Chains[i].fail(s.Guard.err(s.Chains[i].Policy.Chain))
			}
			return e.writeRules(ctx, s, lock)
		}
	}
	failed, overtaken = e.writeRules(ctx, s, lock)
	if last := s.guards(first, s.change == nil); !reflect.DeepEqual(first, last) {
		guardOvertaken = cmp.Or(guardOvertaken, e.writeGuard(ctx, s, last, nil))
	}
	return failed, cmp.Or(overtaken, guardOvertaken)
}

// writeRules writes the rules of each backend that differ, of the chains that did not fail.
func (e *Enforcer) writeRules(ctx context.Context, s *State, lock *store.Lock) (failed bool, overtaken error) {
	for _, t := range s.tables {
		desired := policy.Ruleset{Chains: slices.Clone(t.kept)}
		var blocked error
		var differing []policy.Family
		differs := len(t.diff) > 0
		for _, c := range s.in(t.choice) {
			if blocked = cmp.Or(blocked, c.Err); c.Err == nil {
				desired.Chains = append(desired.Chains, c.Desired.Chains...)
				differs = differs || len(c.Diff) > 0
			}
			for _, d := range slices.Concat(c.Diff, t.diff) {
				differing = append(differing, d.Family)
			}
		}
		if !differs || len(desired.Chains) == len(t.kept) {
			continue
		}
		b, err := e.Drivers.Open(t.choice)
		if err == nil && b.OwnsTables() { // Apply would remove a chain that is left out
			err = blocked
		}
		switch {
		case err != nil:
		case lock.DryRun():
			if err = e.canWrite(ctx, t.choice, differing); err == nil {
				err = b.CheckWrite(ctx, desired, t.observation)
			}
		default:
			err = b.Apply(ctx, desired, t.observation, lock.File())
		}
		if errors.Is(err, fs.ErrPermission) {
			err = cmp.Or(e.canWrite(ctx, t.choice, policy.Families()), err) // the kernel has one number for all that it forbids
		}
		switch {
		case errors.Is(err, netfilter.ErrChanged):
			overtaken = err
		case err != nil:
			s.failTables(t, err)
			failed = true
		}
	}
	return failed, overtaken
}

// chooseAgain chooses another backend for chains that could not be written because theirs does not work on this
// host, if they may be in another one, and reports whether there is one. A backend may seem to work until it
// writes.
func (e *Enforcer) chooseAgain(ctx context.Context, s *State) bool {
	found := false
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Policy.Backend.Value != policy.Auto || !errors.Is(c.Err, netfilter.ErrUnusable) || e.KeepBackend && c.Recorded {
			continue
		}
		choice, err := e.choose(ctx, store.Record{}, c.Policy)
		if err == nil && choice == c.Choice {
			rest := *e
			rest.Drivers = slices.DeleteFunc(slices.Clone(e.Drivers), func(d netfilter.Driver) bool { return d.Backend() == choice.Backend })
			if rest.PreferredBackend == choice.Backend {
				rest.PreferredBackend = ""
				e.warnNotPreferred(c.Policy.Chain, c.Err)
			}
			choice, err = rest.choose(ctx, store.Record{}, c.Policy)
		}
		next := Chain{Policy: c.Policy}
		if err == nil {
			err = e.desire(&next, choice)
		}
		if err == nil {
			*c, found = next, true
		}
	}
	return found
}

// removeUnwanted removes stale chains, and duplicates in other backends, once the desired rules are in place. A chain that cannot be removed stays on record and fails
// nothing.
func (e *Enforcer) removeUnwanted(ctx context.Context, s *State, owned *store.Record, lock *store.Lock) {
	for _, o := range s.Stale {
		err := e.remove(ctx, choiceOf(o), lock, policy.ChainFamily{Chain: o.Chain, Family: o.Family})
		if e.Warn(err); err == nil {
			owned.Chains = slices.DeleteFunc(owned.Chains, func(x store.OwnedChain) bool { return x == o })
		} else if i := slices.Index(owned.Chains, o); i >= 0 {
			owned.Chains[i].Stuck = true // so that not every ADD tries again
		}
	}
	s.Stale = nil
	for _, d := range e.duplicates(ctx, s) {
		if s.keep || s.Err(d.Chain) != nil {
			continue
		}
		_, err := e.removeIf(ctx, d.Choice, lock, []string{d.Chain}, func(c *policy.Chain) (bool, error) {
			if c.Name != d.Chain {
				return false, nil
			}
			if err := e.checkOwnership(c, d.Choice, false); err != nil {
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
	if e.AllBackends {
		s.Duplicates = e.duplicates(ctx, s)
	}
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
	return fmt.Errorf("remove chain %s from %s: %w", strings.Join(names, ", "), c, err)
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
	observed, err := b.Observe(ctx, inEachFamily(names...))
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
		if c.Owner == e.owner() && !c.Guard && !slices.Contains(chains, c.Chain) {
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

// RemoveLeftovers removes from the owned tables what interrupted writes left: whatever no chain
// there uses, and the guard tables.
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
		if err := b.Remove(ctx, nil, lock.File()); err != nil {
			e.Warn(fmt.Errorf("remove what an interrupted write left in %s: %w", d.Backend(), err))
		}
	}
}

// choicesOf returns the backends that have one of the chains or are on record for one.
func (e *Enforcer) choicesOf(ctx context.Context, chains []string, rec store.Record) []netfilter.Choice {
	var all []netfilter.Choice
	for _, o := range rec.Chains {
		all = append(all, choiceOf(o))
	}
	for _, d := range e.Drivers {
		for _, chain := range chains {
			used, err := d.FindChain(ctx, chain)
			if err != nil && !errors.Is(err, netfilter.ErrUnusable) {
				e.Warn(fmt.Errorf("look for chain %s in %s: %w", chain, d.Backend(), err))
			}
			all = append(all, used...)
		}
	}
	var choices []netfilter.Choice
	for _, c := range all {
		if !slices.Contains(choices, c) {
			choices = append(choices, c)
		}
	}
	return choices
}
