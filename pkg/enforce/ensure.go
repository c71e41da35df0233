// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Sync makes the kernel have the rules that the contributions ask for. It
// looks again first (so a mismatch that a caller saw is read twice before it is
// repaired), applies what differs, and looks once more: the View it returns is
// what stands now. What failed is in there, by chain; the rest is done all the
// same.
//
// What is about to be owned is recorded before it is made, so that a run which
// is cut off leaves nothing that nobody knows of.
func (e *Enforcer) Sync(ctx context.Context, contributions []policy.Source, rec store.Record, lock *store.Lock) *State {
	return e.SyncFrom(ctx, e.Observe(ctx, contributions, rec), contributions, rec, lock)
}

// SyncFrom is Ensure for who has looked already, with the lock held and at
// the same contributions and record.
func (e *Enforcer) SyncFrom(ctx context.Context, before *State, contributions []policy.Source, rec store.Record, lock *store.Lock) *State {
	return e.sync(ctx, before, contributions, nil, rec, lock)
}

// ensure is EnsureFrom where the policies of some chains have changed.
func (e *Enforcer) sync(ctx context.Context, before *State, contributions, changed []policy.Source, rec store.Record, lock *store.Lock) *State {
	if before.InSync() {
		return before
	}
	rec = e.ofThisBoot(rec)
	if len(rec.Chains) == 0 && !lock.DryRun() {
		first, err := e.admitFirst(ctx)
		defer func() { _ = first.Close() }()
		if err != nil {
			for _, p := range before.Policies {
				before.fail(p.Chain, err)
			}
			return before
		}
	}
	after, owned, err := e.write(ctx, contributions, changed, rec, before, lock)
	if err != nil {
		before.RecordErr = fmt.Errorf("record what is to be owned: %w", err)
		for _, p := range before.Policies {
			if before.Err(p.Chain) != nil {
				before.fail(p.Chain, before.RecordErr)
			}
		}
		return before
	}
	if lock.DryRun() {
		return after
	}
	e.clear(ctx, after, &owned, lock)
	if err := lock.PutRecord(owned); err != nil {
		e.warn(fmt.Errorf("record what is owned: %w", err))
	}
	return after
}

// write records, applies and looks again. What cannot work on this host at all
// is chosen anew, once, where nobody insists on it.
func (e *Enforcer) write(ctx context.Context, contributions, changed []policy.Source, rec store.Record, before *State, lock *store.Lock) (*State, store.Record, error) {
	owned := record(rec, before)
	if err := lock.PutRecord(owned); err != nil {
		return nil, owned, err
	}
	failed := e.unable(ctx, before, changed)
	maps.Copy(failed, e.apply(ctx, before, failed, lock))
	if free := e.freeToChoose(before, failed); len(free) > 0 {
		again := e.chooseAgain(ctx, contributions, rec, before, free)
		next := record(store.Record{Boot: rec.Boot}, again)
		next.Chains = append(next.Chains, missingFrom(next, owned)...) // what was written there has to go
		owned = next
		if err := lock.PutRecord(owned); err != nil {
			return nil, owned, err
		}
		for chain := range free {
			if again.Failed[chain] == nil {
				delete(failed, chain)
			}
		}
		maps.Copy(failed, e.unable(ctx, again, changed))
		maps.Copy(failed, e.apply(ctx, again, failed, lock))
		before = again
	}
	if lock.DryRun() {
		return before.asWritten(failed), owned, nil
	}
	after := e.Observe(ctx, contributions, owned)
	if len(after.Diff()) > 0 { // a reading can be torn by a writer beside us
		after = e.Observe(ctx, contributions, owned)
	}
	if len(after.Diff()) > 0 && len(failed) == 0 { // or somebody has changed them since
		failed = e.apply(ctx, after, nil, lock)
		after = e.Observe(ctx, contributions, owned)
	}
	for chain, err := range failed {
		after.fail(chain, err)
	}
	return after, owned, nil
}

