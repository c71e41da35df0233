// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// resetInterval is the shortest time between two walks that only look for untranslated connections, as rules
// can be lost repeatedly, and after a walk that failed.
const resetInterval = 10 * time.Second

// ResetConnections walks once through the conntrack table, for the resets on record that are due, and takes
// those off the record. It waits for another process that does so. It holds the lock while it reads and
// writes the record, and not while it walks. It returns how many connections it deleted, also with an
// error, and how long to wait for the next reset on record, 0 without one. The numbers are added to those on
// record, or the error is an UnwritableError.
func (e *Enforcer) ResetConnections(ctx context.Context) (deleted map[policy.ChainFamily]uint64, next time.Duration, err error) {
	running, err := e.Dir.ResetLock(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = running.Close() }()
	s, due, next, began, err := e.readDue(ctx)
	if err != nil || len(due) == 0 {
		return nil, next, err
	}
	judge := e.judge(s, due)
	if err := e.Dir.CheckWritable(); err != nil { // a walk that cannot be recorded would be repeated without end
		return nil, 0, &UnwritableError{err}
	}
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	if judge.IsEmpty() { // no reason for the walk after the first pod range becomes known to wait
		if err := e.recordWalk(ctx, due, 0, nil, nil); err != nil {
			return nil, 0, &UnwritableError{err}
		}
		return nil, next, nil
	}
	// A packet may have met the previous rules and not be listed yet, as a commit does not wait for it. This waits
	// for an RCU grace period; without it an entry may be missed.
	const global = 1 // MEMBARRIER_CMD_GLOBAL of membarrier(2)
	_, _, _ = unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0)
	deleted, err = e.Conntrack(ctx, judge)
	failed := err
	if failed != nil { // also after a timeout
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		next = 0
	}
	if err = e.recordWalk(ctx, due, began, deleted, failed); err != nil {
		err = &UnwritableError{err}
	}
	return deleted, next, errors.Join(failed, err)
}

// readDue reads the resets on record that are due, when it began to, and how long to wait for the others. A writer of rules
// holds the lock, so the rules that a reset is for are in place by now.
func (e *Enforcer) readDue(ctx context.Context) (s store.State, due []store.Reset, next time.Duration, began int64, err error) {
	err = e.withLock(ctx, func(*store.Lock) (err error) {
		began = store.BootTime() // before any reset that is recorded from here on, which this walk is not for
		s, err = e.Dir.Load()
		return err
	})
	if err == nil && len(s.Unreadable) > 0 { // what is masqueraded is not known
		err = s.Unreadable[0].Err
	}
	if err == nil {
		due, next = dueResets(e.currentBoot(s.Record))
	}
	return s, due, next, began, err
}

func (e *Enforcer) judge(s store.State, due []store.Reset) *policy.ConnectionJudge {
	var before [][]policy.Policy
	for _, r := range due {
		if r.Before != nil {
			before = append(before, policiesOf(r.Before, r.Pods))
		}
	}
	now := e.Policies(s)
	judge := policy.NewConnectionJudge(now, before, slices.ContainsFunc(due, store.Reset.FindsUntranslated))
	for _, r := range due {
		for _, l := range r.Left {
			judge.Left(l.Chain, l.Address)
		}
		for _, a := range r.Passed {
			judge.Passed(chainOf(now, a), a)
		}
	}
	return judge
}

// recordWalk takes the resets of a walk that did not fail off the record, and adds how many connections it deleted. Began is 0
// if no walk was needed.
func (e *Enforcer) recordWalk(
	ctx context.Context, due []store.Reset, began int64, deleted map[policy.ChainFamily]uint64, failed error,
) error {
	return e.withLock(ctx, func(lock *store.Lock) error {
		s, err := e.Dir.Load()
		if err != nil || lock == nil {
			return err
		}
		rec := e.currentBoot(s.Record)
		if len(rec.Chains) == 0 && len(rec.Resets) == 0 { // it was removed or damaged meanwhile
			return nil
		}
		rec.Resets = slices.DeleteFunc(rec.Resets, func(r store.Reset) bool {
			return failed == nil && slices.ContainsFunc(due, func(d store.Reset) bool { return d.At == r.At })
		})
		if failed != nil || began > 0 && slices.ContainsFunc(due, store.Reset.FindsUntranslated) {
			rec.LastReset = began
		}
		rec.Deleted = addDeleted(rec, deleted)
		return lock.PutRecord(rec)
	})
}

// addDeleted returns the numbers of the record with those of a walk, without chains that are gone.
func addDeleted(rec store.Record, deleted map[policy.ChainFamily]uint64) []store.Deleted {
	sum := map[policy.ChainFamily]uint64{}
	maps.Copy(sum, deleted)
	for _, d := range rec.Deleted {
		sum[d.ChainFamily] += d.Connections
	}
	var all []store.Deleted
	for c, n := range sum {
		if slices.ContainsFunc(rec.Chains, func(o store.OwnedChain) bool { return o.Chain == c.Chain && o.Family == c.Family }) {
			all = append(all, store.Deleted{ChainFamily: c, Connections: n})
		}
	}
	slices.SortFunc(all, func(a, b store.Deleted) int {
		return cmp.Or(strings.Compare(a.Chain, b.Chain), strings.Compare(string(a.Family), string(b.Family)))
	})
	return all
}

// withLock calls a function with the lock, which is nil without a dataDir.
func (e *Enforcer) withLock(ctx context.Context, do func(*store.Lock) error) error {
	lock, err := e.Dir.LockToRead(ctx)
	for errors.Is(err, store.ErrBusy) && ctx.Err() == nil { // a walk that is not recorded would be made again
		lock, err = e.Dir.LockToRead(ctx)
	}
	if err != nil {
		return err
	}
	return errors.Join(do(lock), lock.Release())
}

// dueResets returns the resets that are due now, and how long to wait for another one on record.
func dueResets(rec store.Record) (due []store.Reset, next time.Duration) {
	for _, r := range rec.Resets {
		failed := r.At < rec.LastReset // or it would not be on record
		wait := resetInterval - time.Duration(store.BootTime()-rec.LastReset)
		isLimited := rec.LastReset > 0 && (r.FindsUntranslated() || failed)
		if isLimited && wait > 0 {
			next = wait
		} else {
			due = append(due, r)
		}
	}
	return due, next
}

// ResetsDue reports whether ResetConnections has something to do now. Without the rules nothing would translate the
// connections.
func (s *State) ResetsDue() bool { return !s.Failed() && ResetsDue(s.onRecord.now) }

// Passed reports whether a reset on record is for one of these addresses, which passed to another pod.
func (s *State) Passed(addresses []netip.Addr) bool {
	return slices.ContainsFunc(s.onRecord.now.Resets, func(r store.Reset) bool {
		return slices.ContainsFunc(r.Passed, func(a netip.Addr) bool { return slices.Contains(addresses, a) })
	})
}

// ResetsDue reports whether ResetConnections has something to do now for the record of this boot.
func ResetsDue(rec store.Record) bool {
	due, _ := dueResets(rec)
	return len(due) > 0
}
