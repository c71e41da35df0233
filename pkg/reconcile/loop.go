// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const (
	// minInterval is the shortest time between syncs that events ask for: commits come in groups. It
	// bounds the cost of a storm of third-party commits, and how long a repair can wait.
	minInterval = 20 * time.Millisecond
	// firstRetry is when a failed sync is repeated; the time doubles, up to the interval.
	firstRetry = minInterval
	// Files are read once they have not changed for quietFiles, as editors and shells empty a file
	// before they fill it, and at the latest after maxQuietFiles.
	quietFiles    = 100 * time.Millisecond
	maxQuietFiles = time.Second
	// An address that is removed and added again within quietAddresses changes nothing.
	quietAddresses    = 20 * time.Millisecond
	maxQuietAddresses = 30 * time.Millisecond
	// The same drift this often within flappingWindow is flapping. A person who experiments, or a
	// program that writes its rules each minute, causes it less often.
	flappingThreshold = 30
	flappingWindow    = time.Minute
	// standbyInterval is how often a standby reconciler tries to become active.
	standbyInterval = time.Second
)

// Writer is the program that changed rules, as the kernel names it, with its pid on the host. In a
// PID namespace that pid may be another process, so nothing may be looked up by it.
type Writer struct {
	PID     uint32
	Program string
}

// String writes "iptables" (host pid 4711).
func (w Writer) String() string {
	if w == (Writer{}) {
		return "an unknown program"
	}
	return fmt.Sprintf("%s (host pid %d)", policy.Quote(w.Program), w.PID)
}

// Loop syncs the node: when rules or files change, on request, to retry what failed, and after the
// interval. It guarantees that at most one sync runs, that syncs for events are at least minInterval
// apart, and that without flapping there is one per interval. Its triggers may be called by any
// goroutine, and never wait.
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
	// which is right: after that sync, and after commits since that touched nothing owned. Files may be slow, so it
	// has a goroutine of its own.
	Verified func(r *Report, generation uint32)
	// Active, unless it is nil, runs while this loop has the instance lock, which is kept until it returns.
	Active func(context.Context)

	log     syncLog
	publish func(*Report)

	rules, request chan struct{} // at most one pending trigger of each kind
	resets         chan struct{} // the same, for resetConnections
	lastReset      int64         // Reset.At of the last one that it was triggered for
	conflistDue    chan struct{} // the same, for syncConflist
	conflistSynced chan conflist.Status
	addresses      atomic.Bool // a policy has outputAddresses
	addressEvents  *flowcontrol.Debouncer
	writer         atomic.Pointer[Writer]
	commits        commits
	verified       chan struct{}          // at most one pending call of Verified
	watched        []netfilter.OwnedChain // what Watch was called with
	files          *flowcontrol.Debouncer

	sources  *Sources         // as they were read last
	conflist *conflist.Status // nil without SyncConflist
	schedule schedule
	flapping flowcontrol.Flapping[policy.Change]
	by       Writer // the likely cause of flapping

	mu   sync.Mutex // held while the node is in use
	last *Report    // of the last sync; nil if this loop is not active
}

// NewLoop returns a loop that passes the report of each sync to publish, and logs what is new in it.
func NewLoop(n *Node, log *slog.Logger, publish func(*Report)) *Loop {
	return &Loop{
		Node: n, log: syncLog{log: log, once: flowcontrol.LogOnce(log)}, publish: publish,
		rules: make(chan struct{}, 1), request: make(chan struct{}, 1), resets: make(chan struct{}, 1),
		verified:    make(chan struct{}, 1),
		conflistDue: make(chan struct{}, 1), conflistSynced: make(chan conflist.Status),
		files: flowcontrol.NewDebouncer(quietFiles, maxQuietFiles),

		addressEvents: flowcontrol.NewDebouncer(quietAddresses, maxQuietAddresses),
		flapping:      flowcontrol.Flapping[policy.Change]{Threshold: flappingThreshold, Window: flappingWindow},
	}
}

// RulesChanged triggers a sync because a program changed rules.
func (l *Loop) RulesChanged(by Writer) {
	if by != (Writer{}) {
		l.writer.Store(&by)
	}
	trigger(l.rules)
}

// Commit is a commit to the ruleset.
type Commit struct {
	Generation uint32
	Touched    bool   // owned rules may have changed since the commit before
	By         Writer // zero if it is this program
}

