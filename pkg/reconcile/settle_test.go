// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestSettling(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var mu sync.Mutex
		var passed []time.Duration
		s := settling{pass: func() {
			mu.Lock()
			defer mu.Unlock()
			passed = append(passed, time.Since(start))
		}}
		want := func(what string, times ...time.Duration) {
			t.Helper()
			time.Sleep(2 * calmAtMost)
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if len(passed) != len(times) {
				t.Fatalf("%s: passed on at %v, want %v", what, passed, times)
			}
			for i := range times {
				if passed[i] != times[i] {
					t.Errorf("%s: passed on at %v, want %v", what, passed, times)
				}
			}
			passed, start = nil, time.Now()
		}
		s.happened()
		if !s.busy() {
			t.Error("it is not busy")
		}
		want("one", calm)
		if s.busy() {
			t.Error("it is busy for ever")
		}

		for range 5 {
			s.happened()
			time.Sleep(calm / 2)
		}
		want("a group", 4*calm/2+calm)

		const step = 51 * time.Millisecond
		for range 30 {
			s.happened()
			time.Sleep(step)
		}
		want("without end", calmAtMost, 29*step+calm)
	})
}
