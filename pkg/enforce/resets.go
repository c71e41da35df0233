// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// samePolicies reports whether two lists of sources ask for the same.
func samePolicies(before, after []policy.Source) bool {
	same := func(s policy.Source) bool {
		t := store.State{Sources: before}.Find(s.ID)
		return t != nil && s.Superseded == t.Superseded && s.Policy.Equal(t.Policy) && reflect.DeepEqual(s.Files, t.Files)
	}
	return len(before) == len(after) && !slices.ContainsFunc(after, func(s policy.Source) bool { return !same(s) })
}

// resets returns the resets that are due after the rules are written: those on record, and those for what is about to be
// written. A reset waits until no chain fails, so it is on record whatever can be written.
func (s *State) resets(at int64) []store.Reset {
	r := resetList{slices.Clone(s.onRecord.now.Resets), at}
	addTo(&r, passed, netip.Addr.Compare, s.node.exempt.passed(s.onRecord.now))
	addTo(&r, left, store.ChainAddress.Compare, s.left())
	concerns := func(chain string) bool {
		return slices.ContainsFunc(s.Chains, func(c Chain) bool {
			return (c.Policy.Chain == chain || chain == "") && c.Policy.ResetsConnections() && c.Err == nil
		})
	}
	if !concerns("") {
		return r.list
	}
	untranslated := len(s.onRecord.now.Chains) == 0 || s.dropsMore(concerns) || s.lostRules(concerns)
	if s.documents.before != nil {
		// Removing a chain deletes no connection.
		remaining := slices.DeleteFunc(slices.Clone(s.documents.before), func(b policy.Source) bool {
			return !slices.ContainsFunc(s.documents.after, func(a policy.Source) bool { return a.ID == b.ID || a.Policy.Chain == b.Policy.Chain })
		})
		differs := !samePolicies(remaining, s.documents.after) && len(s.rulesDiff(anyChain))+len(s.Stale) > 0
		untranslated = untranslated || differs && len(remaining) == 0 || s.findsRange(remaining)
		if differs && len(remaining) > 0 {
			r.add(store.Reset{Before: remaining, Pods: s.onRecord.now.Addresses()})
		}
	}
	if untranslated {
		r.add(store.Reset{})
	}
	return r.list
}

// findsRange reports whether the first pod range of a policy and family became known: connections before were judged by
// none.
func (s *State) findsRange(before []policy.Source) bool {
	was := policiesOf(before, s.onRecord.now.Addresses())
	return slices.ContainsFunc(s.Chains, func(c Chain) bool {
		at := slices.IndexFunc(was, func(p policy.Policy) bool { return p.Chain == c.Policy.Chain })
		return at >= 0 && c.Policy.ResetsConnections() && slices.ContainsFunc(c.Policy.Families(), func(f policy.Family) bool {
			return len(was[at].PodRanges(f)) == 0 && len(c.Policy.PodRanges(f)) > 0
		})
	})
}

// lostRules reports whether rules that had been written are missing or changed. While a policy changes, only
// whole chains and their jumps count, as other differences may be the change. A subnet that is found changes no rule.
func (s *State) lostRules(concerns func(chain string) bool) bool {
	if s.documents.before == nil || samePolicies(s.documents.before, s.documents.after) {
		return slices.ContainsFunc(s.rulesDiff((*Chain).wasWritten), func(c policy.Change) bool { return concerns(c.Chain) })
	}
	return slices.ContainsFunc(s.Chains, func(c Chain) bool {
		return slices.ContainsFunc(c.Desired.Chains, func(want policy.Chain) bool {
			have := c.Observed.Find(want.Family, want.Name)
			return concerns(want.Name) && owns(s.onRecord.now, want.Family, want.Name, c.Choice) &&
				(have == nil || len(have.Jumps) == 0 || len(have.Rules) == 0)
		})
	})
}

// dropsMore reports whether a guard is about to drop packets that none in the kernel drops, such as those of
// a subnet that an ADD found. The connections of an exempt pod end with it, or are those of an address that passed.
func (s *State) dropsMore(concerns func(chain string) bool) bool {
	var exempt []netip.Prefix
	for _, pod := range s.onRecord.now.Pods {
		exempt = append(exempt, netip.PrefixFrom(pod.Address, pod.Address.BitLen()))
	}
	known := policy.RangesOf(exempt...)
	return s.Guard.tables != nil && slices.ContainsFunc(s.Guard.Desired, func(g policy.Guard) bool {
		return g.Mode == policy.GuardDrop && concerns(g.Chain) && !slices.ContainsFunc(s.Guard.Observed.Guards, func(o policy.Guard) bool {
			return o.Chain == g.Chain && o.Mode == policy.GuardDrop &&
				len(g.Scope.Sources.Without(slices.Concat(policy.Ranges{}, o.Scope.Sources)).Without(known)) == 0
		})
	})
}

// maxChanges is the number of changes of policies for which resets are kept on record while no walk passes: the first ones
// are forgotten then. Of each other kind there is one.
const maxChanges = 5

// resetList is a list of resets to which more are added at one time.
type resetList struct {
	list []store.Reset
	at   int64
}

// add adds a reset, or renews an equal one: a walk that runs already may have passed entries that
// the rules to come contradict.
func (r *resetList) add(reset store.Reset) {
	r.list = slices.DeleteFunc(r.list, func(x store.Reset) bool {
		x.At = 0
		return reflect.DeepEqual(x, reset)
	})
	isChange := func(x store.Reset) bool { return x.Before != nil }
	if others := slices.DeleteFunc(slices.Clone(r.list), isChange); isChange(reset) && len(r.list)-len(others) >= maxChanges {
		first := slices.IndexFunc(r.list, isChange)
		r.list = slices.Delete(r.list, first, first+1)
	}
	if reset.At = r.at; len(r.list) > 0 {
		reset.At = max(reset.At, r.list[len(r.list)-1].At+1)
	}
	r.list = append(r.list, reset)
}

// addTo adds values to the reset that has a list of them, of which there is one.
func addTo[T comparable](r *resetList, list func(*store.Reset) *[]T, compare func(a, b T) int, values []T) {
	if len(values) == 0 {
		return
	}
	r.list = slices.DeleteFunc(r.list, func(x store.Reset) bool {
		values = append(values, *list(&x)...)
		return *list(&x) != nil
	})
	slices.SortFunc(values, compare)
	var reset store.Reset
	*list(&reset) = slices.Compact(values)
	r.add(reset)
}

func passed(r *store.Reset) *[]netip.Addr { return &r.Passed }

func left(r *store.Reset) *[]store.ChainAddress { return &r.Left }

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