// commits are those that were received, and what is known of the rules since.
type commits struct {
	mu       sync.Mutex
	seen     uint32  // generation of the last one, 0 before the first
	touched  int     // how many touched owned rules
	verified *Report // of a sync that found everything right, unless a commit has touched owned rules since it began
}

// Committed takes note of a commit. It triggers a sync only if the commit touched owned rules.
func (l *Loop) Committed(c Commit) {
	l.commits.mu.Lock()
	defer l.commits.mu.Unlock()
	l.commits.seen = c.Generation
	if c.Touched {
		l.touch(c.By)
	}
	trigger(l.verified)
}

// touch takes note that owned rules may have changed.
func (l *Loop) touch(by Writer) {
	l.commits.touched++
	l.commits.verified = nil
	l.RulesChanged(by)
}

// touched returns how many commits have touched owned rules.
func (l *Loop) touched() int {
	l.commits.mu.Lock()
	defer l.commits.mu.Unlock()
	return l.commits.touched
}

// verify takes note of the report of a sync, which began when that many commits had touched owned rules. Its rules
// were read at generations since then; they are those of the last commit unless a further one touched them.
func (l *Loop) verify(r *Report, touched int) {
	l.commits.mu.Lock()
	defer l.commits.mu.Unlock()
	l.commits.verified = nil
	if r.verified() && l.commits.touched == touched {
		l.commits.verified = r
	}
	trigger(l.verified)
}

// callVerified calls Verified when a generation is, until ctx ends.
func (l *Loop) callVerified(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.verified:
		}
		l.commits.mu.Lock()
		r, generation := l.commits.verified, l.commits.seen
		l.commits.mu.Unlock()
		if r != nil && generation != 0 {
			l.Verified(r, generation)
		}
	}
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
	if (chains == nil) == (l.watched == nil) && slices.Equal(chains, l.watched) {
		return
	}
	l.Watch(chains)
	if chains != nil && l.watched != nil {
		l.commits.mu.Lock()
		defer l.commits.mu.Unlock()
		l.touch(Writer{})
	}
	l.watched = chains
}

// AddressesChanged triggers a sync if the rules depend on the node's addresses.
func (l *Loop) AddressesChanged() {
	if l.addresses.Load() {
		l.addressEvents.Event()
	}
}

// FilesChanged triggers a sync because a conflist or an agent file may have changed.
func (l *Loop) FilesChanged() { l.files.Event() }

// SyncNow triggers a sync that reads and tries everything again.
func (l *Loop) SyncNow() { trigger(l.request) }

func trigger(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // pending already
	}
}

// State observes the rules, and writes nothing. It returns nil if this
// loop is not active, if the rules cannot be read, or while a sync runs: its report is more recent.
func (l *Loop) State(ctx context.Context) *enforce.State {
	if !l.mu.TryLock() {
		return nil
	}
	defer l.mu.Unlock()
	if ctx.Err() != nil || l.last == nil || l.last.Rules == nil {
		return nil
	}
	return l.Node.Enforcer(l.last.Sources, func(error) {}).Observe(ctx, l.last.State.Sources, l.last.State.Record)
}

// Run syncs until ctx ends, and leaves the rules as they are. Without the instance lock of the node
// it is on standby.
func (l *Loop) Run(ctx context.Context) {
	defer l.deactivate()
	var resets sync.WaitGroup
	defer resets.Wait()
	for ctx.Err() == nil {
		if r := l.admit(ctx); r != nil { // before anything is created in the dataDir
			l.standby(ctx, r)
			continue
		}
		instance, err := l.Node.Dir.InstanceLock()
		if errors.Is(err, store.ErrBusy) {
			err = fmt.Errorf("%w; this one takes over when that ends", err)
			l.standby(ctx, &Report{Result: Unchanged, Problems: []Problem{{Reason: ReasonStandby, Err: err}}})
			continue
		}
		if err != nil { // two active reconcilers do no harm, but log twice
			l.log.warn(fmt.Errorf("failed to find out whether another reconciler runs: %w", err))
		}
		instance.RecordActive()
		active, end := context.WithCancel(ctx)
		resets.Go(func() { l.resetConnections(active) })
		var serving sync.WaitGroup
		if l.Verified != nil {
			serving.Go(func() { l.callVerified(active) })
		}
		if err == nil && l.Active != nil {
			serving.Go(func() { l.Active(active) })
		}
		if l.SyncConflist != nil {
			notYet := errors.New("not looked at yet")
			l.conflist = &conflist.Status{Problems: []conflist.Problem{{Reason: string(ReasonConflist), Err: notYet, Waiting: true}}}
			serving.Go(func() { l.syncConflist(active) })
		}
		for due := (triggers{request: true}); ; {
			l.sync(ctx, due)
			if due = l.wait(ctx); ctx.Err() != nil || !instance.Held() {
				break
			}
		}
		end()
		serving.Wait()
		l.log.warn(instance.Release())
	}
}

