// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
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
	Drivers netfilter.Drivers
	// Program identifies the build of the program, because another build may verify differently. With "" every ADD
	// verifies the rules.
	Program string
	// Version is the version of the program, without white space. The plugin trusts what a reconciler of the same
	// version verified; with "" it trusts no reconciler.
	Version string
	// Generation returns the generation of the nf_tables ruleset. If it is nil every ADD reads the
	// rules.
	Generation func() (netfilter.Generation, error)
	// Addresses returns the addresses of the node; see enforce.Enforcer.
	Addresses func([]policy.Family) ([]policy.NodeAddress, error)
	// Conntrack deletes stale connections; see enforce.Enforcer.
	Conntrack  func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error)
	PluginFile string        // the administrators' plugin.toml
	LockWait   time.Duration // for the lock of the dataDir; 10 s by contract
	Stdout     io.Writer
	Stderr     io.Writer
}

// Funcs returns the verbs for the CNI skeleton.
func (p *Plugin) Funcs() skel.CNIFuncs {
	verb := func(do func(*node, context.Context, *skel.CmdArgs) error) func(*skel.CmdArgs) error {
		return func(args *skel.CmdArgs) error {
			err := do(p.node(config.ReadNetconf(args.StdinData)), context.Background(), args)
			if err == nil {
				return nil
			}
			return types.NewError(codeOf(err), err.Error(), "")
		}
	}
	return skel.CNIFuncs{
		Add: verb((*node).add), Del: verb((*node).del), Check: verb((*node).check),
		GC: verb((*node).gc), Status: verb((*node).status),
	}
}

// node is the node as one call of a verb uses it.
type node struct {
	plugin *Plugin
	enforce.Enforcer
	netconf    config.Netconf // from stdin
	network    string
	cniVersion string         // of the configuration
	subnets    []netip.Prefix // of the pod, in an ADD
	pod        store.Pod      // in an ADD

	stdinDiffers bool          // from what the network's conflist has and had in this boot, in force because of plugin.toml
	resetLimit   time.Duration // how long connections are reset; 0 if none are to be

	pluginFile    config.PluginFile
	pluginFileErr error
	confs         *config.ConfDir // see confDir
	confsErr      error

	// Each of these is found out once.
	netconfInForce func() (config.Netconf, error) // the configuration that states the network's policy
	entry          func() (config.Entry, error)   // that, validated
	entryDigest    func() string                  // of that, subnets and the program; "" if there is none
	cached         func() store.VerificationCache // what the previous ADD verified
	generation     func() string                  // of the ruleset, before this process read it; "" if unknown
	checkDataDir   func() error                   // why nothing must be written to the dataDir, or nil
}

// node returns the node of a configuration, even of a stale or bad one: DEL and GC need only the
// network and the dataDir.
func (p *Plugin) node(conf config.Netconf) *node {
	id := conf.Identity()
	file, err := config.ReadPluginFile(p.PluginFile)
	if file.Present {
		id.DataDir = file.DataDir
	}
	n := &node{
		plugin:        p,
		Enforcer:      enforce.Enforcer{Dir: store.Open(id.DataDir), Drivers: p.Drivers, Warn: p.warn, Conntrack: p.Conntrack, Addresses: p.Addresses},
		netconf:       conf,
		network:       id.Network,
		cniVersion:    id.CNIVersion,
		pluginFile:    file,
		pluginFileErr: err,
	}
	n.Dir.LockWait = p.LockWait
	n.netconfInForce = sync.OnceValues(n.findNetconf)
	n.entry = sync.OnceValues(n.validEntry)
	n.entryDigest = sync.OnceValue(func() string {
		conf, err := n.netconfInForce()
		if err != nil {
			return ""
		}
		return store.Digest(append(conf.PolicyTexts(), p.Program, fmt.Sprint(n.subnets))...)
	})
	n.cached = sync.OnceValue(func() store.VerificationCache { return n.Dir.VerificationCache(n.source()) })
	n.generation = sync.OnceValue(func() string {
		if p.Generation == nil {
			return ""
		}
		g, err := p.Generation()
		if err != nil {
			return "" // whatever reads the rules reports that
		}
		return g.String()
	})
	n.checkDataDir = sync.OnceValue(func() error { return n.CheckDataDir(context.Background()) })
	return n
}

func (n *node) attachment(args *skel.CmdArgs) store.Attachment {
	return store.Attachment{Network: n.network, ContainerID: args.ContainerID, IfName: args.IfName}
}

func (n *node) source() policy.SourceID {
	return policy.SourceID{Kind: policy.Network, Name: n.network}
}

func (n *node) resetConnections(ctx context.Context) {
	if n.resetLimit == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, n.resetLimit)
	defer cancel()
	if _, _, err := n.ResetConnections(ctx); err != nil {
		n.Warn(fmt.Errorf("connections that are older than a change of the rules may keep a wrong source address, "+
			"until ip-masq-reconciler or the next ADD, DEL or GC has reset them: %w", err))
	}
}

// dueResets takes note of resets on record. The connections of a former pod end before this ADD returns: the walk for them
// comes after those of other ADDs. Without a write, an active reconciler or a process that walks already makes other resets.
func (n *node) dueResets(s *enforce.State, wrote bool) {
	const limit = 2 * time.Second
	n.resetLimit = 0
	switch {
	case !s.ResetsDue():
	case s.Passed(n.pod.Addresses):
		n.resetLimit = n.Dir.LockWait
	case wrote || !n.Dir.ReconcilerActive() && !n.Dir.ResetsRunning():
		n.resetLimit = limit
	}
}

// warn writes a warning to stderr, which the runtime logs.
func (p *Plugin) warn(err error) {
	if err != nil {
		fmt.Fprintf(p.Stderr, "ip-masq: warning: %v\n", err)
	}
}

func (n *node) warnUnreadable(s store.State) {
	for _, f := range s.Unreadable {
		n.Warn(f.Err)
	}
}

// Error codes of this plugin. The CNI spec leaves those from 100 on to plugins.
const (
	codeRules uint = 100 // the rules cannot be ensured
	codeDrift uint = 101 // CHECK found a difference
)

type codedError struct {
	code uint
	error
}

// Unwrap returns the error without its code.
func (e codedError) Unwrap() error { return e.error }

func withCode(code uint, err error) error {
	if err == nil {
		return nil
	}
	return codedError{code, err}
}

func codeOf(err error) uint {
	var coded codedError
	var conflict *policy.ConflictError
	var bound *policy.BoundError
	var unwritable *enforce.UnwritableError
	switch {
	case errors.As(err, &coded):
		return coded.code
	case errors.As(err, &conflict), errors.As(err, &bound), errors.Is(err, enforce.ErrOtherDataDir):
		return types.ErrInvalidNetworkConfig
	case errors.As(err, &unwritable), errors.Is(err, store.ErrBusy), errors.Is(err, netfilter.ErrBusy):
		return types.ErrTryAgainLater
	default:
		return codeRules
	}
}
