// SPDX-License-Identifier: Apache-2.0

package flowcontrol

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestDebounce(t *testing.T) {
	const quiet, longest = 100 * time.Millisecond, time.Second
	for name, c := range map[string]struct {
		events int
		every  time.Duration
		want   []time.Duration // when events are due
	}{
		"one event":          {1, 0, []time.Duration{quiet}},
		"a group":            {5, quiet / 2, []time.Duration{4*quiet/2 + quiet}},
		"events without end": {30, 51 * time.Millisecond, []time.Duration{longest, 29*51*time.Millisecond + quiet}},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Now()
			d := Debounce{Quiet: quiet, Longest: longest}
			var got []time.Duration
			for at := time.Duration(0); at < 3*longest; at += time.Millisecond {
				if d.Take(start.Add(at)) {
					got = append(got, at)
				}
				if i := int(at / max(c.every, 1)); c.every > 0 && at%c.every == 0 && i < c.events || at == 0 {
					d.Event(start.Add(at))
					if !d.Pending() || d.IsDue(start.Add(at)) {
						t.Error("not pending after an event")
					}
				}
			}
			if diff := cmp.Diff(c.want, got); diff != "" || d.Pending() {
				t.Error(diff, d.Pending())
			}
		})
	}
}

func TestFlapping(t *testing.T) {
	const threshold = 30
	now := time.Now()
	f := Flapping[string]{Threshold: threshold, Window: time.Minute}
	revert := func(after time.Duration, what string) string {
		now = now.Add(after)
		f.Reverted(now, what)
		return f.Active(now)
	}
	for range 3 * threshold {
		if revert(4*time.Second, "slow") != "" {
			t.Fatal("less often than the threshold")
		}
	}
	for i := range threshold - 1 {
		if revert(time.Millisecond, "a") != "" || i > 0 && revert(time.Millisecond, "b") != "" {
			t.Fatal("different changes were counted together")
		}
	}
	var pauses []time.Duration
	for range 10 {
		if revert(f.Pause(), "a") != "a" {
			t.Fatal("not detected")
		}
		pauses = append(pauses, f.Pause()/time.Second)
	}
	if diff := cmp.Diff([]time.Duration{1, 2, 4, 8, 16, 32, 60, 60, 60, 60}, pauses); diff != "" {
		t.Error(diff)
	}
	if f.Active(now.Add(2*longestPause)) == "" {
		t.Error("it ends too early")
	}
	if f.Active(now.Add(2*longestPause+1)) != "" || f.Pause() != 0 || f.Threshold != threshold {
		t.Errorf("it does not end: %+v", f)
	}
	for i := range 1000 {
		if revert(time.Millisecond, strings.Repeat("x", i)); len(f.reverts) > maxKeys {
			t.Fatal("what it remembers is not bounded")
		}
	}
}

func TestLogOnce(t *testing.T) {
	var out bytes.Buffer
	log := LogOnce(slog.New(slog.NewTextHandler(&out, nil)))
	for range 3 {
		log.Warn("failed", "err", "a")
		log.Warn("failed", "err", "b")
		log.Debug("failed", "err", "a")
	}
	if n := strings.Count(out.String(), "\n"); n != 2 {
		t.Errorf("%d lines:\n%s", n, out.String())
	}
	for i := range 2 * maxRecords {
		if log.Warn("failed", "n", i); len(log.Handler().(*onceHandler).logged) > maxRecords {
			t.Fatal("what it remembers is not bounded")
		}
	}
}