// admit returns why the dataDir may not be used, or nil.
func (l *Loop) admit(ctx context.Context) *Report {
	l.mu.Lock()
	defer l.mu.Unlock()
	src := l.Node.reread(&Sources{})
	if err := l.Node.checkDataDir(ctx, l.Node.Enforcer(src, l.log.warn), src); err != nil {
		return l.Node.otherDataDir(src, err)
	}
	return nil
}

// deactivate makes State return nil: another loop may use the node.
func (l *Loop) deactivate() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = nil
	l.verify(&Report{}, 0)
}

// syncConflist syncs the conflist when it is due, until ctx ends. It has a goroutine of its own, as another
// process may hold the lock of the directory, and disks may be slow: that must not delay a repair of rules.
func (l *Loop) syncConflist(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.conflistDue:
		}
		select {
		case <-ctx.Done():
		case l.conflistSynced <- l.SyncConflist(ctx):
		}
	}
}

// beginConflist begins a sync of the conflist if one is due, and waits for it for minInterval unless rules changed:
// usually the sync reports the result. A later result causes a sync of its own.
func (l *Loop) beginConflist(due triggers) {
	if l.SyncConflist == nil || !due.files && !due.request && !due.timer {
		return
	}
	l.schedule.conflist = time.Time{}
	trigger(l.conflistDue)
	if due.rules {
		return
	}
	select {
	case c := <-l.conflistSynced:
		l.conflistIs(c)
	case <-time.After(minInterval):
	}
}

func (l *Loop) conflistIs(c conflist.Status) {
	c.Inserted += l.conflist.Inserted
	l.conflist, l.schedule.conflist = &c, c.Next
}

// standby reports why no sync is made, and waits for standbyInterval.
func (l *Loop) standby(ctx context.Context, r *Report) {
	l.deactivate()
	r.Started = time.Now()
	l.log.report(r)
	l.publish(r)
	flowcontrol.Sleep(ctx, standbyInterval)
}

// triggers are what a sync is made for.
type triggers struct {
	rules, files, request bool
	timer                 bool // the interval is over, or a retry is due
	conflist              bool // its sync has ended
}

// wait returns the triggers of the next sync when it is due.
func (l *Loop) wait(ctx context.Context) (due triggers) {
	timer := time.NewTimer(time.Until(l.schedule.due(due)))
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return due
		case <-l.rules:
			due.rules = true
		case <-l.addressEvents.C:
			due.rules = true
		case <-l.files.C:
			due.files = true
		case <-l.request:
			due.request = true
		case c := <-l.conflistSynced:
			l.conflistIs(c)
			due.conflist = true
		case <-timer.C:
			due.timer = due == triggers{}
			return due
		}
		next := time.Until(l.schedule.due(due))
		if next <= 0 {
			return due
		}
		timer.Reset(next)
	}
}

