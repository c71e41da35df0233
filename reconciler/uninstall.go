// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ip-masq/ip-masq-cni/pkg/conflist/install"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

type uninstallFlags struct {
	wait                    time.Duration
	noWait, keepRules, stay bool
}

func (a *app) uninstallCommand() *cobra.Command {
	var f uninstallFlags
	c := a.addOutput(&cobra.Command{
		Use:   "uninstall",
		Short: "Take the plugin from this node: the entry, the binary, rules and state",
		Long: `Takes our entry out of all conflists, and then removes the plugin, the rules and the state.
Pods that run keep running, and can be ended; new ones start without us.

CRI-O and podman end a pod by the conflist as it was when the pod started. While there are
pods that they started with the plugin, it stays, and rules and state with it; the exit
code is 1 then. --wait gives it time, and once more is fine. containerd ends pods by the
conflist as it is: its pods are not waited for, where /run/containerd can be read. Multus
ends pods as CRI-O does, whatever the runtime is.

The plugin stays too, --no-wait or not, while a file in the directories of configurations
names it, such as the one that Multus generates: restart Multus, or wait with --wait.

It looks in --cni-conf-dir and --cni-bin-dir; where they are not given, in all that install
knows. It refuses to work while "run" does. reconciler.toml, plugin.toml and the entry file
stay.

Exit codes: 0 nothing of ours is left (but for --keep-rules), 1 something is.`,
		Example: `  ip-masq-reconciler uninstall
  ip-masq-reconciler uninstall --keep-rules  # until the next boot, or "cleanup"
  ip-masq-reconciler uninstall --stay        # as a DaemonSet: done is ready`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return a.uninstall(c.Context(), f) },
	})
	c.Flags().BoolVar(&f.keepRules, "keep-rules", false, "leave rules and state as they are")
	c.Flags().BoolVar(&f.noWait, "no-wait", false, "remove the plugin although pods' cached conflists name it: right where the runtime ends pods by the conflist as it is then")
	c.Flags().BoolVar(&f.stay, "stay", false, "try until all is done, and stay until stopped; /readyz (health_listen) says how far it is")
	c.Flags().Var((*waiting)(&f.wait), "wait", "`TIME` to wait for pods that the runtime will end with the plugin, such as 10m")
	return c
}

// waiting is the value of --wait.
type waiting time.Duration

// String implements pflag.Value.
func (w *waiting) String() string { return time.Duration(*w).String() }

// Type implements pflag.Value.
func (w *waiting) Type() string { return "duration" }

// Set implements pflag.Value.
func (w *waiting) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return fmt.Errorf("%s is not a time to wait; write a number with its unit: 30s, 10m", policy.Quote(text))
	}
	*w = waiting(d)
	return nil
}

// pause is what lies between tries.
const pause = 2 * time.Second

// addsTake is how long an ADD takes that has begun with a conflist that named us.
const addsTake = 2 * time.Second

