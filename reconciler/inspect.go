// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const answerTime = 2 * time.Second

// inspection is the node for a command that reads, with the settings of the reconciler that answers. The
// command reads sources and rules itself, and not from the reconciler: so it answers while that hangs, and
// finds faults that it does not see. Every program with NET_ADMIN can name a dataDir in the comment of a
// chain, and so a socket. Therefore a command runs no program that only the socket names (pluginVersion),
// bounds what it reads there (metrics.ReadStatus), and escapes control characters (escaped).
type inspection struct {
	*reconcile.Node
	active       activeReconciler
	binDir       string // cni_bin_dir without the reconciler's settings
	settingsFrom string // "from FILE"
}

// activeReconciler is the reconciler that runs on the node, as it answers on its socket.
type activeReconciler struct {
	Running bool    `json:"running"`
	Answers bool    `json:"answers"` // on its socket
	PID     *int    `json:"pid"`     // of one that answers
	Version *string `json:"version"` // of one that answers

	status   *metrics.Status     // nil unless it answers
	problems []reconcile.Problem // why the node is not ready, as it says
	err      error               // why it does not answer
}

// inspect opens the node for a command that only reads. An invalid reconciler.toml is in its reports.
func (a *app) inspect(ctx context.Context) (*inspection, error) {
	node, err := a.node(ctx)
	if _, is := errors.AsType[usageError](err); is {
		return nil, err
	}
	n := &inspection{Node: node, settingsFrom: "from " + a.settingsFile(), binDir: node.Settings.CNIBinDir}
	if err != nil || safefile.IsMissing(a.settingsFile()) {
		n.settingsFrom = "from the defaults"
	}
	n.SettingsErr = err
	n.active = ask(ctx, n.Dir)
	if s := n.active.status; s != nil && a.config == "" {
		if err := n.useSettings(a, s); err != nil {
			err = fmt.Errorf("its version is %s, and this one, %s, cannot take its settings: %w; "+
				"use the program of that version", policy.Printable(s.Version), version, err)
			n.active = activeReconciler{Running: true, problems: s.Problems, err: err}
		}
	}
	if a.given("") {
		n.settingsFrom += " and flags"
	}
	return n, nil
}

func (a *app) examine(ctx context.Context) (*inspection, *reconcile.Report, error) {
	n, err := a.inspect(ctx)
	if err != nil {
		return nil, nil, err
	}
	r := n.Check(ctx)
	n.addReadiness(ctx, r)
	return n, r, nil
}

// addReadiness adds what a reconciler would report in a sync now.
func (n *inspection) addReadiness(ctx context.Context, r *reconcile.Report) {
	if n.active.Answers {
		n.AddADDProblems(r)
	} else {
		n.AddReadiness(ctx, r)
	}
}

// useSettings opens the node with the settings of the reconciler that runs, except those for which a flag is
// given.
func (n *inspection) useSettings(a *app, s *metrics.Status) error {
	running := config.DefaultSettings()
	if err := errors.Join(running.SetAll(s.Settings), a.setFlags(&running)); err != nil {
		return err
	}
	running.DataDir = n.Settings.DataDir // whose socket has answered
	// [agent] may have stated nothing but defaults, which the list of settings does not show.
	running.AgentStated = running.AgentStated || s.AgentSource && running.AgentConfigDir == ""
	n.Node = open(running, n.Drivers)
	if s.SettingsErr != "" {
		n.SettingsErr = errors.New(s.SettingsErr)
	}
	changesAgentFiles := a.given("agent") // or the policy beside them
	if s.AgentFiles != nil && !changesAgentFiles {
		n.AgentFiles = s.ReadAgentFiles
	}
	n.settingsFrom = fmt.Sprintf("from the reconciler that runs (pid %d, version %s)", s.PID, s.Version)
	return nil
}

// pluginVersion returns the version of the plugin. One in a directory that only the reconciler names is not
// run: a program that listens on a socket in its place must not choose what root runs.
func (n *inspection) pluginVersion(ctx context.Context, path string) (string, error) {
	if n.Settings.CNIBinDir == n.binDir {
		return install.Version(ctx, path)
	}
	if known := n.active.status.PluginVersion; known != "" {
		return policy.Printable(known), nil
	}
	return "", fmt.Errorf("the reconciler does not know the version of %s", policy.Printable(path))
}

// ask asks the reconciler of the dataDir for its status.
func ask(ctx context.Context, dir *store.Dir) activeReconciler {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	status, err := metrics.ReadStatus(ctx, dir)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("no answer in %s", answerTime)
	}
	if err != nil {
		return activeReconciler{Running: dir.ReconcilerActive(), err: err}
	}
	return activeReconciler{
		Running: true, Answers: true, PID: &status.PID, Version: &status.Version,
		status: status, problems: status.Problems,
	}
}

// printSettingsOrigin writes where settings come from that are not the reconciler's, unless --config says it.
func (n *inspection) printSettingsOrigin(a *app) {
	switch {
	case a.config != "" || n.active.Answers:
	case n.active.Running:
		fmt.Fprintf(a.err, "settings: the reconciler that runs does not answer: %v; %s\n",
			n.active.err, n.settingsFrom)
	default:
		fmt.Fprintf(a.err, "settings: no reconciler runs; %s\n", n.settingsFrom)
	}
}

// ignoreWarning is the Warn of an Enforcer that a command does not sync with.
func ignoreWarning(error) {}

// problems returns why the node is not ready: what a dry run found, and what the reconciler tells. While
// the reconciler tells why a policy is not in force yet, the rules that it asks for are no reason of their
// own.
func (n *inspection) problems(r *reconcile.Report, found []reconcile.Problem) []reconcile.Problem {
	withheld := false
	for _, p := range n.active.problems {
		withheld = withheld || slices.Contains(r.Pending, p.Source)
	}
	all := []reconcile.Problem{}
	for _, p := range found {
		if slices.ContainsFunc(n.active.problems, p.SameCause) {
			continue
		}
		isOfRules := p.Source == policy.SourceID{} && p.Reason == reconcile.ReasonRules
		if withheld && isOfRules {
			continue
		}
		all = append(all, p)
	}
	return append(all, n.active.problems...)
}

func errOf(p reconcile.Problem) error { return p.Err }

func described(p reconcile.Problem) error { return fmt.Errorf("%s: %w", p.Reason, p.Err) }

func joined(problems []reconcile.Problem) error { return errors.Join(mapped(problems, described)...) }
