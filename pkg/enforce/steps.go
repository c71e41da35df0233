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

// isRead reports whether all has been read since it was written last.
func (s *State) isRead() bool {
	if !isReadEnough(s.Guard.readings, s.guardDiffers()) {
		return false
	}
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		if !isReadEnough(t.readings, s.rulesDiffer(t)) {
			return false
		}
	}
	return true
}

// isReadEnough reports whether tables were read as often as is necessary. A dump that a commit overtakes can
// lack rules, so tables that differ are read twice before they are written. One reading is enough if it is of
// one generation, see readingsAfter.
func isReadEnough(readings int, differs bool) bool {
	return readings >= enoughReadings || readings > 0 && !differs
}

// unread makes all unread, as another program interfered. If that happens too often it fails what is to be
// written.
func (s *State) unread(err error) {
	s.progress.overtaken++
	tooOften := s.progress.overtaken >= maxOvertaken
	if tooOften && s.guardDiffers() {
		s.Guard.failWrite(err)
	}
	s.Guard.readings = 0
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		t.readings = 0
		if tooOften {
			s.failTables(t, err)
		}
	}
}

// ask asks whether all would be accepted, before anything is stored: a policy that is refused leaves the old
// one in force.
func ask(ctx context.Context, do effects, s *State) *State {
	s.progress.asked = true
	answer := takeSteps(ctx, s, do.asking())
	for _, src := range s.documents.unstored {
		s.progress.refused = cmp.Or(s.progress.refused, answer.Err(src.Policy.Chain))
	}
	return s
}

// mustAsk reports whether rules are in force that a new document may change: those on record, or those of an
// agent, which stay if the kernel refuses the policy that takes them over. On a node without rules nothing is
// asked: there is no policy to keep.
func (s *State) mustAsk() bool {
	if s.progress.asked || len(s.documents.unstored) == 0 {
		return false
	}
	return len(s.onRecord.before.Chains) > 0 || s.mayHaveRules()
}

// recordFirst records the chains that are about to be owned, besides those that are, and the resets that are
// due then. If the record cannot be written, because the disk is full, rules that exist do not wait for it: a
// run goes on with what is on record, if that fits the stored policies. Any other run ends.
func recordFirst(_ context.Context, do effects, s *State) *State {
	err := do.PutRecord(s.onRecord.planned)
	if err == nil {
		s.onRecord.now = s.onRecord.planned
		s.compare() // stale chains are those on record
		return s
	}
	err = fmt.Errorf("record the chains to be written: %w", err)
	if !s.recordFits() {
		s.failRecord(err)
		return s
	}
	if len(s.onRecord.planned.Resets) > len(s.onRecord.now.Resets) {
		do.warn(fmt.Errorf("connections are not reset: %w", err))
	}
	s.RecordErr, s.progress.keepsToRecord = &UnwritableError{err}, true
	for i := range s.Chains {
		c := &s.Chains[i]
		if !c.Recorded {
			c.fail(s.RecordErr)
		}
	}
	do.desireRecorded(s)
	s.onRecord.planned = s.onRecord.now
	s.compare()
	return s
}

// recordFits reports whether the pods and addresses on record are those of the stored policies, so that rules
// can be repaired with them: the run changes no policy, all documents can be read, and the record was written
// for the same namespaces and outputAddresses. Otherwise the rules would be those of no policy.
func (s *State) recordFits() bool {
	isChange := s.documents.before != nil // or an ADD, which fails without the record of its pod
	sameNamespaces := slices.Equal(s.node.exempt.Namespaces, s.onRecord.now.Namespaces)
	if isChange || s.node.keepsAll || !sameNamespaces {
		return false
	}
	for i := range s.Chains {
		c := &s.Chains[i]
		items := recordedItems(s.onRecord.now, c.Policy.Chain)
		if c.Recorded && !slices.Equal(items, c.Policy.OutputAddresses.Value) {
			return false
		}
	}
	return true
}

func (s *State) isOnRecord() bool { return reflect.DeepEqual(s.onRecord.planned, s.onRecord.now) }

// failRecord fails everything that is still to be done: without the record nothing is written.
func (s *State) failRecord(err error) {
	s.RecordErr = &UnwritableError{err}
	for i := range s.Chains {
		c := &s.Chains[i]
		if s.Err(c.Policy.Chain) != nil {
			c.fail(s.RecordErr)
		}
	}
}

