// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// running is a loop at work.
type running struct {
	*fixture
	*Loop
	stop func()

	mu      sync.Mutex
	reports []*Report
	told    bytes.Buffer
}

func (f *fixture) run() *running {
	r := &running{fixture: f}
	log := slog.New(slog.NewTextHandler(lockedWriter{r}, nil))
	r.Loop = NewLoop(f.Node, log, func(report *Report) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reports = append(r.reports, report)
	})
	ctx, cancel := context.WithCancel(f.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	r.stop = func() { cancel(); <-done }
	f.T.Cleanup(r.stop)
	r.until("a pass", func(all []*Report) bool { return len(all) > 0 })
	return r
}

type lockedWriter struct{ r *running }

func (w lockedWriter) Write(b []byte) (int, error) {
	w.r.mu.Lock()
	defer w.r.mu.Unlock()
	return w.r.told.Write(b)
}

// until waits until what was reported is as wanted.
func (r *running) until(what string, is func([]*Report) bool) {
	r.Helper()
	const most = 5 * time.Second
	for start := time.Now(); !timelimit.Exceeded(time.Since(start), most); time.Sleep(time.Millisecond) {
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
	return r.told.String()
}

func (r *running) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.reports)
}

func last(all []*Report) *Report { return all[len(all)-1] }

func TestLoopRepairsWhenToldOfRules(t *testing.T) {
	r := newFixture(t).withAgent().run()
	r.nft("flush", "ruleset")
	r.RulesChanged(Writer{7, "nft"})
	r.until("repair", func(all []*Report) bool { return last(all).Result == Repaired })
	r.exempts(defaults)
	if log := r.log(); !strings.Contains(log, "repaired rules") || !strings.Contains(log, "pid 7") {
		t.Errorf("the log does not tell:\n%s", log)
	}
}

func TestLoopReadsFilesWhenToldOfThem(t *testing.T) {
	r := newFixture(t).withAgent().run()
	r.agentFile("nonMasqueradeCIDRs: [10.9.0.0/16]\n")
	passes := r.count()
	r.RulesChanged(Writer{})
	r.until("pass", func(all []*Report) bool { return len(all) > passes })
	r.exempts(defaults) // files have events of their own
	r.FilesChanged()
	r.until("change", func(all []*Report) bool { return last(all).Result == Changed })
	r.exempts("10.9.0.0/16," + linkLocal)
}

// The interval does without events, and a file's own replaces the settings'.
func TestLoopInterval(t *testing.T) {
	f := newFixture(t).withAgent()
	f.agentFile("resyncInterval: 1s\n")
	r := f.run()
	r.nft("flush", "ruleset")
	r.until("repair", func(all []*Report) bool { return last(all).Result == Repaired })
}

// A problem is told once, and so is its end; and what is as it was says nothing.
func TestLoopTellsNewsAlone(t *testing.T) {
	f := newFixture(t).withAgent()
	r := f.run()
	pass := func() {
		n := r.count()
		r.SyncNow()
		r.until("pass", func(all []*Report) bool { return len(all) > n })
	}
	before := r.log()
	for range 3 {
		pass()
	}
	if after := r.log(); after != before {
		t.Errorf("quiet passes say\n%s", strings.TrimPrefix(after, before))
	}
	r.agentFile("nonMasqueradeCIDRs: [10.9.0.1/16]\n")
	for range 3 {
		pass()
	}
	if n := strings.Count(r.log(), "10.9.0.1/16"); n != 1 {
		t.Errorf("the mistake is told %d times:\n%s", n, r.log())
	}
	r.agentFile("")
	for range 3 {
		pass()
	}
	if n := strings.Count(r.log(), "all is well again"); n != 1 {
		t.Errorf("its end is told %d times:\n%s", n, r.log())
	}
}

// One works and the other stands by, until the first ends.
func TestTwoLoops(t *testing.T) {
	f := newFixture(t).withAgent()
	first := f.run()
	second := (&fixture{T: t, Node: f.Node, dir: f.dir}).run()
	second.until("standing by", func(all []*Report) bool {
		return len(last(all).Problems) == 1 && last(all).Problems[0].Reason == ReasonStandby
	})
	if v := second.State(t.Context()); v != nil {
		t.Errorf("it has a view: %v", v)
	}
	first.stop()
	second.until("taking over", func(all []*Report) bool { return last(all).Ready() && last(all).Rules != nil })
}

