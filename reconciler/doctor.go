// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// notReadyFindings returns the reasons why the node is not ready, without those that package
// diagnose finds: conflicts between sources, and plugin entries with which every ADD fails.
func notReadyFindings(n *inspection, r *reconcile.Report) []diagnose.Finding {
	f := diagnose.Finding{
		ID: "not-ready", Severity: diagnose.SeverityProblem,
		Summary: "The rules are not what the sources ask for, or cannot be verified; /readyz says the same.",
		Remedy:  "Each line names what to repair.",
	}
	if r.Differs() {
		f.Remedy += " Where rules differ, ip-masq-reconciler once repairs them, unless the line says otherwise."
	}
	for _, p := range r.Problems {
		var conflict *policy.ConflictError
		inForce := errors.As(p.Err, &conflict) && p.Source == (policy.SourceID{})
		if !inForce && p.Reason != reconcile.ReasonConflist {
			f.Detail = append(f.Detail, strings.ReplaceAll(p.Err.Error(), "\n", "; "))
		}
	}
	for _, p := range n.loopProblems(r) {
		if p.Reason != reconcile.ReasonConflist {
			f.Detail = append(f.Detail, strings.ReplaceAll(p.Message, "\n", "; "))
		}
	}
	if len(f.Detail) == 0 {
		return nil
	}
	return []diagnose.Finding{f}
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
	node, err := a.inspect(c.Context())
	if err != nil {
		return err
	}
	r := node.DryRun(c.Context(), node.Read())
	findings := slices.Concat(notReadyFindings(node, r), node.findings(c.Context(), r))
	if a.json() {
		return a.print(notNil(findings))
	}
	node.say(a)
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
	})...)
}
