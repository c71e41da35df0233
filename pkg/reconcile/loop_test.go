// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// running is a loop that runs.
type running struct {
	*fixture
	*Loop
	stop func()

	mu      sync.Mutex
	reports []*Report
	logged  bytes.Buffer
}

func (f *fixture) run(change ...func(*Loop)) *running {
	r := &running{fixture: f}
	log := slog.New(slog.NewTextHandler(lockedWriter{r}, nil))
	r.Loop = NewLoop(f.Node, log, func(report *Report) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reports = append(r.reports, report)
	})
	for _, c := range change {
		c(r.Loop)
	}
	ctx, cancel := context.WithCancel(f.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	r.stop = func() { cancel(); <-done }
	f.T.Cleanup(r.stop)
	r.until("a sync", func(all []*Report) bool { return len(all) > 0 })
	return r
}

type lockedWriter struct{ r *running }

func (w lockedWriter) Write(b []byte) (int, error) {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	return w.r.logged.Write(b)
}

// until waits until what was reported is as wanted.
func (r *running) until(what string, is func([]*Report) bool) {
	r.Helper()
	const most = 5 * time.Second
	for start := time.Now(); time.Since(start) < most; time.Sleep(time.Millisecond) {
		r.mu.Lock()
		all := slices.Clone(r.reports)
		r.mu.Unlock()
		if is(all) {
			return
		}
	}
	r.Fatalf("no %s within %s; the log:\n%s", what, most, r.log())
}

func (r *running) log() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.logged.String()
}

func (r *running) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.reports)
}

// rulesChanged reports a commit by a program to the loop.
func (r *running) rulesChanged(by Writer) { r.Committed(Commit{Touched: true, By: by}) }

func last(all []*Report) *Report { return all[len(all)-1] }

// TestChangedByOfALateRepair: the program that changed the rules is named, too, if the first repair failed.
func TestChangedByOfALateRepair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, failing := newFixture(t).failRepair(Writer{Process: Process{7, "nft"}})
		failing.broken.Store(false)
		var by Writer
		r.until("repair", func(all []*Report) bool { by = last(all).By; return last(all).Result == Repaired })
		if want := (Writer{Process: Process{7, "nft"}}); by != want {
			t.Errorf("repaired what %s changed, want %s", by, want)
		}
	})
}

// TestLoopCommits: a commit that touched nothing owned causes no sync, and what was verified before it is
// verified after it. What was read before a commit that did is not.
func TestLoopCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type verified struct {
			generation uint32
			by         time.Time // when the sync began
		}
		var mu sync.Mutex
		var calls []verified
		var r *running
		f := newFixture(t).withAgent()
		driver := &readOnly{Driver: f.Drivers[0]}
		f.Drivers = netfilter.Drivers{driver}
		r = f.run(func(l *Loop) {
			l.Verified = func(report *Report, generation uint32) {
				mu.Lock()
				defer mu.Unlock()
				calls = append(calls, verified{generation, report.Started})
			}
		})
		untilVerified := func(generation uint32) (at verified) {
			t.Helper()
			r.until("verification", func([]*Report) bool {
				mu.Lock()
				defer mu.Unlock()
				i := slices.IndexFunc(calls, func(v verified) bool { return v.generation == generation })
				if i >= 0 {
					at = calls[i]
				}
				return i >= 0
			})
			return at
		}
		r.Committed(Commit{Generation: 10, Touched: true})
		untilVerified(10)
		r.Committed(Commit{Generation: 11})
		untilVerified(11)
		time.Sleep(3 * minInterval)
		if n := r.count(); n != 2 {
			t.Errorf("%d syncs, want those at the start and after generation 10", n)
		}
		// Before the event is there, the rules are wrong: what follows is not verified.
		r.nft("flush", "ruleset")
		r.Committed(Commit{Generation: 12, Touched: true, By: Writer{Process: Process{7, "nft"}}})
		r.Committed(Commit{Generation: 13})
		r.until("repair", func(all []*Report) bool { return last(all).Result == Repaired })
		r.Committed(Commit{Generation: 14, Touched: true}) // the repair
		untilVerified(14)
		mu.Lock()
		if slices.ContainsFunc(calls, func(v verified) bool { return v.generation == 12 || v.generation == 13 }) {
			t.Errorf("wrong rules are verified: %v", calls)
		}
		mu.Unlock()
		// While the rules are read, a commit touches them.
		var at time.Time
		touch := sync.OnceFunc(func() {
			at = time.Now()
			r.Committed(Commit{Generation: 15, Touched: true})
		})
		driver.observing.Store(&touch)
		r.SyncNow()
		if v := untilVerified(15); v.by.Sub(at) < minInterval/2 {
			t.Errorf("generation 15 is verified by a sync that began before it")
		}
	})
}

