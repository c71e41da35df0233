// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"fmt"
	"slices"
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
	// A sync or a reset that failed is repeated after a time that doubles from firstRetry to lastRetry.
	firstRetry = time.Second
	lastRetry  = time.Minute
	// The same drift this often within flappingWindow is flapping. A person who experiments, or a
	// program that writes its rules each minute, causes it less often.
	flappingThreshold = 30
	flappingWindow    = time.Minute
)

// work is what the loop does in a goroutine of its own. Of each kind one runs at a time.
type work int

const (
	publishing      work = iota // writes for the plugin at which generation the rules are right
	syncingConflist             // may wait for a lock and for disks, which delays no repair
	reading                     // reads the sources
	syncing                     // syncs the rules
	resetting                   // walks through the conntrack table
	works                       // how many kinds there are
)

// state is what the loop knows. Only its goroutine has it. Events change it, and next decides by it alone.
type state struct {
	triggers  triggers             // since the last sync began
	files     flowcontrol.Debounce // a conflist or an agent file may have changed
	addresses flowcontrol.Debounce // the node's addresses changed, and the rules depend on them

	generation uint32 // of the last commit, 0 before the first
	touches    int    // how many commits may have changed owned rules
	writer     Writer // the program that changed them last, until a sync has repaired that

	sources     *Sources         // as they were read last
	conflist    *conflist.Status // nil if this loop does not sync it
	conflistDue time.Time

	last        *Report // of the last sync; nil before the first and after this loop stopped being active
	lastTouches int     // touches when that sync began
	lastEnded   time.Time
	interval    time.Time     // when the next sync is due without an event
	retry       time.Duration // how long the last sync waits for its repetition; 0 unless it failed
	published   publication   // the last one
	watched     []netfilter.OwnedChain
	flapping    flowcontrol.Flapping[policy.Change]
	flappingBy  Writer // its likely cause

	resetDue   time.Time
	resetRetry time.Duration // 0 unless the last reset failed

	running [works]time.Time // when each work began that runs; else zero
}

// triggers are what a sync is made for, besides its interval.
type triggers struct {
	rules    bool      // a program may have changed owned rules
	request  bool      // everything is to be read and tried again
	read     time.Time // when the sources were read first; zero if they were not
	conflist bool      // it was synced
}

// publication says that the rules are as a sync found them, at a generation.
type publication struct {
	report     *Report
	generation uint32
}

// never is when something is due that nothing asks for.
func never() time.Time { return time.Unix(1<<40, 0) }

// next returns the work that is due. If none is, it returns works, and when one may be.
func (s *state) next(now time.Time) (work, time.Time) {
	sync := syncing
	if s.readsSources(now) {
		sync = reading
	}
	usesNode := !s.running[reading].IsZero() || !s.running[syncing].IsZero() // which is for one at a time
	wake := never()
	for _, w := range []struct {
		work
		due time.Time
	}{
		{publishing, s.publishDue()}, {syncingConflist, s.conflistDue}, {sync, s.syncDue()}, {resetting, s.resetDue},
	} {
		switch {
		case !s.running[w.work].IsZero(), w.work == sync && usesNode:
		case !w.due.After(now):
			return w.work, now
		default:
			wake = earlier(wake, w.due)
		}
	}
	return works, wake
}

// syncDue returns when the next sync is due. Syncs are minInterval apart, and more while the rules are flapping, unless
// more than rules has changed. A sync that follows a reading waits a little for the conflist, whose result it reports.
func (s *state) syncDue() time.Time {
	soon := s.lastEnded.Add(minInterval)
	due := s.interval
	if s.triggers.rules {
		due = earlier(due, soon)
	}
	if s.addresses.Pending() {
		due = earlier(due, later(soon, s.addresses.Due()))
	}
	if pause := s.flapping.Pause(); pause > 0 { // at its end it is known whether the flapping is over
		due = later(earlier(due, s.flapping.Ends()), s.lastEnded.Add(pause))
	}
	if s.files.Pending() {
		due = earlier(due, later(soon, s.files.Due()))
	}
	if s.triggers.request || !s.triggers.read.IsZero() || s.triggers.conflist {
		due = earlier(due, soon)
	}
	if !s.running[syncingConflist].IsZero() && !s.triggers.rules {
		due = later(due, s.triggers.read.Add(minInterval)) // since the first reading, so that further ones do not delay it again
	}
	return due
}

