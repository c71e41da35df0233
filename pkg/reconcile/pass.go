// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// DryRun finds out what a pass would find and do, and writes nothing.
func (n *Node) DryRun(ctx context.Context, src *Sources) *Report {
	r := &Report{Started: time.Now(), Sources: src, Result: Unchanged}
	if n.load(r) {
		p := n.plan(r, func(s policy.SourceID) bool { return n.unused(r, s) })
		r.Stored = p.Sources
		e := n.Enforcer(src, r.warn)
		r.Refused = e.CheckDataDir(ctx)
		r.Rules = e.Observe(ctx, p.Sources, retrying(r.State.Record))
	}
	if r.Incomplete() != nil { // what differs from half the documents says nothing
		r.Pending, r.Dropped, r.Rules.Stale, r.Rules.Duplicates, r.Rules.OtherDataDirs = nil, nil, nil, nil, nil
		for i := range r.Rules.Groups {
			r.Rules.Groups[i].Diff = nil
		}
	}
	n.judge(r)
	return r
}

// Sync makes the node as its sources have it. Where all is so already it only
// reads, without the lock.
func (n *Node) Sync(ctx context.Context, src *Sources) *Report {
	r := n.DryRun(ctx, src)
	if r.Unfinished() {
		started := r.Started
		r = &Report{Started: started, Sources: src, Result: Unchanged}
		n.write(ctx, r)
		n.judge(r)
	}
	n.judgeMeans(ctx, r)
	return r
}

// load reads the documents, and returns false where that failed.
func (n *Node) load(r *Report) bool {
	state, err := n.Dir.Load()
	if err != nil {
		r.problem(ReasonState, err)
		return false
	}
	r.State = state
	return true
}

// retrying returns the record as if nothing in it had been tried in vain: what
// verbs leave alone is for the reconciler to try again.
func retrying(rec store.Record) store.Record {
	rec.Chains = slices.Clone(rec.Chains)
	for i := range rec.Chains {
		rec.Chains[i].Stuck = false
	}
	return rec
}

// write is the part of a pass that holds the lock. What was seen without it is
// read again, so that a difference is seen twice before it is repaired.
func (n *Node) write(ctx context.Context, r *Report) {
	wait, cancel := context.WithTimeout(ctx, n.LockWait)
	defer cancel()
	lock, err := n.Dir.Lock(wait)
	if err != nil {
		r.problem(ReasonState, err)
		n.load(r)
		return
	}
	defer func() { r.warn(lock.Release()) }()
	// An ADD may have put in force meanwhile what a conflist says now; what it
	// said before would undo that.
	r.Sources = n.again(r.Sources)
	e := n.Enforcer(r.Sources, r.warn)
	if r.Refused = e.CheckDataDir(ctx); r.Refused != nil || !n.load(r) || len(r.State.Newer) > 0 {
		return
	}
	for _, d := range r.State.Damaged {
		r.warn(fmt.Errorf("a damaged document counts as absent: %w", d.Err))
	}
	unused := func(s policy.SourceID) bool { return n.unused(r, s) }
	p := n.plan(r, unused)
	if !r.Unfinished() && len(r.Lost) > 0 {
		return
	}
	r.warn(lock.Tidy(r.State))
	dropped := map[policy.SourceID]*store.Staged{}
	for _, s := range r.Dropped {
		d, err := lock.Drop(s)
		if r.warn(err); err == nil {
			dropped[s] = d
		}
	}
	rec := retrying(r.State.Record)
	before := e.Observe(ctx, r.State.Sources, rec)
	if len(r.Dropped) > 0 {
		// An ADD that attached before the document was gone may have found all right,
		// and relies on the rules. One that attaches now finds no document, and waits.
		p = n.plan(r, func(s policy.SourceID) bool {
			if dropped[s] != nil && unused(s) {
				return true
			}
			r.warn(dropped[s].Discard())
			return false
		})
	}
	if r.Before = before; len(r.State.Damaged) == 0 { // what a document held is no drift
		r.Drift = drift(before)
	}
	r.Wrote = !before.InSync() || len(r.Pending)+len(r.Dropped)+len(r.State.Damaged) > 0
	if len(r.Pending)+len(r.Dropped) == 0 {
		r.Rules = e.Sync(ctx, before, lock)
	} else {
		n.adopt(ctx, r, e, lock, p)
	}
	for _, s := range r.Dropped {
		r.warn(dropped[s].Commit())
	}
	if len(before.OtherDataDirs) > 0 {
		r.Sources.owned = nil
	}
	r.Drift = slices.DeleteFunc(r.Drift, func(c policy.Change) bool { return !written(r.Rules, c.Chain) })
	r.Pending = slices.DeleteFunc(r.Pending, func(s policy.SourceID) bool { return slices.Contains(r.Adopted, s) })
	if n.load(r) {
		r.Stored = r.State.Sources
	}
	switch {
	case len(r.Rejected) > 0:
		r.Result = Failed
	case len(r.Drift) > 0:
		r.Result = Repaired
	case r.Wrote:
		r.Result = Changed
	}
}

// drift is how the rules that were made in this boot differ from what they were
// made to be. What has not been made yet has not drifted.
func drift(v *enforce.State) policy.Diff {
	var d policy.Diff
	for _, g := range v.Groups {
		if g.Recorded {
			d = append(d, g.Diff...)
		}
	}
	return d
}

// written reports whether the rules of a chain could be written, whatever others
// have made of them since; of what belongs to no chain, whether those of all could.
func written(v *enforce.State, chain string) bool {
	for _, p := range v.Policies {
		var drift *enforce.DriftError
		if err := v.Err(p.Chain); (chain == "" || chain == p.Chain) && err != nil && !errors.As(err, &drift) {
			return false
		}
	}
	return true
}

// adopt puts all changed documents in force, in one go so that no packet meets
// half of them. Where that fails, each is tried by itself: a mistake in one
// source is no reason to withhold another.
func (n *Node) adopt(ctx context.Context, r *Report, e *enforce.Enforcer, lock *store.Lock, p *enforce.Proposal) {
	var err error
	r.Rejected = map[policy.SourceID]error{}
	defer func() { n.backoff.note(p.Changed, r.Rejected, time.Now()) }()
	if r.Rules, err = e.ApplyProposal(ctx, lock, r.State, p, vouchFor(p.Changed)); err == nil {
		for _, c := range p.Changed {
			r.Adopted = append(r.Adopted, c.ID)
		}
		return
	}
	for _, c := range p.Changed {
		if !n.load(r) {
			return
		}
		if len(p.Changed) > 1 {
			one := &enforce.Proposal{Sources: enforce.WithSource(r.State.Sources, c), Changed: []policy.Source{c}}
			if r.Rules, err = e.ApplyProposal(ctx, lock, r.State, one, vouchFor(one.Changed)); err == nil {
				r.Adopted = append(r.Adopted, c.ID)
				continue
			}
		}
		r.Rejected[c.ID] = fmt.Errorf("%s: what it states now cannot be put in force; the last good policy stays: %w", c.ID, err)
		r.sourceProblem(ReasonRules, c.ID, r.Rejected[c.ID])
	}
	if n.load(r) {
		r.Rules = e.Sync(ctx, e.Observe(ctx, r.State.Sources, retrying(r.State.Record)), lock)
	}
}

// vouchFor fails where the rules of a chain that one of these contributes to are
// not as desired.
func vouchFor(changed []policy.Source) func(*enforce.State) error {
	return func(v *enforce.State) error {
		for _, c := range changed {
			if err := v.Err(c.Policy.Chain); err != nil {
				return err
			}
		}
		return nil
	}
}