// TestLoopPublishesDuringSync: commits are received while a sync reads the kernel.
func TestLoopPublishesDuringSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t).withAgent()
		f.Version = "test"
		r := f.run(func(l *Loop) { l.Verified = f.Publish })
		r.Committed(Commit{Generation: 1, Touched: true})
		r.until("verification", func([]*Report) bool { return f.Dir.Published().Entry == "test" })
		for generation, syncs := uint32(2), r.count(); r.count() < syncs+5; generation++ {
			r.SyncNow()
			r.Committed(Commit{Generation: generation})
			r.until("publication", func([]*Report) bool {
				return strings.HasSuffix(f.Dir.Published().Generation, fmt.Sprintf(".%d", generation))
			})
		}
		r.until("end", func(all []*Report) bool {
			for _, report := range all {
				if !report.Ready() {
					t.Fatal(problems(report))
				}
			}
			return true
		})
	})
}

// TestLoopWatches: the loop names the chains of its policies when all of them are right. After other ones it
// reads the rules again, as a commit may have touched them before.
func TestLoopWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t).withAgent()
		watched := make(chan []netfilter.OwnedChain, 9)
		verified := make(chan *Report, 99)
		r := f.run(func(l *Loop) {
			l.Watch = func(chains []netfilter.OwnedChain) { watched <- chains }
			l.Verified = func(r *Report, _ uint32) { verified <- r }
		})
		r.Committed(Commit{Generation: 1, Touched: true})
		for _, c := range <-watched {
			if c.Chain != policy.DefaultChain || c.Choice.Backend != policy.NFTables {
				t.Errorf("got %v", c)
			}
		}
		r.agentFile("masqChain: OTHER\n")
		r.FilesChanged()
		if chains := <-watched; chains != nil {
			t.Errorf("after a write got %v", chains)
		}
		r.rulesChanged(Writer{})
		if chains := <-watched; len(chains) == 0 || chains[0].Chain != "OTHER" {
			t.Errorf("got %v", chains)
		}
		// Another process makes a chain and its rules.
		other := *f.Node
		f.conflist("podnet", map[string]any{"masqChain": "THIRD"})
		other.Sync(t.Context(), other.Read())
		time.Sleep(time.Millisecond) // what was verified so far began before
		before := time.Now()
		r.SyncNow()
		if chains := <-watched; len(chains) != 2 {
			t.Errorf("got %v", chains)
		}
		report := <-verified
		for report.Started.Before(before) {
			report = <-verified
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		i := slices.IndexFunc(r.reports, func(r *Report) bool { return r.Started.After(before) })
		if i < 0 || r.reports[i] == report {
			t.Error("the sync that found other chains verified them")
		}
	})
}

// A problem is logged once, and so is its end. A sync that changes nothing logs nothing.
func TestLoopLogsChangesOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t).withAgent()
		r := f.run()
		syncOnce := func() {
			n := r.count()
			r.SyncNow()
			r.until("sync", func(all []*Report) bool { return len(all) > n })
		}
		before := r.log()
		for range 3 {
			syncOnce()
		}
		assert.Equal(t, "log of syncs that change nothing", r.log(), before)
		r.agentFile("nonMasqueradeCIDRs: [10.9.0.1/16]\n")
		for range 3 {
			syncOnce()
		}
		if n := strings.Count(r.log(), "10.9.0.1/16"); n != 1 {
			t.Errorf("the mistake is logged %d times:\n%s", n, r.log())
		}
		r.agentFile("")
		for range 3 {
			syncOnce()
		}
		if n := strings.Count(r.log(), "msg=ready"); n != 1 {
			t.Errorf("its end is logged %d times:\n%s", n, r.log())
		}
	})
}

