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

// walk is one pass through the conntrack table.
type walk struct {
	state store.State
	due   []store.Reset // that it is for
	began int64         // when the record was read: resets that are recorded later need another walk
	next  time.Duration // how long to wait for another reset on record, 0 without one
}

// ResetConnections walks once through the conntrack table, for the resets on record that are due, and takes
// those off the record. It waits for another process that does so. It holds the lock while it reads and
// writes the record, and not while it walks. It returns how many connections it deleted, also with an
// error, and how long to wait for the next reset on record, 0 without one. The numbers are added to those on
// record, or the error is an UnwritableError.
func (e *Enforcer) ResetConnections(
	ctx context.Context,
) (deleted map[policy.ChainFamily]uint64, next time.Duration, err error) {
	running, err := e.Dir.ResetLock(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = running.Close() }()
	w, err := e.readDue(ctx)
	if err != nil || len(w.due) == 0 {
		return nil, w.next, err
	}
	// A walk that cannot be recorded would be repeated without end.
	if err := e.Dir.CheckWritable(); err != nil {
		return nil, 0, &UnwritableError{err}
	}
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	judge := e.judge(&w)
	// A walk without any connection to judge must not begin the resetInterval: the reset for the first pod
	// range would wait for it.
	if judge.IsEmpty() {
		w.began = 0
		if err := e.recordWalk(ctx, &w, nil, nil); err != nil {
			return nil, 0, &UnwritableError{err}
		}
		return nil, w.next, nil
	}
	awaitPackets()
	deleted, failed := e.Conntrack(ctx, judge)
	if failed != nil { // also after a timeout
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		w.next = 0
	}
	if err := e.recordWalk(ctx, &w, deleted, failed); err != nil {
		failed = errors.Join(failed, &UnwritableError{err})
	}
	return deleted, w.next, failed
}

// awaitPackets waits for an RCU grace period: a packet may have met the previous rules and not be listed yet,
// as a commit does not wait for it. Without it an entry may be missed.
func awaitPackets() {
	const global = 1 // MEMBARRIER_CMD_GLOBAL of membarrier(2)
	_, _, _ = unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0)
}

// readDue reads the resets on record that are due. A writer of rules holds the lock, so the rules that a
// reset is for are in place by now.
func (e *Enforcer) readDue(ctx context.Context) (walk, error) {
	var w walk
	err := e.withLock(ctx, func(*store.Lock) (err error) {
		w.began = store.BootTime()
		w.state, err = e.Dir.Load()
		return err
	})
	if err != nil {
		return walk{}, err
	}
	if len(w.state.Unreadable) > 0 { // what is masqueraded is not known
		return walk{}, w.state.Unreadable[0].Err
	}
	w.due, w.next = dueResets(e.currentBoot(w.state.Record))
	return w, nil
}

// judge returns the judge of the connections that the walk meets.
func (e *Enforcer) judge(w *walk) *policy.ConnectionJudge {
	var before [][]policy.Policy
	findsUntranslated := false
	for _, r := range w.due {
		findsUntranslated = findsUntranslated || r.FindsUntranslated()
		if r.Before != nil {
			before = append(before, policiesOf(r.Before, r.Pods))
		}
	}
	now := e.Policies(w.state)
	judge := policy.NewConnectionJudge(now, before, findsUntranslated)
	for _, r := range w.due {
		for _, l := range r.Left {
			judge.AddLeft(l.Chain, l.Address)
		}
		for _, a := range r.Passed {
			judge.AddPassed(chainOf(now, a), a)
		}
	}
	return judge
}

// recordWalk takes the resets of a walk that did not fail off the record, and adds how many connections it
// deleted. Began is 0 if no walk was needed.
func (e *Enforcer) recordWalk(
	ctx context.Context, w *walk, deleted map[policy.ChainFamily]uint64, failed error,
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
		isLimited := w.began > 0 && slices.ContainsFunc(w.due, store.Reset.FindsUntranslated)
		if failed != nil || isLimited {
			rec.LastReset = w.began
		}
		if failed == nil {
			rec.Resets = w.without(rec.Resets)
		}
		rec.Deleted = addDeleted(rec, deleted)
		return lock.PutRecord(rec)
	})
}

// without returns the resets on record that the walk was not for.
func (w *walk) without(resets []store.Reset) (left []store.Reset) {
	isDone := map[int64]bool{}
	for _, d := range w.due {
		isDone[d.At] = true
	}
	for _, r := range resets {
		if !isDone[r.At] {
			left = append(left, r)
		}
	}
	return left
}

// addDeleted returns the numbers of the record with those of a walk, without chains that are gone.
func addDeleted(rec store.Record, deleted map[policy.ChainFamily]uint64) []store.Deleted {
	sum := map[policy.ChainFamily]uint64{}
	maps.Copy(sum, deleted)
	for _, d := range rec.Deleted {
		sum[d.ChainFamily] += d.Connections
	}
	isThere := map[policy.ChainFamily]bool{}
	for _, o := range rec.Chains {
		isThere[policy.ChainFamily{Chain: o.Chain, Family: o.Family}] = true
	}
	var all []store.Deleted
	for c, n := range sum {
		if isThere[c] {
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
	wait := resetInterval - time.Duration(store.BootTime()-rec.LastReset)
	for _, r := range rec.Resets {
		failed := r.At < rec.LastReset // or it would not be on record
		isLimited := rec.LastReset > 0 && (r.FindsUntranslated() || failed)
		if isLimited && wait > 0 {
			next = wait
		} else {
			due = append(due, r)
		}
	}
	return due, next
}

// ResetsDue reports whether ResetConnections has something to do now. Without the rules nothing would
// translate the connections.
func (s *State) ResetsDue() bool { return !s.Failed() && ResetsDue(s.onRecord.now) }

// Passed reports whether a reset on record is for one of these addresses, which passed to another pod.
func (s *State) Passed(addresses []netip.Addr) bool {
	for _, r := range s.onRecord.now.Resets {
		for _, a := range r.Passed {
			if slices.Contains(addresses, a) {
				return true
			}
		}
	}
	return false
}

// ResetsDue reports whether ResetConnections has something to do now for the record of this boot.
func ResetsDue(rec store.Record) bool {
	due, _ := dueResets(rec)
	return len(due) > 0
}
