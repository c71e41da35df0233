// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// plan is what a sync is to do: what the documents are to become, and what the sources say that cannot be
// done.
type plan struct {
	enforce.Proposal
	says Report // Dropped, Lost, Problems and Warnings
}

// plan returns what the sources ask for, without the documents of the dropped networks. A source with a
// mistake keeps its stored policy.
func (n *Node) plan(state store.State, src *Sources, dropped []policy.SourceID) plan {
	var kept []policy.Source
	for _, c := range state.Sources {
		if !slices.Contains(dropped, c.ID) {
			kept = append(kept, c)
		}
	}
	p := plan{Proposal: enforce.Proposal{Sources: kept}, says: Report{Dropped: dropped}}
	n.proposeNetworks(src, &p)
	n.proposeAgent(src, &p)
	lost := n.lost(state, p.Changed)
	if len(lost) > 0 && len(dropped) > 0 { // nothing is dropped while it is unknown what the chains are to be
		return n.plan(state, src, nil)
	}
	if len(lost) > 0 {
		p.Proposal = *n.storedWith(state, n.restorable(state, lost, p.Changed)...)
	}
	for _, f := range state.Unreadable {
		if slices.Contains(lost, f) {
			p.says.Lost = append(p.says.Lost, Problem{Reason: ReasonState, Err: whatStays(f)})
		} else {
			p.says.warn(FindingWarning{f.Err, "damaged-document"})
		}
	}
	return p
}

// whatStays returns the error of a file that no source restores, with what it stops and until when.
func whatStays(f store.FileError) error {
	if f.IsNewer() { // its error ends in "install the newer version again"
		const until = "of the reconciler and the plugin: all chains stay as they are until then"
		return fmt.Errorf("%w, %s", f.Err, until)
	}
	return fmt.Errorf("%w; but no conflist or agent file says what it held, so all chains stay as they are "+
		"until the next ADD of its network writes it again, or the document is removed", f.Err)
}

// restorable returns the sources that are stored although some documents are lost: those without a document,
// and those whose document is damaged. A new policy of the others would have no effect, as their chains stay
// as they are; it waits.
func (n *Node) restorable(
	state store.State, lost []store.FileError, changed []policy.Source,
) (restorable []policy.Source) {
	isLost := map[string]bool{}
	for _, f := range lost {
		isLost[f.File] = true
	}
	for _, c := range changed {
		if state.Find(c.ID) == nil && !isLost[n.Dir.DocumentPath(c.ID)] {
			restorable = append(restorable, c)
		}
	}
	return restorable
}

// lost returns the unreadable files that storing these sources does not replace.
func (n *Node) lost(state store.State, restored []policy.Source) []store.FileError {
	var ids []policy.SourceID
	for _, s := range restored {
		ids = append(ids, s.ID)
	}
	return n.Dir.Lost(state, ids...)
}

// storedWith returns what is stored as a proposal, with sources added or replaced.
func (n *Node) storedWith(state store.State, changed ...policy.Source) *enforce.Proposal {
	return &enforce.Proposal{
		Sources: enforce.WithSources(state.Sources, changed...),
		Changed: changed,
		Lost:    n.lost(state, changed),
	}
}

func (s *Sources) conflists() enforce.Conflists { return s.ConfDir }

// proposeNetworks proposes the policies of the conflists: for each network, that of the first with a plugin
// entry; with a plugin.toml, that of the first at all. A bad plugin.toml does not say which conflists count.
func (n *Node) proposeNetworks(src *Sources, p *plan) {
	if src.PluginFileErr != nil {
		return
	}
	var networks []policy.Source
	for i := range src.ConfDir.Conflists {
		list := &src.ConfDir.Conflists[i]
		// Conflist returns an element of the same slice, and one with an entry.
		isUsed := src.PluginFile.Conflist(src.ConfDir, list.Network) == list
		if !isUsed {
			continue
		}
		source := policy.SourceID{Kind: policy.Network, Name: list.Network}
		entry := list.Entries[0]
		dataDirErr := list.DataDirErr(src.PluginFile, n.Dir.Path())
		switch {
		case entry.Err != nil:
			p.says.sourceProblem(source, untilCorrected(&p.Proposal, source, entry.Err))
		case dataDirErr != nil:
			p.says.problem(ReasonConflist, dataDirErr)
		default:
			networks = append(networks, src.network(list))
		}
	}
	errs := p.AddNetworks(networks, src.conflists, p.says.warn)
	for _, s := range networks {
		if err := errs[s.ID]; err != nil {
			p.says.sourceProblem(s.ID, err)
		}
	}
}

