// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"sync"
	"time"
)

const (
	// calm is how long nothing must have happened to files before they are
	// read: an editor, or a shell that redirects into a file, empties it first
	// and fills it then, and what it says in between is nobody's policy.
	calm = 100 * time.Millisecond
	// calmAtMost bounds how long that can be put off by files that change all
	// the time.
	calmAtMost = time.Second
)

// settling passes on that something happened once it is calm.
type settling struct {
	pass func()

	mu    sync.Mutex
	timer *time.Timer
	first time.Time // of the happenings that were not passed on yet; zero where there are none
}

func (s *settling) happened() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.first.IsZero() {
		s.first = now
	}
	wait := min(calm, s.first.Add(calmAtMost).Sub(now))
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, s.calmed)
		return
	}
	s.timer.Reset(wait)
}

// busy reports whether something happened that was not passed on yet.
func (s *settling) busy() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.first.IsZero()
}

func (s *settling) calmed() {
	s.mu.Lock()
	s.first = time.Time{}
	s.mu.Unlock()
	s.pass()
}