// freeToChoose returns the chains that could not be written because their
// backend does not work here, and need not be it.
func (e *Enforcer) freeToChoose(v *State, failed map[string]error) map[string]bool {
	free := map[string]bool{}
	bound := func(chain string) bool {
		return e.KeepBackend && slices.ContainsFunc(v.Groups, func(g Group) bool { return g.Recorded && g.holds(chain) })
	}
	for _, p := range v.Policies {
		if p.Backend.Value == policy.Auto && errors.Is(failed[p.Chain], netfilter.ErrUnusable) && !bound(p.Chain) {
			free[p.Chain] = true
		}
	}
	return free
}

// chooseAgain looks again with new choices for those chains. What would be
// chosen as before is left out: a backend may seem to work until it writes.
func (e *Enforcer) chooseAgain(ctx context.Context, contributions []policy.Source, rec store.Record, before *State, free map[string]bool) *State {
	left := store.Record{Boot: rec.Boot}
	for _, o := range rec.Chains {
		if !free[o.Chain] {
			left.Chains = append(left.Chains, o)
		}
	}
	again := e.Observe(ctx, contributions, left)
	for _, was := range before.Groups {
		for _, is := range again.Groups {
			same := is.Choice.SameBackend(was.Choice)
			if !same || !slices.ContainsFunc(is.chains(), func(c string) bool { return free[c] && was.holds(c) }) {
				continue
			}
			rest := *e
			rest.Drivers = slices.DeleteFunc(slices.Clone(e.Drivers), func(d netfilter.Driver) bool { return d.Backend() == was.Choice.Backend })
			return rest.Observe(ctx, contributions, left)
		}
	}
	return again
}

func missingFrom(rec, from store.Record) []store.OwnedChain {
	var out []store.OwnedChain
	for _, o := range from.Chains {
		if !owns(rec, o.Family, o.Chain, choiceOf(o)) {
			out = append(out, o)
		}
	}
	return out
}

// unable tells, by chain, why rules cannot be written, before any are. It is about
// chains that are new or whose policy has changed: IPv4 rules without the IPv6 rules
// would be rolled back. Where rules are only to be repaired, each family that can be
// is better than none.
func (e *Enforcer) unable(ctx context.Context, v *State, changed []policy.Source) map[string]error {
	return e.unableOf(ctx, v, func(g *Group, chain string) bool {
		states := func(c policy.Source) bool { return c.Policy.Chain == chain }
		return len(g.Diff) > 0 && (!g.Recorded || slices.ContainsFunc(changed, states))
	})
}

func unwritten(chain string, in netfilter.Choice, err error) error {
	return fmt.Errorf("write the rules of chain %s in %s: %w", chain, in, err)
}

// apply writes each group that differs, without the chains that cannot be written.
// Errors are reported per chain.
func (e *Enforcer) apply(ctx context.Context, v *State, unable map[string]error, lock *store.Lock) map[string]error {
	failed := map[string]error{}
	for _, g := range v.Groups {
		desired := withoutChains(withoutChains(g.Desired, v.Failed), unable)
		if len(g.Diff) == 0 || len(desired.Chains) == 0 {
			continue
		}
		b, err := e.Drivers.Open(g.Choice)
		if err == nil && b.OwnsTables() {
			err = g.leftOut(v.Failed, unable) // Apply would remove it
		}
		switch {
		case err != nil:
		case lock.DryRun():
			err = e.able(ctx, g.Choice, g.differing())
		default:
			err = b.Apply(ctx, desired, g.observation, lock.File())
		}
		if errors.Is(err, fs.ErrPermission) {
			if why := e.able(ctx, g.Choice, policy.Families()); why != nil {
				err = why // the kernel has one number for whatever it forbids
			}
		}
		if err != nil {
			for _, chain := range g.chains() {
				failed[chain] = unwritten(chain, g.Choice, err)
			}
			continue
		}
		for i := range g.Observed.Chains {
			if c := &g.Observed.Chains[i]; c.Owner.Differs(e.owner()) && !lock.DryRun() {
				e.replaced(ownedChain(c, g.Choice))
			}
		}
	}
	return failed
}

