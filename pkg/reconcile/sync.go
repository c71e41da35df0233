// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// DryRun reports what a sync would find and do, and writes nothing.
func (n *Node) DryRun(ctx context.Context, src *Sources) *Report {
	r := &Report{Started: time.Now(), Sources: src, Result: Unchanged}
	if n.load(r) {
		p := n.plan(r, n.unused(r))
		r.Stored = p.Sources
		e := n.Enforcer(src, r.warn)
		r.OtherDataDir = n.checkDataDir(ctx, e, src)
		r.Rules = observe(ctx, e, p, r.State.Record)
	}
	if r.OtherDataDir != nil {
		r.Dropped = nil
	}
	if r.unknown() != nil { // differences from a part of the documents mean nothing
		r.Pending, r.Dropped = nil, nil
		r.Rules.DiscardDiff()
	}
	n.addProblems(ctx, r)
	return r
}

// Sync enforces what the sources ask for. When everything is correct it only reads, without the lock.
func (n *Node) Sync(ctx context.Context, src *Sources) *Report {
	r := n.DryRun(ctx, src)
	n.rememberEntries(r)
	if n.syncCachedPods(r) {
		r = n.DryRun(ctx, src)
	}
	if r.Unfinished() {
		r = &Report{Started: r.Started, Sources: src, Result: Unchanged}
		n.write(ctx, r)
		n.addProblems(ctx, r)
	}
	n.addBackendProblems(ctx, r)
	if r.Rules != nil && r.Rules.PodsRecorded() {
		n.cached.fresh = false
	}
	return r
}

// rememberEntries records the entries that conflists have because of plugin.toml; see store.Dir.HadEntry.
func (n *Node) rememberEntries(r *Report) {
	src := r.Sources
	if !src.PluginFile.Present || src.PluginFileErr != nil || r.OtherDataDir != nil {
		return
	}
	for _, s := range r.State.Sources {
		if list := src.PluginFile.Conflist(src.ConfDir, s.ID.Name); list != nil {
			r.warn(n.Dir.AddEntry(s.ID.Name, list.Entries[0].Netconf.Statements()))
		}
	}
}

// Check compares the rules with what the sources ask for, and writes nothing. It looks at a
// difference again under the lock, as an ADD may be about to remove it.
func (n *Node) Check(ctx context.Context) *Report {
	r := n.DryRun(ctx, n.Read())
	if !r.Differs() {
		return r
	}
	wait, cancel := context.WithTimeout(ctx, n.LockWait)
	defer cancel()
	lock, err := n.Dir.LockToRead(wait)
	if err != nil {
		r.warn(err)
		return r
	}
	again := n.DryRun(ctx, n.Read())
	again.warn(lock.Release())
	return again
}

// load reads the documents, and returns false if that fails.
func (n *Node) load(r *Report) bool {
	reading, err := n.Dir.Read()
	if err != nil {
		r.problem(ReasonState, err)
		return false
	}
	e := n.Enforcer(r.Sources, r.warn)
	r.State, r.inputs = reading.State(), e.Inputs(reading, n.Version, r.Sources.PluginFile)
	r.generation, _ = n.Drivers.Generation() // without it nothing is published
	return true
}

// observe observes once: a sync sees a difference twice, in its dry run and with the lock.
func observe(ctx context.Context, e *enforce.Enforcer, p *enforce.Proposal, rec store.Record) *enforce.State {
	if rec = withoutStuck(rec); p.Incomplete {
		return e.ObserveProposal(ctx, p, rec)
	}
	return e.Observe(ctx, p.Sources, rec)
}

// withoutStuck returns the record without marks of chains that could not be removed: the verbs leave
// those alone, the reconciler tries again.
func withoutStuck(rec store.Record) store.Record {
	rec.Chains = slices.Clone(rec.Chains)
	for i := range rec.Chains {
		rec.Chains[i].Stuck = false
	}
	return rec
}

