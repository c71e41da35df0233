// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// work is what the loop does in a goroutine of its own. Of each kind one runs at a time. It gets what it
// needs from the state when it begins, and its result is an event.
type work int

const (
	publishing      work = iota // writes for the plugin at which generation the rules are right
	syncingConflist             // may wait for a lock and for disks, which delays no repair
	reading                     // reads the sources
	syncing                     // syncs the rules
	resetting                   // walks through the conntrack table

	works        = iota // the number of kinds
	nothing work = -1   // no work is due
)

// finished is the end of a work.
type finished struct {
	work   work
	result event
}

func (f finished) apply(l *Loop, now time.Time) {
	l.state.running[f.work] = false
	f.result.apply(l, now)
}

// start starts a work that is due.
func (l *Loop) start(ctx context.Context, w work, now time.Time) {
	s := &l.state
	s.running[w] = true
	var do func() event
	switch w {
	case publishing:
		p := publication{s.last.report, s.commits.generation}
		do = func() event { return l.publishVerified(p) }
	case syncingConflist:
		s.conflist.due = never()
		do = func() event { return l.syncConflist(ctx) }
	case reading:
		s.files.Take(now)
		s.triggers.request = false
		do = func() event { return l.readSources() }
	case syncing:
		order := s.beginSync(now)
		do = func() event { return l.sync(ctx, order) }
	case resetting:
		s.resets.due = never()
		do = func() event { return l.resetConnections(ctx) }
	}
	l.working.Go(func() { l.events.put(finished{w, do()}) })
}

// publication says that the rules are as a sync found them, at a generation.
type publication struct {
	report     *Report
	generation uint32
}

func (p publication) apply(l *Loop, _ time.Time) { l.state.published = p }

func (l *Loop) publishVerified(p publication) event {
	if l.Verified != nil {
		l.Verified(p.report, p.generation)
	}
	return p
}

type conflistSynced struct{ conflist.Status }

func (c conflistSynced) apply(l *Loop, _ time.Time) { l.state.noteConflist(c.Status) }

func (l *Loop) syncConflist(ctx context.Context) event { return conflistSynced{l.SyncConflist(ctx)} }

type sourcesRead struct{ sources *Sources }

func (r sourcesRead) apply(l *Loop, now time.Time) {
	l.state.noteSources(r.sources, now, l.SyncConflist != nil)
}

func (l *Loop) readSources() event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return sourcesRead{l.Node.Read()}
}

// syncOrder is what a sync needs from the state in which it begins.
type syncOrder struct {
	sources *Sources
	last    *Report // of the sync before
	isEarly bool    // the one before failed, and only rules ask for this one
	isRead  bool    // the sources were read for it, so the runtime's cache is read, too
	touches int
	by      Writer
}

// sync makes one sync. If the last one failed, a sync that only rules ask for is made only if it would do
// something else: what failed is not retried at the rate of events, which beside kube-proxy is every second.
func (l *Loop) sync(ctx context.Context, o syncOrder) event {
	l.mu.Lock()
	defer l.mu.Unlock()
	if o.isEarly && l.Node.DryRun(ctx, o.sources).sameOutstanding(o.last) {
		return notSynced{o.by}
	}
	r := l.Node.sync(ctx, o.sources, o.isRead)
	l.Node.AddADDProblems(r)
	if ctx.Err() != nil { // it may have been interrupted
		return notSynced{o.by}
	}
	r.By = o.by
	l.observed = r
	return synced{r, o.touches}
}

// notSynced is the result of a sync that did nothing or was interrupted. The program that changed rules is
// named by the next one.
type notSynced struct{ by Writer }

func (n notSynced) apply(l *Loop, now time.Time) {
	s := &l.state
	s.last.ended = now
	s.commits.writer = cmp.Or(s.commits.writer, n.by)
}

type synced struct {
	report  *Report
	touches int // commits that may have changed owned rules, when it began
}

// apply completes the report of a sync and reports it.
func (d synced) apply(l *Loop, now time.Time) {
	s, r := &l.state, d.report
	if r.Differs() {
		s.commits.writer = cmp.Or(s.commits.writer, r.By) // the next sync repairs what that program changed
	}
	s.sources = r.Sources
	s.last.touches = d.touches
	s.noteSync(now, r, l.Node.Interval(r.Sources))
	if p := s.detectFlapping(now, r); p != nil {
		r.Problems = append(r.Problems, *p)
	}
	if c := s.takeConflist(); c != nil {
		r.addConflist(c)
	}
	l.watch(r)
	l.report(r)
}

// addConflist takes over the state of the conflist.
func (r *Report) addConflist(c *conflist.Status) {
	r.Conflist = c
	for _, p := range c.Problems {
		r.add(Problem{Reason: Reason(p.Reason), Err: p.Err, Waiting: p.Waiting})
	}
	r.Warnings = append(r.Warnings, c.Warnings...)
	for _, f := range c.Findings {
		r.warn(FindingWarning{errors.New(f.Message), f.ID})
	}
}

func (l *Loop) report(r *Report) {
	l.log.report(r)
	l.publish(r)
}

// watch calls Watch with the chains of a report. If they are not the ones before, a commit since its begin
// may have touched one that was not watched yet.
func (l *Loop) watch(r *Report) {
	if l.Watch == nil {
		return
	}
	before, chains := l.state.watched, chainsToWatch(r)
	isAll, wasAll := chains == nil, before == nil
	if isAll == wasAll && slices.Equal(chains, before) {
		return
	}
	l.Watch(chains)
	l.state.watched = chains
	if !isAll && !wasAll {
		l.state.committed(Commit{Touched: true})
	}
}

// chainsToWatch returns the chains that matter while everything is as the report says, or nil if that is
// unknown.
func chainsToWatch(r *Report) []netfilter.OwnedChain {
	if !r.verified() {
		return nil
	}
	chains := []netfilter.OwnedChain{}
	for _, c := range r.Rules.Chains {
		for _, d := range c.Desired.Chains {
			at := policy.ChainFamily{Chain: d.Name, Family: d.Family}
			chains = append(chains, netfilter.OwnedChain{ChainFamily: at, Choice: c.Choice})
		}
	}
	return chains
}

// connectionsReset is the result of the resets on record that were due.
type connectionsReset struct {
	deleted map[policy.ChainFamily]uint64
	next    time.Duration // until the next one is due; 0 if none is on record
	took    time.Duration
	err     error
}

func (l *Loop) resetConnections(ctx context.Context) event {
	e := enforce.Enforcer{Dir: l.Node.Dir, Conntrack: l.Node.Conntrack}
	began := time.Now()
	deleted, next, err := e.ResetConnections(ctx)
	if ctx.Err() != nil {
		err = nil // it was interrupted
	}
	return connectionsReset{deleted, next, time.Since(began), err}
}

// apply decides when the next reset is due. A sync follows, as nothing is verified while resets are on
// record.
func (c connectionsReset) apply(l *Loop, now time.Time) {
	l.log.reset(c.deleted, c.took, c.err)
	if l.ConnectionsReset != nil && (len(c.deleted) > 0 || c.err != nil) {
		l.ConnectionsReset(c.deleted, c.err)
	}
	l.state.triggers.rules = true
	resets := &l.state.resets
	if c.err != nil {
		resets.retry = min(max(2*resets.retry, firstRetry), lastRetry)
		resets.due = now.Add(resets.retry)
		return
	}
	resets.retry = 0
	if c.next > 0 {
		resets.due = now.Add(c.next)
	}
}
