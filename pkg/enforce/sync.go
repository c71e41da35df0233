// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
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
// not on record.
func (e *Enforcer) Sync(ctx context.Context, before *State, lock *store.Lock) *State {
	return e.sync(ctx, before, nil, lock)
}

// sync is Sync after the policies of some sources changed.
func (e *Enforcer) sync(ctx context.Context, before *State, changed []policy.Source, lock *store.Lock) *State {
	if before.InSync() {
		return before
	}
	if before.change != nil && before.Guard.Err != nil { // the guard has to change with the rules
		for _, p := range before.Policies {
			if err := before.Guard.err(p.Chain); err != nil {
				before.fail(p.Chain, err)
			}
		}
		before.undesired = maps.Clone(before.Failed) // also after it is observed again
	}
	if len(before.record.Chains) == 0 && !lock.DryRun() {
		first, err := e.checkFirstWrite(ctx)
		defer func() { _ = first.Close() }()
		if err != nil {
			for _, p := range before.Policies {
				before.fail(p.Chain, err)
			}
			return before
		}
	}
	after, owned, err := e.write(ctx, before, changed, lock)
	if err != nil {
		before.RecordErr = fmt.Errorf("record the chains to be written: %w", err)
		for _, p := range before.Policies {
			if before.Err(p.Chain) != nil {
				before.fail(p.Chain, before.RecordErr)
			}
		}
		return before
	}
	if !lock.DryRun() {
		if failed := func(p policy.Policy) bool { return p.ResetsConnections() && after.Err(p.Chain) != nil }; //
		slices.ContainsFunc(before.Policies, failed) && !reflect.DeepEqual(owned.Resets, before.record.Resets) {
			owned.Resets = resetsOf(before, after.Err) // nothing translates what a reset of those would delete
		}
		e.removeUnwanted(ctx, after, &owned, lock)
		if err := lock.PutRecord(owned); err != nil {
			e.Warn(fmt.Errorf("record the owned chains: %w", err))
		}
	}
	return after
}

// write records, applies and observes. For a chain whose backend does not work on this host, and
// that may be in another one, it chooses again, once.
func (e *Enforcer) write(ctx context.Context, before *State, changed []policy.Source, lock *store.Lock) (*State, store.Record, error) {
	owned := recordOf(before, before.record)
	owned.Resets = resetsOf(before, func(chain string) error { return before.Failed[chain] })
	if err := e.putRecord(lock, before, &owned); err != nil {
		return nil, owned, err
	}
	after, failed := e.apply(ctx, before, e.cannotWrite(ctx, before, changed), owned, lock)
	if again := e.chooseAgain(ctx, before, failed); again != nil {
		again.change = before.change
		next := recordOf(again, store.Record{Boot: owned.Boot, Resets: owned.Resets, LastReset: owned.LastReset, Deleted: owned.Deleted})
		next.Chains = append(next.Chains, missingFrom(next, owned)...) // what was written there has to be removed
		owned = next
		if err := e.putRecord(lock, before, &owned); err != nil {
			return nil, owned, err
		}
		maps.Copy(failed, e.cannotWrite(ctx, again, changed))
		after, failed = e.apply(ctx, again, failed, owned, lock)
	}
	for chain, err := range failed {
		after.fail(chain, err)
	}
	return after, owned, nil
}

// putRecord writes the record. If it cannot be written with new resets, because the disk is full or they are
// too long, it is written without: rules do not wait for that.
func (e *Enforcer) putRecord(lock *store.Lock, before *State, rec *store.Record) error {
	err := lock.PutRecord(*rec)
	for _, resets := range [][]store.Reset{before.record.Resets, nil} {
		if err == nil || len(rec.Resets) == 0 {
			break
		}
		without := *rec
		if without.Resets = resets; lock.PutRecord(without) == nil {
			e.Warn(fmt.Errorf("connections are not reset: %w", err))
			*rec, err = without, nil
		}
	}
	return err
}

// apply writes until an observation finds no difference: again if the rules changed since they were
// read, and once more if another program changed them since. It returns the last observation and,
// by chain, why it could not be written, including those that failed before. A dry run finds the
// reasons and takes the rules as written.
func (e *Enforcer) apply(
	ctx context.Context, s *State, failed map[string]error, owned store.Record, lock *store.Lock,
) (*State, map[string]error) {
	const attempts, writes = 6, 2
	for attempt, written := 1, 0; ; attempt++ {
		errs := e.applyOnce(ctx, s, failed, lock)
		if lock.DryRun() {
			after := *s
			after.Groups, after.Guard.Diff = slices.Clone(s.Groups), nil
			for i := range after.Groups {
				after.Groups[i].Diff = nil
			}
			maps.Copy(failed, errs)
			return &after, failed
		}
		s = e.observeAgain(ctx, s, owned)
		if len(s.Diff()) > 0 {
			s = e.observeAgain(ctx, s, owned) // the dump may have been torn
		}
		all, inSync := len(errs), len(s.Diff()) == 0
		if inSync || attempt < attempts {
			maps.DeleteFunc(errs, func(_ string, err error) bool { return errors.Is(err, netfilter.ErrChanged) })
		}
		changed := len(errs) < all
		maps.Copy(failed, errs)
		if !changed {
			written++
		}
		if inSync || !changed && (len(failed) > 0 || written == writes) {
			return s, failed
		}
	}
}

