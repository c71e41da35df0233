// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// DryRun reports what a sync would find and do, and writes nothing.
func (n *Node) DryRun(ctx context.Context, src *Sources) *Report {
	r := &Report{Started: time.Now(), Sources: src, Result: Unchanged}
	if n.load(r) {
		p := n.plan(r.State, src, n.toDrop(r.State, src, r.warn))
		r.planned(p)
		r.InForce = p.Sources
		e := n.Enforcer(src, r.warn)
		r.OtherDataDir = n.checkDataDir(ctx, e, src)
		r.Rules = observe(ctx, e, &p.Proposal, r.State.Record)
		if r.refuseBeyondBounds(p.Changed) {
			r.InForce = r.State.Sources
			r.Rules = observe(ctx, e, n.storedWith(r.State), r.State.Record)
		}
	}
	if r.OtherDataDir != nil {
		r.Dropped = nil
	}
	n.addProblems(ctx, r)
	return r
}

// refuseBeyondBounds reports whether changed sources ask for more rules than their chain can have, such as
// by a namespace with too many pods, and adds these as problems. A sync applies none of them, so a dry run
// is about the stored policies, which stay in force.
func (r *Report) refuseBeyondBounds(changed []policy.Source) (isRefused bool) {
	for _, source := range changed {
		c := r.Rules.Find(source.Policy.Chain)
		if c == nil {
			continue
		}
		bound, isBeyond := errors.AsType[*policy.BoundError](c.Err)
		if isBeyond {
			r.refuse(source.ID, bound)
			isRefused = true
		}
	}
	return isRefused
}

// refuse adds that the policy of a source cannot be applied.
func (r *Report) refuse(source policy.SourceID, err error) {
	what := "the policy cannot be applied"
	if r.State.Find(source) != nil {
		what = "the new policy cannot be applied; the last good policy stays"
	}
	r.add(Problem{Reason: ReasonRules, Source: source, Err: fmt.Errorf("%s: %s: %w", source, what, err)})
}

// Sync enforces what the sources ask for. Where everything is correct and each pod of the runtime's cache has
// its record, it only reads, without the lock.
func (n *Node) Sync(ctx context.Context, src *Sources) *Report { return n.sync(ctx, src, true) }

// sync is Sync. Without syncsCache it leaves the records of cached pods as they are: it comes because rules
// or addresses changed, and a repair does not wait until the runtime's cache is read.
func (n *Node) sync(ctx context.Context, src *Sources, syncsCache bool) *Report {
	r := n.DryRun(ctx, src)
	mayRecord := r.mayRecord() // before the rules are written, which depend on the records
	var warnings []error
	var cached cacheSync
	if mayRecord {
		warnings = n.rememberEntries(r.State, src)
	}
	if mayRecord && syncsCache {
		cached = n.syncCachedPods(src)
		warnings = append(warnings, cached.warnings...)
	}
	if cached.changed {
		r = n.DryRun(ctx, src)
	}
	if r.Unfinished() {
		r = &Report{Started: r.Started, Sources: src, Result: Unchanged}
		n.write(ctx, r)
		n.addProblems(ctx, r)
	}
	n.addBackendProblems(ctx, r)
	if r.Rules != nil && r.Rules.PodsRecorded() {
		n.cached.awaitRules = false
	}
	if mayRecord {
		r.Unrecorded = n.cached.unrecorded
	}
	for _, w := range warnings {
		r.warn(w)
	}
	return r
}

// mayRecord reports whether the entries and pods of the node may be recorded: the dataDir is the node's, and
// its conflists say which networks have an entry.
func (r *Report) mayRecord() bool { return r.OtherDataDir == nil && r.Sources.PluginFileErr == nil }

// rememberEntries records the entries that conflists have because of plugin.toml; see store.Dir.HadEntry.
func (n *Node) rememberEntries(state store.State, src *Sources) (warnings []error) {
	if !src.PluginFile.Present {
		return nil
	}
	for _, s := range state.Sources {
		if list := src.PluginFile.Conflist(src.ConfDir, s.ID.Name); list != nil {
			err := n.Dir.AddEntry(s.ID.Name, list.Entries[0].Netconf.Statements())
			warnings = append(warnings, err)
		}
	}
	return warnings
}

