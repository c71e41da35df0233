// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// faultFindings returns why the node is not ready. status, doctor and check have the same ones.
func faultFindings(problems []reconcile.Problem) []diagnose.Finding {
	details, found := map[reconcile.Reason][]string{}, []diagnose.Finding{}
	for _, p := range problems {
		details[p.Reason] = append(details[p.Reason], p.Err.Error())
	}
	for _, f := range reconcile.Faults() {
		if d := details[f.Reason]; d != nil {
			found = append(found, diagnose.Finding{
				ID: string(f.Reason), Severity: diagnose.SeverityFault,
				Cause: f.Cause, Details: d, Remedy: f.Remedy,
			})
		}
	}
	return found
}

func (a *app) doctor(c *cobra.Command, _ []string) error {
	node, r, err := a.examine(c.Context())
	if err != nil {
		return err
	}
	findings := node.findings(c.Context(), r)
	if a.json() {
		return a.print(map[string][]diagnose.Finding{"findings": findings})
	}
	node.printSettingsOrigin(a)
	const hanging = 4
	_, err = io.WriteString(a.out, wrapped(diagnose.Text(findings), terminalWidth(os.Stdout), hanging))
	return err
}

// findings returns the findings of status and doctor: the faults, then what Examine finds.
func (n *inspection) findings(ctx context.Context, r *reconcile.Report) []diagnose.Finding {
	rules := cmp.Or(r.Rules, &enforce.State{})
	if r.Incomplete() != nil {
		rules = &enforce.State{}
	}
	s := cmp.Or(n.active.status, &metrics.Status{})
	running := &diagnose.Running{
		Active: n.active.Running, Seen: n.Dir.ReconcilerSeen(), Err: n.active.err,
		ManagesConflist: s.ConflistManaged,
	}
	found := n.entryFindings(ctx)
	found["files-not-applied"] = n.notApplied(r)
	if err := n.multusErr(); err != nil && !s.ConflistManaged { // else the manager reports it
		found["multus"] = []error{err}
	}
	warnings := func(id string) []error {
		if len(found[id]) > 0 {
			return found[id]
		}
		return r.WarningsOf(id)
	}
	pods, without, err := n.Dir.Pods()
	host := diagnose.Host{
		Rules:             rules,
		State:             r.State,
		ConfDir:           r.Sources.ConfDir,
		ConfDirErr:        r.Sources.ConfDirErr,
		BinDir:            n.Settings.CNIBinDir,
		DataDir:           n.Dir.Path(),
		Reconciler:        running,
		Warnings:          warnings,
		Pods:              pods,
		PodsWithoutRecord: n.podsWithoutRecord(r, without),
		PodsErr:           err,
		IPTablesVersion:   func(variant string) string { return n.iptablesVersion(ctx, variant) },
	}
	return append(faultFindings(n.problems(r, r.Problems)), diagnose.Examine(host)...)
}

// multusErr returns why an entry that is there, or would be in the file of a delegate, is without effect
// behind Multus.
func (n *inspection) multusErr() error {
	used, err := conflist.Find(n.Settings.CNIConfDir, n.Settings.Conflist.Network)
	if errors.Is(err, conflist.ErrDelegate) {
		return err
	}
	isElsewhere := err != nil || used.Entries == 0 // another finding says so
	if isElsewhere {
		return nil
	}
	return used.MultusErr
}

// iptablesVersion returns the version of a variant of iptables, or that there is none.
func (n *inspection) iptablesVersion(ctx context.Context, variant string) string {
	for _, p := range n.Drivers.Programs(ctx, netfilter.Choice{Backend: policy.IPTables, Variant: variant}) {
		if p.Err == nil {
			return p.Version
		}
	}
	return "not installed"
}

// podsWithoutRecord returns a line for each cause why pods have no record.
func (n *inspection) podsWithoutRecord(r *reconcile.Report, withADD int) (lines []string) {
	if withADD > 0 {
		const cause = "that had an ADD: an earlier version made the record, or it is damaged"
		lines = append(lines, fmt.Sprintf("%d %s", withADD, cause))
	}
	return append(lines, reconcile.DescribeUnrecorded(n.unrecordedPods(r))...)
}

// unrecordedPods returns the pods of the runtime's cache that have no record, as the reconciler says. Its
// privileges may not be those of this process.
func (n *inspection) unrecordedPods(r *reconcile.Report) []reconcile.UnrecordedPod {
	if n.active.Answers {
		return n.active.status.UnrecordedPods
	}
	return n.UnrecordedPods(r)
}

// notApplied returns what the files of sources ask for and the active reconciler has not applied, unless it
// says why.
func (n *inspection) notApplied(r *reconcile.Report) (found []error) {
	if !n.active.Answers {
		return nil
	}
	said := map[policy.SourceID]bool{}
	for _, p := range n.active.problems {
		said[p.Source] = true
	}
	for _, source := range r.Pending {
		if !said[source] {
			err := fmt.Errorf("%s: the policy that its files state now is not in force", source)
			found = append(found, err)
		}
	}
	return found
}

// entryFindings returns the findings of the reconciler by ID or, if it does not answer, those about a managed
// entry.
func (n *inspection) entryFindings(ctx context.Context) map[string][]error {
	found := map[string][]error{}
	var conflists []conflist.Finding
	if s := n.active.status; s != nil {
		found["listen-failed"] = mapped(s.ListenErrs, errors.New)
		conflists = s.ConflistFindings
	} else if n.Settings.Conflist.Manage {
		conflists = newManager(n.Settings, n.Node, slog.New(slog.DiscardHandler)).Examine(ctx)
	}
	editor := newEditor(n.Settings, n.Node)
	for _, f := range []*conflist.Finding{editor.CopyFinding(), editor.GeneratedFinding()} {
		if f != nil && !slices.Contains(conflists, *f) {
			conflists = append(conflists, *f)
		}
	}
	for _, f := range conflists {
		found[f.ID] = append(found[f.ID], errors.New(f.Message))
	}
	return found
}
