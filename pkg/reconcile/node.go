// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Node is the node that passes are made on: its files, its dataDir, and the
// network namespace of the process. It is for one goroutine at a time.
type Node struct {
	Settings config.Settings
	// SettingsErr is why the settings are not those of their file.
	SettingsErr error
	PluginFile  string // the administrators' guard, /etc/ip-masq/plugin.toml
	Dir         *store.Dir
	Drivers     netfilter.Drivers

	// DropAfter is how long a network that no conflist names is kept without
	// an attachment; ten minutes by contract.
	DropAfter time.Duration
	// LockWait is how long a pass waits for the lock of the dataDir.
	LockWait time.Duration

	backoff backoff
}

// Open returns the node that the settings describe. Where there are
// administrators who guard the plugin, their dataDir holds.
func Open(s config.Settings, pluginFile string, drivers netfilter.Drivers) *Node {
	dataDir := s.DataDir
	if guard, _ := config.ReadPluginFile(pluginFile); guard.Present {
		dataDir = guard.DataDir // an error is told by each pass
	}
	return &Node{
		Settings: s, PluginFile: pluginFile, Dir: store.Open(dataDir), Drivers: drivers,
		DropAfter: 10 * time.Minute, LockWait: 10 * time.Second,
	}
}

// pluginInstalled tells whether there is a plugin on the node, which knows better
// than an image what the host can do.
func (n *Node) pluginInstalled() bool {
	_, err := os.Stat(filepath.Join(n.Settings.CNIBinDir, config.PluginType))
	return err == nil
}

// Enforcer returns what makes sure of the node's rules, by what the sources say of the
// node's dataDir, and tells warn about what goes wrong and stops nothing.
func (n *Node) Enforcer(src *Sources, warn func(error)) *enforce.Enforcer {
	return &enforce.Enforcer{
		Dir: n.Dir, Drivers: n.Drivers, Warn: warn, PreferredBackend: n.Settings.Backend, AllBackends: true,
		KeepBackend: n.pluginInstalled(),
		Node: enforce.NodeDataDir{
			Stated: func() (dataDir, origin string, certain bool) {
				if src.GuardErr != nil {
					return "", "", false
				}
				return config.NodeDataDir(src.Guard, func() config.ConfDir { return src.ConfDir })
			},
			Owned: func(ctx context.Context) ([]netfilter.OwnedChain, error) { return src.ownedBy(ctx, n.Drivers) },
		},
	}
}