// Check compares the rules with what the sources ask for, and writes nothing. It observes a
// difference again under the lock, as an ADD may be about to remove it.
func (n *Node) Check(ctx context.Context) *Report {
	r := n.DryRun(ctx, n.Read())
	if !r.Differs() {
		return r
	}
	lock, err := n.Dir.LockToRead(ctx)
	if err != nil {
		r.warn(err)
		return r
	}
	again := n.DryRun(ctx, n.Read())
	again.warn(lock.Release())
	return again
}

// CheckEntry returns why ADDs would fail with the plugin entry of a conflist that is not written yet, or nil.
// It asks the kernel, and writes nothing.
func (n *Node) CheckEntry(ctx context.Context, list config.Conflist) (err error) {
	src := n.reread(&Sources{})
	src.ConfDir = src.ConfDir.With(list)
	dataDirErr := list.DataDirErr(src.PluginFile, n.Dir.Path())
	if err := cmp.Or(list.Err, list.Entries[0].Err, src.PluginFileErr, dataDirErr); err != nil {
		return err
	}
	ignore := func(error) {} // the syncs warn
	e := n.Enforcer(src, ignore)
	if err := n.checkDataDir(ctx, e, src); err != nil {
		return err
	}
	lock, err := n.Dir.LockToRead(ctx)
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, lock.Release()) }()
	state, err := n.Dir.Load()
	if err := cmp.Or(err, state.Newer()); err != nil {
		return err
	}
	if err := n.checkAgentFiles(list.Entries[0].Entry, state); err != nil {
		return err
	}
	p := enforce.Proposal{Sources: state.Sources}
	own := src.network(&list)
	if err := p.Add(own, src.conflists, ignore); err != nil {
		return err
	}
	return e.CheckApply(ctx, state, &p).Err(own.Policy.Chain)
}

// load reads the documents for a report, without resets of an earlier boot, and the generation of the
// ruleset. It returns false if it fails.
func (n *Node) load(r *Report) bool {
	reading, err := n.Dir.Read()
	if err != nil {
		r.problem(ReasonState, err)
		return false
	}
	e := n.Enforcer(r.Sources, r.warn)
	r.State, r.inputs = reading.State(), e.Inputs(reading, n.Version, r.Sources.PluginFile)
	if r.State.Record.Boot != n.Dir.Boot() {
		r.State.Record.Resets = nil // the connections ended with that boot
	}
	r.generation, _ = n.Drivers.Generation() // without it nothing is published
	return true
}

// observe observes the rules of a proposal once: a sync observes a difference twice, in its dry run and
// with the lock. With lost documents the chains stay as they are, which only ObserveProposal knows.
func observe(ctx context.Context, e *enforce.Enforcer, p *enforce.Proposal, rec store.Record) *enforce.State {
	if len(p.Lost) > 0 {
		return e.ObserveProposal(ctx, p, rec)
	}
	return e.Observe(ctx, p.Sources, rec)
}

// write is the part of a sync that holds the lock. It reads everything again, so a difference is seen
// twice before it is repaired.
func (n *Node) write(ctx context.Context, r *Report) {
	lock, err := n.Dir.Lock(ctx)
	if err != nil {
		r.problem(ReasonState, err)
		n.load(r)
		return
	}
	defer func() { r.warn(lock.Release()) }()
	r.Sources = n.reread(r.Sources) // an ADD may have stored the policy of a newer conflist meanwhile
	e := n.Enforcer(r.Sources, r.warn)
	r.OtherDataDir = n.checkDataDir(ctx, e, r.Sources)
	if r.OtherDataDir != nil || !n.load(r) { // addProblems reports it
		return
	}
	p := n.plan(r.State, r.Sources, n.toDrop(r.State, r.Sources, r.warn))
	r.warn(lock.Tidy())
	dropped := dropDocuments(r, lock, p.says.Dropped)
	// With the dropped networks, whose rules are in the kernel until the sync removes them.
	before := observe(ctx, e, n.storedWith(r.State), r.State.Record)
	p = n.keepUsed(r, lock, p, dropped)
	r.planned(p)
	r.Before, r.Drift = before, before.Drift()
	changes := len(p.Changed)+len(p.says.Dropped) > 0
	if changes {
		n.applyChanges(ctx, r, e, lock, &p.Proposal)
	} else {
		r.Rules = e.Sync(ctx, before, lock)
	}
	for _, s := range p.says.Dropped {
		r.warn(lock.CommitDrop(s))
	}
	if len(before.OtherDataDirs)+len(before.Stale) > 0 {
		r.Sources.owned = nil
	}
	r.Drift = slices.DeleteFunc(r.Drift, func(c policy.Change) bool { return !written(r.Rules, c.Chain) })
	if n.load(r) {
		r.InForce = r.State.Sources
	}
	switch {
	case len(r.Pending) > 0:
		r.Result = Failed
	case len(r.Drift) > 0:
		r.Result = Repaired
	case changes || !before.InSync():
		r.Result = Changed
	}
}