func (a *app) uninstall(ctx context.Context, f uninstallFlags) error {
	switch {
	case f.noWait && f.wait > 0:
		return usageError{errors.New("--no-wait and --wait contradict each other; write one of them")}
	case f.stay && f.wait > 0:
		return usageError{errors.New("--stay waits for as long as it takes; leave --wait out")}
	case f.stay && a.json():
		return usageError{errors.New("--stay tells by its log; leave -o json out")}
	}
	node, err := a.node()
	if err != nil {
		return err
	}
	stated, err := a.directories()
	if err != nil {
		return err
	}
	d := &departure{node: node, places: install.Ours(stated), elsewhere: stated.Bin == "", uninstallFlags: f, leavings: newLeavings(node)}
	if f.stay {
		return a.stay(ctx, d)
	}
	until := time.Now().Add(f.wait)
	for {
		err = d.step(ctx)
		var attached *install.AttachedError
		left := time.Until(until)
		if err == nil || !errors.As(err, &attached) || left <= 0 || ctx.Err() != nil {
			break
		}
		sleep(ctx, min(pause, left))
	}
	d.Warnings = append(notNil(d.notes), d.Warnings...)
	if a.json() {
		return errors.Join(err, a.print(d))
	}
	if d.tell(a); err == nil {
		d.tellAbsent(a)
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// departure is an uninstall under way, and what it has removed so far.
type departure struct {
	uninstallFlags
	node      *reconcile.Node
	places    install.Places       // to look in
	elsewhere bool                 // may the plugin be too
	notes     []string             // warnings of the steps so far, each once
	Conflists []withdrawnEntry     `json:"conflists"`
	Plugins   []string             `json:"plugins"` // removed
	Attached  []install.Attachment `json:"attached"`
	Copies    []install.Copy       `json:"copies"` // files that name the plugin still
	*leavings
}

type withdrawnEntry struct {
	Network string `json:"network"`
	Path    string `json:"path"`

	stays string // why the file does, of those that install made
}

// step does what can be done now.
func (d *departure) step(ctx context.Context) error {
	d.Conflists, d.Plugins, d.Attached, d.Copies = notNil(d.Conflists), notNil(d.Plugins), notNil(d.Attached), notNil(d.Copies)
	lead, err := alone(d.node.Dir)
	if err != nil {
		return err
	}
	u := install.Uninstall{Places: d.places, Backups: d.node.Dir.BackupsPath(), Root: "/", NoWait: d.noWait, Settle: addsTake}
	if _, err := d.node.Dir.Load(); errors.Is(err, store.ErrRefused) { // nothing is written there
		u.Backups = ""
		d.note("no backup is kept: %v", err)
	}
	if !d.keepRules {
		u.State = func(ctx context.Context) error { // which takes the lead by itself
			return errors.Join(lead.Release(), d.cleanUp(ctx, d.node))
		}
	}
	done, err := u.Step(ctx)
	for _, c := range done.Conflists {
		d.Conflists = append(d.Conflists, withdrawnEntry{c.Network, c.Path, c.Stays})
	}
	if done.NoBackup != nil {
		d.note("no backup was kept: %v", done.NoBackup)
	}
	for _, c := range done.Copies {
		if !c.Loaded {
			d.note("%s names the plugin; no runtime reads it under this name: remove it, or the plugin entry in it, before it gets another",
				policy.Quote(c.File))
		}
	}
	if done.Missing {
		d.note("the plugin is gone, and runtimes will call it for %d containers that they made with it, such as container %s in %s: ending them fails",
			len(done.Attached), policy.Quote(done.Attached[0].ContainerID), policy.Quote(done.Attached[0].File))
	}
	d.Plugins = append(d.Plugins, done.Binaries...)
	d.Attached, d.Copies = notNil(done.Attached), notNil(done.Copies)
	return remedied(errors.Join(err, lead.Release()))
}

func (d *departure) note(format string, args ...any) {
	if text := fmt.Sprintf(format, args...); !slices.Contains(d.notes, text) {
		d.notes = append(d.notes, text)
	}
}

func notNil[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// alone takes the lead, or fails beside a reconciler that runs: it may put the
// entry back. A dataDir that cannot be used is no reason to leave an entry that
// keeps pods from starting, and who removes the state will tell.
func alone(dir *store.Dir) (*store.InstanceLock, error) {
	if _, err := os.Lstat(dir.Path()); errors.Is(err, fs.ErrNotExist) {
		return nil, nil // it would be there, and is not to be made
	}
	lead, err := dir.InstanceLock()
	if errors.Is(err, store.ErrBusy) {
		return nil, fmt.Errorf("%w, and would restore what is removed; stop it first", err)
	}
	return lead, nil
}

func (d *departure) any() bool {
	return len(d.Conflists) > 0 || len(d.Plugins) > 0 || d.leavings.any()
}

// tell tells people of it.
func (d *departure) tell(a *app) {
	for _, c := range d.Conflists {
		fmt.Fprintf(a.out, "took the entry out of network %s in %s\n", policy.Quote(c.Network), policy.Quote(c.Path))
		if c.stays != "" {
			fmt.Fprintf(a.out, "%s stays, as %s\n", policy.Quote(c.Path), c.stays)
		}
	}
	for _, path := range d.Plugins {
		fmt.Fprintf(a.out, "removed %s\n", path)
	}
	d.leavings.tell(a)
}

// tellAbsent tells of what was not there, or stays.
func (d *departure) tellAbsent(a *app) {
	_, err := os.Lstat(d.DataDir)
	kept := d.keepRules && err == nil
	if kept {
		fmt.Fprintf(a.out, "rules and the state in %s stay; \"cleanup\" removes them\n", d.DataDir)
	}
	if len(d.Plugins) == 0 && (d.elsewhere || d.any()) {
		fmt.Fprintf(a.out, "no plugin was found in %s", strings.Join(d.places.Bins, ", "))
		if d.elsewhere {
			fmt.Fprint(a.out, "; if it was installed elsewhere, name the directory with --cni-bin-dir")
		}
		fmt.Fprintln(a.out)
	}
	if !kept && !d.any() {
		fmt.Fprintln(a.out, "nothing of ours is there")
	}
}
