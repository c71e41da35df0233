// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/diagnose"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
)

// faultFindings returns why the node is not ready. status, doctor and check have the same ones.
func faultFindings(problems []reconcile.Problem) []diagnose.Finding {
	found := []diagnose.Finding{}
	for _, fault := range reconcile.Faults() {
		f := diagnose.Finding{
			ID: string(fault.Reason), Severity: diagnose.SeverityFault, Cause: fault.Cause, Remedy: fault.Remedy,
		}
		for _, p := range problems {
			if p.Reason == fault.Reason {
				f.Details = append(f.Details, p.Err.Error())
			}
		}
		if len(f.Details) > 0 {
			found = append(found, f)
		}
	}
	return found
}

// multusErr returns how Multus uses the network of the plugin entry, or nil. Where the reconciler manages the
// conflist, that is a fault of the conflist.
func multusErr(s config.Settings, managed bool) error {
	if managed {
		return nil
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
	return err
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
	var text strings.Builder
	if err := diagnose.WriteFindings(&text, findings); err != nil {
		return err
	}
	const hanging = 4
	_, err = io.WriteString(a.out, wrapped(text.String(), terminalWidth(os.Stdout), hanging))
	return err
}

// findings returns the findings of status and doctor: the faults, then what Examine finds.
func (n *inspection) findings(ctx context.Context, r *reconcile.Report) []diagnose.Finding {
	rules := r.Rules
	if r.Incomplete() != nil {
		rules = nil // the policy is incomplete
	}
	running := n.running()
	ofEntry := n.entryFindings(ctx)
	warnings := func(id string) []error {
		if found := ofEntry[id]; len(found) > 0 {
			return found
		}
		if err := multusErr(n.Settings, running.ManagesConflist); err != nil && id == "multus" {
			return []error{err}
		}
		if s := n.active.status; s != nil && id == "listen-failed" {
			return mapped(s.ListenErrs, errors.New)
		}
		return r.WarningsOf(id)
	}
	_, withoutRecord, err := n.Dir.Pods()
	return append(faultFindings(n.problems(r, r.Problems)), diagnose.Examine(ctx, diagnose.Host{
		Rules: rules, State: r.State, ConfDir: r.Sources.ConfDir, ConfDirErr: r.Sources.ConfDirErr, OwnConflist: config.ReadOwnConflist(n.Dir.OwnConflistPath()),
		BinDir: n.Settings.CNIBinDir, DataDir: n.Dir.Path(), Reconciler: running, Warnings: warnings, PodsWithoutRecord: withoutRecord, PodsErr: err,
	})...)
}

// entryFindings returns the findings about the plugin entry of a managed conflist, by ID: those of the reconciler that
// runs, if it answers.
func (n *inspection) entryFindings(ctx context.Context) map[string][]error {
	found := map[string][]error{}
	switch s := n.active.status; {
	case s != nil:
		for _, f := range s.ConflistFindings {
			found[f.ID] = append(found[f.ID], errors.New(f.Message))
		}
	case n.Settings.Conflist.Managed():
		for _, f := range newManager(n.Settings, n.Node, slog.New(slog.DiscardHandler)).Examine(ctx) {
			found[f.ID] = append(found[f.ID], f.Err)
		}
	}
	return found
}

// running returns what is known of the reconciler of the node.
func (n *inspection) running() *diagnose.Running {
	r := &diagnose.Running{Active: n.active.Running && !n.active.elsewhere, Seen: n.Dir.ReconcilerSeen(), Err: n.active.err}
	if s := n.active.status; s != nil {
		r.ManagesConflist = s.ConflistManaged
	}
	return r
}
