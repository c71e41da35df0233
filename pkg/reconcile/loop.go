// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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

const (
	// Files are read once they have not changed for quietFiles, as editors and shells empty a file
	// before they fill it, and at the latest after maxQuietFiles.
	quietFiles    = 100 * time.Millisecond
	maxQuietFiles = time.Second
	// An address that is removed and added again within quietAddresses changes nothing.
	quietAddresses    = 20 * time.Millisecond
	maxQuietAddresses = 30 * time.Millisecond
	// standbyInterval is how often a standby reconciler tries to become active.
	standbyInterval = time.Second
)

// Loop syncs the node: when rules or files change, on request, to retry what failed, and after the
// interval. It guarantees that at most one sync runs, that syncs for events are at least minInterval
// apart, and that without flapping there is one per interval.
//
// One goroutine takes events from a queue, which change the state, and begins what is due by the state
// (state.next). It never waits for anything else: what may take time has a goroutine of its own, whose
// result is an event.
type Loop struct {
	Node *Node
	// SyncConflist, unless it is nil, syncs the conflist whenever this loop is active and more than rules may have
	// changed.
	SyncConflist func(context.Context) conflist.Status
	// ConnectionsReset is called after a reset with the numbers of connections that were deleted, and why it
	// failed, unless it is nil.
	ConnectionsReset func(deleted map[policy.ChainFamily]uint64, err error)
	// Watch, unless it is nil, is called when Commit.Touched is to be about other chains than before. Nil is all
	// that the listener receives: which chains matter is unknown.
	Watch func([]netfilter.OwnedChain)
	// Verified, unless it is nil, is called with a ruleset generation at which everything is as a sync found it,
	// which is right: after that sync, and after commits since that touched nothing owned.
	Verified func(r *Report, generation uint32)
	// Active, unless it is nil, runs while this loop has the instance lock, which is kept until it returns.
	Active func(context.Context)

	log     syncLog
	publish func(*Report)
	events  queue
	state   state
	working sync.WaitGroup // the works that run, and Active

	mu       sync.Mutex // held while the node is in use
	observed *Report    // of the last sync; nil if this loop is not active
}

// NewLoop returns a loop that passes the report of each sync to publish, and logs what is new in it.
func NewLoop(n *Node, log *slog.Logger, publish func(*Report)) *Loop {
	return &Loop{
		Node: n, log: syncLog{log: log, once: flowcontrol.LogOnce(log)}, publish: publish,
		events: queue{ready: make(chan struct{}, 1)},
		state: state{
			files:     flowcontrol.Debounce{Quiet: quietFiles, Longest: maxQuietFiles},
			addresses: flowcontrol.Debounce{Quiet: quietAddresses, Longest: maxQuietAddresses},
			flapping:  flowcontrol.Flapping[policy.Change]{Threshold: flappingThreshold, Window: flappingWindow},
		},
	}
}

// queue has the events of a Loop in their order. Any goroutine may put one, and never waits.
type queue struct {
	mu     sync.Mutex
	events []event
	ready  chan struct{} // has an element if there are events
}

type event func(now time.Time)

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

// Committed records a commit. It triggers a sync only if the commit touched owned rules.
func (l *Loop) Committed(c Commit) { l.events.put(func(time.Time) { l.state.committed(c) }) }

// AddressesChanged triggers a sync if the rules depend on the node's addresses.
func (l *Loop) AddressesChanged() {
	l.events.put(func(now time.Time) {
		if s := &l.state; s.addresses.Pending() || s.last == nil || s.last.Rules != nil && s.last.Rules.DependsOnAddresses() {
			s.addresses.Event(now)
		}
	})
}

// FilesChanged triggers a sync because a conflist or an agent file may have changed.
func (l *Loop) FilesChanged() {
	l.events.put(func(now time.Time) { l.state.files.Event(now) })
}

// SyncNow triggers a sync that reads and tries everything again.
func (l *Loop) SyncNow() { l.events.put(func(time.Time) { l.state.triggers.request = true }) }

// State observes the rules, and writes nothing. It returns nil if this
// loop is not active, if the rules cannot be read, or while a sync runs: its report is more recent.
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

// CheckEntry is Node.CheckEntry beside the syncs.
func (l *Loop) CheckEntry(ctx context.Context, list config.Conflist) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Node.CheckEntry(ctx, list)
}

// Run syncs until ctx ends, and leaves the rules as they are. Without the instance lock of the node
// it is on standby.
func (l *Loop) Run(ctx context.Context) {
	for ctx.Err() == nil {
		instance, standby := l.takeOver(ctx)
		if standby == nil {
			l.runActive(ctx, instance)
			continue
		}
		standby.Started = time.Now()
		l.report(standby)
		for until := time.Now().Add(standbyInterval); ctx.Err() == nil && time.Now().Before(until); {
			l.wait(ctx, until)
		}
	}
}

// takeOver takes the instance lock, or returns why this loop is on standby.
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

// runActive does what is due until ctx ends or the instance lock is lost, which is nil if it could not be taken.
func (l *Loop) runActive(ctx context.Context, instance *store.InstanceLock) {
	ctx, end := context.WithCancel(ctx)
	if instance != nil && l.Active != nil {
		l.working.Go(func() { l.Active(ctx) })
	}
	s := &l.state
	s.begin()
	if l.SyncConflist != nil {
		notYet := errors.New("not looked at yet")
		s.conflist = &conflist.Status{Problems: []conflist.Problem{{Reason: string(ReasonConflist), Err: notYet, Waiting: true}}}
	}
	for ctx.Err() == nil {
		now := time.Now()
		w, at := s.next(now)
		switch {
		case w == works:
			l.wait(ctx, at)
			continue
		case w != reading && w != syncing:
		case s.last != nil && !instance.Held() && (instance != nil || s.intervalOver(now)): // without one it is tried again then
			end()
			continue
		default:
			instance.RecordSync()
		}
		l.begin(ctx, w, now)
	}
	end()
	l.working.Wait()
	l.handleAll()
	l.mu.Lock()
	l.observed, s.last = nil, nil // another loop may use the node
	l.mu.Unlock()
	l.log.warn(instance.Release())
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
	for _, change := range l.events.take() {
		change(time.Now())
	}
}

