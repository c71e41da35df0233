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

// Flow is one new connection of a Load, as the receiver saw it.
type Flow struct {
	// From is the source port.
	From uint16
	To   netip.AddrPort
	// Source is the address and port that the receiver saw.
	Source netip.AddrPort
	// At is the time when it was sent, since the load began.
	At time.Duration
}

// Report is the result of a Load.
type Report struct {
	// Flows are the flows that arrived, in order of arrival.
	Flows []Flow
	// Sent is the number of flows sent.
	Sent int
	// Elapsed is the duration of the load.
	Elapsed time.Duration
}

// Load opens new UDP flows as fast as it can.
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

// pendingFlow is a flow in flight. Its number distinguishes it from a later flow in the same slot.
type pendingFlow struct {
	number uint32
	Flow
}

// While a load runs, connection tracking expires an unanswered flow after trackedFor; a pair of
// port and destination is reused only later.
const (
	trackedFor = 2 * time.Second
	reuseAfter = 2 * trackedFor
	timeout    = "net/netfilter/nf_conntrack_udp_timeout"
)

// StartLoad sends packets to the destinations in turn, from a new source port each round, until
// Stop. It neither resends lost packets nor asks for answers. Every flow is new to connection
// tracking: the node's timeouts are shortened, and the load pauses if the ports run out. A hundred
// destinations avoid pauses. Only one load can run on a node.
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

// Stop ends the load and returns its report. It must be called once.
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
	// Wait for the flows in flight, whose number the window limits.
	for patience := time.Now().Add(time.Second); time.Now().Before(patience); time.Sleep(time.Millisecond) {
		if l.arrived.Load() >= int64(l.report.Sent) {
			break
		}
	}
	forget()
	l.report.Flows = l.flows
	return err
}

// arrive completes the flow that send stored in pending. A flow that arrives after its slot was
// reused counts as lost.
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

// leave stores a flow for arrive.
func (l *Load) leave(number uint32, flow Flow) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending[number%uint32(len(l.pending))] = pendingFlow{number, flow}
}

func (l *Load) send(h *Host, to []netip.AddrPort, s sending, batch uint32, began time.Time) error {
	flow := h.observer.newSendWindow()
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
		// All ports have been used.
		if !l.pause(time.Until(cycle.Add(reuseAfter))) {
			return nil
		}
	}
}

// pause waits and reports whether the load continues.
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

// forgetFaster shortens the timeout of unanswered flows in the node's connection tracking. It does
// nothing if the kernel module is not loaded.
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