// A sync syncs the conflist too, unless only rules changed.
func TestLoopSyncsConflist(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		var calls atomic.Int64
		var next atomic.Pointer[time.Time]
		next.Store(&time.Time{})
		r := f.run(func(l *Loop) {
			l.SyncConflist = func(context.Context) conflist.Status {
				calls.Add(1)
				return conflist.Status{Present: true, Inserted: 1, Next: *next.Swap(&time.Time{})}
			}
		})
		r.until("result", func(all []*Report) bool { return last(all).Conflist.Present })
		for name, c := range map[string]struct {
			trigger func()
			want    int64
		}{
			"rules":   {func() { r.rulesChanged(Writer{}) }, 0},
			"files":   {r.FilesChanged, 1},
			"request": {r.SyncNow, 1},
			"its own time": {func() {
				at := time.Now().Add(50 * time.Millisecond)
				next.Store(&at)
				r.SyncNow()
			}, 2},
		} {
			before, syncs := calls.Load(), r.count()
			c.trigger()
			r.until("sync for "+name, func(all []*Report) bool { return len(all) > syncs && calls.Load() == before+c.want })
		}
		r.until("each insertion", func(all []*Report) bool {
			sum := 0
			for _, report := range all {
				sum += report.Conflist.Inserted
			}
			return sum == int(calls.Load())
		})
	})
}

// The conflist is synced when files have been quiet for 100 ms, and within a second while they are written
// all the time.
func TestLoopSyncsTheConflistOfQuietFiles(t *testing.T) {
	for name, c := range map[string]struct {
		writes        int
		least, within time.Duration // since the first write
	}{
		"one write":          {writes: 1, least: quietFiles, within: quietFiles + 2*minInterval},
		"writes without end": {writes: 100, least: maxQuietFiles, within: maxQuietFiles + 2*minInterval},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t)
				synced := make(chan time.Time, 100)
				r := f.run(func(l *Loop) {
					l.SyncConflist = func(context.Context) conflist.Status {
						synced <- time.Now()
						return conflist.Status{Present: true}
					}
				})
				<-synced // of the start
				time.Sleep(time.Second)
				began := time.Now()
				for range c.writes {
					r.FilesChanged()
					time.Sleep(30 * time.Millisecond)
				}
				if took := (<-synced).Sub(began); took < c.least || took > c.within {
					t.Errorf("the conflist was synced %s after the first write", took)
				}
			})
		})
	}
}

// A conflist that is locked delays no repair. Its problems and their end are logged like others.
func TestLoopDoesNotWaitForConflist(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t).withAgent()
		synced := make(chan conflist.Status)
		r := f.run(func(l *Loop) {
			l.SyncConflist = func(ctx context.Context) conflist.Status {
				select {
				case c := <-synced:
					return c
				case <-ctx.Done():
					return conflist.Status{}
				}
			}
		})
		r.FilesChanged()
		r.until("report", func(all []*Report) bool {
			p := last(all).Problems
			return len(p) == 1 && p[0].Reason == ReasonConflist && p[0].Waiting
		})
		r.nft("flush", "ruleset")
		r.rulesChanged(Writer{})
		r.until("repair", func(all []*Report) bool { return last(all).Result == Repaired })
		synced <- conflist.Status{Problems: []conflist.Problem{{Reason: "plugin", Err: errors.New("no plugin")}}}
		r.until("its result", func(all []*Report) bool {
			p := last(all).Problems
			return len(p) == 1 && p[0].Reason == ReasonPlugin && !last(all).Conflist.Present
		})
		synced <- conflist.Status{Present: true} // for the files
		r.until("its end", func(all []*Report) bool { return last(all).Ready() && last(all).Conflist.Present })
		log := r.log()
		for _, line := range []string{`level=INFO msg=waiting reason=conflist`, `level=ERROR msg="not ready" reason=plugin err="no plugin"`, "level=INFO msg=ready"} {
			if strings.Count(log, line) != 1 {
				t.Errorf("the log does not have %s once:\n%s", line, log)
			}
		}
	})
}