// write is the part of a sync that holds the lock. It reads everything again, so a difference is seen
// twice before it is repaired.
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
	r.Sources = n.reread(r.Sources) // an ADD may have stored the policy of a newer conflist meanwhile
	e := n.Enforcer(r.Sources, r.warn)
	if r.OtherDataDir = n.checkDataDir(ctx, e, r.Sources); r.OtherDataDir != nil || !n.load(r) || r.unknown() != nil {
		return
	}
	p := n.plan(r, n.unused(r))
	r.warn(lock.Tidy(r.State))
	dropped := map[policy.SourceID]*store.Staged{}
	for _, s := range r.Dropped {
		d, err := lock.Drop(s)
		if r.warn(err); err == nil {
			dropped[s] = d
		}
	}
	rec := withoutStuck(r.State.Record)
	before := observe(ctx, e, n.stored(r), rec)
	// An ADD that attached before the document was dropped may have returned and relies on the rules.
	// One that attaches later finds no document, and waits for the lock.
	unused := n.unused(r)
	used := func(s policy.SourceID) bool { return dropped[s] == nil || !slices.Contains(unused, s) }
	if slices.ContainsFunc(r.Dropped, used) {
		for _, s := range r.Dropped {
			if used(s) {
				r.warn(dropped[s].Discard())
			}
		}
		p = n.plan(r, slices.DeleteFunc(r.Dropped, used))
	}
	r.Before, r.Drift = before, before.Drift()
	changes := len(r.Pending)+len(r.Dropped) > 0
	wrote := changes || !before.InSync()
	if changes {
		n.applyChanges(ctx, r, e, lock, p)
	} else {
		r.Rules = e.Sync(ctx, before, lock)
	}
	for _, s := range r.Dropped {
		r.warn(dropped[s].Commit())
	}
	if len(before.OtherDataDirs)+len(before.Stale) > 0 {
		r.Sources.owned = nil
	}
	r.Drift = slices.DeleteFunc(r.Drift, func(c policy.Change) bool { return !written(r.Rules, c.Chain) })
	if n.load(r) {
		r.Stored = r.State.Sources
	}
	switch {
	case len(r.Pending) > 0:
		r.Result = Failed
	case len(r.Drift) > 0:
		r.Result = Repaired
	case wrote:
		r.Result = Changed
	}
}

// written reports whether the rules of a chain could be written, even if another program has changed
// them since. For "" it reports that of all chains.
func written(s *enforce.State, chain string) bool {
	return !slices.ContainsFunc(s.Policies(), func(p policy.Policy) bool { return (chain == "" || chain == p.Chain) && failed(s, p.Chain) })
}

// failed reports whether the rules of a chain could not be read or written.
func failed(s *enforce.State, chain string) bool {
	err := s.Err(chain)
	return err != nil && !isDrift(err)
}

// applyChanges applies all changed documents at once, so that no packet meets a part of them.
// If that is refused it tries each by itself: a mistake in one source does not hold up another.
func (n *Node) applyChanges(ctx context.Context, r *Report, e *enforce.Enforcer, lock *store.Lock, p *enforce.Proposal) {
	apply := func(p *enforce.Proposal) (err error) {
		if r.Rules, err = e.Apply(ctx, lock, r.State, p); err == nil {
			for _, c := range p.Changed {
				r.Applied = append(r.Applied, c.ID)
			}
		}
		return err
	}
	err := apply(p)
	if err == nil {
		r.Pending = nil
		return
	}
	for _, c := range p.Changed {
		if !n.load(r) {
			return
		}
		if len(p.Changed) > 1 {
			if err = apply(n.stored(r, c)); err == nil {
				continue
			}
		}
		what := "the policy cannot be applied"
		if r.State.Find(c.ID) != nil {
			what = "the new policy cannot be applied; the last good policy stays"
		}
		r.add(Problem{Reason: ReasonRules, Source: c.ID, Err: fmt.Errorf("%s: %s: %w", c.ID, what, err)})
	}
	r.Pending = slices.DeleteFunc(r.Pending, func(s policy.SourceID) bool { return slices.Contains(r.Applied, s) })
	if n.load(r) {
		r.Rules = e.Sync(ctx, observe(ctx, e, n.stored(r), r.State.Record), lock)
	}
}

