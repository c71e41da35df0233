// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/fswatch"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// manager keeps the plugin entry in the conflist while this reconciler is the leader of the node. A
// nil one does nothing.
type manager struct {
	conflist *conflist.Manager
	files    *fswatch.Watcher
	monitor  *metrics.Monitor
	leader   atomic.Bool
}

// manage returns the manager that the settings ask for, or nil.
func (d *daemon) manage(s config.Settings, node *reconcile.Node) *manager {
	d.monitor.Conflist(nil)
	if !s.Conflist.Manage {
		return nil
	}
	files := fswatch.New(s.CNIConfDir, filepath.Dir(s.Conflist.EntryFile), filepath.Dir(config.DefaultPluginFile), s.CNIBinDir)
	if err := files.Err(); err != nil {
		d.log.Warn("some changes of the conflist are noticed late", "err", err.Error())
	}
	const maxInterval = 30 * time.Second
	m := &manager{files: files, monitor: d.monitor}
	m.conflist = conflist.NewManager(conflist.Options{
		Editor: conflist.Editor{
			Dir: s.CNIConfDir, Network: s.Conflist.Network, Backups: node.Dir.Backups, Check: checkNetwork(node.Dir),
		},
		ReadEntry: func() ([]byte, error) { return pluginEntry(s) }, BinDir: s.CNIBinDir,
		Changed: files.Changed(), Interval: min(maxInterval, s.ResyncInterval), Leader: m.leader.Load,
		Log: d.log, Report: m.report,
	})
	return m
}

// report reports a sync to metrics and health.
func (m *manager) report(s conflist.Status) {
	if !s.Leader {
		m.monitor.Conflist(nil) // the leader reports
		return
	}
	c := &metrics.Conflist{Present: s.Present, Flapping: s.Flapping, Wrote: s.Wrote}
	for _, p := range s.Problems {
		c.Problems = append(c.Problems, reconcile.Problem{Reason: reconcile.Reason(p.Reason), Err: p.Err, LoopOnly: true})
	}
	m.monitor.Conflist(c)
}

func (m *manager) run(ctx context.Context) {
	defer func() { _ = m.files.Close() }() // nothing was written
	m.conflist.Run(ctx)
}

// setLeader takes note of a sync of the rules, which the leader alone makes, before health reports it.
func (m *manager) setLeader(r *reconcile.Report) {
	leader := !r.Standby()
	if m == nil || m.leader.Swap(leader) == leader {
		return
	}
	if leader {
		m.monitor.Conflist(&metrics.Conflist{Problems: []reconcile.Problem{
			{Reason: reconcile.ReasonConflist, Err: errors.New("not looked at yet"), LoopOnly: true},
		}})
	}
	m.conflist.SyncNow()
}

// syncNow makes the manager sync at once.
func (m *manager) syncNow() {
	if m != nil {
		m.conflist.SyncNow()
	}
}

// pluginEntry returns the entry that belongs in the conflist: the content of conflist.entry_file, or an
// entry without a policy if the default file is missing. The plugin must keep its state where the
// reconciler does, so the entry has to state the dataDir unless plugin.toml does.
func pluginEntry(s config.Settings) ([]byte, error) {
	const key = "conflist.entry_file"
	pluginFile, err := config.ReadPluginFile(config.DefaultPluginFile)
	if err != nil {
		return nil, err
	}
	path := s.Conflist.EntryFile
	_, err = os.Stat(path)
	missing := errors.Is(err, fs.ErrNotExist)
	if missing && path != config.DefaultEntryFile {
		return nil, fmt.Errorf("%s: %s is missing; write the entry into it, or remove the key for an entry without a policy",
			key, policy.Quote(path))
	}
	entry, err := conflist.ReadEntry(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	dataDir := config.ReadNetconf(entry).Identity().DataDir
	switch {
	case pluginFile.Present || dataDir == s.DataDir:
		return entry, nil
	case missing:
		return json.Marshal(struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir"`
		}{config.PluginType, s.DataDir})
	}
	return nil, fmt.Errorf("%s: %s: dataDir: %s is not the data_dir of the reconciler; write %s into one of them, as a node has one dataDir",
		key, policy.Quote(path), policy.Quote(dataDir), policy.Quote(s.DataDir))
}

// checkNetwork returns a function that returns why the plugin would refuse all pods of a network:
// plugin.toml does not allow the network, or the dataDir is refused. The plugin creates a dataDir
// that is missing, and needs none that it can write as long as the rules are correct.
func checkNetwork(dir *store.Dir) func(network string) error {
	return func(network string) error {
		pluginFile, err := config.ReadPluginFile(config.DefaultPluginFile)
		if err != nil {
			return err
		}
		if err := pluginFile.Admits(network); err != nil {
			return err
		}
		if _, err = dir.Load(); err == nil {
			now, cancel := context.WithCancel(context.Background())
			cancel()
			var lock *store.Lock
			if lock, err = dir.LockToRead(now); !errors.Is(err, store.ErrRefused) {
				return lock.Release()
			}
		}
		return fmt.Errorf("no pod would start with the plugin entry: %w", err)
	}
}