// dropDocuments drops the documents of networks, and returns those that could be dropped.
func dropDocuments(r *Report, lock *store.Lock, toDrop []policy.SourceID) (dropped []policy.SourceID) {
	for _, s := range toDrop {
		err := lock.Drop(s)
		r.warn(err)
		if err == nil {
			dropped = append(dropped, s)
		}
	}
	return dropped
}

// keepUsed restores the documents of networks that are used again, or whose drop failed, and returns the plan
// without them. An ADD that attached before the document was dropped may have returned and relies on the
// rules. One that attaches later finds no document, and waits for the lock.
func (n *Node) keepUsed(r *Report, lock *store.Lock, p plan, dropped []policy.SourceID) plan {
	toDrop := n.toDrop(r.State, r.Sources, r.warn)
	var stillDropped []policy.SourceID
	for _, s := range p.says.Dropped {
		if slices.Contains(dropped, s) && slices.Contains(toDrop, s) {
			stillDropped = append(stillDropped, s)
			continue
		}
		r.warn(lock.UndoDrop(s))
	}
	if len(stillDropped) == len(p.says.Dropped) {
		return p
	}
	return n.plan(r.State, r.Sources, stillDropped)
}

// written reports whether the rules of a chain could be written, even if another program has changed
// them since. For "" it reports that of all chains.
func written(s *enforce.State, chain string) bool {
	for _, p := range s.Policies() {
		err := s.Err(p.Chain)
		isMeant := chain == "" || chain == p.Chain
		if isMeant && err != nil && !isDrift(err) {
			return false
		}
	}
	return true
}

// applyChanges applies all changed documents at once, so that no packet meets a part of them. If that is
// refused it tries each by itself: a mistake in one source does not hold up another. Where documents were
// dropped and none has changed, the sync at the end meets the same error, and its state has it.
func (n *Node) applyChanges(
	ctx context.Context, r *Report, e *enforce.Enforcer, lock *store.Lock, p *enforce.Proposal,
) {
	err := apply(ctx, r, e, lock, p)
	if err == nil {
		r.Pending = nil
		return
	}
	for _, c := range p.Changed {
		if !n.load(r) {
			return
		}
		if len(p.Changed) > 1 {
			err = apply(ctx, r, e, lock, n.storedWith(r.State, c))
		}
		if err == nil {
			continue
		}
		r.refuse(c.ID, err)
	}
	isApplied := func(s policy.SourceID) bool { return slices.Contains(r.Applied, s) }
	r.Pending = slices.DeleteFunc(r.Pending, isApplied)
	if n.load(r) {
		r.Rules = e.Sync(ctx, observe(ctx, e, n.storedWith(r.State), r.State.Record), lock)
	}
}

// apply applies a proposal, and takes note of the sources whose policy it applied.
func apply(ctx context.Context, r *Report, e *enforce.Enforcer, lock *store.Lock, p *enforce.Proposal) error {
	var err error
	r.Rules, err = e.Apply(ctx, lock, r.State, p)
	if err != nil {
		return err
	}
	for _, c := range p.Changed {
		r.Applied = append(r.Applied, c.ID)
	}
	return nil
}

// booted returns the time of the boot by the wall clock, which may be set at any time.
func booted() time.Time { return time.Now().Add(-time.Duration(store.BootTime())) }