// plan returns what the documents are to become, without those of the dropped networks. What is wrong
// with a source goes into the report; its stored policy stays.
func (n *Node) plan(r *Report, dropped []policy.SourceID) *enforce.Proposal {
	r.Problems, r.Pending, r.Dropped, r.Lost = nil, nil, dropped, nil
	kept := slices.DeleteFunc(slices.Clone(r.State.Sources), func(c policy.Source) bool { return slices.Contains(dropped, c.ID) })
	p := &enforce.Proposal{Sources: kept}
	n.proposeNetworks(r, p)
	n.proposeAgent(r, p)
	lost := n.unreadable(r, p.Changed)
	if p.Incomplete = len(lost) > 0; p.Incomplete && len(dropped) > 0 {
		return n.plan(r, nil)
	}
	for _, c := range p.Changed {
		r.Pending = append(r.Pending, c.ID)
	}
	for _, d := range r.State.Damaged {
		if slices.Contains(lost, d) {
			r.Lost = append(r.Lost, Problem{Reason: ReasonState, Err: fmt.Errorf("%w; but no conflist or agent file says what it held, so all chains "+
				"stay as they are until the next ADD of its network writes it again, or the document is removed", d.Err)})
		} else {
			r.warn(FindingWarning{fmt.Errorf("damaged document: %w", d.Err), "damaged-document"})
		}
	}
	return p
}

// unreadable returns the damaged documents of sources that these do not restore.
func (n *Node) unreadable(r *Report, restored []policy.Source) []store.FileError {
	return slices.DeleteFunc(slices.Clone(r.State.Damaged), func(d store.FileError) bool {
		return !n.Dir.IsDocument(d.File) ||
			slices.ContainsFunc(restored, func(c policy.Source) bool { return d.File == n.Dir.DocumentPath(c.ID) })
	})
}

// stored returns what is stored as a proposal, with sources added or replaced.
func (n *Node) stored(r *Report, changed ...policy.Source) *enforce.Proposal {
	return &enforce.Proposal{Sources: enforce.WithSources(r.State.Sources, changed...), Changed: changed, Incomplete: len(n.unreadable(r, changed)) > 0}
}

func (r *Report) conflists() enforce.Conflists { return r.Sources.ConfDir }

// proposeNetworks proposes the policies of the conflists: for each network, that of the first with a
// plugin entry; with a plugin.toml, that of the first at all. A bad plugin.toml does not say which conflists count.
func (n *Node) proposeNetworks(r *Report, p *enforce.Proposal) {
	if r.Sources.PluginFileErr != nil {
		return
	}
	seen, confDir := map[string]bool{}, ""
	var networks []policy.Source
	if r.Sources.PluginFile.Present {
		confDir = r.Sources.PluginFile.CNIConfDir
	}
	for _, list := range r.Sources.ConfDir.Conflists {
		if list.Network == "" || list.Err != nil || seen[list.Network] || len(list.Entries) == 0 && confDir == "" {
			continue
		}
		if seen[list.Network] = true; len(list.Entries) == 0 {
			continue
		}
		source := policy.SourceID{Kind: policy.Network, Name: list.Network}
		entry := list.Entries[0]
		dataDirErr := list.DataDirErr(r.Sources.PluginFile, n.Dir.Path())
		switch {
		case entry.Err != nil:
			r.sourceProblem(source, untilCorrected(p, source, entry.Err))
		case dataDirErr != nil:
			r.problem(ReasonConflist, dataDirErr)
		default:
			networks = append(networks, policy.Source{ID: source, Policy: entry.Entry.Policy, ConfDir: confDir})
		}
	}
	errs := p.AddNetworks(networks, r.conflists, r.warn)
	for _, s := range networks {
		if err := errs[s.ID]; err != nil {
			r.sourceProblem(s.ID, err)
		}
	}
}