// begin begins a work, whose result is an event.
func (l *Loop) begin(ctx context.Context, w work, now time.Time) {
	s := &l.state
	s.running[w] = now
	var do func() event
	switch w {
	case publishing:
		p := publication{s.last, s.generation}
		do = func() event {
			if l.Verified != nil {
				l.Verified(p.report, p.generation)
			}
			return func(time.Time) { s.published = p }
		}
	case syncingConflist:
		s.conflistDue = never()
		do = func() event {
			c := l.SyncConflist(ctx)
			return func(time.Time) { s.conflistSynced(c) }
		}
	case reading:
		s.files.Take(now)
		s.triggers.request = false
		do = func() event {
			l.mu.Lock()
			defer l.mu.Unlock()
			src := l.Node.Read()
			return func(now time.Time) { s.sourcesRead(src, now, l.SyncConflist != nil) }
		}
	case syncing:
		do = l.sync(ctx, now)
	case resetting:
		s.resetDue = never()
		do = func() event { return l.resetConnections(ctx) }
	}
	l.working.Go(func() {
		change := do()
		l.events.put(func(now time.Time) {
			s.running[w] = time.Time{}
			change(now)
		})
	})
}

// sync returns a function that makes one sync. If the last one failed, a sync that only rules ask for is made only if it
// would do something else: what failed is not retried at the rate of events.
func (l *Loop) sync(ctx context.Context, now time.Time) func() event {
	s := &l.state
	src, last, soon := s.sources, s.last, s.retriesSoon(now)
	touches, by := s.touches, s.writer
	s.triggers, s.writer = triggers{}, Writer{}
	s.addresses.Take(now)
	return func() event {
		l.mu.Lock()
		defer l.mu.Unlock()
		none := func(now time.Time) { s.lastEnded, s.writer = now, cmp.Or(s.writer, by) }
		if soon && l.Node.DryRun(ctx, src).sameOutstanding(last) {
			return none
		}
		r := l.Node.Sync(ctx, src)
		l.Node.AddADDProblems(r)
		if ctx.Err() != nil { // it may have been interrupted
			return none
		}
		l.observed = r
		return func(now time.Time) {
			s.lastTouches = touches
			l.synced(r, by, now)
		}
	}
}

// synced completes the report of a sync and reports it.
func (l *Loop) synced(r *Report, by Writer, now time.Time) {
	s := &l.state
	r.By = by
	if r.Differs() {
		s.writer = cmp.Or(s.writer, by) // the next sync repairs what that program changed
	}
	s.sources = r.Sources
	s.synced(now, r, l.Node.Interval(r.Sources))
	if p := s.detectFlapping(now, r); p != nil {
		r.Problems = append(r.Problems, *p)
	}
	if s.conflist != nil {
		c := *s.conflist
		r.Conflist, s.conflist.Inserted = &c, 0
		for _, p := range c.Problems {
			r.add(Problem{Reason: Reason(p.Reason), Err: p.Err, Waiting: p.Waiting})
		}
		r.Warnings = append(r.Warnings, c.Warnings...)
		for _, f := range c.Findings {
			r.warn(FindingWarning{errors.New(f.Message), f.ID})
		}
	}
	l.watch(r)
	l.report(r)
}

func (l *Loop) report(r *Report) {
	l.log.report(r)
	l.publish(r)
}

// watch calls Watch with the chains of a report. If they are not the ones before, a commit since its begin may have
// touched one that was not watched yet.
func (l *Loop) watch(r *Report) {
	if l.Watch == nil {
		return
	}
	var chains []netfilter.OwnedChain
	if r.verified() {
		chains = []netfilter.OwnedChain{}
		for _, c := range r.Rules.Chains {
			for _, d := range c.Desired.Chains {
				chains = append(chains, netfilter.OwnedChain{ChainFamily: policy.ChainFamily{Chain: d.Name, Family: d.Family}, Choice: c.Choice})
			}
		}
	}
	before := l.state.watched
	if (chains == nil) == (before == nil) && slices.Equal(chains, before) {
		return
	}
	l.Watch(chains)
	if l.state.watched = chains; chains != nil && before != nil {
		l.state.committed(Commit{Touched: true})
	}
}

// resetConnections makes the resets on record that are due, and decides when the next one is. A sync follows, as nothing
// is verified while resets are on record.
func (l *Loop) resetConnections(ctx context.Context) event {
	e := enforce.Enforcer{Dir: l.Node.Dir, Conntrack: l.Node.Conntrack}
	began := time.Now()
	deleted, next, err := e.ResetConnections(ctx)
	if ctx.Err() != nil {
		err = nil // it was interrupted
	}
	took := time.Since(began)
	return func(now time.Time) {
		l.log.reset(deleted, took, err)
		if l.ConnectionsReset != nil && (len(deleted) > 0 || err != nil) {
			l.ConnectionsReset(deleted, err)
		}
		s := &l.state
		s.triggers.rules = true
		switch {
		case err != nil:
			s.resetRetry = min(max(2*s.resetRetry, firstRetry), lastRetry)
			s.resetDue = now.Add(s.resetRetry)
		case next > 0:
			s.resetRetry, s.resetDue = 0, now.Add(next)
		default:
			s.resetRetry = 0
		}
	}
}