// The hook runs while the loop is active, and the instance lock is held until it returns.
func TestActive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t).withAgent()
		var active atomic.Int32
		hook := func(l *Loop) {
			l.Active = func(ctx context.Context) {
				if active.Add(1) != 1 {
					t.Error("two loops are active")
				}
				<-ctx.Done()
				time.Sleep(50 * time.Millisecond)
				if !f.Dir.ReconcilerActive() {
					t.Error("the instance lock is not held")
				}
				active.Add(-1)
			}
		}
		first := f.run(hook)
		first.until("active", func([]*Report) bool { return active.Load() == 1 })
		second := (&fixture{T: t, Node: f.Node, dir: f.dir}).run(hook)
		second.until("standing by", func(all []*Report) bool { return len(all) > 1 })
		first.stop()
		second.until("active", func([]*Report) bool { return active.Load() == 1 })
	})
}

// The instance lock is lost with the dataDir, and taken again.
func TestLoopSurvivesTheLossOfItsDataDir(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFixture(t).withAgent().run()
		must(t, os.RemoveAll(r.Dir.Path()))
		r.SyncNow()
		r.until("new instance lock", func([]*Report) bool {
			instance, err := r.Dir.InstanceLock()
			if err == nil { // the loop takes it within a second
				err = instance.Release()
			}
			return errors.Is(err, store.ErrBusy)
		})
	})
}

// The state is the present one, and does not wait for a sync.
func TestLoopState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFixture(t).withAgent().run()
		var v *enforce.State
		r.until("state", func([]*Report) bool { v = r.State(t.Context()); return v != nil }) // after the sync
		if !v.InSync() {
			t.Fatalf("state %+v", v)
		}
		time.Sleep(time.Second)
		r.nft("flush", "ruleset")
		if v := r.State(t.Context()); v == nil || v.InSync() {
			t.Errorf("the state is an old one: %+v", v)
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		r.stop()
		if v := r.State(ended); v != nil {
			t.Errorf("a loop that ended has a state: %+v", v)
		}
	})
}

// A reading does not wait for a sync that takes long.
func TestLoopStateDuringASync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t).withAgent()
		slow := &readOnly{Driver: f.Drivers[0], hold: make(chan struct{}, 1)}
		slow.hold <- struct{}{}
		f.Drivers = netfilter.Drivers{slow}
		r := f.run()
		written := slow.tried.Load()
		<-slow.hold
		r.nft("flush", "ruleset")
		r.rulesChanged(Writer{})
		r.until("sync", func([]*Report) bool { return slow.tried.Load() > written })
		read := make(chan *enforce.State, 1)
		go func() { read <- r.State(t.Context()) }()
		select {
		case v := <-read:
			if v != nil {
				t.Errorf("a state while a sync runs, which its report would follow: %+v", v)
			}
		case <-time.After(2 * time.Second):
			t.Error("the reading waits for the sync")
		}
		slow.hold <- struct{}{}
		r.until("repair", func(all []*Report) bool { return last(all).Result == Repaired })
	})
}

// failRepair runs a loop with agent files until it has failed to repair what a program changed, as its driver
// does not write.
func (f *fixture) failRepair(by Writer) (*running, *readOnly) {
	failing := &readOnly{Driver: f.Drivers[0]}
	f.Drivers = netfilter.Drivers{failing}
	r := f.withAgent().run()
	r.until("rules", func(all []*Report) bool { return last(all).Ready() })
	failing.broken.Store(true)
	r.nft("flush", "ruleset")
	r.rulesChanged(by)
	r.until("a failure", func(all []*Report) bool { return last(all).Result == Failed })
	return r, failing
}

// readOnly is a driver that does not write while it is broken, waits while it is held, and counts
// the tries.
type readOnly struct {
	netfilter.Driver
	hold   chan struct{} // nil, or it has an element while it is not held
	broken atomic.Bool
	tried  atomic.Int64

	observing atomic.Pointer[func()] // called before the rules are read
	err       error                  // of a write; nil is one without a meaning
}

