// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/conflist"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/reconcile"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// newManager returns what keeps the plugin entry in the conflist.
func newManager(s config.Settings, node *reconcile.Node, log *slog.Logger) *conflist.Manager {
	return &conflist.Manager{
		Editor: newEditor(s, node), BinDir: s.CNIBinDir, Log: log, Unmanaged: !s.Conflist.Managed(),
		ReadEntry: func() (entry []byte, fromFile bool, err error) {
			entry, _, fromFile, err = pluginEntry(s)
			return entry, fromFile, err
		},
	}
}

// managesConflist reports whether the loop syncs the conflist. Without conflist.own it does so until ip-masq's own
// conflist is removed.
func managesConflist(s config.Settings, node *reconcile.Node) bool {
	return s.Conflist.Managed() || config.ReadOwnConflist(node.Dir.OwnConflistPath()) != nil
}

// newEditor returns the Editor for the directory and the network of the settings, without an entry.
func newEditor(s config.Settings, node *reconcile.Node) conflist.Editor {
	return conflist.Editor{
		Dir: s.CNIConfDir, Network: s.Conflist.Network, Own: s.Conflist.Own, Backups: node.Dir.Backups, RecordPath: node.Dir.ConflistRecordPath(),
		OwnRecordPath: node.Dir.OwnConflistPath(),
		Check:         checkNetwork(node.Dir), Ask: node.CheckEntry,
	}
}

// pluginEntry returns the entry that belongs in the conflist: the content of conflist.entry_file, or an
// entry without a policy if the default file is missing; and which of them it is. The plugin must keep its state
// where the reconciler does, so the entry has to state the dataDir unless plugin.toml does.
func pluginEntry(s config.Settings) (entry []byte, origin string, fromFile bool, err error) {
	const key = "conflist.entry_file"
	pluginFile, err := config.ReadPluginFile(config.DefaultPluginFile)
	if err != nil {
		return nil, "", false, err
	}
	path := s.Conflist.EntryFile
	entry, err = conflist.ReadEntry(path)
	switch missing := errors.Is(err, fs.ErrNotExist); {
	case missing && path != config.DefaultEntryFile:
		return nil, "", false, missingEntryFile{fmt.Errorf("%s: %s is missing; write the entry into it, or remove the key for an entry without a policy",
			key, policy.Quote(path))}
	case missing:
		values := struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir,omitempty"`
		}{Type: config.PluginType}
		if !pluginFile.Present && s.DataDir != config.DefaultDataDir {
			values.DataDir = s.DataDir
		}
		entry, err = json.Marshal(values)
		return entry, fmt.Sprintf("the default, because %s is missing", policy.Quote(path)), false, err
	case err != nil:
		return nil, "", true, fmt.Errorf("%s: %w", key, err)
	}
	if err := pluginFile.DataDirErr(config.ReadNetconf(entry)); err != nil {
		return nil, "", true, fmt.Errorf("%s: %s: %w", key, policy.Quote(path), err)
	}
	if dataDir := config.ReadNetconf(entry).Identity().DataDir; !pluginFile.Present && dataDir != s.DataDir {
		return nil, "", true, fmt.Errorf("%s: %s: dataDir: %s is not the data_dir of the reconciler; write %s into one of them, as a node has one dataDir",
			key, policy.Quote(path), policy.Quote(dataDir), policy.Quote(s.DataDir))
	}
	return entry, "from " + policy.Quote(path), true, nil
}

// missingEntryFile is an fs.ErrNotExist.
type missingEntryFile struct{ error }

// Is implements what errors.Is needs.
func (missingEntryFile) Is(target error) bool { return target == fs.ErrNotExist }

// checkNetwork returns a function that returns why the plugin would refuse all pods of a network:
// plugin.toml is bad, or the dataDir is refused. The plugin creates a dataDir
// that is missing, and needs none that it can write as long as the rules are correct.
func checkNetwork(dir *store.Dir) func(network string) error {
	return func(string) error {
		_, err := config.ReadPluginFile(config.DefaultPluginFile)
		if err != nil {
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