// clear removes what nobody wants any more, once what is wanted stands: chains
// that we own elsewhere, and what an agent or an earlier choice left in another
// form under the name of a chain of ours. What cannot be removed stays on
// record, and makes nobody fail.
func (e *Enforcer) clear(ctx context.Context, v *State, owned *store.Record, lock *store.Lock) {
	for _, o := range v.Stale {
		if err := e.remove(ctx, choiceOf(o), netfilter.ChainRef{Family: o.Family, Name: o.Chain}, lock); err != nil {
			e.warn(err)
			stuck(owned, o)
			continue
		}
		owned.Chains = slices.DeleteFunc(owned.Chains, func(x store.OwnedChain) bool { return x == o })
	}
	v.Stale = nil
	for _, at := range e.elsewhere(ctx, v) {
		if v.Err(at.Chain) != nil {
			continue
		}
		if err := e.supersede(ctx, at.Choice, at.Chain, lock); errors.Is(err, ErrOtherDataDir) {
			v.fail(at.Chain, err) // what one exempts the other masquerades
		} else {
			e.warn(err)
		}
	}
	e.replaceOthers(ctx, v, lock)
	if e.AllBackends {
		v.Duplicates = e.elsewhere(ctx, v)
	}
}

// stuck marks what could not be removed, so that not every ADD tries again.
func stuck(rec *store.Record, o store.OwnedChain) {
	if i := slices.Index(rec.Chains, o); i >= 0 {
		rec.Chains[i].Stuck = true
	}
}

// supersede removes a chain of our name that stands in another form, if it
// holds only what the agents and we write.
func (e *Enforcer) supersede(ctx context.Context, c netfilter.Choice, chain string, lock *store.Lock) error {
	b, err := e.Drivers.Open(c)
	if err != nil {
		return err
	}
	observed, err := b.Observe(ctx, inEachFamily(chain))
	if err != nil {
		return fmt.Errorf("read chain %s in %s: %w", chain, c, err)
	}
	var errs []error
	for i := range observed.Rules.Chains {
		old := &observed.Rules.Chains[i]
		if old.Name != chain || old.Owner.Differs(e.owner()) && e.replaces() { // for replaceOthers
			continue
		}
		err := e.judge(old, c, false)
		if err == nil {
			err = e.remove(ctx, c, netfilter.ChainRef{Family: old.Family, Name: chain}, lock)
		} else {
			err = fmt.Errorf("in %s: %w", c, err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
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

func (e *Enforcer) remove(ctx context.Context, c netfilter.Choice, ref netfilter.ChainRef, lock *store.Lock) error {
	b, err := e.Drivers.Open(c)
	if err == nil {
		err = b.Remove(ctx, []netfilter.ChainRef{ref}, lock.File())
	}
	if err != nil {
		return fmt.Errorf("remove chain %s (%s) from %s: %w", ref.Name, ref.Family, c, err)
	}
	return nil
}

// record returns the record with all that the view is about to own, current
// choices first: a chain is kept in the first form that the record has for it.
func record(rec store.Record, v *State) store.Record {
	out := store.Record{Boot: rec.Boot}
	for _, g := range v.Groups {
		for _, c := range withoutChains(g.Desired, v.Failed).Chains {
			out.Chains = append(out.Chains, store.OwnedChain{
				Chain: c.Name, Family: c.Family,
				Backend: g.Choice.Backend, Variant: g.Choice.Variant, PlainPorts: g.Choice.PlainPorts,
			})
		}
	}
	out.Chains = append(out.Chains, missingFrom(out, rec)...)
	return out
}

func (e *Enforcer) warn(err error) {
	if e.Warn != nil && err != nil {
		e.Warn(err)
	}
}
