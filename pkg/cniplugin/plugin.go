// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Plugin is the plugin on one host.
type Plugin struct {
	Drivers netfilter.Drivers
	Program string // tells one build of the program from another, which looks with other eyes; "" where it cannot be told
	// Generation tells the state that nf_tables is in, so that an ADD knows if anything
	// changed since another; nil where each ADD should look.
	Generation func() (netfilter.Generation, error)
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
	dryRun   bool                           // nothing is to be written
	netconf  func() (config.Netconf, error) // what states the network's policy, once
	admit    func() (config.Entry, error)   // what that is, if it is admitted, once
	entry    func() string                  // its fingerprint with the program's, once
	disk     *conflists
	asked    bool   // whether the dataDir is the node's
	refusal  error  // why not
	version  string // of the protocol, that the runtime speaks
	guard    config.PluginFile
	guardErr error
	network  string
}

// node finds out whose state a configuration is about, and where that is, even
// if it is stale or bad: DEL and GC have no use for the rest of it.
func (p *Plugin) node(conf config.Netconf) *node {
	id := conf.Identity()
	guard, err := config.ReadPluginFile(p.PluginFile)
	if guard.Present {
		id.DataDir = guard.DataDir
	}
	n := &node{
		plugin:   p,
		version:  id.CNIVersion,
		guard:    guard,
		guardErr: err,
		network:  id.Network,
		disk:     &conflists{dir: guard.CNIConfDir, warn: p.warn},
		Enforcer: enforce.Enforcer{Dir: store.Open(id.DataDir), Drivers: p.Drivers, Warn: p.warn},
	}
	n.netconf = sync.OnceValues(func() (config.Netconf, error) { return n.findNetconf(conf) })
	n.admit = sync.OnceValues(n.judge)
	n.entry = sync.OnceValue(n.fingerprint)
	n.Node.Stated = func() (dataDir, origin string, certain bool) {
		if err != nil {
			return "", "", false
		}
		return config.NodeDataDir(guard, n.disk.load)
	}
	return n
}

// mayWrite tells why nothing may be written from the dataDir, if so: it is not the
// node's. A verb that finds all rules right does not ask.
func (n *node) mayWrite(ctx context.Context) error {
	if !n.asked {
		n.asked, n.refusal = true, n.CheckDataDir(ctx)
	}
	return n.refusal
}

func (n *node) source() policy.SourceID {
	return policy.SourceID{Kind: policy.Network, Name: n.network}
}

// lock takes the lock of the dataDir, for as long as the plugin may wait.
func (n *node) lock(ctx context.Context, take func(context.Context) (*store.Lock, error)) (*store.Lock, error) {
	ctx, cancel := context.WithTimeout(ctx, n.plugin.LockWait)
	defer cancel()
	return take(ctx)
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
