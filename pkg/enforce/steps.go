// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const (
	maxOvertaken = 6 // how often a run begins again because another program changed the rules meanwhile
	maxWrites    = 2 // how often the same rules are written, as another program may revert them
)

// observe reads what is unread, and compares.
func observe(ctx context.Context, do effects, s *State) *State {
	do.read(ctx, s)
	s.compare()
	return s
}

// isRead reports whether all has been read since it was written last, and read twice where it differs: a reading can be
// torn.
func (s *State) isRead() bool {
	isRead := func(readings int, differs bool) bool { return readings > 1 || readings == 1 && !differs }
	unread := func(t tables) bool { return !isRead(t.readings, s.rulesDiffer(&t)) }
	return isRead(s.Guard.readings, s.guardDiffers()) && !slices.ContainsFunc(s.observed.tables, unread)
}

// unread makes all unread, as another program interfered. If that happens too often it fails what is to be written.
func (s *State) unread(err error) {
	s.run.overtaken++
	if s.run.overtaken >= maxOvertaken && s.guardDiffers() {
		s.Guard.fail(err)
	}
	s.Guard.readings = 0
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		t.readings = 0
		if s.run.overtaken >= maxOvertaken {
			s.failTables(t, err)
		}
	}
}

// ask asks whether all would be accepted, before anything is stored: a policy that is refused leaves the old one in force.
func ask(ctx context.Context, do effects, s *State) *State {
	s.run.asked = true
	answer := run(ctx, s, do.asking())
	for _, src := range s.documents.unstored {
		s.run.refused = cmp.Or(s.run.refused, answer.Err(src.Policy.Chain))
	}
	return s
}

// mustAsk reports whether rules are in force that a new document may change: those on record, or those of an agent.
func (s *State) mustAsk() bool {
	return !s.run.asked && len(s.documents.unstored) > 0 && (len(s.onRecord.before.Chains) > 0 || s.hasRules())
}

// recordFirst records the chains that are about to be owned, besides those that are, and the resets that are due then.
// If the record cannot be written with new resets, because the disk is full or they are too long, it is written
// without: rules do not wait for that.
func recordFirst(_ context.Context, do effects, s *State) *State {
	err := do.PutRecord(s.onRecord.planned)
	for _, resets := range [][]store.Reset{s.onRecord.now.Resets, nil} {
		if err == nil || len(s.onRecord.planned.Resets) == 0 {
			break
		}
		without := s.onRecord.planned
		without.Resets = resets
		if do.PutRecord(without) == nil {
			do.warn(fmt.Errorf("connections are not reset: %w", err))
			s.onRecord.planned, err = without, nil
		}
	}
	if err == nil {
		s.onRecord.now = s.onRecord.planned
		s.compare() // stale chains are those on record
	} else {
		s.failRecord(fmt.Errorf("record the chains to be written: %w", err))
	}
	return s
}

func (s *State) isOnRecord() bool { return reflect.DeepEqual(s.onRecord.planned, s.onRecord.now) }

// failRecord fails everything that is still to be done: without the record nothing is written.
func (s *State) failRecord(err error) {
	s.RecordErr = &UnwritableError{err}
	for i := range s.Chains {
		if c := &s.Chains[i]; s.Err(c.Policy.Chain) != nil {
			c.fail(s.RecordErr)
		}
	}
}

// storeDocuments stores the new policies. Then it lists the pods again if other namespaces are exempt: an ADD that read
// the documents before has recorded its pod by now.
func storeDocuments(_ context.Context, do effects, s *State) *State {
	for _, src := range s.documents.unstored {
		if err := do.Put(src); err != nil {
			s.failRecord(err)
			return s
		}
	}
	s.documents.unstored = nil
	if !slices.Equal(s.node.exempt.Namespaces, s.onRecord.before.Namespaces) {
		do.desirePods(s)
	}
	return s
}

// writeGuards writes the guards for the rules that are in the kernel.
func writeGuards(ctx context.Context, do effects, s *State) *State {
	g := &s.Guard
	err := do.guards(ctx, s.guards(), g)
	g.readings, g.writes = 0, g.writes+1
	switch {
	case errors.Is(err, netfilter.ErrChanged):
		g.writes--
		s.unread(err)
	case err != nil:
		g.fail(fmt.Errorf("write the tables %s: %w", netfilter.GuardTable, err))
	}
	return s
}

// guardsDue reports whether the guards in the kernel are not those for the rules in the kernel. They are written again
// whenever the rules have changed.
func (s *State) guardsDue() bool { return s.guardDiffers() && s.Guard.writes < maxWrites }

// writeRules writes the rules of the first backend in which that is due.
func writeRules(ctx context.Context, do effects, s *State) *State {
	t := &s.observed.tables[slices.IndexFunc(s.observed.tables, s.rulesDue)]
	err := s.guardForbids()
	if err == nil && t.whole { // Apply would remove a chain that is left out
		for _, c := range s.in(t.choice) {
			err = cmp.Or(err, c.Err)
		}
	}
	if err == nil {
		err = do.rules(ctx, t, s.desired(t), s.differing(t))
		t.readings, t.writes, s.Guard.writes = 0, t.writes+1, 0
	}
	switch {
	case errors.Is(err, netfilter.ErrChanged):
		t.writes--
		s.unread(err)
	case err != nil:
		s.failTables(t, err)
	}
	return s
}

