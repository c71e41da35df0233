// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// minInterval is the shortest time between syncs that events ask for: commits come in groups. It
	// bounds the cost of a storm of third-party commits, and how long a repair can wait.
	minInterval = 20 * time.Millisecond
	// Files are read once they have not changed for quietFiles, as editors and shells empty a file
	// before they fill it, and at the latest after maxQuietFiles.
	quietFiles    = 100 * time.Millisecond
	maxQuietFiles = time.Second
	// An address that is removed and added again within quietAddresses changes nothing.
	quietAddresses    = 20 * time.Millisecond
	maxQuietAddresses = 30 * time.Millisecond
	// A sync or a reset that failed is repeated after a time that doubles from firstRetry to lastRetry.
	// After a sync whose rules another program changed at once, it doubles from minInterval.
	firstRetry = time.Second
	lastRetry  = time.Minute
	// The same drift this often within flappingWindow is flapping. A person who experiments, or a
	// program that writes its rules each minute, causes it less often.
	flappingThreshold = 30
	flappingWindow    = time.Minute
)

// state is what the loop knows. Only its goroutine has it. Events change it, and next decides by it alone.
type state struct {
	// What happened and asks for a sync.
	triggers  triggers
	files     flowcontrol.Debounce // a conflist or an agent file may have changed
	addresses flowcontrol.Debounce // the node's addresses changed, and the rules depend on them
	commits   commits

	// What the works found out.
	sources   *Sources // as they were read last
	last      lastSync
	conflist  conflistState
	flapping  flapping
	resets    resetState
	published publication // the last one
	watched   []netfilter.OwnedChain

	running [works]bool // which works run
}

// commits are what is known of the commits to the ruleset.
type commits struct {
	generation uint32 // of the last one, 0 before the first
	touches    int    // how many may have changed owned rules
	writer     Writer // the program that changed them last, until a sync has repaired that
}

// lastSync is what is known of the last sync.
type lastSync struct {
	report  *Report // nil before the first since this loop is active
	touches int     // commits.touches when it began
	ended   time.Time
	next    time.Time     // when the next one is due without an event
	retry   time.Duration // how long it waits for its repetition; 0 unless it failed
}

// conflistState is what is known of the conflist.
type conflistState struct {
	status *conflist.Status // nil if this loop does not sync it
	due    time.Time
}

// flapping are the reverts by another program, and the program.
type flapping struct {
	flowcontrol.Flapping[policy.Change]
	by   Writer        // the likely one; zero if it is unknown
	what policy.Change // that was reverted last; while one is flapping, that one
	at   time.Time     // when it was
}

// note takes note of a revert. If its program is unknown, it is most likely the one that reverted the same
// change before, if that was not too long ago.
func (f *flapping) note(now time.Time, what policy.Change, by Writer) {
	f.Reverted(now, what)
	none := policy.Change{}
	active := f.Active(now)
	isUnrelated := active != none && active != what
	if isUnrelated {
		return
	}
	isLate := active == none && now.Sub(f.at) > flappingWindow
	if isLate || what != f.what {
		f.by = Writer{}
	}
	f.by = cmp.Or(by, f.by)
	f.what, f.at = what, now
}

// resetState is when connections are reset.
type resetState struct {
	due   time.Time
	retry time.Duration // 0 unless the last reset failed
}

func newState() state {
	reverts := flowcontrol.Flapping[policy.Change]{Threshold: flappingThreshold, Window: flappingWindow}
	return state{
		files:     flowcontrol.Debounce{Quiet: quietFiles, Longest: maxQuietFiles},
		addresses: flowcontrol.Debounce{Quiet: quietAddresses, Longest: maxQuietAddresses},
		flapping:  flapping{Flapping: reverts},
	}
}

// triggers are what a sync is made for, besides its interval.
type triggers struct {
	rules    bool      // a program may have changed owned rules
	request  bool      // everything is to be read and tried again
	read     time.Time // when the sources were read first; zero if they were not
	conflist bool      // it was synced
}

// never is when something is due that nothing asks for.
func never() time.Time { return time.Unix(1<<40, 0) }

