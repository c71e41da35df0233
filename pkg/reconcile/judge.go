// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// judge says what is wrong with the node as the report has it.
func (n *Node) judge(r *Report) {
	n.judgeSources(r)
	for _, err := range r.Lost {
		r.problem(ReasonState, err)
	}
	if err := newer(r.State); err != nil {
		r.problem(ReasonState, err)
	} else if r.Refused != nil {
		stated, _, _ := config.NodeDataDir(r.Sources.Guard, func() config.ConfDir { return r.Sources.ConfDir })
		if r.Sources.Guard.Present || stated == "" { // or each conflist's dataDir is a problem
			r.problem(ReasonState, r.Refused)
		}
	} else if r.Rules != nil && len(r.Lost) == 0 {
		judgeRules(r)
	}
	if r.rulesFailed() {
		r.Result = Failed
	}
	r.Took = time.Since(r.Started)
}

// judgeMeans says what chains are right and could not be made so again, as those
// in iptables where an image has no iptables. The pass has not failed by that.
func (n *Node) judgeMeans(ctx context.Context, r *Report) {
	if r.Rules == nil || r.Result == Failed {
		return
	}
	unable := n.Enforcer(r.Sources, r.warn).Unwritable(ctx, r.Rules)
	for _, chain := range slices.Sorted(maps.Keys(unable)) {
		r.chainProblem(ReasonRules, chain, fmt.Errorf("nothing could be repaired: %w", unable[chain]))
	}
}

// judgeADDs says why ADDs fail although the rules are right.
func (n *Node) judgeADDs(r *Report) {
	var file string
	for _, list := range r.Sources.ConfDir.Conflists {
		if err := list.PositionErr(); err != nil {
			r.problem(ReasonConflist, err)
		}
		if len(list.Entries) > 0 {
			file = cmp.Or(file, list.File)
		}
	}
	if err := config.CheckPlugin(n.Settings.CNIBinDir); err != nil && file != "" {
		r.problem(ReasonPlugin, fmt.Errorf("%w, and %s names it, so no pod can start: run \"ip-masq-reconciler install\", "+
			"or state the runtime's directory of plugins as cni_bin_dir", err, policy.Printable(file)))
	}
}

func (n *Node) judgeSources(r *Report) {
	s := r.Sources
	if n.SettingsErr != nil {
		r.problem(ReasonSettings, n.SettingsErr)
	}
	if s.GuardErr != nil {
		r.problem(ReasonState, s.GuardErr)
	}
	if s.ConfDirErr != nil && !errors.Is(s.ConfDirErr, fs.ErrNotExist) {
		r.problem(ReasonState, s.ConfDirErr)
	}
	for _, list := range s.ConfDir.Conflists {
		if list.Err != nil {
			judgeBroken(r, list)
		}
	}
}

// judgeBroken judges a conflist that cannot be read. It matters if it may be the
// one of a network whose document is in force.
func judgeBroken(r *Report, list config.Conflist) {
	for _, c := range r.State.Sources {
		mayBe := list.Network == "" || list.Network == c.ID.Name
		if c.ID.Kind == policy.Network && mayBe && !r.Sources.ConfDir.HasEntry(c.ID.Name) {
			r.sourceProblem(ReasonSource, c.ID, fmt.Errorf("%s: what its conflist said last stays in force: %w", c.ID, list.Err))
			return
		}
	}
	r.warn(list.Err)
}

// orForget adds what helps where the agent files that a conflict is about are not
// read any more: what they said last stays stored.
func (r *Report) orForget(conflict error) error {
	var c *policy.ConflictError
	if r.Sources.Agent != nil || !errors.As(conflict, &c) || c.Superseded.Source.Kind != policy.AgentFiles {
		return conflict
	}
	return fmt.Errorf("%w; or, as no setting here reads agent files, remove what they said before with ip-masq-reconciler cleanup", conflict)
}

func judgeRules(r *Report) {
	v := r.Rules
	if v.RecordErr != nil {
		r.problem(ReasonState, v.RecordErr)
	}
	for _, p := range v.Policies {
		for _, c := range p.Conflicts.Summary() {
			r.chainProblem(ReasonConflict, p.Chain, r.orForget(c))
		}
		if err := v.Err(p.Chain); err != nil && !errors.Is(err, v.RecordErr) {
			r.chainProblem(ReasonRules, p.Chain, err)
		}
	}
	for _, o := range r.State.Record.Chains {
		if o.Stuck {
			r.chainProblem(ReasonRules, o.Chain, fmt.Errorf("chain %s (%s): it was to go from %s and cannot be removed; "+
				"see the warnings, or remove it by hand", o.Chain, o.Family, o.Backend))
		}
	}
	for _, at := range v.Duplicates {
		r.chainProblem(ReasonRules, at.Chain, fmt.Errorf("chain %s stands in %s too, and what ours exempts may be masqueraded there: "+
			"it is removed if it holds nothing but RETURN and MASQUERADE rules", at.Chain, at.Choice))
	}
	for _, o := range v.OtherDataDirs {
		remedy := "ip-masq-reconciler once removes it; if it stays, see the warnings"
		if !v.ReplaceOtherDataDirs {
			remedy = "state which one is this node's as data_dir in " + r.Sources.Guard.Path + ", or run ip-masq-reconciler cleanup with the other"
		}
		r.chainProblem(ReasonConflict, o.Name, fmt.Errorf("chain %s (%s) in %s belongs to another dataDir, %s: %s",
			o.Name, o.Family, o.Choice, policy.Quote(o.Owner.DataDir), remedy))
	}
	r.Warnings = append(r.Warnings, v.LinearWarnings()...)
}

// newer returns what a newer version wrote, as an error, or nil.
func newer(s store.State) error {
	if len(s.Newer) == 0 {
		return nil
	}
	return fmt.Errorf("document %s: %w: it has schema %d and this program knows schemas up to %d; "+
		"nothing is repaired until the newer version, of the reconciler and the plugin, is installed again",
		s.Newer[0].File, enforce.ErrNewer, s.Newer[0].Schema, store.Schema)
}