func (d *readOnly) Open(c netfilter.Choice) (netfilter.Backend, error) {
	b, err := d.Driver.Open(c)
	return &readOnlyBackend{b, d}, err
}

type readOnlyBackend struct {
	netfilter.Backend
	driver *readOnly
}

func (b *readOnlyBackend) Observe(ctx context.Context, chains []policy.ChainFamily) (netfilter.Observation, error) {
	if f := b.driver.observing.Load(); f != nil {
		(*f)()
	}
	return b.Backend.Observe(ctx, chains)
}

func (b *readOnlyBackend) Apply(ctx context.Context, desired policy.Ruleset, from netfilter.Observation, held *os.File) error {
	b.driver.tried.Add(1)
	if hold := b.driver.hold; hold != nil {
		<-hold
		defer func() { hold <- struct{}{} }()
	}
	if b.driver.broken.Load() {
		return cmp.Or(b.driver.err, errors.New("not today"))
	}
	return b.Backend.Apply(ctx, desired, from, held)
}

// TestNext: what is due, and when, by what happened since a sync that ended now.
func TestNext(t *testing.T) {
	now := time.Now()
	const interval = 2 * time.Minute
	failed := &Report{Result: Failed, Problems: []Problem{{Reason: ReasonRules, Err: errors.New("not today")}}}
	refused := &Report{Result: Failed, Problems: []Problem{{Reason: ReasonRules, Source: policy.SourceID{Kind: policy.AgentFiles}, Err: errors.New("not today")}}}
	reverted := &Report{Drift: policy.Diff{{}}, Problems: []Problem{{Reason: ReasonRules, Err: &enforce.DriftError{}}}}
	invalid := &Report{Problems: []Problem{{Reason: ReasonSource, Err: errors.New("no CIDR")}}}
	well := &Report{Result: Unchanged, Rules: &enforce.State{}}
	resets := &Report{Result: Unchanged, State: store.State{Record: store.Record{Resets: []store.Reset{{At: 1}}}}}
	laterResets := &Report{Result: Unchanged, State: store.State{Record: store.Record{Resets: []store.Reset{{At: 1}}, LastReset: 1 << 60}}}
	after := func(reports ...*Report) func(*state) {
		return func(s *state) {
			for _, r := range reports {
				s.noteSync(now, r, interval)
			}
		}
	}
	times := func(n int, r *Report) []*Report { return slices.Repeat([]*Report{r}, n) }
	flapping := func(s *state) {
		for range flappingThreshold + 2 {
			s.flapping.Reverted(now, policy.Change{Chain: "A"})
		}
	}
	rules := func(s *state) { s.committed(Commit{Generation: 5, Touched: true}) }
	files := func(s *state) { s.files.Event(now) }
	addresses := func(s *state) { s.addresses.Event(now) }
	request := func(s *state) { s.triggers.request = true }
	read := func(s *state) { s.triggers.read = now.Add(time.Millisecond) }
	begun := func(w work) func(*state) { return func(s *state) { s.running[w] = true } }
	for name, c := range map[string]struct {
		state []func(*state)
		want  work
		after time.Duration
	}{
		"nothing was synced":                       {[]func(*state){func(s *state) { *s = state{}; s.activate(false) }}, reading, 0},
		"no event":                                 {nil, reading, interval},
		"a commit that touched nothing":            {[]func(*state){func(s *state) { s.committed(Commit{Generation: 5}) }}, publishing, 0},
		"which is published":                       {[]func(*state){func(s *state) { s.commits.generation, s.published = 5, publication{s.last.report, 5} }}, reading, interval},
		"rules changed":                            {[]func(*state){rules}, syncing, minInterval},
		"files changed":                            {[]func(*state){files}, reading, quietFiles},
		"addresses changed":                        {[]func(*state){addresses}, syncing, quietAddresses},
		"requested":                                {[]func(*state){request}, reading, minInterval},
		"requested, files are written":             {[]func(*state){request, files}, syncing, minInterval},
		"read":                                     {[]func(*state){read}, syncing, minInterval},
		"read, conflist begun":                     {[]func(*state){read, begun(syncingConflist)}, syncing, minInterval + time.Millisecond},
		"conflist begun":                           {[]func(*state){begun(syncingConflist)}, reading, interval},
		"read, conflist begun, rules":              {[]func(*state){rules, read, begun(syncingConflist)}, syncing, minInterval},
		"conflist due":                             {[]func(*state){func(s *state) { s.conflist.due = now.Add(time.Second) }}, syncingConflist, time.Second},
		"conflist synced":                          {[]func(*state){func(s *state) { s.triggers.conflist = true }}, syncing, minInterval},
		"a sync runs":                              {[]func(*state){rules, begun(syncing)}, nothing, 0},
		"sources are read":                         {[]func(*state){rules, begun(reading)}, nothing, 0},
		"failed once":                              {[]func(*state){after(failed)}, reading, firstRetry},
		"a policy was refused":                     {[]func(*state){after(refused)}, reading, firstRetry},
		"a policy is invalid":                      {[]func(*state){after(invalid)}, reading, interval},
		"failed three times":                       {[]func(*state){after(times(3, failed)...)}, reading, 4 * firstRetry},
		"failed for long":                          {[]func(*state){after(times(20, failed)...)}, reading, lastRetry},
		"failed, rules changed":                    {[]func(*state){after(failed), rules}, syncing, minInterval}, // for a dry run
		"failed, files changed":                    {[]func(*state){after(times(3, failed)...), files}, reading, quietFiles},
		"failed, then well":                        {[]func(*state){after(append(times(3, failed), well)...)}, reading, interval},
		"reverted":                                 {[]func(*state){after(reverted)}, reading, minInterval},
		"flapping, rules changed":                  {[]func(*state){flapping, rules}, syncing, 4 * time.Second},
		"flapping, requested":                      {[]func(*state){flapping, rules, request}, reading, minInterval},
		"flapping, no event":                       {[]func(*state){flapping}, syncing, 8 * time.Second},
		"flapping, files":                          {[]func(*state){flapping, files}, reading, quietFiles},
		"flapping, addresses":                      {[]func(*state){flapping, addresses}, syncing, quietAddresses},
		"flapping, conflist synced":                {[]func(*state){flapping, func(s *state) { s.triggers.conflist = true }}, syncing, minInterval},
		"resets on record":                         {[]func(*state){after(resets)}, resetting, 0},
		"resets on record, due at an unknown time": {[]func(*state){after(laterResets)}, resetting, 0},
		"resets on record, due later":              {[]func(*state){func(s *state) { s.resets.due = now.Add(time.Second) }, after(laterResets)}, resetting, time.Second},
		"resets on record, due now":                {[]func(*state){func(s *state) { s.resets.due = now.Add(time.Second) }, after(resets)}, resetting, 0},
		"a reset that is due later":                {[]func(*state){func(s *state) { s.resets.due = now.Add(time.Second) }}, resetting, time.Second},
		"a reset failed":                           {[]func(*state){func(s *state) { s.resets = resetState{now.Add(2 * time.Second), 2 * time.Second} }, after(resets)}, resetting, 2 * time.Second},
		"a reset failed, before this loop was active again": {[]func(*state){func(s *state) {
			s.resets.retry = time.Minute
			s.activate(false)
			s.triggers = triggers{}
		}, after(resets)}, resetting, 0},
		"resets on record, a reset runs": {[]func(*state){after(resets), begun(resetting)}, reading, interval},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewLoop(nil, slog.New(slog.DiscardHandler), nil).state
			s.activate(false)
			s.triggers.request, s.sources = false, &Sources{}
			s.noteSync(now, well, interval)
			for _, f := range c.state {
				f(&s)
			}
			got, at := s.next(now)
			if got == nothing && at.Before(never()) { // a moment later it is due
				wake := at
				if got, at = s.next(at); !at.Equal(wake) {
					t.Errorf("at %s nothing is due", wake.Sub(now))
				}
			}
			if after := at.Sub(now); got != c.want || got != nothing && after != c.after {
				t.Errorf("work %d is due after %s, want %d after %s", got, after, c.want, c.after)
			}
		})
	}
}