// sync makes one sync. It reads the sources again unless only rules changed. Files that are being
// written are read when their own event is due.
func (l *Loop) sync(ctx context.Context, due triggers) {
	l.mu.Lock()
	defer l.mu.Unlock()
	touched := l.touched()
	if due.request {
		l.Node.backoff.retry()
	}
	if l.sources == nil || due.files || (due.request || due.timer) && !l.files.Pending() {
		l.sources = l.Node.Read()
	}
	l.beginConflist(due) // after the files were read: another program may write the conflist as soon as it has the entry
	onlyRules := due == triggers{rules: true}
	if onlyRules && l.schedule.retry > 0 && l.Node.DryRun(ctx, l.sources).sameOutstanding(l.last) {
		l.schedule.ended = time.Now()
		return // what failed is not retried at the rate of events
	}
	by := l.writer.Swap(nil) // not of a commit that follows, such as the sync's own
	r := l.Node.Sync(ctx, l.sources)
	l.Node.AddADDProblems(r)
	l.sources = r.Sources
	if ctx.Err() != nil {
		return // the sync may have been interrupted
	}
	if by != nil {
		r.By = *by
		if r.Differs() {
			l.writer.CompareAndSwap(nil, by) // the next sync repairs what that program changed
		}
	}
	now := time.Now()
	if p := l.detectFlapping(now, r); p != nil {
		r.Problems = append(r.Problems, *p)
	}
	if rec := r.State.Record; len(rec.Resets) > 0 {
		// Of those that are not due, resetConnections needs to know once.
		if last := rec.Resets[len(rec.Resets)-1].At; last != l.lastReset || enforce.ResetsDue(rec) {
			l.lastReset = last
			trigger(l.resets)
		}
	}
	if l.conflist != nil {
		c := *l.conflist
		r.Conflist, l.conflist.Inserted = &c, 0
		for _, p := range c.Problems {
			r.Problems = append(r.Problems, Problem{Reason: Reason(p.Reason), Err: p.Err, Waiting: p.Waiting})
		}
		r.Warnings = append(r.Warnings, c.Warnings...)
	}
	l.addresses.Store(r.Rules != nil && len(policy.OutputItems(r.Rules.Policies())) > 0)
	l.last = r
	l.watch(r)
	l.verify(r, touched)
	l.schedule.after(now, r, l.flapping.Pause(), l.Node.Interval(l.sources), l.Node.backoff.next)
	l.schedule.flappingEnds = l.flapping.Ends()
	l.log.report(r)
	l.publish(r)
}

// detectFlapping returns the problem if another program reverts the rules repeatedly.
func (l *Loop) detectFlapping(now time.Time, r *Report) *Problem {
	if len(r.Drift) > 0 {
		l.flapping.Reverted(now, r.Drift[0])
		if r.By != (Writer{}) {
			l.by = r.By
		}
	}
	what := l.flapping.Active(now)
	if what == (policy.Change{}) {
		return nil
	}
	return &Problem{Reason: ReasonFlapping, Err: fmt.Errorf("another program reverts the rules repeatedly (%s), most likely %s; "+
		"repairs are %s apart now: stop that program, make it leave the chain alone, or set backend to \"nftables\" if the chain is kept in iptables, and then run ip-masq-reconciler once; "+
		"this message ends %s after the last repair", what, l.by, l.flapping.Pause(), 2*l.flapping.Pause())}
}

// schedule decides when the next sync is due.
type schedule struct {
	ended time.Time     // the last sync or dry run
	next  time.Time     // the next sync without a trigger
	retry time.Duration // 0 unless the last sync failed
	pause time.Duration // 0 unless the rules are flapping

	flappingEnds time.Time // if nothing is reverted any more
	conflist     time.Time // when the conflist is to be synced without a trigger; zero: then it is not
}

// after takes note of a sync. If backoff is not zero, withheld policies are due then.
func (s *schedule) after(now time.Time, r *Report, pause, interval time.Duration, backoff time.Time) {
	*s = schedule{ended: now, next: now.Add(interval), retry: s.retry, pause: pause, conflist: s.conflist}
	if !r.rulesFailed() || r.reverted() {
		s.retry = 0
	} else {
		s.retry = min(max(2*s.retry, firstRetry), interval)
		s.next = now.Add(s.retry)
	}
	if !backoff.IsZero() && backoff.Before(s.next) {
		s.next = backoff
	}
}

// due returns when the next sync is to begin, for the triggers so far.
func (s *schedule) due(t triggers) time.Time {
	next := s.next
	if soon := s.ended.Add(minInterval); t != (triggers{}) && soon.Before(next) {
		next = soon
	}
	if s.pause > 0 && !t.files && !t.request && !t.conflist {
		if s.flappingEnds.Before(next) { // by then the flapping is over, or goes on
			next = s.flappingEnds
		}
		if first := s.ended.Add(s.pause); next.Before(first) {
			next = first
		}
	}
	if !s.conflist.IsZero() && s.conflist.Before(next) {
		next = s.conflist
	}
	return next
}