// readsSources reports whether a sync reads the sources first. Files that are being written are read when their own
// event is due.
func (s *state) readsSources(now time.Time) bool {
	asked := s.triggers.request || s.intervalOver(now) && s.triggers.read.IsZero()
	return s.sources == nil || s.files.Over(now) || asked && !s.files.Pending()
}

func (s *state) intervalOver(now time.Time) bool { return !now.Before(s.interval) }

// retriesSoon reports whether the last sync failed, and the one that is due is neither its repetition nor asked for by
// more than events about rules.
func (s *state) retriesSoon(now time.Time) bool {
	only := triggers{rules: s.triggers.rules}
	return s.retry > 0 && s.triggers == only && !s.intervalOver(now) && !s.last.reverted()
}

// verified reports whether the rules are as the last sync found them, which is right: its rules were read at
// generations since it began, and they are those of the last commit unless a further one changed them.
func (s *state) verified() bool {
	return s.last != nil && s.last.verified() && s.touches == s.lastTouches
}

// publishDue returns the past if the last generation is verified and not published.
func (s *state) publishDue() time.Time {
	if s.generation == 0 || !s.verified() || s.published == (publication{s.last, s.generation}) {
		return never()
	}
	return s.lastEnded
}

// begin makes this loop active: nothing is known, and everything due.
func (s *state) begin() {
	s.triggers.request, s.conflistDue, s.resetDue, s.resetRetry = true, never(), never(), 0
}

// conflistSynced takes note of the conflist's state, which the next sync reports.
func (s *state) conflistSynced(c conflist.Status) {
	c.Inserted += s.conflist.Inserted
	s.conflist, s.triggers.conflist, s.conflistDue = &c, true, earlier(s.conflistDue, c.Next)
}

// sourcesRead takes note of the sources. The conflist is synced after that: another program may write it as soon as it has
// the entry.
func (s *state) sourcesRead(src *Sources, now time.Time, syncsConflist bool) {
	s.sources = src
	if s.triggers.read.IsZero() {
		s.triggers.read = now
	}
	if syncsConflist {
		s.conflistDue = now
	}
}

func (s *state) committed(c Commit) {
	if c.Generation != 0 {
		s.generation = c.Generation
	}
	if !c.Touched {
		return
	}
	s.touches++
	s.triggers.rules = true
	if c.By != (Writer{}) {
		s.writer = c.By
	}
}

// detectFlapping returns the problem if another program reverts the rules repeatedly.
func (s *state) detectFlapping(now time.Time, r *Report) *Problem {
	if len(r.Drift) > 0 {
		s.flapping.Reverted(now, r.Drift[0])
		s.flappingBy = cmp.Or(r.By, s.flappingBy)
	}
	what := s.flapping.Active(now)
	if what == (policy.Change{}) {
		return nil
	}
	return &Problem{Reason: ReasonFlapping, Err: fmt.Errorf("another program reverts the rules repeatedly (%s), most likely %s; "+
		"repairs are %s apart now: stop that program, make it leave the chain alone, or set backend to \"nftables\" if the chain is kept in iptables, and then run ip-masq-reconciler once; "+
		"this message ends %s after the last repair", what, s.flappingBy, s.flapping.Pause(), 2*s.flapping.Pause())}
}

// synced takes note of the report of a sync, and decides when the next one is due without an event.
func (s *state) synced(now time.Time, r *Report, interval time.Duration) {
	s.last, s.lastEnded, s.interval = r, now, now.Add(interval)
	switch {
	case !r.failed():
		s.retry = 0
	case r.reverted(): // the other program's commit is an event, too, where the kernel has events
		s.retry = max(2*s.retry, minInterval)
	default:
		s.retry = max(2*s.retry, firstRetry)
	}
	s.retry = min(s.retry, lastRetry)
	if s.retry > 0 {
		s.interval = earlier(s.interval, now.Add(s.retry))
	}
	if len(r.State.Record.Resets) == 0 || s.resetRetry > 0 || r.rulesFailed() {
		return
	}
	// Of resets that are not due, the one that runs then returns when they are.
	if s.resetDue.Equal(never()) || enforce.ResetsDue(r.State.Record) {
		s.resetDue = now
	}
}

// earlier returns the earlier time. A zero u is none.
func earlier(t, u time.Time) time.Time {
	if u.Before(t) && !u.IsZero() {
		return u
	}
	return t
}

func later(t, u time.Time) time.Time { return slices.MaxFunc([]time.Time{t, u}, time.Time.Compare) }