// TestNoteAddresses: an event of an address counts while it is unknown whether the rules depend on it.
func TestNoteAddresses(t *testing.T) {
	now := time.Now()
	well := &Report{Result: Unchanged, Rules: &enforce.State{}}
	for name, c := range map[string]struct {
		state func(*state)
		want  bool
	}{
		"nothing was synced":                 {func(s *state) { s.last.report = nil }, true},
		"no rule depends on addresses":       {func(*state) {}, false},
		"the rules cannot be read":           {func(s *state) { s.last.report = &Report{Result: Failed} }, false},
		"a sync runs, maybe of a new policy": {func(s *state) { s.running[syncing] = true }, true},
		"another event is not synced yet":    {func(s *state) { s.addresses.Event(now) }, true},
	} {
		s := newState()
		s.last.report = well
		c.state(&s)
		later := now.Add(time.Millisecond)
		s.noteAddresses(later)
		isNoted := s.addresses.Pending() && s.addresses.Due().Equal(later.Add(quietAddresses))
		assert.Equal(t, name+": the event is noted", isNoted, c.want)
	}
}

func TestDetectFlapping(t *testing.T) {
	l := NewLoop(nil, slog.New(slog.DiscardHandler), nil).state
	now := time.Now()
	drift := policy.Diff{{Kind: policy.JumpChange, Family: policy.IPv4, Chain: "A", Text: "jump"}}
	for i := range flappingThreshold {
		p := l.detectFlapping(now, &Report{Drift: drift, By: []Writer{{Process: Process{7, "firewalld"}}, {}}[i%2]})
		if (p != nil) != (i == flappingThreshold-1) {
			t.Fatalf("after %d reverts: %v", i+1, p)
		}
	}
	want := `another program reverts the rules repeatedly (ipv4 A: missing jump from POSTROUTING: of all traffic), most likely "firewalld" (host pid 7); ` +
		"repairs are 1s apart now: stop that program, make it leave the chain alone, or set backend to \"nftables\" if the chain is kept in iptables, and then run ip-masq-reconciler once; " +
		"this message ends 2s after the last repair"
	if p := l.detectFlapping(now.Add(2*time.Second), &Report{}); p == nil || p.Err.Error() != want || p.Reason != ReasonFlapping {
		t.Errorf("%v\nwant %s", p, want)
	}
	if p := l.detectFlapping(now.Add(2*time.Second+1), &Report{}); p != nil {
		t.Errorf("it is not over: %v", p)
	}
}

