// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"slices"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// faultFindings returns why the node is not ready.
func faultFindings(problems []reconcile.Problem) (found []diagnose.Finding) {
	for _, fault := range reconcile.Faults() {
		f := diagnose.Finding{
			ID: string(fault.Reason), Severity: diagnose.SeverityFault, Summary: fault.Summary,
			Remedy: "Do what each line says after its cause. A reconciler that runs notices by itself when it is done.",
		}
		for _, p := range problems {
			if p.Reason == fault.Reason {
				f.Detail = append(f.Detail, p.Err.Error())
			}
		}
		if len(f.Detail) > 0 {
			found = append(found, f)
		}
	}
	return found
}

// multusFindings returns how Multus uses the network of the plugin entry. It is a fault where the reconciler
// manages the conflist.
func multusFindings(s config.Settings, managed bool) []diagnose.Finding {
	if managed {
		return nil
	}
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
	if err == nil || n.Path != "" && n.Entries == 0 { // the missing entry is another finding
		return nil
	}
	f.Detail = []string{err.Error()}
	return []diagnose.Finding{f}
}

func (a *app) doctor(c *cobra.Command, _ []string) error {
	node, _, findings, err := a.examine(c.Context())
	if err != nil {
		return err
	}
	if a.json() {
		return a.print(map[string][]diagnose.Finding{"findings": notNil(findings)})
	}
	node.printSettingsOrigin(a)
	return diagnose.WriteFindings(a.out, findings)
}

// findings returns the one list of findings.
func (n *inspection) findings(ctx context.Context, r *reconcile.Report) []diagnose.Finding {
	rules := r.Rules
	if r.Incomplete() != nil {
		rules = nil // the policy is incomplete
	}
	running := n.running()
	_, withoutRecord, err := n.Dir.Pods()
	found := slices.Concat(faultFindings(n.problems(r, r.Problems)), multusFindings(n.Settings, running.ManagesConflist), diagnose.Examine(ctx, diagnose.Host{
		Rules: rules, State: r.State, ConfDir: r.Sources.ConfDir, ConfDirErr: r.Sources.ConfDirErr,
		BinDir: n.Settings.CNIBinDir, DataDir: n.Dir.Path(), Reconciler: running, Warnings: r.WarningsOf, PodsWithoutRecord: withoutRecord, PodsErr: err,
	}))
	diagnose.Sort(found)
	return found
}

// running returns what is known of the reconciler of the node.
func (n *inspection) running() *diagnose.Running {
	r := &diagnose.Running{Active: n.active.Running, Seen: n.Dir.ReconcilerSeen(), Err: n.active.err}
	if s := n.active.status; s != nil {
		r.ManagesConflist = s.ConflistManaged
	}
	return r
}