// next returns the work that is due, or the constant nothing and the time when a work may be due. Of several
// works that are due, it returns the first one in the order of the constants.
func (s *state) next(now time.Time) (work, time.Time) {
	due := [works]time.Time{
		publishing: s.publishDue(), syncingConflist: s.conflist.due, resetting: s.resets.due,
		reading: never(), syncing: never(),
	}
	usesNode := s.runs(reading) || s.runs(syncing) // which is for one goroutine at a time
	if !usesNode && s.readsSources(now) {
		due[reading] = s.syncDue()
	}
	if !usesNode && !s.readsSources(now) {
		due[syncing] = s.syncDue()
	}
	wake := never()
	for i, at := range due {
		w := work(i)
		if s.runs(w) {
			continue
		}
		if !at.After(now) {
			return w, now
		}
		wake = earlier(wake, at)
	}
	return nothing, wake
}

// runs reports whether a work of this kind runs.
func (s *state) runs(w work) bool { return s.running[w] }

// syncDue returns when the next sync is due. A sync that follows a reading waits a little for the conflist,
// whose result it reports.
func (s *state) syncDue() time.Time {
	soon := s.soon()
	due := s.repairDue()
	if s.addresses.Pending() {
		due = earlier(due, later(soon, s.addresses.Due()))
	}
	if s.files.Pending() {
		due = earlier(due, later(soon, s.files.Due()))
	}
	if s.triggers.request || !s.triggers.read.IsZero() || s.triggers.conflist {
		due = earlier(due, soon)
	}
	waitsForConflist := s.runs(syncingConflist) && !s.triggers.rules
	if !waitsForConflist {
		return due
	}
	// Counted from the first reading, so that further ones do not delay the sync again. Without a reading
	// its time is zero, and nothing waits.
	return later(due, s.triggers.read.Add(minInterval))
}

// soon is the earliest time of a sync: minInterval after the last one.
func (s *state) soon() time.Time { return s.last.ended.Add(minInterval) }

// repairDue returns when a sync is due that the rules or the interval ask for. While the rules are flapping
// it waits for the pause, as repairs are what the other program reverts. Nothing else that a sync is made for
// waits so long: pods must not leave with an address that is gone until the pause ends.
func (s *state) repairDue() time.Time {
	due := s.last.next
	if s.triggers.rules {
		due = earlier(due, s.soon())
	}
	pause := s.flapping.Pause()
	if pause == 0 {
		return due
	}
	due = earlier(due, s.flapping.Ends()) // when it is known whether the flapping is over
	return later(due, s.last.ended.Add(pause))
}

// readsSources reports whether the sources are read before the next sync.
func (s *state) readsSources(now time.Time) bool {
	if s.sources == nil || s.files.IsDue(now) {
		return true
	}
	if s.files.Pending() { // they are being written, and read when that event is due
		return false
	}
	isReadForNext := !s.triggers.read.IsZero()
	return s.triggers.request || s.isNextDue(now) && !isReadForNext
}

// isNextDue reports whether a sync is due without an event: after the interval or, if the last sync failed,
// to repeat it.
func (s *state) isNextDue(now time.Time) bool { return !now.Before(s.last.next) }

// beginSync takes from the state what a sync needs, and what it is for.
func (s *state) beginSync(now time.Time) syncOrder {
	o := syncOrder{
		sources: s.sources, last: s.last.report,
		isEarly: s.retriesEarly(now), isRead: !s.triggers.read.IsZero(),
		touches: s.commits.touches, by: s.commits.writer,
	}
	s.triggers, s.commits.writer = triggers{}, Writer{}
	s.addresses.Take(now)
	return o
}

// retriesEarly reports whether the sync that is due comes after one that failed and before its repetition,
// only because rules may have changed.
func (s *state) retriesEarly(now time.Time) bool {
	if s.last.retry == 0 || s.last.report == nil || s.last.report.reverted() {
		return false
	}
	others := s.triggers
	others.rules = false
	onlyRules := others == triggers{}
	return onlyRules && !s.isNextDue(now)
}

// verified reports whether the rules are known to be right: the last sync found them so, and no commit
// since it began touched owned rules.
func (s *state) verified() bool {
	return s.last.report != nil && s.last.report.verified() && s.commits.touches == s.last.touches
}