// The lead is lost with the dataDir, and taken again.
func TestLoopSurvivesTheLossOfItsState(t *testing.T) {
	r := newFixture(t).withAgent().run()
	if err := os.RemoveAll(r.Dir.Path()); err != nil {
		t.Fatal(err)
	}
	r.SyncNow()
	r.until("new lead", func([]*Report) bool {
		lead, err := r.Dir.InstanceLock()
		if err == nil { // the loop will find it free in a second
			err = lead.Release()
		}
		return errors.Is(err, store.ErrBusy)
	})
}

// A View is of now and does not wait for a pass.
func TestLoopView(t *testing.T) {
	r := newFixture(t).withAgent().run()
	v := r.State(t.Context())
	if v == nil || !v.InSync() {
		t.Fatalf("view %+v", v)
	}
	time.Sleep(time.Second)
	r.nft("flush", "ruleset")
	if v := r.State(t.Context()); v == nil || v.InSync() {
		t.Errorf("the view is an old one: %+v", v)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r.stop()
	if v := r.State(ended); v != nil {
		t.Errorf("a loop that ended has a view: %+v", v)
	}
}

// What somebody undoes at once, each time, is not repaired at the pace of events.
func TestLoopBacksOffFromARival(t *testing.T) {
	r := newFixture(t).withAgent().run()
	rival := Writer{7, "firewalld"}
	for suspected := false; !suspected; {
		r.nft("flush", "ruleset")
		n := r.count()
		r.RulesChanged(rival)
		r.until("pass", func(all []*Report) bool { return len(all) > n })
		r.mu.Lock()
		problems := last(r.reports).Problems
		r.mu.Unlock()
		suspected = len(problems) == 1 && problems[0].Reason == ReasonFlapping && strings.Contains(problems[0].Err.Error(), `"firewalld" (host pid 7)`)
		if n > 10*rivalry {
			t.Fatal("nobody is suspected")
		}
	}
	n := r.count()
	for range 20 {
		r.RulesChanged(rival)
		time.Sleep(10 * time.Millisecond)
	}
	if made := r.count() - n; made > 1 {
		t.Errorf("%d passes in 200 ms of a rival's events", made)
	}
	// It is gone: after a while all is well again, with nobody's help.
	r.until("peace", func(all []*Report) bool { return last(all).Ready() })
}

// A repair that fails is not tried again at the pace of events, as long as no other
// is due.
func TestLoopBacksOffFromARepairThatFails(t *testing.T) {
	f := newFixture(t).withAgent()
	failing := &readOnly{Driver: f.Drivers[0]}
	f.Drivers = netfilter.Drivers{failing}
	r := f.run()
	r.until("rules", func(all []*Report) bool { return last(all).Ready() })
	failing.broken.Store(true)
	r.nft("flush", "ruleset")
	r.RulesChanged(Writer{})
	const retry = 16 * firstRetry
	r.until("a failure", func(all []*Report) bool { return last(all).Result == Failed })
	time.Sleep(retry) // then the next is that far away
	tried := failing.tried.Load()
	for range 20 {
		r.RulesChanged(Writer{})
		time.Sleep(10 * time.Millisecond)
	}
	if n := failing.tried.Load() - tried; n > 2 {
		t.Errorf("tried %d times in 200 ms of events", n)
	}
	failing.broken.Store(false)
	r.until("repair", func(all []*Report) bool { return last(all).Ready() })
}

// readOnly is a driver that does not write while it is broken, and counts the tries.
type readOnly struct {
	netfilter.Driver
	broken atomic.Bool
	tried  atomic.Int64
}

func (d *readOnly) Open(c netfilter.Choice) (netfilter.Backend, error) {
	b, err := d.Driver.Open(c)
	return &readOnlyBackend{b, d}, err
}

type readOnlyBackend struct {
	netfilter.Backend
	driver *readOnly
}

func (b *readOnlyBackend) Apply(ctx context.Context, desired policy.Ruleset, from netfilter.Observation, held *os.File) error {
	b.driver.tried.Add(1)
	if b.driver.broken.Load() {
		return errors.New("not today")
	}
	return b.Backend.Apply(ctx, desired, from, held)
}
