// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Plugin is the plugin on one host.
type Plugin struct {
	Drivers    netfilter.Drivers
	PluginFile string        // the administrators' guard, /etc/ip-masq/plugin.toml
	LockWait   time.Duration // for the lock of the dataDir; 10 s by contract
	Stdout     io.Writer
	Stderr     io.Writer
}

// Funcs returns the verbs for the CNI skeleton.
func (p *Plugin) Funcs() skel.CNIFuncs {
	verb := func(do func(context.Context, *skel.CmdArgs) error) func(*skel.CmdArgs) error {
		return func(args *skel.CmdArgs) error { return cniError(do(context.Background(), args)) }
	}
	return skel.CNIFuncs{
		Add: verb(p.add), Del: verb(p.del), Check: verb(p.check), GC: verb(p.gc), Status: verb(p.status),
	}
}

// node is what one call of a verb works on.
type node struct {
	plugin *Plugin
	enforce.Enforcer
	guard   config.PluginFile
	network string
}

func (p *Plugin) node(guard config.PluginFile, network, dataDir string) *node {
	if guard.Present {
		dataDir = guard.DataDir
	}
	return &node{
		plugin:   p,
		guard:    guard,
		network:  network,
		Enforcer: enforce.Enforcer{Dir: store.Open(dataDir), Drivers: p.Drivers, Warn: p.warn},
	}
}

// admit reads the entry on stdin and holds it against the administrators' guard.
func (p *Plugin) admit(stdin []byte) (*node, config.Entry, error) {
	entry, err := config.ParseEntry(stdin)
	if err != nil {
		return nil, entry, withCode(codeOfConfig(err), fmt.Errorf("entry of network %s: %w", policy.Quote(entry.Network), err))
	}
	guard, err := config.ReadPluginFile(p.PluginFile)
	if err == nil {
		err = guard.Admits(entry.Network)
	}
	if err != nil {
		return nil, entry, withCode(types.ErrInvalidNetworkConfig, err)
	}
	return p.node(guard, entry.Network, entry.DataDir), entry, nil
}

// tolerate finds what DEL and GC need in a configuration that may be stale or
// bad: they have no use for the rest of it.
func (p *Plugin) tolerate(stdin []byte) *node {
	network, dataDir := config.ParseLenient(stdin)
	guard, err := config.ReadPluginFile(p.PluginFile)
	p.warn(err)
	return p.node(guard, network, dataDir)
}

func (n *node) source() policy.Source {
	return policy.Source{Kind: policy.Network, Name: n.network}
}

// lock takes the lock of the dataDir, for as long as the plugin may wait.
func (n *node) lock(ctx context.Context) (*store.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, n.plugin.LockWait)
	defer cancel()
	return n.Dir.Lock(ctx)
}

func (n *node) release(l *store.Lock) { n.Warn(l.Release()) }

// warn tells on stderr, which the runtime logs, what went wrong and stops nobody.
func (p *Plugin) warn(err error) {
	if err != nil {
		fmt.Fprintf(p.Stderr, "ip-masq: warning: %v\n", err)
	}
}

func (n *node) warnState(s store.State) {
	for _, d := range s.Damaged {
		n.Warn(fmt.Errorf("a damaged document counts as absent: %w", d.Err))
	}
}
