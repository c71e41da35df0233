// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
	"github.com/ip-masq/ip-masq-cni/pkg/flowcontrol"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

type uninstallFlags struct {
	noWait, keepRules, stay bool
	bootUnit                string
}

func (a *app) uninstallCommand() *cobra.Command {
	var f uninstallFlags
	c := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove the plugin from this node, its entry, the rules and the state",
		RunE:  func(c *cobra.Command, _ []string) error { return a.uninstall(c.Context(), f) },
	}
	c.Flags().BoolVar(&f.keepRules, "keep-rules", false, "leave the rules and the state as they are")
	c.Flags().BoolVar(&f.noWait, "no-wait", false,
		"remove the plugin although the cached network configuration of a pod names it")
	c.Flags().StringVar(&f.bootUnit, "boot-unit", "",
		"remove the boot unit that install wrote into `DIR` (default: the directory that install used, "+
			"and "+install.UnitDirs()[0]+")")
	c.Flags().BoolVar(&f.stay, "stay", false,
		"retry until all is removed, and run until stopped; /readyz says what is left")
	return c
}

const reasonUninstall = reconcile.Reason("uninstall") // not one of reconcile.Faults: "run" never has it

func (a *app) uninstall(ctx context.Context, f uninstallFlags) error {
	if f.stay && a.json() {
		return usageError{errors.New("--stay reports by its log; leave -o json out")}
	}
	node, err := a.node(ctx)
	stated, errDirs := a.directories()
	if err = cmp.Or(err, errDirs); err != nil {
		return err
	}
	u := &uninstallation{
		uninstallFlags: f,
		node:           node,
		dirs:           install.AllDirs(stated),
		binUnknown:     stated.Bin == "",
		cleanupResult:  newCleanupResult(node),
		Conflists:      []editedConflist{},
		Plugins:        []string{},
	}
	if f.stay {
		return a.stay(ctx, u)
	}
	err = u.step(ctx)
	if a.json() {
		u.Attached, u.References = notNil(u.Attached), notNil(u.References)
		return errors.Join(err, a.print(u))
	}
	u.print(a, err == nil)
	return err
}

func notNil[T any](list []T) []T { return append([]T{}, list...) }

type uninstallation struct {
	uninstallFlags
	node       *reconcile.Node
	dirs       install.SearchDirs
	binUnknown bool // the plugin may be in another directory

	Conflists  []editedConflist       `json:"conflists"`
	Plugins    []string               `json:"plugins"` // removed
	Attached   []install.CachedResult `json:"attached"`
	References []string               `json:"copies"`             // configurations that name the plugin
	BootUnit   string                 `json:"bootUnit,omitempty"` // removed
	*cleanupResult
}

type editedConflist struct {
	Network string `json:"network"`
	Path    string `json:"path"`
}

func (u *uninstallation) step(ctx context.Context) error {
	lock, err := lockInstance(u.node)
	if err != nil {
		return err
	}
	u.removeBootUnit()
	todo := install.Uninstall{
		SearchDirs: u.dirs,
		Root:       "/",
		NoWait:     u.noWait,
		AddTime:    2 * time.Second,
		Editor: conflist.Editor{
			Backups:    u.node.Dir.Backups,
			RecordPath: u.node.Dir.ConflistRecordPath(),
			CopyRecord: u.node.Dir.CopyRecordPath(),
		},
	}
	if !u.keepRules {
		todo.RemoveState = func(ctx context.Context) error { // cleanUp takes the lock itself
			return errors.Join(lock.Release(), u.cleanUp(ctx, u.node))
		}
	}
	done, err := todo.Step(ctx)
	for _, c := range done.Conflists {
		u.Conflists = append(u.Conflists, editedConflist{c.Network, c.Path})
		if c.BackupErr != nil {
			u.Warnings = append(u.Warnings, fmt.Sprintf("no backup is kept in the data dir, so it is %s: %v",
				policy.Printable(c.Backup), c.BackupErr))
		}
	}
	u.Warnings = append(u.Warnings, done.Stays...)
	u.Plugins = append(u.Plugins, done.Binaries...)
	u.Attached, u.References = done.Attached, done.References
	return remedied(errors.Join(err, lock.Release()))
}

// removeBootUnit removes the boot unit. One that stays restores no rule once the documents are gone, so it is
// a warning.
func (u *uninstallation) removeBootUnit() {
	dirs := []string{u.bootUnit}
	if u.bootUnit == "" {
		dirs = []string{install.UnitDirs()[0]}
		if recorded := u.node.Dir.BootUnitDir(); recorded != "" && recorded != dirs[0] {
			dirs = append(dirs, recorded)
		}
	}
	for _, dir := range dirs {
		path, err := install.RemoveBootUnit(dir)
		if err != nil {
			u.Warnings = append(u.Warnings, err.Error())
		}
		u.BootUnit = cmp.Or(path, u.BootUnit)
	}
}

// lockInstance takes the instance lock, or fails if another reconciler runs, which may insert the entry
// again. If a dataDir cannot be used, the entry is removed all the same, and the removal of the state reports
// it.
func lockInstance(node *reconcile.Node) (*store.InstanceLock, error) {
	if safefile.IsMissing(node.Dir.Path()) {
		return nil, nil // the lock would create it
	}
	lock, err := node.Dir.InstanceLock()
	if errors.Is(err, store.ErrBusy) {
		return nil, node.StopFirst()
	}
	return lock, nil
}