// publishDue returns the past if the last generation is verified and not published.
func (s *state) publishDue() time.Time {
	isPublished := s.published == publication{s.last.report, s.commits.generation}
	if s.commits.generation == 0 || !s.verified() || isPublished {
		return never()
	}
	return s.last.ended
}

// activate makes this loop active. A reading and a sync are due, and they schedule the conflist and the
// resets. The waits after a sync that failed stay: a loop that cannot take the instance lock is activated
// again and again.
func (s *state) activate(syncsConflist bool) {
	s.triggers.request = true
	s.conflist.due = never()
	s.resets = resetState{due: never()}
	if syncsConflist {
		notYet := errors.New("not looked at yet")
		unknown := conflist.Problem{Reason: string(ReasonConflist), Err: notYet, Waiting: true}
		s.conflist.status = &conflist.Status{Problems: []conflist.Problem{unknown}}
	}
}

// noteConflist takes note of the conflist's state, which the next sync reports.
func (s *state) noteConflist(c conflist.Status) {
	c.Inserted += s.conflist.status.Inserted
	s.conflist.status = &c
	s.conflist.due = earlier(s.conflist.due, c.Next)
	s.triggers.conflist = true
}

// takeConflist returns the conflist's state for a report, or nil. The next report has the insertions from
// here on.
func (s *state) takeConflist() *conflist.Status {
	if s.conflist.status == nil {
		return nil
	}
	c := *s.conflist.status
	s.conflist.status.Inserted = 0
	return &c
}

// noteSources takes note of the sources. The conflist is synced after that: another program may write it as
// soon as it has the entry.
func (s *state) noteSources(src *Sources, now time.Time, syncsConflist bool) {
	s.sources = src
	if s.triggers.read.IsZero() {
		s.triggers.read = now
	}
	if syncsConflist {
		s.conflist.due = now
	}
}

// detectFlapping returns the problem if another program reverts the rules repeatedly.
func (s *state) detectFlapping(now time.Time, r *Report) *Problem {
	f := &s.flapping
	if len(r.Drift) > 0 {
		f.note(now, r.Drift[0], r.By)
	}
	what := f.Active(now)
	if what == (policy.Change{}) {
		return nil
	}
	err := fmt.Errorf("another program reverts the rules repeatedly (%s), most likely %s; "+
		"repairs are %s apart now: stop that program, make it leave the chain alone, "+
		"or set backend to \"nftables\" if the chain is kept in iptables, "+
		"and then run ip-masq-reconciler once; this message ends %s after the last repair",
		what, f.by, f.Pause(), 2*f.Pause())
	return &Problem{Reason: ReasonFlapping, Err: err}
}

// noteSync takes note of the report of a sync, and decides when the next one is due without an event.
func (s *state) noteSync(now time.Time, r *Report, interval time.Duration) {
	s.last.report, s.last.ended, s.last.next = r, now, now.Add(interval)
	s.last.retry = retryAfter(r, s.last.retry)
	if s.last.retry > 0 {
		s.last.next = earlier(s.last.next, now.Add(s.last.retry))
	}
	if len(r.State.Record.Resets) == 0 || s.resets.retry > 0 || r.rulesFailed() {
		return
	}
	// The time of a scheduled reset stays, unless one is due now.
	if s.resets.due.Equal(never()) || enforce.ResetsDue(r.State.Record) {
		s.resets.due = now
	}
}

// retryAfter returns how long a sync waits for its repetition, by how long the one before it waited; 0 unless
// it failed.
func retryAfter(r *Report, before time.Duration) time.Duration {
	switch {
	case !r.failed():
		return 0
	case r.reverted(): // the other program's commit is an event, too, where the kernel has events
		return min(max(2*before, minInterval), lastRetry)
	default:
		return min(max(2*before, firstRetry), lastRetry)
	}
}

// earlier returns the earlier time. A zero u is none.
func earlier(t, u time.Time) time.Time {
	if u.Before(t) && !u.IsZero() {
		return u
	}
	return t
}

// later returns the later time. A zero one never is.
func later(t, u time.Time) time.Time {
	if u.After(t) {
		return u
	}
	return t
}
