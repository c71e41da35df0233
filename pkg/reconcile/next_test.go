// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// told is an event that comes after a wait.
type told struct {
	wait time.Duration
	kind int
}

const (
	touchedCommit = iota
	otherCommit
	fileEvent
	request
	addressEvent
	kinds
)

// history is what a loop was told and what it did, with the times.
type history struct {
	mu        sync.Mutex
	touched   map[uint32]time.Time // commits that touched owned rules, by generation
	files     []time.Time          // events
	reads     []time.Time
	reports   []*Report
	ended     []time.Time          // when each report came
	published map[uint32]time.Time // generation: when the sync that verified it began
}

func (h *history) record(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
}

// TestLoopKeepsItsPromises tells a loop on a node without rules any events at any times, while the conflist
// and the publication take any time. A sync begins within minInterval of a commit that touched owned rules,
// whatever else is under way. Syncs are minInterval apart, and at most the interval. Files are read when they
// have settled. Nothing is published that a sync verified which began before the last commit that touched
// owned rules.
func TestLoopKeepsItsPromises(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		upTo := func(what string, most time.Duration) time.Duration {
			return time.Duration(rapid.Int64Range(0, int64(most/time.Millisecond)).Draw(rt, what)) * time.Millisecond
		}
		var events []told
		for range rapid.IntRange(1, 40).Draw(rt, "events") {
			most := rapid.SampledFrom([]time.Duration{5 * time.Millisecond, 50 * time.Millisecond, 3 * time.Second}).Draw(rt, "pace")
			events = append(events, told{upTo("wait", most), rapid.IntRange(0, kinds-1).Draw(rt, "kind")})
		}
		conflistTakes, publicationTakes := upTo("conflist", time.Second), upTo("publication", 100*time.Millisecond)
		dir := t.TempDir()
		var h *history
		synctest.Test(t, func(t *testing.T) { h = runLoop(t, dir, events, conflistTakes, publicationTakes) })
		h.check(rt)
	})
}

// TestRequestsDelayNoSync: a sync waits for the conflist once, however often the sources are read meanwhile.
func TestRequestsDelayNoSync(t *testing.T) {
	events := slices.Repeat([]told{{time.Millisecond, request}}, 500)
	var h *history
	synctest.Test(t, func(t *testing.T) { h = runLoop(t, t.TempDir(), events, 15*time.Millisecond, 0) })
	const most = 2*minInterval + time.Millisecond // after one sync, and for the conflist
	if len(h.reports) < 10 {
		t.Fatalf("%d syncs, while one is requested each millisecond", len(h.reports))
	}
	for i := range 9 {
		if pause := h.reports[i+1].Started.Sub(h.ended[i]); pause > most {
			t.Errorf("a sync begins %s after the one before, while it is requested each millisecond", pause)
		}
	}
}

const testInterval = 2 * time.Second

func runLoop(t *testing.T, dir string, events []told, conflistTakes, publicationTakes time.Duration) *history {
	h := &history{touched: map[uint32]time.Time{}, published: map[uint32]time.Time{}}
	s := config.DefaultSettings()
	s.DataDir, s.CNIConfDir, s.AgentConfigDir, s.ResyncInterval = filepath.Join(dir, "data"), dir, dir, testInterval
	n := Open(s, filepath.Join(dir, "plugin.toml"), nil)
	n.AgentFiles = func() (agentconfig.Files, error) {
		h.record(func() { h.reads = append(h.reads, time.Now()) })
		return agentconfig.Files{Dir: dir}, errors.New("not today") // so that there is no policy
	}
	l := NewLoop(n, slog.New(slog.DiscardHandler), func(r *Report) {
		h.record(func() { h.reports, h.ended = append(h.reports, r), append(h.ended, time.Now()) })
	})
	l.SyncConflist = func(context.Context) conflist.Status {
		time.Sleep(conflistTakes)
		return conflist.Status{Present: true}
	}
	l.Verified = func(r *Report, generation uint32) {
		h.record(func() {
			if _, again := h.published[generation]; !again {
				h.published[generation] = r.Started
			}
		})
		time.Sleep(publicationTakes)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { l.Run(ctx) })
	for i, e := range events {
		time.Sleep(e.wait)
		now, generation := time.Now(), uint32(i+1)
		switch e.kind {
		case touchedCommit:
			h.record(func() { h.touched[generation] = now })
			l.Committed(Commit{Generation: generation, Touched: true})
		case otherCommit:
			l.Committed(Commit{Generation: generation})
		case fileEvent:
			h.record(func() { h.files = append(h.files, now) })
			l.FilesChanged()
		case request:
			l.SyncNow()
		case addressEvent:
			l.AddressesChanged()
		}
	}
	time.Sleep(2 * testInterval)
	cancel()
	running.Wait()
	return h
}