// network returns the source of a conflist with a valid plugin entry.
func (s *Sources) network(list *config.Conflist) policy.Source {
	return policy.Source{
		ID:      policy.SourceID{Kind: policy.Network, Name: list.Network},
		Policy:  list.Entries[0].Entry.Policy,
		ConfDir: s.PluginFile.PolicyDir(),
	}
}

// proposeAgent proposes the policy of the agent files. A directory that is missing keeps the stored
// policy; without a stored one it counts as empty.
func (n *Node) proposeAgent(src *Sources, p *plan) {
	files := src.Agent
	if files == nil {
		return
	}
	source := policy.SourceID{Kind: policy.AgentFiles}
	switch {
	case src.AgentErr != nil:
		p.says.sourceProblem(source, untilCorrected(&p.Proposal, source, src.AgentErr))
	case files.Missing && p.Find(source) != nil:
		const stays = "the policy that was read from it stays in force"
		err := fmt.Errorf("agent_config_dir: %s does not exist; %s", policy.Quote(files.Dir), stays)
		p.says.warn(FindingWarning{err, "agent-files-missing"})
	default:
		err := p.Add(n.withPreferredBackend(files.Source, p.Sources), src.conflists, p.says.warn)
		if err != nil {
			p.says.sourceProblem(source, err)
		}
	}
	for _, u := range files.UnknownKeys {
		p.says.warn(FindingWarning{errors.New(u), "unknown-key"})
	}
	for _, w := range files.Warnings {
		p.says.warn(FindingWarning{errors.New(w), "agent-files-invalid"})
	}
}

// withPreferredBackend returns the source of the agent files with the backend of the settings, unless a file
// or a network of its chain states one.
func (n *Node) withPreferredBackend(agent policy.Source, sources []policy.Source) policy.Source {
	preferred, chain := n.Settings.Backend, agent.Policy.Chain
	if preferred == "" || preferred == policy.Auto || statesBackend(agent, chain) {
		return agent
	}
	for _, s := range sources {
		if s.ID.Kind == policy.Network && statesBackend(s, chain) {
			return agent
		}
	}
	if len(agent.Files) == 0 {
		agent.Policy.Backend = preferred
		return agent
	}
	own := policy.SourcePolicy{Chain: chain, Backend: preferred}
	agent.Files = append(slices.Clone(agent.Files), policy.FilePolicy{File: config.OwnPolicy, Policy: own})
	return agent
}

// statesBackend reports whether a source states the backend of a chain.
func statesBackend(s policy.Source, chain string) bool {
	if s.Policy.Chain != chain {
		return false
	}
	for _, p := range s.Policies() {
		if p.Backend != "" && p.Backend != policy.Auto {
			return true
		}
	}
	return false
}

// untilCorrected adds to the error of a source what it stops, and which policy is in force, until it is
// corrected.
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

// toDrop returns the stored networks to drop: those that have had neither a conflist nor an attachment for
// DropAfter, and those that plugin.toml excludes.
func (n *Node) toDrop(state store.State, src *Sources, warn func(error)) (toDrop []policy.SourceID) {
	if src.PluginFileErr != nil || src.ConfDirErr != nil || src.ConfDir.Err() != nil {
		return nil
	}
	for _, s := range state.Sources {
		if s.ID.Kind != policy.Network {
			continue
		}
		hasEntry := src.ConfDir.HasEntry(s.ID.Name)
		if n.isExcluded(src, s) || !hasEntry && n.unusedLongEnough(src, s.ID, warn) {
			toDrop = append(toDrop, s.ID)
		}
	}
	return toDrop
}

// isExcluded reports whether plugin.toml excludes the policy of a network: it did not come from the
// directory of that file, and none there takes its place.
func (n *Node) isExcluded(src *Sources, s policy.Source) bool {
	if !src.PluginFile.Present || s.ConfDir == src.PluginFile.CNIConfDir {
		return false
	}
	list := src.PluginFile.Conflist(src.ConfDir, s.ID.Name)
	return list == nil || list.Entries[0].Err != nil || list.DataDirErr(src.PluginFile, n.Dir.Path()) != nil
}

// unusedLongEnough reports whether a network without a conflist has had no attachment for DropAfter.
func (n *Node) unusedLongEnough(src *Sources, s policy.SourceID, warn func(error)) bool {
	attached, lastAttached, err := n.Dir.Attachments(s.Name)
	written, writtenErr := n.Dir.Written(s)
	if err := errors.Join(err, writtenErr); err != nil {
		warn(err)
		return false
	}
	uptime := time.Duration(store.BootTime()) // attachments are counted since the boot
	if attached > 0 || uptime < n.DropAfter {
		return false
	}
	// Each of these may be the time since which the network has been unused.
	for _, since := range []time.Time{lastAttached, written, src.ConfDir.Changed} {
		if time.Since(since) < n.DropAfter {
			return false
		}
	}
	return true
}
