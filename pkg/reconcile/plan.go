// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// plan works out what the documents have to become, without those that drop
// reports. What cannot be used of the sources goes into the report; what is stored
// of it stays.
func (n *Node) plan(r *Report, drop func(policy.SourceID) bool) *enforce.Proposal {
	r.Problems, r.Pending, r.Dropped = nil, nil, nil
	kept := slices.Clone(r.State.Sources)
	for _, c := range r.State.Sources {
		if drop(c.ID) {
			r.Dropped = append(r.Dropped, c.ID)
			kept = slices.DeleteFunc(kept, func(k policy.Source) bool { return k.ID == c.ID })
		}
	}
	p := enforce.NewProposal(kept)
	n.proposeNetworks(r, p)
	n.proposeAgent(r, p)
	p = n.withhold(r, p, kept)
	for _, c := range p.Changed {
		r.Pending = append(r.Pending, c.ID)
	}
	r.Lost = n.lost(r, p)
	return p
}

// withhold returns the proposal without the statements that failed and are not to be
// tried again yet.
func (n *Node) withhold(r *Report, p *enforce.Proposal, stored []policy.Source) *enforce.Proposal {
	changed, failed := n.backoff.withhold(p.Changed, time.Now())
	if len(failed) == 0 {
		return p
	}
	for _, c := range p.Changed {
		if err := failed[c.ID]; err != nil {
			r.sourceProblem(ReasonRules, c.ID, err)
		}
	}
	next := enforce.NewProposal(stored)
	for _, c := range changed {
		next.Sources = enforce.WithSource(next.Sources, c)
	}
	next.Changed = changed
	return next
}

// lost tells of the documents that are damaged and that no source makes again.
// Their networks may have pods, whose rules nobody could make anew.
func (n *Node) lost(r *Report, p *enforce.Proposal) []error {
	var lost []error
	for _, d := range r.State.Damaged {
		madeAgain := d.File == n.Dir.RecordPath() ||
			slices.ContainsFunc(p.Changed, func(c policy.Source) bool { return d.File == n.Dir.DocumentPath(c.ID) })
		if !madeAgain {
			lost = append(lost, fmt.Errorf("%w; but no conflist or agent file says what it held, so all rules stay as they are "+
				"until the next ADD of its network writes it again, or the document is removed", d.Err))
		}
	}
	return lost
}

// proposeNetworks proposes what the conflists state, the first that has an entry
// of ours for each network.
func (n *Node) proposeNetworks(r *Report, p *enforce.Proposal) {
	var all []policy.Source
	seen := map[string]bool{}
	for _, list := range r.Sources.ConfDir.Conflists {
		if len(list.Entries) == 0 || list.Network == "" || seen[list.Network] {
			continue
		}
		seen[list.Network] = true
		source := policy.SourceID{Kind: policy.Network, Name: list.Network}
		entry := list.Entries[0]
		guard, dataDirErr := r.Sources.Guard, list.DataDirErr(r.Sources.Guard, n.Dir.Path())
		switch err := guard.Admits(list.Network); {
		case entry.Err != nil:
			r.sourceProblem(ReasonSource, source, n.meanwhile(p, source, entry.Err))
		case err != nil:
			r.warn(fmt.Errorf("%s: %w", policy.Quote(list.File), err))
		case dataDirErr != nil:
			r.problem(ReasonConflist, dataDirErr)
		default:
			all = append(all, policy.Source{ID: source, Policy: entry.Entry.Policy})
		}
	}
	errs := p.AddAll(all, r.Sources.ConfDir, r.warn)
	for _, c := range all {
		if err := errs[c.ID]; err != nil {
			r.sourceProblem(ReasonSource, c.ID, err)
		}
	}
}

// proposeAgent proposes what the agent files state. A directory that is missing
// states nothing on a node that has none of them stored; on another the stored
// contribution stays.
func (n *Node) proposeAgent(r *Report, p *enforce.Proposal) {
	files := r.Sources.Agent
	source := policy.SourceID{Kind: policy.AgentFiles}
	switch {
	case files == nil:
	case r.Sources.AgentErr != nil:
		r.sourceProblem(ReasonSource, source, n.meanwhile(p, source, r.Sources.AgentErr))
	case files.Missing && p.Find(source) != nil:
		r.warn(fmt.Errorf("agent_config_dir: %s does not exist; what was read from it before stays in force", policy.Quote(files.Dir)))
	default:
		if err := p.Add(files.Source, r.Sources.ConfDir, r.warn); err != nil {
			r.sourceProblem(ReasonSource, source, err)
		}
	}
	if files != nil {
		r.Warnings = append(r.Warnings, files.Warnings...)
	}
}

// meanwhile adds to what is wrong with a source what holds until it is mended.
func (n *Node) meanwhile(p *enforce.Proposal, s policy.SourceID, wrong error) error {
	if p.Find(s) == nil {
		return fmt.Errorf("%w (until then nothing of it is in force)", wrong)
	}
	return fmt.Errorf("%w (until then its last good policy stays in force)", wrong)
}

// unused reports whether a network is neither named by a conflist nor has an
// attachment, and so for long enough.
func (n *Node) unused(r *Report, s policy.SourceID) bool {
	if s.Kind != policy.Network || r.Sources.ConfDirErr != nil || !r.Sources.ConfDir.LacksEntry(s.Name) {
		return false
	}
	attached, lastAttached, err := n.Dir.Attachments(s.Name)
	if err != nil || attached > 0 {
		r.warn(err)
		return false
	}
	written, err := n.Dir.Written(s)
	if err != nil {
		r.warn(err)
		return false
	}
	// Each of these may be the moment since which nobody wants it.
	for _, since := range []time.Time{lastAttached, written, r.Sources.ConfDir.Changed, booted()} {
		if time.Since(since) < n.DropAfter {
			return false
		}
	}
	return true
}

// booted returns when the running boot began; attachments are counted from then.
func booted() time.Time {
	var up unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &up) != nil {
		return time.Now()
	}
	return time.Now().Add(-time.Duration(up.Nano()))
}