// storeDocuments stores the new policies. Then it lists the pods again if other namespaces are exempt, or if
// a document can be read again: an ADD that read the documents before has recorded its pod by now.
func storeDocuments(_ context.Context, do effects, s *State) *State {
	for _, src := range s.documents.unstored {
		if err := do.Put(src); err != nil {
			s.failRecord(err)
			return s
		}
	}
	s.documents.unstored = nil
	namespacesChange := !slices.Equal(s.node.exempt.Namespaces, s.onRecord.before.Namespaces)
	if namespacesChange || s.documents.restored {
		do.desirePods(s)
	}
	return s
}

// writeGuards writes the guards for the rules that are in the kernel.
func writeGuards(ctx context.Context, do effects, s *State) *State {
	g := &s.Guard
	err := do.guards(ctx, s.guardsNow(), g)
	g.readings = 0
	if errors.Is(err, netfilter.ErrChanged) {
		s.unread(err)
		return s
	}
	g.writes++
	if err != nil {
		g.failWrite(err)
	}
	return s
}

// guardsDue reports whether the guards in the kernel are not those for the rules in the kernel. They are
// written again whenever the rules have changed.
func (s *State) guardsDue() bool { return s.guardDiffers() && s.Guard.writes < maxWrites }

// writeRules writes the rules of the first backend in which that is due.
func writeRules(ctx context.Context, do effects, s *State) *State {
	t := s.dueTables()
	err := cmp.Or(s.guardForbids(), s.chainForbids(t))
	if err == nil {
		err = do.rules(ctx, t, s.desired(t), s.differing(t))
		t.readings, s.Guard.writes = 0, 0
	}
	if errors.Is(err, netfilter.ErrChanged) {
		s.unread(err)
		return s
	}
	t.writes++
	if err != nil {
		s.failTables(t, err)
	}
	return s
}

// chainForbids returns why tables that belong to ip-masq must not be written: Apply would remove a chain that
// is there and failed.
func (s *State) chainForbids(t *tables) error {
	if !t.whole {
		return nil
	}
	for _, c := range s.in(t.choice) {
		isThere := len(c.Observed.Chains) > 0
		if isThere && c.Err != nil {
			return fmt.Errorf("chain %s, which is in the same table, failed: %w", c.Policy.Chain, c.Err)
		}
	}
	return nil
}

// dueTables returns the first tables whose rules are to be written, of the chains that did not fail, or nil.
func (s *State) dueTables() *tables {
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		if t.writes < maxWrites && s.rulesDiffer(t) {
			return t
		}
	}
	return nil
}

// takeAddresses removes the addresses of exempt pods from the records of other attachments that had them.
func takeAddresses(_ context.Context, do effects, s *State) *State {
	do.warn(do.TakeAddresses(s.node.exempt.taken))
	s.node.exempt.taken = nil
	return s
}

// addressesDue reports whether the rules that exempt the pods are in the kernel: an ADD that fails takes
// nothing.
func (s *State) addressesDue() bool {
	if len(s.node.exempt.taken) == 0 {
		return false
	}
	for i := range s.Chains {
		p := &s.Chains[i].Policy
		if len(p.Namespaces) > 0 && s.Err(p.Chain) != nil {
			return false
		}
	}
	return true
}

// removeStale removes a chain that no policy wants. A chain that cannot be removed stays on record and fails
// nothing.
func removeStale(ctx context.Context, do effects, s *State) *State {
	o := s.removable()[0]
	err := do.remove(ctx, o)
	do.warn(err)
	if err == nil {
		s.progress.removed = append(slices.Clip(s.progress.removed), o) // clone shares the array
		s.Guard.writes = 0
		s.forget(o)
	} else {
		// On record, so that not every ADD tries again.
		s.progress.failedRemovals = append(slices.Clip(s.progress.failedRemovals), o)
	}
	s.compare()
	return s
}

// forget takes a chain that was removed out of what was read.
func (s *State) forget(o store.OwnedChain) {
	t := s.tablesOf(ChoiceOf(o))
	if t == nil {
		return
	}
	var left []policy.Chain
	for _, c := range t.observation.Rules.Chains {
		if c.Name != o.Chain || c.Family != o.Family {
			left = append(left, c)
		}
	}
	t.observation.Rules.Chains = left
}

