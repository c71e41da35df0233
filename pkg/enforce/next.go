// SPDX-License-Identifier: Apache-2.0

package enforce

import "context"

// step is one step of a run. It may change its State, which is a copy, and returns it.
type step func(ctx context.Context, do effects, s *State) *State

// takeSteps takes the steps that are due until none is. A step that fails changes the State, and next decides
// with that.
func takeSteps(ctx context.Context, s *State, do effects) *State {
	for n := s.next(); n != nil; n = s.next() {
		s = n(ctx, do, s.clone())
	}
	return s
}

// next returns the step that is due, or nil: by what is desired, what the kernel and the record have, and
// what failed.
//
//  1. Nothing is in the kernel that is not on record, at any moment: recordFirst makes State.onRecord.now
//     what is planned before each write, and recordLast makes it the truth after each removal.
//  2. A guard never drops what the rules in the kernel exempt, and never binds what they masquerade:
//     State.guardsNow has the guards for the rules that are in the kernel now (State.observed,
//     Chain.Observed), so guards are due before the rules change, and again after it.
//  3. The guard tables are one resource: where they cannot be written as the change needs them
//     (State.Guard), writeRules fails.
//  4. After another program interfered nothing is written before it was read: what a write left is unread,
//     and so is all of State.observed after ErrChanged; and observe comes before any write.
//  5. What no policy wants goes last, and never under a guard that drops: State.removable chooses in
//     State.Stale.
//  6. It ends, as each step makes itself not due, by success or by a failure in State.progress, State.Guard
//     or a Chain, and writes are counted. A run without faults afterwards repairs everything, as nothing but
//     the kernel, the documents and the record decides.
func (s *State) next() step {
	cannotRecord := s.RecordErr != nil && !s.progress.keepsToRecord
	if cannotRecord || s.progress.refused != nil {
		return nil
	}
	switch {
	case !s.isRead():
		return observe
	case s.mustAsk():
		return ask
	case !s.isOnRecord():
		return recordFirst
	case len(s.documents.unstored) > 0:
		return storeDocuments
	case s.guardsDue():
		return writeGuards
	case s.dueTables() != nil:
		return writeRules
	case s.addressesDue():
		return takeAddresses
	case len(s.removable()) > 0:
		return removeStale
	case !s.isRecordTrue():
		return recordLast
	}
	return nil
}
