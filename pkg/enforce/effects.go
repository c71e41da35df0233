// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"net/netip"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// effects is all that steps do outside the State. One implementation does it, and one asks whether it would
// succeed.
type effects interface {
	// Those of Enforcer.
	read(context.Context, *State)
	desirePods(*State)
	desireRecorded(*State)

	// Those of store.Lock.
	PutRecord(store.Record) error
	Put(policy.Source) error
	TakeAddresses(map[store.Attachment][]netip.Addr) error

	// guards writes the guard tables, as Apply of GuardTables; rules those of a backend, as Apply of Backend.
	guards(context.Context, []policy.Guard, *GuardState) error
	rules(ctx context.Context, t *tables, desired policy.Ruleset, families differing) error
	remove(context.Context, store.OwnedChain) error

	warn(error)
	asking() effects
}

// differing are the families in which rules differ, and those of them in which a chain is new.
type differing struct{ all, isNew []policy.Family }

// does has effects, with the lock held.
type does struct {
	*Enforcer
	*store.Lock
}

func (d does) warn(err error) { d.Warn(err) }

func (d does) asking() effects {
	return asks{d.Enforcer}
}

func (d does) guards(ctx context.Context, guards []policy.Guard, g *GuardState) error {
	tables, err := d.Drivers.GuardTables()
	if err != nil {
		return err
	}
	return tables.ApplyGuards(ctx, guards, g.Observed)
}

func (d does) rules(ctx context.Context, t *tables, desired policy.Ruleset, families differing) error {
	b, err := d.Drivers.Open(t.choice)
	if err != nil {
		return err
	}
	// A new chain is written in all of its families or in none. A repair does what it can.
	if err := d.CanWrite(ctx, t.choice, families.isNew...); err != nil {
		return err
	}
	return b.Apply(ctx, desired, t.observation, d.File())
}

func (d does) remove(ctx context.Context, o store.OwnedChain) error {
	return d.Enforcer.remove(ctx, ChoiceOf(o), d.Lock, policy.ChainFamily{Chain: o.Chain, Family: o.Family})
}

// asks asks the kernel, and takes what it would accept as written. Whether files can be written only a write
// can tell.
type asks struct{ *Enforcer }

func (asks) PutRecord(store.Record) error { return nil }

func (asks) Put(policy.Source) error { return nil }

func (asks) TakeAddresses(map[store.Attachment][]netip.Addr) error { return nil }

func (asks) warn(error) {}

func (a asks) asking() effects { return a }

func (asks) remove(context.Context, store.OwnedChain) error { return nil }

func (a asks) guards(ctx context.Context, guards []policy.Guard, g *GuardState) error {
	tables, err := a.Drivers.GuardTables()
	if err != nil {
		return err
	}
	if err := tables.CheckGuards(ctx, guards, g.Observed); err != nil {
		return err
	}
	g.Observed.Guards, g.asIfWritten = guards, true
	return nil
}

func (a asks) rules(ctx context.Context, t *tables, desired policy.Ruleset, families differing) error {
	b, err := a.Drivers.Open(t.choice)
	if err != nil {
		return err
	}
	// A policy is accepted only if it can be written in all of its families.
	if err := a.CanWrite(ctx, t.choice, families.all...); err != nil {
		return err
	}
	if err := b.CheckWrite(ctx, desired, t.observation); err != nil {
		return err
	}
	t.observation.Rules = t.with(desired)
	return nil
}

// with returns what the tables have once these chains are written: others stay in tables that other programs
// use, too.
func (t *tables) with(desired policy.Ruleset) policy.Ruleset {
	after := policy.Ruleset{Chains: slices.Clone(desired.Chains)}
	for _, c := range t.observation.Rules.Chains {
		if !t.whole && desired.Find(c.Family, c.Name) == nil {
			after.Chains = append(after.Chains, c)
		}
	}
	return after
}

// read reads nothing that was taken as written.
func (a asks) read(ctx context.Context, s *State) {
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		if t.writes > 0 {
			t.readings = enoughReadings
		}
	}
	if s.Guard.asIfWritten {
		s.Guard.readings = enoughReadings
	}
	a.Enforcer.read(ctx, s)
}
