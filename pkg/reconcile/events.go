// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// event is what the loop takes note of: something that happened on the node, or the result of a work.
type event interface {
	// apply changes the state. The loop's goroutine calls it, and it never waits.
	apply(l *Loop, now time.Time)
}

// queue has the events of a Loop in their order. Any goroutine may put one, and never waits.
type queue struct {
	mu     sync.Mutex
	events []event
	ready  chan struct{} // has an element if there are events
}

func (q *queue) put(e event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events = append(q.events, e)
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

func (q *queue) take() []event {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.events
	q.events = nil
	return all
}

// Process is a program with its pid on the host. In another PID namespace that pid may be another process.
type Process struct {
	PID     uint32
	Program string
}

// String writes "iptables" (host pid 4711).
func (p Process) String() string {
	return fmt.Sprintf("%s (host pid %d)", policy.Quote(p.Program), p.PID)
}

// Writer is the program that changed rules, as the kernel names it.
type Writer struct {
	Process
	Parent Process // that started the program, if that was known before it ended
}

// String names the program, and what is known of its origin.
func (w Writer) String() string {
	if w == (Writer{}) {
		return "an unknown program"
	}
	text := w.Process.String()
	if w.Parent != (Process{}) {
		text += ", started by " + w.Parent.String()
	}
	return text
}

// Commit is a commit to the ruleset.
type Commit struct {
	Generation uint32 // 0 if it is unknown
	Touched    bool   // owned rules may have changed since the commit before
	By         Writer // zero if it is this program
}

func (c Commit) apply(l *Loop, _ time.Time) { l.state.committed(c) }

// Committed records a commit. It triggers a sync only if the commit touched owned rules.
func (l *Loop) Committed(c Commit) { l.events.put(c) }

type addressesChanged struct{}

func (addressesChanged) apply(l *Loop, now time.Time) { l.state.noteAddresses(now) }

// AddressesChanged triggers a sync if the rules depend on the node's addresses.
func (l *Loop) AddressesChanged() { l.events.put(addressesChanged{}) }

type filesChanged struct{}

func (filesChanged) apply(l *Loop, now time.Time) { l.state.files.Event(now) }

// FilesChanged triggers a sync because a conflist or an agent file may have changed.
func (l *Loop) FilesChanged() { l.events.put(filesChanged{}) }

type syncRequest struct{}

func (syncRequest) apply(l *Loop, _ time.Time) { l.state.triggers.request = true }

// SyncNow triggers a sync that reads and tries everything again.
func (l *Loop) SyncNow() { l.events.put(syncRequest{}) }

// committed takes note of a commit.
func (s *state) committed(c Commit) {
	s.commits.generation = cmp.Or(c.Generation, s.commits.generation)
	if !c.Touched {
		return
	}
	s.commits.touches++
	s.commits.writer = cmp.Or(c.By, s.commits.writer)
	s.triggers.rules = true
}

// noteAddresses takes note of addresses that changed, unless the rules do not depend on them.
func (s *state) noteAddresses(now time.Time) {
	if s.mayDependOnAddresses() {
		s.addresses.Event(now)
	}
}

func (s *state) mayDependOnAddresses() bool {
	last := s.last.report
	if last == nil || s.runs(syncing) { // its policies may be the first that depend on them
		return true
	}
	if s.addresses.Pending() { // a sync follows the addresses anyway, so it waits until they are quiet
		return true
	}
	return last.Rules != nil && last.Rules.DependsOnAddresses()
}
