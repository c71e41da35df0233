// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Loop makes passes: when rules or files change, when asked to, when something
// has to be tried again, and when the interval is over.
type Loop struct {
	node    *Node
	log     *journal
	publish func(*Report)
	pending *pending
	files   settling
	asked   chan chan<- *enforce.State

	sources  *Sources // as they were read last
	debounce pace
	flapping rival
	last     *Report
	view     *enforce.State // the last reading of the rules, and when it was made
	seen     time.Time
}

// NewLoop returns a loop over the node's passes. It tells publish about each
// pass, and the log about what is news.
func NewLoop(n *Node, log *slog.Logger, publish func(*Report)) *Loop {
	l := &Loop{
		node: n, log: &journal{log: log}, publish: publish,
		pending: newPending(), asked: make(chan chan<- *enforce.State),
	}
	l.files.pass = func() { l.pending.add(cause{files: true}) }
	return l
}

// RulesChanged tells that somebody changed rules, and who where that is known.
// As the other tellings it may be called by any goroutine, and never waits.
func (l *Loop) RulesChanged(by Writer) { l.pending.add(cause{rules: true, writer: by}) }

// FilesChanged tells that a conflist or an agent file may have changed, or
// changes still.
func (l *Loop) FilesChanged() { l.files.happened() }

// SyncNow asks for a pass that takes nothing for granted.
func (l *Loop) SyncNow() { l.pending.add(cause{asked: true}) }

// State returns a reading of the rules, or nil where they cannot be read now. One
// of this very moment takes a loop that has nothing else to do; who asks very
// often gets the last one. It writes nothing.
func (l *Loop) State(ctx context.Context) *enforce.State {
	answer := make(chan *enforce.State, 1)
	select {
	case l.asked <- answer:
		return <-answer
	case <-ctx.Done():
		return nil
	}
}

// Run makes passes until ctx ends, and leaves the rules as they are. While
// another reconciler has the lead of the node it stands by.
func (l *Loop) Run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := l.refused(ctx); err != nil { // before anything is made there
			l.standBy(ctx, Problem{Reason: ReasonState, Err: err})
			continue
		}
		lead, err := l.node.Dir.InstanceLock()
		if errors.Is(err, store.ErrBusy) {
			l.standBy(ctx, Problem{Reason: ReasonStandby, Err: fmt.Errorf("%w; this one takes over when that ends", err)})
			continue
		}
		if err != nil { // it works without: two at once do no harm, but talk twice
			l.log.warn([]error{fmt.Errorf("cannot tell whether another reconciler runs: %w", err)})
		}
		l.keep(ctx, lead)
		l.log.warn([]error{lead.Release()})
	}
}

// refused tells why the dataDir may not be used, if so.
func (l *Loop) refused(ctx context.Context) error {
	return l.node.Enforcer(l.node.again(&Sources{}), func(err error) { l.log.warn([]error{err}) }).CheckDataDir(ctx)
}

// standBy waits a moment for what keeps this reconciler from its work to end.
func (l *Loop) standBy(ctx context.Context, cause Problem) {
	const again = time.Second
	result := Failed
	if cause.Reason == ReasonStandby {
		result = Unchanged
	}
	l.tell(&Report{Started: time.Now(), Result: result, Problems: []Problem{cause}})
	for timer := time.NewTimer(again); ; {
		select {
		case <-ctx.Done():
			return
		case answer := <-l.asked:
			answer <- nil
		case <-timer.C:
			return
		}
	}
}

// keep makes passes for as long as the lead is held.
func (l *Loop) keep(ctx context.Context, lead *store.InstanceLock) {
	due := cause{asked: true}
	for {
		l.sync(ctx, due)
		if due = l.wait(ctx); ctx.Err() != nil || !lead.Held() {
			return
		}
	}
}

// wait returns what the next pass is made for, once it is time for it.
func (l *Loop) wait(ctx context.Context) cause {
	timer := time.NewTimer(time.Until(l.debounce.due(cause{})))
	defer timer.Stop()
	var due cause
	for {
		select {
		case <-ctx.Done():
			return due
		case answer := <-l.asked:
			answer <- l.look(ctx)
			continue
		case <-l.pending.wake:
			due = due.with(l.pending.take())
		case <-timer.C:
			due.due = due.none()
			return due
		}
		next := time.Until(l.debounce.due(due))
		if next <= 0 {
			return due
		}
		timer.Reset(next)
	}
}

// look reads the rules for who asks, unless they were read a moment ago.
func (l *Loop) look(ctx context.Context) *enforce.State {
	const fresh = 20 * time.Millisecond
	if l.view != nil && time.Since(l.seen) >= fresh {
		l.view = l.node.Enforcer(l.last.Sources, func(error) {}).Observe(ctx, l.last.State.Sources, l.last.State.Record)
		l.seen = time.Now()
	}
	return l.view
}

// pass makes one pass. The sources are read again unless only rules changed:
// files have events of their own. Those that somebody is writing will be read
// when he is done.
func (l *Loop) sync(ctx context.Context, due cause) {
	if due.asked {
		l.node.backoff.retry()
	}
	if l.sources == nil || due.files || (due.asked || due.due) && !l.files.busy() {
		l.sources = l.node.Read()
	}
	if due.onlyRules() && l.debounce.retry > 0 && l.node.DryRun(ctx, l.sources).leaves(l.last) {
		l.debounce.ended = time.Now()
		return // what failed is not tried at the pace of events
	}
	r := l.node.Sync(ctx, l.sources)
	l.node.judgeADDs(r)
	l.sources = r.Sources
	if ctx.Err() != nil {
		return // half a pass is no news
	}
	r.By = due.writer
	now := time.Now()
	if p := l.flapping.judge(now, r.Drift, due.writer); p != nil {
		r.Problems = append(r.Problems, *p)
	}
	l.last, l.view, l.seen = r, r.Rules, now
	l.debounce.after(now, r, l.flapping.pause(), l.node.Interval(l.sources), l.node.backoff.next)
	l.tell(r)
}

func (l *Loop) tell(r *Report) {
	l.log.report(r)
	l.publish(r)
}
