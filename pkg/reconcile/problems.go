// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// addProblems adds the problems of the sources, the documents and the rules to the report.
func (n *Node) addProblems(ctx context.Context, r *Report) {
	n.addSourceProblems(r)
	r.Problems = append(r.Problems, r.Lost...)
	if r.OtherDataDir != nil {
		r.problem(ReasonState, r.OtherDataDir)
	} else if r.Rules != nil {
		n.addRuleProblems(ctx, r)
	}
	if r.rulesFailed() {
		r.Result = Failed
	}
	r.Took = time.Since(r.Started)
}

func (n *Node) addSourceProblems(r *Report) {
	s := r.Sources
	if n.SettingsErr != nil {
		r.problem(ReasonSource, fmt.Errorf("settings: %w", n.SettingsErr))
	}
	if s.PluginFileErr != nil {
		const until = "until it is corrected, no pod can start, and the policies in force stay"
		r.problem(ReasonSource, fmt.Errorf("%w (%s)", s.PluginFileErr, until))
	} else {
		n.addConfDirProblem(r)
	}
	if s.ConfDirErr != nil && !errors.Is(s.ConfDirErr, fs.ErrNotExist) {
		const remedy = "set cni_conf_dir to the directory that the runtime reads, or repair this one"
		err := fmt.Errorf("%w; %s", s.ConfDirErr, remedy)
		r.add(Problem{Reason: ReasonState, Err: err, BesideRules: true})
	}
	for _, list := range s.ConfDir.Conflists {
		if list.Err != nil {
			addBrokenConflist(r, list)
		}
	}
}

// addConfDirProblem adds that the settings state another directory of conflists than plugin.toml does.
func (n *Node) addConfDirProblem(r *Report) {
	file, stated := r.Sources.PluginFile, n.Settings.Origins["cni_conf_dir"]
	isStated := stated != "" && stated != file.Path
	if !file.Present || !isStated || n.Settings.CNIConfDir == file.CNIConfDir {
		return
	}
	own, other := policy.Quote(n.Settings.CNIConfDir), policy.Quote(file.CNIConfDir)
	r.problem(ReasonSource, fmt.Errorf("cni_conf_dir: %s (%s) is not that of %s, %s, which is in force; "+
		"remove it", own, stated, policy.Printable(file.Path), other))
}

// addBrokenConflist adds a conflist that cannot be read. It matters if it may be that of a network whose
// policy is in force.
func addBrokenConflist(r *Report, list config.Conflist) {
	for _, c := range r.State.Sources {
		mayBe := list.Network == "" || list.Network == c.ID.Name
		if c.ID.Kind == policy.Network && mayBe && !r.Sources.ConfDir.HasEntry(c.ID.Name) {
			const stays = "the last good policy from its conflist stays in force"
			r.sourceProblem(c.ID, fmt.Errorf("%s: %s: %w", c.ID, stays, list.Err))
			return
		}
	}
	r.warn(FindingWarning{list.Err, "conflist-broken"})
}

func (n *Node) addRuleProblems(ctx context.Context, r *Report) {
	s := r.Rules
	if s.RecordErr != nil {
		r.problem(ReasonState, s.RecordErr)
	}
	for _, p := range s.Policies() {
		addChainProblems(r, p)
	}
	n.addStaleChains(ctx, r)
	for _, o := range s.OtherDataDirs {
		r.chainProblem(ReasonConflict, o.Chain, "%s belongs to another dataDir; "+
			"remove it with ip-masq-reconciler cleanup --data-dir %s", o, policy.Quote(o.Owner.DataDir))
	}
	// The chains have it already, unless the guard was to be removed and is that of no chain.
	if s.Guard.Err != nil && !r.has(s.Guard.Err) {
		r.problem(ReasonRules, s.Guard.Err)
	}
	for _, e := range s.NoOutputs() {
		r.add(Problem{Reason: ReasonAddress, Chain: e.Chain, Err: e})
	}
	addRuleWarnings(r)
}