func (h *history) check(t *rapid.T) {
	var began []time.Time
	for i, r := range h.reports {
		began = append(began, r.Started)
		if i == 0 {
			continue
		}
		if pause := r.Started.Sub(h.ended[i-1]); pause < minInterval || pause > testInterval+minInterval {
			t.Errorf("a sync begins %s after the one before", pause)
		}
	}
	for generation, at := range h.touched {
		if !containsFrom(began, at, minInterval) {
			t.Errorf("no sync begins within %s of generation %d", minInterval, generation)
		}
		for published, began := range h.published {
			if published >= generation && began.Before(at) {
				t.Errorf("generation %d is published by a sync that began before generation %d", published, generation)
			}
		}
	}
	for _, at := range h.files {
		if !containsFrom(h.reads, at, maxQuietFiles+minInterval) {
			t.Errorf("files that changed are not read within %s", maxQuietFiles+minInterval)
		}
	}
}

// containsFrom reports whether one of the times is at most this long after another one.
func containsFrom(times []time.Time, at time.Time, most time.Duration) bool {
	for _, x := range times {
		if wait := x.Sub(at); wait >= 0 && wait <= most {
			return true
		}
	}
	return false
}

// TestRetriesEarly: after a failure, events about rules ask for a dry run first, and nothing else does.
func TestRetriesEarly(t *testing.T) {
	now := time.Now()
	failed := Problem{Reason: ReasonRules, Err: errors.New("not today")}
	reverted := Problem{Reason: ReasonRules, Err: netfilter.ErrChanged}
	for name, c := range map[string]struct {
		last  []Problem
		event func(*state)
		want  bool
	}{
		"rules":                  {[]Problem{failed}, func(s *state) { s.triggers.rules = true }, true},
		"addresses":              {[]Problem{failed}, func(*state) {}, true},
		"rules and a request":    {[]Problem{failed}, func(s *state) { s.triggers = triggers{rules: true, request: true} }, false},
		"rules and files":        {[]Problem{failed}, func(s *state) { s.triggers = triggers{rules: true, read: now} }, false},
		"rules and the conflist": {[]Problem{failed}, func(s *state) { s.triggers = triggers{rules: true, conflist: true} }, false},
		"the retry":              {[]Problem{failed}, func(s *state) { s.last.next = now }, false},
		"reverted":               {[]Problem{reverted}, func(s *state) { s.triggers.rules = true }, false},
		"nothing failed":         {nil, func(s *state) { s.triggers.rules = true }, false},
	} {
		var s state
		s.noteSync(now, &Report{Problems: c.last}, time.Minute)
		c.event(&s)
		assert.Equal(t, name, s.retriesEarly(now), c.want)
	}
}

// TestEventsOfASync: what asked for a sync is forgotten when it begins. If it does nothing, the program that
// changed rules is named by the next one.
func TestEventsOfASync(t *testing.T) {
	now, by := time.Now(), Writer{Process: Process{7, "nft"}}
	settings := config.DefaultSettings()
	settings.DataDir, settings.CNIConfDir = t.TempDir(), t.TempDir()
	l := NewLoop(Open(settings, "", nil), slog.New(slog.DiscardHandler), nil)
	s := &l.state
	l.Committed(Commit{Generation: 1, Touched: true, By: by})
	l.AddressesChanged()
	l.SyncNow()
	l.handleAll()
	s.sources = l.Node.Read()
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	order := s.beginSync(now.Add(time.Second))
	if s.triggers != (triggers{}) || s.addresses.Pending() || s.commits.writer != (Writer{}) {
		t.Errorf("after it began: %+v", s)
	}
	l.sync(interrupted, order).apply(l, now)
	if s.commits.writer != by {
		t.Errorf("changed by %v", s.commits.writer)
	}
	s.conflist.status = &conflist.Status{}
	for range 2 {
		s.noteConflist(conflist.Status{Inserted: 1})
	}
	assert.Equal(t, "insertions to report", s.conflist.status.Inserted, 2)
}