// applyOnce writes the guard tables and each group that differs, without the chains that failed
// before. Errors are reported per chain.
func (e *Enforcer) applyOnce(ctx context.Context, s *State, failed map[string]error, lock *store.Lock) map[string]error {
	if !s.Guard.writable() {
		return e.applyRules(ctx, s, failed, lock)
	}
	if lock.DryRun() {
		errs := e.applyRules(ctx, s, failed, lock)
		if len(s.Guard.Diff) > 0 {
			maps.Copy(errs, s.guardErrs(e.canWrite(ctx, netfilter.Choice{Backend: policy.NFTables}, policy.Families())))
		}
		return errs
	}
	if len(s.rulesDiff()) == 0 && (s.change == nil || len(failed)+len(s.Failed) == 0) {
		return e.writeGuard(ctx, s, s.guardsWithout(failed, nil, true), &s.Guard.Observed)
	}
	first := s.guardsBeforeRules(failed)
	errs := e.writeGuard(ctx, s, first, &s.Guard.Observed)
	ofRules := e.applyRules(ctx, s, failed, lock)
	unwritten := maps.Clone(failed)
	maps.Copy(unwritten, ofRules)
	if last := s.guardsWithout(unwritten, first, s.change == nil); !reflect.DeepEqual(first, last) {
		maps.Copy(errs, e.writeGuard(ctx, s, last, nil))
	}
	maps.Copy(errs, ofRules)
	return errs
}

// applyRules is applyOnce without the guard tables.
func (e *Enforcer) applyRules(ctx context.Context, s *State, failed map[string]error, lock *store.Lock) map[string]error {
	errs := map[string]error{}
	for _, g := range s.Groups {
		desired := withoutChains(withoutChains(g.Desired, s.Failed), failed)
		if len(g.Diff) == 0 || len(desired.Chains) == 0 {
			continue
		}
		b, err := e.Drivers.Open(g.Choice)
		if err == nil && b.OwnsTables() { // Apply would remove a chain that is left out
			for _, c := range slices.Concat(g.Desired.Chains, g.Observed.Chains) {
				err = cmp.Or(err, s.Failed[c.Name], failed[c.Name])
			}
		}
		switch {
		case err != nil:
		case lock.DryRun():
			if err = e.canWrite(ctx, g.Choice, g.differing()); err == nil {
				err = b.CheckWrite(ctx, desired)
			}
		default:
			err = b.Apply(ctx, desired, g.observation, lock.File())
		}
		if errors.Is(err, fs.ErrPermission) {
			if why := e.canWrite(ctx, g.Choice, policy.Families()); why != nil {
				err = why // the kernel has one number for all that it forbids
			}
		}
		if err != nil {
			for _, chain := range g.chains() {
				errs[chain] = writeError(chain, g.Choice, err)
			}
			continue
		}
	}
	return errs
}

// cannotWrite returns, by chain, why its rules cannot be written in all families. It is about
// chains that are new or whose policy changed: those are written in all families or in none. A
// repair does what it can.
func (e *Enforcer) cannotWrite(ctx context.Context, s *State, changed []policy.Source) map[string]error {
	return e.Unwritable(ctx, s, func(g *Group, chain string) bool {
		states := func(c policy.Source) bool { return c.Policy.Chain == chain }
		return len(g.Diff) > 0 && (!g.Recorded || slices.ContainsFunc(changed, states))
	})
}

