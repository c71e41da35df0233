// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// answer is the output of check and once as JSON.
type answer struct {
	Result     reconcile.Result   `json:"result,omitempty"` // of once
	Right      bool               `json:"right"`            // check: rules and sources; once: ready
	Drift      []policy.Change    `json:"drift"`            // check: what differs; once: what was repaired
	Applied    []string           `json:"adopted"`          // sources whose policy was applied
	Pending    []string           `json:"pending"`          // sources whose policy is not applied yet
	Dropped    []string           `json:"dropped"`
	Reset      uint64             `json:"connectionsReset,omitempty"` // connections that once reset
	Stale      []string           `json:"stale"`                      // chains that no source asks for
	Findings   []diagnose.Finding `json:"findings"`                   // the faults
	Warnings   []string           `json:"warnings"`
	Reconciler *activeReconciler  `json:"reconciler,omitempty"` // whose settings check takes
}

// answer prints a report as JSON. The error says that there are faults beside differences.
func (a *app) answer(r *reconcile.Report, obstacles []reconcile.Problem, out answer) error {
	out.Applied = mapped(r.Applied, policy.SourceID.String)
	out.Pending = mapped(r.Pending, policy.SourceID.String)
	out.Dropped = mapped(r.Dropped, policy.SourceID.String)
	out.Stale, out.Warnings, out.Drift = staleIn(r), mapped(r.Warnings, error.Error), notNil(out.Drift)
	err := a.print(out)
	if n := len(obstacles); err == nil && n > 0 {
		err = fmt.Errorf("not ready: the output has the reason under \"findings\" (%d)", n)
	}
	return err
}

func staleIn(r *reconcile.Report) []string {
	rules := cmp.Or(r.Rules, &enforce.State{})
	stale := []string{}
	for _, o := range rules.Stale {
		stale = append(stale, fmt.Sprintf("%s (%s, %s)", o.Chain, o.Family, enforce.ChoiceOf(o)))
	}
	for _, at := range rules.Duplicates {
		stale = append(stale, fmt.Sprintf("%s (%s)", at.Chain, at.Choice))
	}
	return stale
}

func summary(r *reconcile.Report) string {
	if chains := r.Summary(); chains != "" {
		return "right: " + chains
	}
	return "no source asks for a chain: nothing is managed"
}

func (a *app) check(c *cobra.Command, _ []string) error {
	node, err := a.inspect(c.Context())
	if err != nil {
		return err
	}
	r := node.Check(c.Context())
	node.AddDiskProblem(r)
	drift := cmp.Or(r.Rules, &enforce.State{}).Diff()
	// right is about the rules and their sources; the exit code is about everything. With other faults,
	// such as a missing plugin, the rules can be right, and the exit code is that of a fault, with and
	// without a reconciler that reports it.
	appliesSources := len(node.problems(r, r.Obstacles())) == 0
	right := !r.Differs() && appliesSources
	node.addReadiness(c.Context(), r)
	problems := node.problems(r, r.Obstacles())
	if a.json() {
		findings := faultFindings(node.problems(r, r.Problems))
		out := answer{Right: right, Drift: drift, Findings: findings, Reconciler: &node.active}
		err = a.answer(r, problems, out)
	} else {
		node.printSettingsOrigin(a)
		warn(a, r.Warnings)
		err = joined(problems)
		a.printDifferences(r, drift, appliesSources)
		if right {
			fmt.Fprintln(a.out, summary(r))
		}
	}
	if !r.Differs() {
		return err
	}
	if err != nil {
		fmt.Fprintf(a.err, "ip-masq-reconciler: %v\n", err)
	}
	return errDrift
}

// printDifferences prints drift and pending sources. If applies is set, "once" would apply these sources.
func (a *app) printDifferences(r *reconcile.Report, drift policy.Diff, applies bool) {
	if r.Differs() {
		fmt.Fprintf(a.out, "%s: the kernel does not have what the sources ask for:\n", reconcile.ReasonRules)
	}
	printEach(a.out, "%s", drift)
	printEach(a.out, "unexpected chain: %s: no source asks for it there", staleIn(r))
	for _, source := range r.Pending {
		fmt.Fprintln(a.out, pendingText(r, source, applies))
	}
}

// pendingText says what is to be done about a source whose policy is not stored. The rules can be right all
// the same, such as those of an agent's chain, or where the policy leaves open what was stated before.
func pendingText(r *reconcile.Report, source policy.SourceID, applies bool) string {
	const isPending = "pending: %s: the current policy is not applied yet"
	if !applies {
		return fmt.Sprintf(isPending, source)
	}
	if r.Differs() {
		return fmt.Sprintf(isPending+"; ip-masq-reconciler once applies it", source)
	}
	changes := ""
	if changed := r.Changed(source); r.State.Find(source) != nil && len(changed) > 0 {
		changes = " (changed: " + strings.Join(changed, ", ") + ")"
	}
	return fmt.Sprintf("pending: %s: the rules are right, and the policy is not stored yet%s; "+
		"ip-masq-reconciler once stores it", source, changes)
}

func (a *app) once(c *cobra.Command, _ []string) error {
	node, err := a.node(c.Context())
	if err != nil {
		return err
	}
	r := node.Sync(c.Context(), node.Read())
	node.AddADDProblems(r)
	reset := uint64(0)
	if len(r.State.Record.Resets) > 0 && !node.Dir.ReconcilerActive() { // which makes them itself
		const limit = 10 * time.Second
		ctx, cancel := context.WithTimeout(c.Context(), limit)
		defer cancel()
		deleted, _, err := node.Enforcer(r.Sources, ignoreWarning).ResetConnections(ctx)
		if err != nil {
			r.Warnings = append(r.Warnings, fmt.Errorf("reset connections: %w", err))
		}
		for _, n := range deleted {
			reset += n
		}
	}
	if a.json() {
		return a.answer(r, r.Problems, answer{
			Result: r.Result, Right: r.Ready(), Drift: r.Drift, Reset: reset,
			Findings: faultFindings(r.Problems),
		})
	}
	printEach(a.out, "repaired: %s", r.Drift)
	printEach(a.out, "applied: %s", r.Applied)
	printEach(a.out, "dropped: %s", r.Dropped)
	if reset > 0 {
		fmt.Fprintf(a.out, "reset: %d connections\n", reset)
	}
	warn(a, r.Warnings)
	if !r.Ready() {
		return joined(r.Problems)
	}
	fmt.Fprintln(a.out, summary(r))
	return nil
}