// rulesDue reports whether the rules of a backend are to be written: of the chains that did not fail.
func (s *State) rulesDue(t tables) bool { return t.writes < maxWrites && s.rulesDiffer(&t) }

// takeAddresses removes the addresses of exempt pods from the records of other attachments that had them.
func takeAddresses(_ context.Context, do effects, s *State) *State {
	do.warn(do.TakeAddresses(s.node.exempt.taken))
	s.node.exempt.taken = nil
	return s
}

// addressesDue reports whether the rules that exempt the pods are in the kernel: an ADD that fails takes nothing.
func (s *State) addressesDue() bool {
	fails := func(c Chain) bool { return len(c.Policy.Namespaces) > 0 && s.Err(c.Policy.Chain) != nil }
	return len(s.node.exempt.taken) > 0 && !slices.ContainsFunc(s.Chains, fails)
}

// removeStale removes a chain that no policy wants. A chain that cannot be removed stays on record and fails nothing.
func removeStale(ctx context.Context, do effects, s *State) *State {
	o := s.removable()[0]
	err := do.remove(ctx, o)
	do.warn(err)
	if err == nil {
		s.run.removed, s.Guard.writes = append(slices.Clip(s.run.removed), o), 0 // clone shares the array
		s.forget(o)
	} else {
		s.run.stuck = append(slices.Clip(s.run.stuck), o) // so that not every ADD tries again
	}
	s.compare()
	return s
}

// forget takes a chain that was removed out of what was read.
func (s *State) forget(o store.OwnedChain) {
	for i := range s.observed.tables {
		if t := &s.observed.tables[i]; t.choice == ChoiceOf(o) {
			t.observation.Rules.Chains = slices.DeleteFunc(slices.Clone(t.observation.Rules.Chains), func(c policy.Chain) bool {
				return c.Name == o.Chain && c.Family == o.Family
			})
		}
	}
}

// removable returns the stale chains under which no guard drops or binds what leaves without them, and whose place other
// rules have taken: those of the same name, and of every chain without rules, or that was not on record, or as one that
// could not be removed: it may be the one with a new name.
func (s *State) removable() []store.OwnedChain {
	awaited := slices.ContainsFunc(s.Chains, func(c Chain) bool {
		was := slices.ContainsFunc(s.onRecord.before.Chains, func(o store.OwnedChain) bool { return o.Chain == c.Policy.Chain && !o.Stuck })
		isRead := slices.ContainsFunc(s.observed.tables, func(t tables) bool { return t.choice == c.Choice && t.err == nil })
		hasNone := func(f policy.Family) bool {
			have := c.Observed.Find(f, c.Policy.Chain)
			return have == nil || len(have.Rules) == 0
		}
		return !s.isWritten(&c) && (!was || isRead && slices.ContainsFunc(c.Policy.Families(), hasNone))
	})
	return slices.DeleteFunc(slices.Clone(s.Stale), func(o store.OwnedChain) bool {
		if c := s.Find(o.Chain); c != nil && (!s.isWritten(c) || c.Desired.Find(o.Family, o.Chain) != nil) {
			return !s.isWritten(c)
		}
		return awaited || s.Guard.isUnknown() || slices.ContainsFunc(s.Guard.Observed.Guards, func(g policy.Guard) bool {
			return g.Chain == o.Chain && g.Family == o.Family && g.HasEffect()
		})
	})
}

// recordLast records what is owned now. If that fails, the record has more than there is.
func recordLast(_ context.Context, do effects, s *State) *State {
	truth := s.truth()
	if err := do.PutRecord(truth); err != nil {
		do.warn(fmt.Errorf("record the owned chains: %w", err))
	}
	s.onRecord.now, s.onRecord.planned = truth, truth
	return s
}

func (s *State) isRecordTrue() bool { return reflect.DeepEqual(s.truth(), s.onRecord.now) }

// truth returns what is to be on record when all is done: without the chains that were removed, and with what a chain
// that could not be written had before.
func (s *State) truth() store.Record {
	r := s.onRecord.now
	r.Chains = nil
	for _, o := range s.onRecord.now.Chains {
		isInPlace := s.wants(o.Chain, o.Family, ChoiceOf(o)) && s.isWritten(s.Find(o.Chain))
		o.Stuck = (o.Stuck || slices.Contains(s.run.stuck, o)) && !isInPlace
		if !slices.Contains(s.run.removed, o) && !s.wasNeverWritten(o) {
			r.Chains = append(r.Chains, o)
		}
	}
	r.Outputs = s.outputs(s.onRecord.before)
	r.Former = s.former(r.Outputs) // the rules of a chain that cannot be read may have the new ones
	if len(s.node.exempt.taken) > 0 {
		r.ExemptPods = s.onRecord.before.ExemptPods
	}
	return r
}

// wasNeverWritten reports whether a chain is on record for this run alone, which failed to create it.
func (s *State) wasNeverWritten(o store.OwnedChain) bool {
	c := s.Find(o.Chain)
	return c != nil && c.Choice == ChoiceOf(o) && s.tablesOf(c.Choice).err == nil &&
		c.Observed.Find(o.Family, o.Chain) == nil && !owns(s.onRecord.before, o.Family, o.Chain, c.Choice)
}