// addRuleWarnings adds what the rules cannot do, and does not make the node unready.
func addRuleWarnings(r *Report) {
	s := r.Rules
	for _, e := range s.NoAddresses() {
		r.warn(FindingWarning{e, "output-address-no-family"})
	}
	for _, e := range s.AmbiguousOutputs() {
		r.warn(FindingWarning{e, "output-address-ambiguous"})
	}
	for _, without := range s.WithoutRandomPorts() {
		r.warn(FindingWarning{without, "ports-not-random"})
	}
	for _, slow := range s.LinearChains() {
		r.warn(FindingWarning{slow, "slow-list"})
	}
	for _, i := range s.Guard.Inactive {
		r.warn(FindingWarning{i, "guard-inactive"})
	}
	for _, full := range s.PodsWithoutRoom() {
		r.warn(FindingWarning{full, "pods-without-room"})
	}
	for _, u := range policy.UnboundTraffic(s.Policies()) {
		r.warn(FindingWarning{u, "enforce-exempt-unbound"})
	}
}

// addStaleChains adds chains that no policy wants any more, and those that exist in another backend as well.
func (n *Node) addStaleChains(ctx context.Context, r *Report) {
	e := n.Enforcer(r.Sources, r.warn)
	failed := r.Rules.FailedRemovals()
	for _, o := range failed {
		err := e.CanWrite(ctx, enforce.ChoiceOf(o), o.Family)
		if err != nil {
			r.chainProblem(ReasonRules, o.Chain, "chain %s (%s) in %s is stale and cannot be removed: %w",
				o.Chain, o.Family, o.Backend, err)
			continue
		}
		r.chainProblem(ReasonRules, o.Chain, "chain %s (%s): failed to remove the stale chain from %s; "+
			"see the warnings, or remove it by hand", o.Chain, o.Family, o.Backend)
	}
	for _, at := range r.Rules.Duplicates {
		if removalFailed(failed, at.Chain, at.Choice) {
			continue // reported
		}
		if err := e.DuplicateErr(ctx, at); errors.Is(err, netfilter.ErrNotOwned) {
			r.chainProblem(ReasonRules, at.Chain, "chain %s also exists in %s, "+
				"which may masquerade what the policy exempts, and stays: %v", at.Chain, at.Choice, err)
			continue
		}
		r.chainProblem(ReasonRules, at.Chain, "chain %s also exists in %s, "+
			"which may masquerade what the policy exempts: it is removed if it holds only rules that the "+
			"agents write", at.Chain, at.Choice)
	}
}

func removalFailed(failed []store.OwnedChain, chain string, in netfilter.Choice) bool {
	for _, o := range failed {
		if o.Chain == chain && enforce.ChoiceOf(o) == in {
			return true
		}
	}
	return false
}

func addChainProblems(r *Report, p policy.Policy) {
	for _, c := range p.Conflicts.Summary() {
		r.add(Problem{Reason: ReasonConflict, Chain: p.Chain, Err: c})
	}
	err := r.Rules.Err(p.Chain)
	if err == nil || errors.Is(err, r.Rules.RecordErr) {
		return
	}
	reason := r.add(Problem{Reason: ReasonRules, Chain: p.Chain, Err: err})
	// What keeps rules from being repaired is a fault of its own, so that the critical alert fires, too.
	diff := r.Rules.ChainDiff(r.Rules.Find(p.Chain))
	if reason == ReasonBackend && len(diff) > 0 {
		r.add(Problem{Reason: ReasonRules, Chain: p.Chain, Err: &enforce.DriftError{Diff: diff}})
	}
}

// addBackendProblems adds chains whose repair would fail, such as those in iptables when the image has no
// iptables. All chains are correct, as the sync has not failed. The node is not ready, so that operators notice
// the fault before a repair fails.
func (n *Node) addBackendProblems(ctx context.Context, r *Report) {
	if r.Rules == nil || r.Result == Failed {
		return
	}
	e := n.Enforcer(r.Sources, r.warn)
	for _, c := range r.Rules.Chains {
		chain := c.Policy.Chain
		err := e.CanWrite(ctx, c.Choice, c.Policy.Families()...)
		if err != nil {
			err = fmt.Errorf("the rules are correct, but a repair would fail: "+
				"write the rules of chain %s in %s: %w", chain, c.Choice, err)
			r.add(Problem{Reason: ReasonRules, Chain: chain, Err: err, BesideRules: true})
		}
	}
}

