// SPDX-License-Identifier: Apache-2.0

package flowcontrol

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// Debounce merges events that follow each other closely. They are due when no event has come for the Quiet
// time, and at the latest the Longest time after the first one.
type Debounce struct {
	Quiet, Longest time.Duration
	first, last    time.Time // of the events that were not taken, the first one zero if there are none
}

// Event records an event.
func (d *Debounce) Event(now time.Time) {
	if !d.Pending() {
		d.first = now
	}
	d.last = now
}

// Pending reports whether there are events that were not taken.
func (d *Debounce) Pending() bool { return !d.first.IsZero() }

// Due returns when the pending events are due.
func (d *Debounce) Due() time.Time {
	quiet, longest := d.last.Add(d.Quiet), d.first.Add(d.Longest)
	if quiet.Before(longest) {
		return quiet
	}
	return longest
}

// IsDue reports whether events are due.
func (d *Debounce) IsDue(now time.Time) bool { return d.Pending() && !now.Before(d.Due()) }

// Take forgets the events if they are due, and reports whether it did.
func (d *Debounce) Take(now time.Time) bool {
	due := d.IsDue(now)
	if due {
		d.first = time.Time{}
	}
	return due
}

// Sleep returns after a time, or when ctx ends.
func Sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

const (
	firstPause   = time.Second
	longestPause = time.Minute
	maxKeys      = 100
)

// Flapping detects that another program reverts the same change repeatedly: Threshold times within
// Window. From then on each revert doubles the pause before the next repair, from one second to one
// minute. It ends when nothing was reverted for longer than twice the pause.
type Flapping[Change comparable] struct {
	Threshold int
	Window    time.Duration

	reverts map[Change][]time.Time // the last ones of each change, Threshold + 1 at most
	active  Change                 // the zero value for none
	last    time.Time
	pause   time.Duration
}

// Reverted records that a change was reverted.
func (f *Flapping[Change]) Reverted(now time.Time, what Change) {
	var none Change
	recent := f.reverts[what]
	for len(recent) > 0 && (now.Sub(recent[0]) > f.Window || len(recent) > f.Threshold) {
		recent = recent[1:]
	}
	if f.reverts == nil || len(f.reverts) >= maxKeys {
		f.reverts = map[Change][]time.Time{}
	}
	f.reverts[what] = append(recent, now)
	f.last = now
	if f.active == none && len(f.reverts[what]) >= f.Threshold {
		f.active = what
	}
	if f.active != none {
		f.pause = min(max(2*f.pause, firstPause), longestPause)
	}
}

// Active returns what is being reverted, the zero value for nothing, and forgets what has ended.
func (f *Flapping[Change]) Active(now time.Time) Change {
	var none Change
	if f.active != none && now.After(f.Ends()) {
		*f = Flapping[Change]{Threshold: f.Threshold, Window: f.Window}
	}
	return f.active
}

// Pause returns how long the next repair has to wait; 0 while nothing is flapping.
func (f *Flapping[Change]) Pause() time.Duration { return f.pause }

// Ends returns when the flapping is over if nothing is reverted any more.
func (f *Flapping[Change]) Ends() time.Time { return f.last.Add(2 * f.pause) }

// LogOnce returns a logger that drops records that it passed on to log before. After maxRecords it forgets
// them all.
func LogOnce(log *slog.Logger) *slog.Logger {
	return slog.New(&onceHandler{Handler: log.Handler()})
}

const maxRecords = 1000

type onceHandler struct {
	slog.Handler
	mu     sync.Mutex
	logged map[string]bool
}

// Handle implements slog.Handler.
func (h *onceHandler) Handle(ctx context.Context, r slog.Record) error {
	key := fmt.Sprint(r.Level, r.Message)
	r.Attrs(func(a slog.Attr) bool {
		key += fmt.Sprint("\x00", a)
		return true
	})
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.logged[key] {
		return nil
	}
	if h.logged == nil || len(h.logged) >= maxRecords {
		h.logged = map[string]bool{}
	}
	h.logged[key] = true
	return h.Handler.Handle(ctx, r)
}
