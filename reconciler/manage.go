// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/fswatch"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// manager keeps our entry in the conflist while this reconciler has the lead of
// the node. A nil one does not.
type manager struct {
	keeper  *conflist.Manager
	files   *fswatch.Watcher
	monitor *metrics.Monitor
	leads   atomic.Bool
}

// manage returns the manager that the settings ask for, or nil. It watches files
// from now on.
func (d *daemon) manage(s config.Settings, node *reconcile.Node) *manager {
	d.monitor.Conflist(nil)
	if !s.Conflist.Manage {
		return nil
	}
	files, err := fswatch.NewFollowing(s.CNIConfDir, filepath.Dir(s.Conflist.EntryFile), filepath.Dir(config.DefaultPluginFile), s.CNIBinDir)
	if err != nil {
		d.log.Error(fmt.Sprintf("the conflist is not managed: %v", err))
		d.monitor.Conflist(&metrics.Conflist{Problems: []reconcile.Problem{{Reason: reconcile.ReasonConflist, Err: fmt.Errorf("is not managed: %w", err)}}})
		return nil
	}
	const often = 30 * time.Second
	if err := files.Err(); err != nil {
		d.log.Warn(fmt.Sprintf("not all changes of the conflist are seen at once: %v", err))
	}
	m := &manager{files: files, monitor: d.monitor}
	m.keeper = conflist.NewManager(conflist.Options{
		Dir: s.CNIConfDir, Network: s.Conflist.Network, Backups: node.Dir.BackupsPath(),
		Entry: entryOf(s), Admits: admits(node.Dir), Bin: s.CNIBinDir,
		Changed: files.Changed(), Every: min(often, s.ResyncInterval), Leads: m.leads.Load,
		Log: d.log, Tell: d.tellConflist,
	})
	return m
}

// entryOf returns what reads the entry that the settings ask for.
func entryOf(s config.Settings) func() ([]byte, error) {
	return func() ([]byte, error) {
		guard, err := config.ReadPluginFile(config.DefaultPluginFile)
		if err != nil {
			return nil, err
		}
		return conflistEntry(s, guard)
	}
}

// admits returns what tells why the plugin would refuse all pods of a network:
// the administrators keep it from contributing, or the dataDir is refused.
func admits(dir *store.Dir) func(network string) error {
	return func(network string) error {
		guard, err := config.ReadPluginFile(config.DefaultPluginFile)
		if err != nil {
			return err
		}
		if err := guard.Admits(network); err != nil {
			return err
		}
		return usable(dir)
	}
}

// tellConflist tells metrics and health of a look at the conflist.
func (d *daemon) tellConflist(s conflist.Status) {
	if !s.Leads {
		d.monitor.Conflist(nil) // it is for the one at work to tell
		return
	}
	c := &metrics.Conflist{Present: s.Present, Flapping: s.Flapping, Wrote: s.Wrote}
	for _, p := range s.Problems {
		topic := reconcile.ReasonConflist
		if p.Plugin {
			topic = reconcile.ReasonPlugin
		}
		c.Problems = append(c.Problems, reconcile.Problem{Reason: topic, Err: p.Err})
	}
	d.monitor.Conflist(c)
}

func (m *manager) run(ctx context.Context) {
	defer func() { _ = m.files.Close() }() // of watches; there is nothing to lose
	m.keeper.Run(ctx)
}

// passed takes note of a pass, before anybody is told that the node is ready: who
// makes passes has the lead.
func (m *manager) passed(r *reconcile.Report) {
	leads := !r.Standby()
	if m == nil || m.leads.Swap(leads) == leads {
		return
	}
	if leads {
		m.monitor.Conflist(&metrics.Conflist{Problems: []reconcile.Problem{{Reason: reconcile.ReasonConflist, Err: errors.New("not looked at yet")}}})
	}
	m.keeper.Look()
}

// look makes the manager look at once.
func (m *manager) look() {
	if m != nil {
		m.keeper.Look()
	}
}
