// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// notReadyFindings returns the reasons why the node is not ready, without those that other findings have.
func notReadyFindings(problems []metrics.Problem, others []diagnose.Finding) []diagnose.Finding {
	f := diagnose.Finding{
		ID: "not-ready", Severity: diagnose.SeverityProblem,
		Summary: "The node is not ready: its rules are not what the sources ask for, or cannot be kept so, or ADDs fail.",
		Remedy:  "Do what each line says after its cause. A reconciler that runs notices by itself when it is done.",
	}
	for _, p := range problems {
		if !slices.ContainsFunc(others, func(o diagnose.Finding) bool { return sameCause(o, p) }) {
			f.Detail = append(f.Detail, string(p.Reason)+": "+strings.NewReplacer(":\n", ": ", "\n", "; ").Replace(p.Message))
		}
	}
	if len(f.Detail) == 0 {
		return nil
	}
	return []diagnose.Finding{f}
}

// sameCause reports whether a finding of package diagnose says what a reason of /readyz does.
func sameCause(f diagnose.Finding, p metrics.Problem) bool {
	switch f.ID {
	case "plugin-missing":
		return p.Reason == reconcile.ReasonPlugin
	case "settings-invalid", "agent-files-invalid", "entry-refused", "entry-position", "data-dir-differs", "conflist-broken", "policy-conflict":
		return slices.ContainsFunc(f.Detail, func(line string) bool { return strings.Contains(p.Message, line) })
	}
	return false
}

// multusFindings returns how Multus uses the network of the plugin entry.
func multusFindings(s config.Settings) []diagnose.Finding {
	f := diagnose.Finding{
		ID: "multus", Severity: diagnose.SeverityProblem,
		Summary: "Pods get their network through Multus, and not as the network's own conflist has it.",
		Remedy:  "See the message; the plugin entry belongs in the conflist of the network that Multus delegates to.",
	}
	n, err := conflist.Find(s.CNIConfDir, s.Conflist.Network)
	if err == nil {
		err = n.Multus.Err(n.Name)
	} else if !errors.Is(err, conflist.ErrDelegate) {
		return nil
	}
	if err == nil || n.Path != "" && n.Entries == 0 && n.Multus.Depth == 1 { // the missing entry is another finding
		return nil
	}
	f.Detail = []string{err.Error()}
	return []diagnose.Finding{f}
}

func (a *app) doctor(c *cobra.Command, _ []string) error {
	node, r, findings, err := a.examine(c.Context())
	if err != nil {
		return err
	}
	findings = append(notReadyFindings(node.problems(r), findings), findings...)
	if a.json() {
		return a.print(map[string][]diagnose.Finding{"findings": notNil(findings)})
	}
	node.printSettingsOrigin(a)
	return diagnose.WriteFindings(a.out, findings)
}

// findings returns what doctor finds, without the reasons why the node is not ready.
func (n *inspection) findings(ctx context.Context, r *reconcile.Report) []diagnose.Finding {
	rules := r.Rules
	if r.Incomplete() != nil {
		rules = nil // the policy is incomplete
	}
	return append(multusFindings(n.Settings), diagnose.Examine(ctx, diagnose.Host{
		Rules: rules, State: r.State, ConfDir: r.Sources.ConfDir, ConfDirErr: r.Sources.ConfDirErr,
		BinDir: n.Settings.CNIBinDir, DataDir: n.Dir.Path(), PluginFile: r.Sources.PluginFile,
		Reconciler: n.running(r), SettingsErr: n.SettingsErr, AgentErr: r.Sources.AgentErr, AgentWarnings: agentWarnings(r.Sources),
	})...)
}

func agentWarnings(s *reconcile.Sources) []error {
	if s.Agent == nil {
		return nil
	}
	return s.Agent.Warnings
}

// running returns what is known of the reconciler of the node.
func (n *inspection) running(report *reconcile.Report) *diagnose.Running {
	locked, elsewhere := n.Dir.ReconcilerActive(), n.elsewhere(report)
	r := &diagnose.Running{
		Active: locked || n.active.Running && elsewhere == "", Seen: n.Dir.ReconcilerSeen(), Elsewhere: elsewhere,
		Answers: n.active.Running && (n.active.Answers || !locked), Err: n.active.err, // without the lock it answered as /readyz does
	}
	s := n.active.status
	if s == nil {
		return r
	}
	r.Warnings = s.Warnings
	for _, standby := range s.Standbys {
		r.Standbys = append(r.Standbys, fmt.Sprintf("pid %d, version %s", standby.PID, policy.Printable(standby.Version)))
	}
	if s.Version != version {
		r.Differs = append(r.Differs, fmt.Sprintf("version %s here, %s in the reconciler", version, policy.Printable(s.Version)))
	}
	theirs := map[string]config.Setting{}
	for _, x := range s.Settings {
		theirs[x.Key] = x
	}
	for _, own := range n.Settings.List() {
		if their, known := theirs[own.Key]; known && their.Value != own.Value {
			r.Differs = append(r.Differs, fmt.Sprintf("%s: %s here (%s), %s in the reconciler (%s)",
				own.Key, policy.Quote(own.Value), own.Origin, policy.Quote(their.Value), policy.Printable(their.Origin)))
		}
	}
	return r
}
