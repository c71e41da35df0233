// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/agentconfig"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Node is the node that is synced: its files, its dataDir and the network namespace of the process. It is
// for one goroutine at a time. Beside it one goroutine may call Publish, one may use Dir and Conntrack,
// which have no state here, and one may use CacheEvents.
type Node struct {
	Settings    config.Settings
	SettingsErr error  // why Settings are not those of the file
	PluginFile  string // /etc/ip-masq/plugin.toml
	Dir         *store.Dir
	Drivers     netfilter.Drivers
	// Conntrack deletes stale connections; see enforce.Enforcer.
	Conntrack func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error)

	// Addresses returns the addresses of the node; see enforce.Enforcer.
	Addresses func([]policy.Family) ([]policy.NodeAddress, error)

	// AgentFiles returns the agent files. Nil reads those that the settings name.
	AgentFiles func() (agentconfig.Files, error)

	// Version is the version of the program. With "" nothing is published; see Publish.
	Version string

	DropAfter time.Duration // how long a network without a conflist and attachments is kept

	CacheDir string // the runtime's cache, from which syncs record pods; "" for none

	published store.VerificationCache
	cached    *cachedPods
}

// Open returns the node that the settings describe.
func Open(s config.Settings, pluginFile string, drivers netfilter.Drivers) *Node {
	return &Node{
		Settings: s, PluginFile: pluginFile, Dir: store.Open(s.DataDir), Drivers: drivers,
		DropAfter: 10 * time.Minute, cached: &cachedPods{awaitRules: true},
	}
}

// Enforcer returns the enforcer of the node's rules. It passes errors that stop nothing to warn.
func (n *Node) Enforcer(src *Sources, warn func(error)) *enforce.Enforcer {
	return &enforce.Enforcer{
		Dir: n.Dir, Drivers: n.Drivers, Conntrack: n.Conntrack, Addresses: n.Addresses, Warn: warn,
		RereadExempt: true, RereadAll: n.cached.awaitRules, AllBackends: true,
		Owned: func(ctx context.Context) ([]netfilter.OwnedChain, error) { return n.owned(ctx, src) },
	}
}

// owned returns the chains in the kernel that name an owner. They are read once, until the sources are read
// again or a sync removes some.
func (n *Node) owned(ctx context.Context, src *Sources) ([]netfilter.OwnedChain, error) {
	if src.owned != nil {
		return *src.owned, nil
	}
	owned, err := n.Drivers.Owned(ctx)
	if err == nil {
		src.owned = &owned
	}
	return owned, err
}

// Publish writes that the rules are right at this generation of the ruleset, as the sync of a report found
// them: plugins of the same version need not read them. It writes nothing twice.
func (n *Node) Publish(r *Report, generation uint32) {
	at := r.generation // read by the loop: its socket is not for two goroutines
	if at == (netfilter.Generation{}) {
		return
	}
	at.Number = generation
	c := r.Rules.Verified(r.inputs, at.String())
	c.Entry = n.Version // in place of an entry, as it holds for the ADDs of any
	if c.Inputs == "" || c == n.published {
		return
	}
	if err := n.Dir.Publish(c); err == nil { // without it plugins read the rules
		n.published = c
	}
}

// checkDataDir returns why the dataDir must not be used, or nil: the node has another one, by its plugin.toml
// or by the chains in the kernel.
func (n *Node) checkDataDir(ctx context.Context, e *enforce.Enforcer, src *Sources) error {
	file, own := src.PluginFile, n.Dir.Path()
	if !file.Present || src.PluginFileErr != nil || file.DataDir == own {
		return e.CheckDataDir(ctx)
	}
	const remedy = "restart it without --data-dir"
	path, dataDir := policy.Quote(file.Path), policy.Quote(file.DataDir)
	return fmt.Errorf("%w: data_dir in %s is %s, and this reconciler runs with %s; %s",
		enforce.ErrOtherDataDir, path, dataDir, policy.Quote(own), remedy)
}