// chooseAgain observes with new choices for chains that could not be written because their backend
// does not work on this host, if they may be in another one, and takes them out of the failed ones.
// A backend that would be chosen again is left out: it may seem to work until it writes. It returns
// nil if there is no better choice.
func (e *Enforcer) chooseAgain(ctx context.Context, before *State, failed map[string]error) *State {
	free := map[string]bool{}
	for _, p := range before.Policies {
		keep := func(g Group) bool { return e.KeepBackend && g.Recorded && slices.Contains(g.chains(), p.Chain) }
		if p.Backend.Value == policy.Auto && errors.Is(failed[p.Chain], netfilter.ErrUnusable) && !slices.ContainsFunc(before.Groups, keep) {
			free[p.Chain] = true
		}
	}
	if len(free) == 0 {
		return nil
	}
	rec := before.record
	rec.Chains = slices.DeleteFunc(slices.Clone(rec.Chains), func(o store.OwnedChain) bool { return free[o.Chain] })
	again := e.observe(ctx, before.Policies, rec)
	for _, was := range before.Groups {
		same := func(is Group) bool {
			unchanged := func(c string) bool { return free[c] && slices.Contains(was.chains(), c) }
			return is.Choice.SameBackend(was.Choice) && slices.ContainsFunc(is.chains(), unchanged)
		}
		if slices.ContainsFunc(again.Groups, same) {
			rest := *e
			rest.Drivers = slices.DeleteFunc(slices.Clone(e.Drivers), func(d netfilter.Driver) bool { return d.Backend() == was.Choice.Backend })
			if rest.PreferredBackend == was.Choice.Backend {
				rest.PreferredBackend = ""
				for _, chain := range slices.Sorted(maps.Keys(free)) {
					e.warnNotPreferred(chain, failed[chain])
				}
			}
			again = rest.observe(ctx, before.Policies, rec)
			break
		}
	}
	all := len(failed)
	maps.DeleteFunc(failed, func(chain string, _ error) bool { return free[chain] && again.Failed[chain] == nil })
	if len(failed) == all {
		return nil
	}
	return again
}

// recordOf returns the record with all chains that the state is about to own, those of the current
// choices first: choose takes the first.
func recordOf(s *State, rec store.Record) store.Record {
	out := store.Record{Boot: rec.Boot, Resets: rec.Resets, LastReset: rec.LastReset, Deleted: rec.Deleted}
	for _, g := range s.Groups {
		for _, c := range withoutChains(g.Desired, s.Failed).Chains {
			out.Chains = append(out.Chains, store.OwnedChain{
				Chain: c.Name, Family: c.Family,
				Backend: g.Choice.Backend, Variant: g.Choice.Variant,
			})
		}
	}
	out.Chains = append(out.Chains, missingFrom(out, rec)...)
	return out
}

func missingFrom(rec, from store.Record) []store.OwnedChain {
	return slices.DeleteFunc(slices.Clone(from.Chains), func(o store.OwnedChain) bool {
		return owns(rec, o.Family, o.Chain, choiceOf(o))
	})
}

// removeUnwanted removes stale chains, and duplicates in other backends, once the desired rules are in place. A chain that cannot be removed stays on record and fails
// nothing.
func (e *Enforcer) removeUnwanted(ctx context.Context, s *State, owned *store.Record, lock *store.Lock) {
	for _, o := range s.Stale {
		err := e.remove(ctx, choiceOf(o), lock, netfilter.ChainRef{Family: o.Family, Name: o.Chain})
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
			s.fail(d.Chain, err) // one chain would masquerade what the other exempts
		} else {
			e.Warn(err)
		}
	}
	if e.AllBackends {
		s.Duplicates = e.duplicates(ctx, s)
	}
}

func (e *Enforcer) remove(ctx context.Context, c netfilter.Choice, lock *store.Lock, chains ...netfilter.ChainRef) error {
	b, err := e.Drivers.Open(c)
	if err == nil {
		err = b.Remove(ctx, chains, lock.File())
	}
	if err == nil {
		return nil
	}
	var names []string
	for _, ref := range chains {
		names = append(names, fmt.Sprintf("%s (%s)", ref.Name, ref.Family))
	}
	return fmt.Errorf("remove chain %s from %s: %w", strings.Join(names, ", "), c, err)
}

// removeIf removes the chains of these names, and of the owned tables all chains, for which a
// function returns true. Its errors are joined to that of the removal.
func (e *Enforcer) removeIf(
	ctx context.Context, c netfilter.Choice, lock *store.Lock, names []string, ok func(*policy.Chain) (bool, error),
) (removed []netfilter.ChainRef, err error) {
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
			removed = append(removed, netfilter.ChainRef{Family: chain.Family, Name: chain.Name})
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
		if c.Owner == e.owner() && !c.Guard && !slices.Contains(chains, c.Name) {
			chains = append(chains, c.Name)
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
			case slices.Contains(chains, c.Name) && c.Owner.DataDir != "":
				e.Warn(fmt.Errorf("%s belongs to dataDir %s and is not removed: run cleanup with --data-dir %s",
					ownedChain(c, choice), policy.Quote(c.Owner.DataDir), policy.Quote(c.Owner.DataDir)))
			case slices.Contains(chains, c.Name):
				e.Warn(fmt.Errorf("chain %s (%s) in %s is not owned by ip-masq and is not removed", c.Name, c.Family, choice))
			}
			return false, nil
		})
		for _, ref := range gone {
			removed = append(removed, netfilter.OwnedChain{ChainRef: ref, Choice: choice})
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
		if !slices.ContainsFunc(choices, c.SameBackend) {
			choices = append(choices, c)
		}
	}
	return choices
}