// TestFlappingProgram: the program is named that reverted this change, in this time.
func TestFlappingProgram(t *testing.T) {
	change := func(chain string) policy.Diff {
		return policy.Diff{{Kind: policy.JumpChange, Family: policy.IPv4, Chain: chain, Text: "jump"}}
	}
	first, last := Writer{Process: Process{7, "iptables"}}, Writer{Process: Process{8, "firewalld"}}
	for name, c := range map[string]struct {
		before string        // the chain that the first program changed
		after  time.Duration // from when unknown programs change chain A
		then   string        // the chain that the last program changes
		want   Writer
	}{
		"the same change": {"A", time.Second, "", first},
		"the same change, and another while A flaps":  {"A", time.Second, "B", first},
		"the same change, days ago":                   {"A", 48 * time.Hour, "", Writer{}},
		"another change":                              {"B", time.Second, "", Writer{}},
		"another change, and one more while A flaps":  {"B", time.Second, "C", Writer{}},
		"another change, and this one while it flaps": {"B", time.Second, "A", last},
	} {
		l := NewLoop(nil, slog.New(slog.DiscardHandler), nil).state
		now := time.Now()
		l.detectFlapping(now, &Report{Drift: change(c.before), By: first})
		now = now.Add(c.after)
		var p *Problem
		for range flappingThreshold {
			p = l.detectFlapping(now, &Report{Drift: change("A")})
		}
		if c.then != "" {
			p = l.detectFlapping(now, &Report{Drift: change(c.then), By: last})
		}
		if p == nil {
			t.Fatalf("%s: it is not detected", name)
		}
		if !strings.Contains(p.Err.Error(), "most likely "+c.want.String()+";") {
			t.Errorf("%s: %v, want %s", name, p.Err, c.want)
		}
	}
}