// Sources are the files that policies come from: plugin.toml, the conflists and the agent files.
type Sources struct {
	PluginFile config.PluginFile
	ConfDir    config.ConfDir
	Agent      *agentconfig.Files // nil if agent files are not a source

	// Why one of them cannot be read.
	PluginFileErr, ConfDirErr, AgentErr error

	owned *[]netfilter.OwnedChain // chains in the kernel that name an owner; nil until they are needed
}

// Read reads the sources; errors are in the result.
func (n *Node) Read() *Sources {
	s := n.reread(&Sources{})
	if n.Settings.AgentSource() {
		files, err := n.readAgentFiles()
		s.Agent, s.AgentErr = &files, err
	}
	return s
}

func (n *Node) readAgentFiles() (agentconfig.Files, error) {
	if n.AgentFiles != nil {
		return n.AgentFiles()
	}
	return agentconfig.Read(n.Settings.AgentConfigDir, n.Settings.AgentDialect, n.Settings.Agent)
}

// reread reads the sources that the plugin reads too. Agent files are not read again: one of them
// may be incomplete at this moment, and the loop gets an event when it is written.
func (n *Node) reread(before *Sources) *Sources {
	s := Sources{Agent: before.Agent, AgentErr: before.AgentErr, owned: before.owned}
	s.PluginFile, s.PluginFileErr = config.ReadPluginFile(n.PluginFile)
	dir := n.Settings.CNIConfDir
	if s.PluginFile.Present && s.PluginFileErr == nil {
		dir = s.PluginFile.CNIConfDir
	}
	s.ConfDir, s.ConfDirErr = config.ReadConfDir(dir)
	return &s
}

// Interval returns the longest time between two syncs: that of the agent files, else of the settings.
func (n *Node) Interval(s *Sources) time.Duration {
	if s != nil && s.Agent != nil && s.AgentErr == nil && s.Agent.ResyncInterval > 0 {
		return s.Agent.ResyncInterval
	}
	return n.Settings.ResyncInterval
}

// StopFirst is the error of a command that removes rules while another process holds the instance lock.
func (n *Node) StopFirst() error {
	const remedy = "stop it first, such as with systemctl stop ip-masq-reconciler"
	return fmt.Errorf("ip-masq-reconciler already runs on this node, with the data dir %s, "+
		"and would restore what is removed; %s", policy.Quote(n.Dir.Path()), remedy)
}

// Cleanup removes everything that ip-masq owns on the node, in every backend and family, and then the
// dataDir. It fails while a reconciler runs, which would restore all of it, and while a guard that drops
// packets cannot be removed, which would drop what the rules masqueraded. It keeps the dataDir as long as
// chains remain that it describes. Chains of another dataDir stay, which is an error.
func (n *Node) Cleanup(ctx context.Context, warn func(error)) (removed []netfilter.OwnedChain, err error) {
	instance, err := n.Dir.InstanceLock()
	if errors.Is(err, store.ErrBusy) {
		return nil, n.StopFirst()
	}
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, instance.Release()) }()
	lock, err := n.Dir.Lock(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Release()) }()
	state, err := n.Dir.Load()
	if err = cmp.Or(err, state.Newer()); err != nil {
		return nil, err
	}
	// The chain that the agents use has no owner. Other chains without a document are found by their owner.
	chains := []string{policy.DefaultChain}
	for _, c := range state.Record.Chains {
		chains = append(chains, c.Chain)
	}
	for _, s := range state.Sources {
		chains = append(chains, s.Policy.Chain)
	}
	slices.Sort(chains)
	removed, err = n.Enforcer(&Sources{}, warn).RemoveAll(ctx, slices.Compact(chains), state.Record, lock)
	if err != nil {
		return removed, err
	}
	return removed, errors.Join(lock.Destroy(), n.Enforcer(&Sources{}, warn).CheckDataDir(ctx))
}