// print prints what was removed and, if all is, what was not there or stays.
func (u *uninstallation) print(a *app, complete bool) {
	for _, c := range u.Conflists {
		network, path := policy.Quote(c.Network), policy.Quote(c.Path)
		fmt.Fprintf(a.out, "removed the plugin entry of network %s from %s\n", network, path)
	}
	printEach(a.out, "removed %s", u.Plugins)
	if u.BootUnit != "" {
		fmt.Fprintf(a.out, "removed the boot unit %s\n", policy.Printable(u.BootUnit))
	}
	u.printRemoved(a)
	if !complete {
		return
	}
	removed := len(u.Conflists) > 0 || len(u.Plugins) > 0 || u.BootUnit != "" || u.removedAnything()
	kept := u.keepRules && !safefile.IsMissing(u.DataDir)
	if kept {
		fmt.Fprintf(a.out, "rules and the state in %s stay; \"cleanup\" removes them\n", u.DataDir)
	}
	if len(u.Plugins) == 0 && (u.binUnknown || removed) {
		fmt.Fprintf(a.out, "no plugin was found in %s; if it was installed elsewhere, "+
			"name the directory with --cni-bin-dir\n", strings.Join(u.dirs.Bin, ", "))
	}
	if !kept && !removed {
		fmt.Fprintln(a.out, "nothing to remove")
	}
}

// stay uninstalls until all is removed, waits until it is stopped, and removes what returns meanwhile:
// a DaemonSet has no other way to run something once on each node. It is ready when nothing is left.
func (a *app) stay(ctx context.Context, u *uninstallation) error {
	log := flowcontrol.LogOnce(a.logger(u.node.Settings))
	monitor := metrics.New(metrics.Options{Version: version})
	left := errors.New("not begun yet")
	reportLeft(monitor, left)
	var server sync.WaitGroup
	defer server.Wait()
	address := u.node.Settings.HealthListen
	server.Go(func() { monitor.Serve(ctx, "health_listen", address, monitor.Health(), log) })
	for ; ctx.Err() == nil; flowcontrol.Sleep(ctx, 2*time.Second) {
		if left != nil || u.dirs.HaveAny() {
			left = u.step(ctx)
			if ctx.Err() != nil {
				break
			}
			u.logStep(log, left)
		}
		reportLeft(monitor, left)
	}
	return nil
}

// reportLeft reports what is left to remove; nil is nothing.
func reportLeft(monitor *metrics.Monitor, left error) {
	r := &reconcile.Report{}
	if left != nil {
		r.Problems = []reconcile.Problem{{Reason: reasonUninstall, Err: left}}
	}
	monitor.Report(r, time.Minute) // longer than a step, so that /livez does not fail meanwhile
}

func (u *uninstallation) logStep(log *slog.Logger, left error) {
	for _, warning := range u.Warnings {
		log.Warn(warning)
	}
	u.Warnings = nil
	if left != nil {
		log.Warn("cannot remove all yet, trying again", "reason", left.Error())
		return
	}
	log.Info("uninstalled; this process may be stopped", "conflists", len(u.Conflists),
		"plugin", strings.Join(u.Plugins, ", "), "chains", len(u.Removed))
}

func (a *app) cleanup(c *cobra.Command, _ []string) error {
	node, err := a.node(c.Context())
	if err != nil {
		return err
	}
	result := newCleanupResult(node)
	err = result.cleanUp(c.Context(), node)
	if a.json() {
		return errors.Join(err, a.print(result))
	}
	result.printRemoved(a)
	if err == nil && !result.removedAnything() {
		fmt.Fprintln(a.out, "nothing to remove")
	}
	return err
}

type cleanupResult struct {
	Removed  []removedChain `json:"removed"`
	Warnings []string       `json:"warnings"`
	DataDir  string         `json:"dataDir"`

	state bool // existed, and is removed
}

type removedChain struct {
	policy.ChainFamily
	Backend string `json:"backend"`
}

func newCleanupResult(node *reconcile.Node) *cleanupResult {
	return &cleanupResult{Removed: []removedChain{}, Warnings: []string{}, DataDir: node.Dir.Path()}
}

func (r *cleanupResult) cleanUp(ctx context.Context, node *reconcile.Node) error {
	missing := safefile.IsMissing(r.DataDir)
	removed, err := node.Cleanup(ctx, func(err error) {
		if err != nil {
			r.Warnings = append(r.Warnings, err.Error())
		}
	})
	for _, o := range removed {
		r.Removed = append(r.Removed, removedChain{o.ChainFamily, o.Choice.String()})
	}
	r.state = r.state || err == nil && !missing
	return err
}

func (r *cleanupResult) removedAnything() bool { return len(r.Removed) > 0 || r.state }

func (r *cleanupResult) printRemoved(a *app) {
	warn(a, r.Warnings)
	for _, g := range r.Removed {
		fmt.Fprintf(a.out, "removed chain %s (%s) from %s\n", g.Chain, g.Family, g.Backend)
	}
	if r.state {
		fmt.Fprintf(a.out, "removed the state in %s\n", r.DataDir)
	}
}