// proposeAgent proposes the policy of the agent files. A directory that is missing keeps the stored
// policy; without a stored one it counts as empty.
func (n *Node) proposeAgent(r *Report, p *enforce.Proposal) {
	files := r.Sources.Agent
	if files == nil {
		return
	}
	source := policy.SourceID{Kind: policy.AgentFiles}
	if r.Sources.AgentErr != nil {
		r.sourceProblem(source, untilCorrected(p, source, r.Sources.AgentErr))
	} else if files.Missing && p.Find(source) != nil {
		r.warn(FindingWarning{fmt.Errorf("agent_config_dir: %s does not exist; the policy that was read from it stays in force", policy.Quote(files.Dir)), "agent-files-missing"})
	} else if err := p.Add(n.preferred(files.Source, p), r.conflists, r.warn); err != nil {
		r.sourceProblem(source, err)
	}
	for _, u := range files.UnknownKeys {
		r.warn(FindingWarning{errors.New(u), "unknown-key"})
	}
	for _, w := range files.Warnings {
		r.warn(FindingWarning{errors.New(w), "agent-files-invalid"})
	}
}

// preferred returns the source of the agent files with the backend of the settings, unless a file or a network of its
// chain states one.
func (n *Node) preferred(agent policy.Source, p *enforce.Proposal) policy.Source {
	states := func(s policy.Source) bool {
		return s.Policy.Chain == agent.Policy.Chain && slices.ContainsFunc(s.Policies(), func(p policy.SourcePolicy) bool {
			return p.Backend != "" && p.Backend != policy.Auto
		})
	}
	networks := slices.DeleteFunc(slices.Clone(p.Sources), func(s policy.Source) bool { return s.ID.Kind != policy.Network })
	switch {
	case n.Settings.Backend == policy.Auto || n.Settings.Backend == "" || slices.ContainsFunc(append(networks, agent), states):
	case len(agent.Files) > 0:
		own := policy.FilePolicy{File: config.OwnPolicy, Policy: policy.SourcePolicy{Chain: agent.Policy.Chain, Backend: n.Settings.Backend}}
		agent.Files = append(slices.Clone(agent.Files), own)
	default:
		agent.Policy.Backend = n.Settings.Backend
	}
	return agent
}

// untilCorrected adds to the error of a source what it stops, and which policy is in force, until it is corrected.
func untilCorrected(p *enforce.Proposal, s policy.SourceID, err error) error {
	pods, inForce := "", "its last good policy stays in force"
	if s.Kind == policy.Network { // ADD has the same error
		pods = "no pod of this network can start, and "
	}
	if p.Find(s) == nil {
		inForce = "nothing of it is in force"
	}
	return fmt.Errorf("%w (until it is corrected, %s%s)", err, pods, inForce)
}

// unused returns the stored networks to drop: those that have had neither a conflist nor an attachment for DropAfter,
// and those whose policy does not come from where plugin.toml says.
func (n *Node) unused(r *Report) []policy.SourceID {
	var unused []policy.SourceID
	src := r.Sources
	if src.PluginFileErr != nil || src.ConfDirErr != nil || src.ConfDir.Err() != nil {
		return nil
	}
	for _, s := range r.State.Sources {
		if s.ID.Kind != policy.Network {
			continue
		}
		list := src.PluginFile.Conflist(src.ConfDir, s.ID.Name)
		elsewhere := src.PluginFile.Present && s.ConfDir != src.PluginFile.CNIConfDir &&
			(list == nil || list.Entries[0].Err != nil || list.DataDirErr(src.PluginFile, n.Dir.Path()) != nil)
		if elsewhere || !src.ConfDir.HasEntry(s.ID.Name) && n.unusedLongEnough(r, s.ID) {
			unused = append(unused, s.ID)
		}
	}
	return unused
}

func (n *Node) unusedLongEnough(r *Report, s policy.SourceID) bool {
	attached, lastAttached, err := n.Dir.Attachments(s.Name)
	written, writtenErr := n.Dir.Written(s)
	if err := errors.Join(err, writtenErr); err != nil || attached > 0 {
		r.warn(err)
		return false
	}
	// Each of these may be the time since which the network has been unused.
	for _, since := range []time.Time{lastAttached, written, r.Sources.ConfDir.Changed, booted()} {
		if time.Since(since) < n.DropAfter {
			return false
		}
	}
	return true
}

// booted returns the time of the boot; attachments are counted since then.
func booted() time.Time {
	var up unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &up) != nil {
		return time.Now()
	}
	return time.Now().Add(-time.Duration(up.Nano()))
}
