// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// standbyInterval is how often a standby reconciler tries to become active.
const standbyInterval = time.Second

// Loop syncs the node: when rules or files change, on request, to retry what failed, and after the
// interval. It guarantees that at most one sync runs, that syncs for events are at least minInterval
// apart, and that without flapping there is one per interval.
//
// One goroutine takes events from a queue, which change the state, and begins the work that is due by the
// state (state.next). It never waits for anything else: a work may take time, so it has a goroutine of its
// own, and its result is an event. A locked conflist or a walk through the conntrack table delays no repair.
type Loop struct {
	Node *Node
	// SyncConflist, unless it is nil, syncs the conflist whenever this loop is active and more than rules may
	// have changed.
	SyncConflist func(context.Context) conflist.Status
	// ConnectionsReset is called after a reset with the numbers of connections that were deleted, and why it
	// failed, unless it is nil.
	ConnectionsReset func(deleted map[policy.ChainFamily]uint64, err error)
	// Watch, unless it is nil, tells the listener for which chains Commit.Touched has to be true from now on.
	// Nil means every commit, as it is not known which chains matter.
	Watch func([]netfilter.OwnedChain)
	// Verified, unless it is nil, is called with each ruleset generation at which the rules are known to be
	// right: the sync of the report found them so, and no commit since then touched owned rules.
	Verified func(r *Report, generation uint32)
	// Active, unless it is nil, runs while this loop has the instance lock, which is kept until it returns.
	Active func(context.Context)

	log     syncLog
	publish func(*Report)
	events  queue
	state   state
	working sync.WaitGroup // the works that run, and Active

	mu       sync.Mutex // held while a goroutine uses the node; see Node for the exceptions
	observed *Report    // of the last sync; nil if this loop is not active
}

// NewLoop returns a loop that passes the report of each sync to publish, and logs what is new in it.
func NewLoop(n *Node, log *slog.Logger, publish func(*Report)) *Loop {
	return &Loop{
		Node: n, log: syncLog{log: log, once: flowcontrol.LogOnce(log)}, publish: publish,
		events: queue{ready: make(chan struct{}, 1)}, state: newState(),
	}
}

// State observes the rules, and writes nothing. It returns nil if this loop is not active, if the rules
// cannot be read, or while another goroutine uses the node, such as a sync, whose report will be more
// recent. A sync that becomes due meanwhile waits until the rules are read.
func (l *Loop) State(ctx context.Context) *enforce.State {
	if !l.mu.TryLock() {
		return nil
	}
	defer l.mu.Unlock()
	if ctx.Err() != nil || l.observed == nil || l.observed.Rules == nil {
		return nil
	}
	e := l.Node.Enforcer(l.observed.Sources, func(error) {})
	s, err := e.Dir.Load() // an ADD may have written since the last sync, without an event of iptables-legacy
	if err != nil {
		return nil
	}
	return e.Observe(ctx, s.Sources, s.Record)
}

// CheckEntry is Node.CheckEntry between the syncs. A sync that becomes due meanwhile waits for it, and so for
// the lock of the dataDir, which a sync would wait for, too.
func (l *Loop) CheckEntry(ctx context.Context, list config.Conflist) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Node.CheckEntry(ctx, list)
}

// Run syncs until ctx ends, and leaves the rules as they are. Without the instance lock of the node
// it is on standby.
func (l *Loop) Run(ctx context.Context) {
	for ctx.Err() == nil {
		instance, waiting := l.takeOver(ctx)
		if waiting == nil {
			l.runActive(ctx, instance)
			continue
		}
		waiting.Started, waiting.Waiting = time.Now(), true
		l.report(waiting)
		until := time.Now().Add(standbyInterval)
		for ctx.Err() == nil && time.Now().Before(until) {
			l.wait(ctx, until)
		}
	}
}

// takeOver takes the instance lock, or returns why this loop waits: another one is active, or the node has
// another dataDir.
func (l *Loop) takeOver(ctx context.Context) (*store.InstanceLock, *Report) {
	l.mu.Lock()
	src := l.Node.reread(&Sources{})
	err := l.Node.checkDataDir(ctx, l.Node.Enforcer(src, l.log.warn), src) // before anything is created in it
	l.mu.Unlock()
	if err != nil {
		return nil, l.Node.otherDataDir(src, err)
	}
	instance, err := l.Node.Dir.InstanceLock()
	if errors.Is(err, store.ErrBusy) {
		err = fmt.Errorf("%w; this one takes over when that ends", err)
		return nil, &Report{Result: Unchanged, Problems: []Problem{{Reason: ReasonStandby, Err: err}}}
	}
	if err != nil { // two active reconcilers do no harm, but log twice
		l.log.warn(fmt.Errorf("failed to find out whether another reconciler runs: %w", err))
	}
	return instance, nil
}

// runActive does what is due until ctx ends or the instance lock is lost, which is nil if it could not be
// taken.
func (l *Loop) runActive(ctx context.Context, instance *store.InstanceLock) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	if instance != nil && l.Active != nil {
		l.working.Go(func() { l.Active(ctx) })
	}
	l.state.activate(l.SyncConflist != nil)
	for ctx.Err() == nil {
		now := time.Now()
		w, at := l.state.next(now)
		if w == nothing {
			l.wait(ctx, at)
			continue
		}
		if w == reading || w == syncing {
			if l.mustTakeOver(instance, now) {
				break
			}
			instance.RecordSync()
		}
		l.start(ctx, w, now)
	}
	end()
	l.working.Wait()
	l.handleAll()
	l.mu.Lock()
	l.observed, l.state.last.report = nil, nil // another loop may use the node
	l.mu.Unlock()
	l.log.warn(instance.Release())
}

// mustTakeOver reports whether the instance lock has to be taken again before the next sync: its file was
// removed, so that another reconciler can have taken it. If it could not be taken, that is tried again before
// each sync that comes without an event.
func (l *Loop) mustTakeOver(instance *store.InstanceLock, now time.Time) bool {
	hasSynced := l.state.last.report != nil
	if instance == nil {
		return hasSynced && l.state.isNextDue(now)
	}
	return hasSynced && !instance.Held()
}

// wait waits until a time, or for an event. Then it handles all events.
func (l *Loop) wait(ctx context.Context, until time.Time) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	case <-l.events.ready:
	}
	l.handleAll()
}

func (l *Loop) handleAll() {
	for _, e := range l.events.take() {
		e.apply(l, time.Now())
	}
}