// After a failure a dry run is followed by a sync if something else, or nothing, is to be written.
func TestSameOutstanding(t *testing.T) {
	state := func(recorded bool, failed error, drift ...policy.Change) *Report {
		r := &Report{Rules: &enforce.State{Chains: []enforce.Chain{{Recorded: recorded, Diff: drift}}}}
		if len(drift) > 0 {
			r.problem(ReasonRules, &enforce.DriftError{Diff: drift})
		}
		if failed != nil {
			r.Rules.Chains[0].Err = failed
		}
		return r
	}
	jump := policy.Change{Kind: policy.JumpChange, Family: policy.IPv4, Chain: "A", Text: "jump"}
	rule := policy.Change{Kind: policy.RuleChange, Family: policy.IPv4, Chain: "A", Text: "rule"}
	for name, c := range map[string]struct {
		now, last *Report
		want      bool
	}{
		"nothing is known of the last":    {state(true, nil, jump), &Report{}, true},
		"nothing, beside a busy lock":     {state(true, nil), &Report{}, false},
		"what failed":                     {state(true, nil, jump), state(true, errors.New("not today"), jump), true},
		"something else":                  {state(true, nil, jump, rule), state(true, errors.New("not today"), jump), false},
		"nothing any more":                {state(true, nil), state(true, errors.New("not today")), false},
		"a record that cannot be written": {state(false, nil), state(false, errors.New("not today")), true},
	} {
		assert.Equal(t, name, c.now.sameOutstanding(c.last), c.want)
	}
}

// TestRevertedRepairIsAWarning: another program changes the rules between a repair and its
// verification. The next sync repairs them, and a repetition is an error of its own (flapping).
func TestRevertedRepairIsAWarning(t *testing.T) {
	drift := policy.Diff{{Chain: "IP-MASQ-AGENT", Family: policy.IPv4}}
	for _, test := range []struct {
		found policy.Diff
		level string
	}{{drift, "WARN"}, {nil, "ERROR"}} {
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		l := syncLog{log: log, once: flowcontrol.LogOnce(log)}
		l.report(&Report{Drift: test.found, Problems: []Problem{{Reason: ReasonRules, Err: &enforce.DriftError{Diff: drift}}}})
		assert.Contains(t, "log", out.String(), "level="+test.level+` msg="not ready"`)
	}
}

// TestRulesOfAnADDAreNotLogged: an ADD wrote the rule of a pod, so the sync that follows finds nothing wrong.
func TestRulesOfAnADDAreNotLogged(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	l := syncLog{log: log, once: flowcontrol.LogOnce(log)}
	report := func(result Result, rules int) {
		desired := policy.Ruleset{Chains: []policy.Chain{{Name: "A", Family: policy.IPv4, Rules: make([]policy.Rule, rules)}}}
		l.report(&Report{Result: result, Rules: &enforce.State{Chains: []enforce.Chain{{Desired: desired}}}})
	}
	report(Changed, 1)
	assert.Contains(t, "log", out.String(), `msg="managing chains" chains="A (ipv4`)
	out.Reset()
	report(Unchanged, 2)
	if out.Len() > 0 {
		t.Errorf("unexpected lines:\n%s", &out)
	}
}

// TestChangedByInJSON: the program is text in both formats of the log.
func TestChangedByInJSON(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewJSONHandler(&out, nil))
	l := syncLog{log: log, once: flowcontrol.LogOnce(log)}
	l.report(&Report{Drift: policy.Diff{{Chain: "A", Family: policy.IPv4}}, By: Writer{Process: Process{7, "iptables"}}})
	assert.Contains(t, "log", out.String(), `"changed_by":"\"iptables\" (host pid 7)"`)
}
