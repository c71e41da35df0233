// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"net/netip"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// effects is all that steps do outside the State. One implementation does it, and one asks whether it would succeed.
type effects interface {
	// Those of Enforcer.
	read(context.Context, *State)
	desirePods(*State)

	// Those of store.Lock.
	PutRecord(store.Record) error
	Put(policy.Source) error
	TakeAddresses(map[store.Attachment][]netip.Addr) error

	// guards writes the guard tables, as Apply of GuardTables; rules those of a backend, as Apply of Backend.
	guards(context.Context, []policy.Guard, netfilter.GuardObservation) error
	rules(ctx context.Context, t *tables, desired policy.Ruleset, families differing) error
	remove(context.Context, store.OwnedChain) error

	warn(error)
	asking() effects
}

// differing are the families in which rules differ, and those of them in which a chain is new: that is written in all of its
// families or in none, while a repair does what it can.
type differing struct{ all, isNew []policy.Family }

// does has effects, with the lock held.
type does struct {
	*Enforcer
	*store.Lock
}

func (d does) warn(err error) { d.Warn(err) }

func (d does) asking() effects {
	return &asks{d.Enforcer, d.Lock.Asking(), map[netfilter.Choice]policy.Ruleset{}, nil, nil}
}

func (d does) guards(ctx context.Context, guards []policy.Guard, from netfilter.GuardObservation) error {
	if _, err := d.File(); err != nil { // the process writes itself
		return &UnwritableError{err}
	}
	tables, err := d.Drivers.GuardTables()
	if err != nil {
		return err
	}
	return tables.ApplyGuards(ctx, guards, from)
}

func (d does) rules(ctx context.Context, t *tables, desired policy.Ruleset, families differing) error {
	held, err := d.File()
	if err != nil {
		return &UnwritableError{err}
	}
	b, err := d.Drivers.Open(t.choice)
	if err == nil {
		err = d.CanWrite(ctx, t.choice, families.isNew...)
	}
	if err == nil {
		err = b.Apply(ctx, desired, t.observation, held)
	}
	return err
}

func (d does) remove(ctx context.Context, o store.OwnedChain) error {
	return d.Enforcer.remove(ctx, choiceOf(o), d.Lock, policy.ChainFamily{Chain: o.Chain, Family: o.Family})
}

// asks asks the kernel and the file system, and takes what they would accept as written.
type asks struct {
	*Enforcer
	*store.Lock // that writes nothing
	written     map[netfilter.Choice]policy.Ruleset
	guarded     []policy.Guard        // that were written last
	tables      netfilter.GuardTables // to which they were written; nil: none were
}

func (a *asks) warn(error) {}

func (a *asks) asking() effects { return a }

func (a *asks) remove(context.Context, store.OwnedChain) error { return nil }

func (a *asks) guards(ctx context.Context, guards []policy.Guard, from netfilter.GuardObservation) error {
	tables, err := a.Drivers.GuardTables()
	if err == nil {
		err = tables.CheckGuards(ctx, guards, from)
	}
	if err == nil {
		a.guarded, a.tables = guards, tables
	}
	return err
}

func (a *asks) rules(ctx context.Context, t *tables, desired policy.Ruleset, families differing) error {
	err := a.CanWrite(ctx, t.choice, families.all...)
	if err == nil {
		var b netfilter.Backend
		if b, err = a.Drivers.Open(t.choice); err == nil {
			err = b.CheckWrite(ctx, desired, t.observation)
		}
	}
	if err == nil {
		a.written[t.choice] = t.with(desired)
	}
	return err
}

// with returns what the tables have once these chains are written: others stay in tables that other programs use, too.
func (t *tables) with(desired policy.Ruleset) policy.Ruleset {
	after := policy.Ruleset{Chains: slices.Clone(desired.Chains)}
	for _, c := range t.observation.Rules.Chains {
		if !t.whole && desired.Find(c.Family, c.Name) == nil {
			after.Chains = append(after.Chains, c)
		}
	}
	return after
}

// read reads nothing that was written.
func (a *asks) read(ctx context.Context, s *State) {
	for i := range s.tables {
		t := &s.tables[i]
		if rules, written := a.written[t.choice]; written {
			t.observation.Rules, t.looks = rules, settledLooks
		}
	}
	if g := &s.Guard; a.tables != nil {
		tables, written := a.tables, netfilter.GuardObservation{Guards: a.guarded}
		g.Observed.Guards, g.looks = written.Guards, settledLooks
		g.compare = func(want []policy.Guard) policy.Diff { return tables.CompareGuards(want, written) }
	}
	a.Enforcer.read(ctx, s)
}
