// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"sync"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Writer is who changed rules, as the kernel tells: the name of a program, and its
// pid on the host. A container with a PID namespace of its own has another process
// of that pid, or none, so nothing may be looked up by it.
type Writer struct {
	PID     uint32
	Program string
}

// String writes "iptables" (host pid 4711).
func (w Writer) String() string {
	if w == (Writer{}) {
		return "nobody knows who"
	}
	return fmt.Sprintf("%s (host pid %d)", policy.Quote(w.Program), w.PID)
}

// cause is what a pass is made for.
type cause struct {
	rules, files, asked bool
	due                 bool   // the interval is over, or something is to be tried again
	writer              Writer // the last, of rules
}

func (c cause) none() bool { return !c.rules && !c.files && !c.asked }

// onlyRules reports whether nothing but a change of rules is the cause.
func (c cause) onlyRules() bool { return c.rules && !c.files && !c.asked && !c.due }

func (c cause) with(d cause) cause {
	if d.writer == (Writer{}) {
		d.writer = c.writer
	}
	return cause{rules: c.rules || d.rules, files: c.files || d.files, asked: c.asked || d.asked, writer: d.writer}
}

// pending collects the causes of the next pass, from any goroutine.
type pending struct {
	wake chan struct{} // holds one if there is something to take

	mu    sync.Mutex
	cause cause
}

func newPending() *pending { return &pending{wake: make(chan struct{}, 1)} }

func (p *pending) add(c cause) {
	p.mu.Lock()
	p.cause = p.cause.with(c)
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default: // whoever takes finds this one too
	}
}

func (p *pending) take() cause {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.cause
	p.cause = cause{}
	return c
}