// removable returns the stale chains whose place other rules have taken, and under which no guard drops or
// binds what leaves without them.
func (s *State) removable() []store.OwnedChain {
	var removable []store.OwnedChain
	awaitsRules := s.awaitsRules()
	for _, o := range s.Stale {
		if s.isNeeded(o) {
			continue
		}
		c := s.Find(o.Chain)
		isElsewhere := c != nil && c.Desired.Find(o.Family, o.Chain) != nil
		if isElsewhere || !awaitsRules && !s.isGuarded(o) {
			removable = append(removable, o)
		}
	}
	return removable
}

// isNeeded reports whether the policy of a stale chain has no right rules elsewhere yet: in another backend
// or family.
func (s *State) isNeeded(o store.OwnedChain) bool {
	c := s.Find(o.Chain)
	return c != nil && !s.isWritten(c)
}

// isGuarded reports whether a guard may drop or bind packets of a chain, which is to be removed after its
// guard.
func (s *State) isGuarded(o store.OwnedChain) bool {
	if s.Guard.unread != nil {
		return true
	}
	g := guardOf(s.Guard.Observed.Guards, o.Chain, o.Family)
	return g != nil && g.HasEffect()
}

// awaitsRules reports whether some chain has no rules yet: a stale chain may be the same one with its former
// name, and stays until then. Which chain takes the place of which is not on record, so any missing one
// counts, also if the kernel refuses it: to masquerade by a former policy is better than not to masquerade. A
// chain that was on record and lacks no rules is not waited for, however long it cannot be written.
func (s *State) awaitsRules() bool {
	for i := range s.Chains {
		c := &s.Chains[i]
		if !s.isWritten(c) && (!s.wasOnRecord(c) || s.lacksRules(c)) {
			return true
		}
	}
	return false
}

// wasOnRecord reports whether the chain was on record before the run, other than as one that could not be
// removed.
func (s *State) wasOnRecord(c *Chain) bool {
	for _, o := range s.onRecord.before.Chains {
		if o.Chain == c.Policy.Chain && !o.RemovalFailed {
			return true
		}
	}
	return false
}

// lacksRules reports whether the kernel is known to have no rules of the chain in some family.
func (s *State) lacksRules(c *Chain) bool {
	t := s.tablesOf(c.Choice)
	if t == nil || t.err != nil {
		return false
	}
	for _, f := range c.Policy.Families() {
		have := c.Observed.Find(f, c.Policy.Chain)
		if have == nil || len(have.Rules) == 0 {
			return true
		}
	}
	return false
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

// truth returns what is to be on record when all is done: without the chains that were removed, and with what
// a chain that could not be written had before. If addresses were not taken from the pods that had them
// before, the record has those pods, so that the next run finds the addresses again.
func (s *State) truth() store.Record {
	truth := s.onRecord.now
	truth.Chains = nil
	for _, o := range s.onRecord.now.Chains {
		if slices.Contains(s.progress.removed, o) || s.wasNeverWritten(o) {
			continue
		}
		isInPlace := s.wants(o.Chain, o.Family, ChoiceOf(o)) && s.isWritten(s.Find(o.Chain))
		couldNotBeRemoved := o.RemovalFailed || slices.Contains(s.progress.failedRemovals, o)
		o.RemovalFailed = couldNotBeRemoved && !isInPlace
		truth.Chains = append(truth.Chains, o)
	}
	truth.Outputs = s.outputs(s.onRecord.before)
	truth.Former = s.former(truth.Outputs) // the rules of a chain that cannot be read may have the new ones
	if len(s.node.exempt.taken) > 0 {
		truth.ExemptPods = s.onRecord.before.ExemptPods
	}
	return truth
}

// wasNeverWritten reports whether a chain is on record for this run alone, which failed to create it.
func (s *State) wasNeverWritten(o store.OwnedChain) bool {
	c := s.Find(o.Chain)
	if c == nil || c.Choice != ChoiceOf(o) || s.tablesOf(c.Choice).err != nil {
		return false
	}
	isThere := c.Observed.Find(o.Family, o.Chain) != nil
	return !isThere && !owns(s.onRecord.before, o.Family, o.Chain, c.Choice)
}