// AddReadiness adds to what Check found why ADDs fail and why rules cannot be repaired: all that an active
// reconciler reports and that needs no history of syncs.
func (n *Node) AddReadiness(ctx context.Context, r *Report) {
	n.addBackendProblems(ctx, r)
	n.addRepairProblems(ctx, r)
	n.AddADDProblems(r)
}

// addRepairProblems adds why rules that differ cannot be repaired, as a dry run of the repair finds it.
func (n *Node) addRepairProblems(ctx context.Context, r *Report) {
	if !r.Differs() {
		return
	}
	e := n.Enforcer(r.Sources, r.warn)
	after := e.CheckSync(ctx, e.ObserveAgain(ctx, r.Rules))
	for _, c := range after.Chains {
		chain := c.Policy.Chain
		if err := after.Err(chain); err != nil && r.Rules.Find(chain).Err == nil {
			r.chainProblem(ReasonRules, chain, "%w", err)
		}
	}
}

// AddADDProblems adds why ADDs fail although the rules are correct.
func (n *Node) AddADDProblems(r *Report) {
	var file string // that names the plugin
	for _, list := range r.Sources.ConfDir.Conflists {
		for _, err := range []error{list.PositionErr(), list.VersionErr()} {
			if err != nil {
				r.problem(ReasonConflist, err)
			}
		}
		for _, e := range list.Entries {
			file = cmp.Or(file, list.File)
			n.addAwaitedAgentFiles(r, list, e)
		}
	}
	err := config.CheckPlugin(n.Settings.CNIBinDir)
	if err != nil && file != "" && n.SettingsErr == nil { // the file of the settings may state the directory
		r.problem(ReasonPlugin, fmt.Errorf("%w, but %s names it, so no pod can start: "+
			"run \"ip-masq-reconciler install\", or in Kubernetes delete this node's pod of ip-masq, whose "+
			"init container does; "+
			"or set cni_bin_dir to the runtime's plugin directory", err, policy.Printable(file)))
	}
	n.AddDiskProblem(r)
}

// addAwaitedAgentFiles adds that an entry waits for agent files of which none is stored.
func (n *Node) addAwaitedAgentFiles(r *Report, list config.Conflist, e config.ConflistEntry) {
	if e.Err != nil || r.Rules == nil {
		return
	}
	if err := n.checkAgentFiles(e.Entry, r.State); err != nil {
		r.problem(ReasonConflist, fmt.Errorf("%s: plugins[%d]: %w", policy.Printable(list.File), e.Index, err))
	}
}

// checkAgentFiles returns that an entry waits for agent files of which none is stored.
func (n *Node) checkAgentFiles(e config.Entry, stored store.State) error {
	agent := policy.SourceID{Kind: policy.AgentFiles}
	if !e.RequireAgentConfig || n.Dir.HasDocument(stored, agent) {
		return nil
	}
	return errors.New("requireAgentConfig: no policy of the agent files is stored, so no pod can start: " +
		"set agent_config_dir, correct the agent files, or remove the key")
}

// AddDiskProblem adds that the dataDir is full or read-only, which fails ADDs although the rules are correct.
func (n *Node) AddDiskProblem(r *Report) {
	if len(r.InForce) == 0 && !r.Sources.hasEntry() {
		return // nothing is managed
	}
	for _, p := range r.Problems {
		if isDiskFault(p.Err) {
			return
		}
	}
	if err := n.Dir.CheckWritable(); isDiskFault(err) {
		const until = "until then pods cannot start, nor is any rule written after a reboot"
		err = fmt.Errorf("%w; %s", err, until)
		r.add(Problem{Reason: ReasonState, Err: err, BesideRules: true})
	}
}

// hasEntry reports whether a conflist has a plugin entry.
func (s *Sources) hasEntry() bool {
	for _, list := range s.ConfDir.Conflists {
		if len(list.Entries) > 0 {
			return true
		}
	}
	return false
}

// otherDataDir reports why the dataDir must not be used: it is not the node's.
func (n *Node) otherDataDir(src *Sources, err error) *Report {
	r := &Report{Started: time.Now(), Result: Failed, Sources: src, OtherDataDir: err}
	for _, list := range src.ConfDir.Conflists {
		if err := list.DataDirErr(src.PluginFile, n.Dir.Path()); err != nil {
			r.problem(ReasonConflist, err)
		}
	}
	r.problem(ReasonState, err)
	return r
}
