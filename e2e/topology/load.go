// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Flow is one new connection of a Load, as the other side saw it.
type Flow struct {
	// From is the port that it was sent from.
	From uint16
	To   netip.AddrPort
	// Source is what the other side saw.
	Source netip.AddrPort
	// At is when it was sent, since the load began.
	At time.Duration
}

// Report is what a Load has done.
type Report struct {
	// Flows are those that arrived, in the order in which they did.
	Flows []Flow
	// Sent is how many were sent.
	Sent int
	// Elapsed is how long it took.
	Elapsed time.Duration
}

// Load makes new UDP flows as fast as it can.
type Load struct {
	stop   chan struct{}
	done   chan struct{}
	report Report
	err    error

	mu      sync.Mutex
	flows   []Flow
	pending [2 * maxWindow]pendingFlow
	arrived atomic.Int64
}

// pendingFlow is on the way. Its number tells it from a later one in its place.
type pendingFlow struct {
	number uint32
	Flow
}

// Connection tracking forgets a flow without answer after this long while a
// load runs; a pair of port and destination is used again later than that.
const (
	trackedFor = 2 * time.Second
	reuseAfter = 2 * trackedFor
	timeout    = "net/netfilter/nf_conntrack_udp_timeout"
)

// StartLoad sends packets to the destinations in turn, from a new source port
// each round, until Stop. Nothing that is lost is sent again, no answer is asked
// for, and no flow is ever an old one to connection tracking: it is made to
// forget faster on the node, and if few destinations let the ports run out the
// load pauses. A hundred destinations keep it from that. One load a node.
func (h *Host) StartLoad(to []netip.AddrPort, options ...Option) (*Load, error) {
	if len(to) == 0 {
		return nil, fmt.Errorf("start load on %s: no destinations", h.Name)
	}
	s := newSending(options)
	if s.port != 0 {
		return nil, fmt.Errorf("start load on %s: every flow needs a port of its own, not %d", h.Name, s.port)
	}
	restore, err := h.forgetFaster()
	if err != nil {
		return nil, fmt.Errorf("start load on %s: %w", h.Name, err)
	}
	l := &Load{stop: make(chan struct{}), done: make(chan struct{})}
	go func() {
		defer close(l.done)
		err := l.run(h, to, s)
		if err := errors.Join(err, restore()); err != nil {
			l.err = fmt.Errorf("load from %s: %w", h.Name, err)
		}
	}()
	return l, nil
}

// Stop ends the load, once, and returns what became of it.
func (l *Load) Stop() (Report, error) {
	close(l.stop)
	<-l.done
	return l.report, l.err
}

func (l *Load) run(h *Host, to []netip.AddrPort, s sending) error {
	batch, forget := h.observer.expect(l.arrive)
	began := time.Now()
	err := h.Do(func() error { return l.send(h, to, s, batch, began) })
	l.report.Elapsed = time.Since(began)
	// What is still on the way; the window bounds how much that is.
	for patience := time.Now().Add(time.Second); time.Now().Before(patience); time.Sleep(time.Millisecond) {
		if l.arrived.Load() >= int64(l.report.Sent) {
			break
		}
	}
	forget()
	l.report.Flows = l.flows
	return err
}

// arrive completes the flow that send left in pending. One so late that its
// place is taken has been counted as lost, and is.
func (l *Load) arrive(number uint32, seen Seen, _ error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	flow := l.pending[number%uint32(len(l.pending))]
	if flow.number != number {
		return
	}
	flow.Source = seen.Source
	l.flows = append(l.flows, flow.Flow)
	l.arrived.Add(1)
}

// leave puts a flow where arrive finds it.
func (l *Load) leave(number uint32, flow Flow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending[number%uint32(len(l.pending))] = pendingFlow{number, flow}
}

func (l *Load) send(h *Host, to []netip.AddrPort, s sending, batch uint32, began time.Time) error {
	flow := h.observer.newPace()
	for {
		cycle := time.Now()
		for range portCount {
			opened, err := h.openSockets(to, s)
			if err != nil {
				return err
			}
			for _, destination := range to {
				number := uint32(l.report.Sent)
				l.leave(number, Flow{From: opened.port, To: destination, At: time.Since(began)})
				if err := opened.send(probe{batch: batch, index: number, silent: true}, destination); err != nil {
					opened.close()
					return err
				}
				l.report.Sent++
				flow.sent(&l.arrived)
				if !l.pause(0) {
					break
				}
			}
			opened.close()
			if !l.pause(0) {
				return nil
			}
		}
		// The ports have been used up.
		if !l.pause(time.Until(cycle.Add(reuseAfter))) {
			return nil
		}
	}
}

// pause waits, and reports whether the load is to go on.
func (l *Load) pause(d time.Duration) bool {
	if d <= 0 {
		select {
		case <-l.stop:
			return false
		default:
			return true
		}
	}
	select {
	case <-l.stop:
		return false
	case <-time.After(d):
		return true
	}
}

// forgetFaster shortens the life of unanswered flows in the node's connection
// tracking. Where the kernel has not loaded that there is nothing to forget.
func (h *Host) forgetFaster() (restore func() error, err error) {
	var before []byte
	err = h.router.Do(func() error {
		before, err = os.ReadFile("/proc/sys/" + timeout)
		return err
	})
	if errors.Is(err, os.ErrNotExist) {
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, err
	}
	shorter := fmt.Sprint(int(trackedFor.Seconds()))
	return func() error { return h.router.Sysctl(timeout, strings.TrimSpace(string(before))) },
		h.router.Sysctl(timeout, shorter)
}
