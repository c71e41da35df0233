// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
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
	// Program identifies the build of the program, because another build may verify differently. With ""
	// every ADD verifies the rules.
	Program string
	// Version is the version of the program, without white space. The plugin trusts what a reconciler of the
	// same version verified; with "" it trusts no reconciler.
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
	return skel.CNIFuncs{
		Add:    func(args *skel.CmdArgs) error { return p.runForPod(args, (*node).add) },
		Del:    func(args *skel.CmdArgs) error { return p.runForPod(args, (*node).del) },
		Check:  func(args *skel.CmdArgs) error { return p.runForPod(args, (*node).check) },
		GC:     func(args *skel.CmdArgs) error { return p.runForAll(args, (*node).gc) },
		Status: func(args *skel.CmdArgs) error { return p.runForPod(args, (*node).status) },
	}
}

// verb is a verb of CNI.
type verb func(*node, context.Context, *skel.CmdArgs) error

// runForPod runs a verb that reads the record of one attachment again. STATUS reads the record of an
// attachment that does not exist, as an ADD reads that of its own.
func (p *Plugin) runForPod(args *skel.CmdArgs, do verb) error {
	n := p.node(config.ReadNetconf(args.StdinData))
	n.Reread = []store.Attachment{n.attachment(args)}
	return p.run(n, args, do)
}

// runForAll runs a verb that reads the records of all exempt pods again.
func (p *Plugin) runForAll(args *skel.CmdArgs, do verb) error {
	n := p.node(config.ReadNetconf(args.StdinData))
	n.RereadExempt = true
	return p.run(n, args, do)
}

func (p *Plugin) run(n *node, args *skel.CmdArgs, do verb) error {
	err := do(n, context.Background(), args)
	if err == nil {
		return nil
	}
	return types.NewError(codeOf(err), err.Error(), "")
}

// warn writes a warning to stderr, which the runtime logs.
func (p *Plugin) warn(err error) {
	if err != nil {
		fmt.Fprintf(p.Stderr, "ip-masq: warning: %v\n", err)
	}
}

// node is the node as one call of a verb uses it.
type node struct {
	enforce.Enforcer
	plugin        *Plugin
	netconf       config.Netconf // from stdin
	network       string
	cniVersion    string // of the configuration
	pluginFile    config.PluginFile
	pluginFileErr error
}

// node returns the node of a configuration, even of a stale or bad one: DEL and GC need only the
// network and the dataDir.
func (p *Plugin) node(conf config.Netconf) *node {
	id := conf.Identity()
	file, err := config.ReadPluginFile(p.PluginFile)
	if file.Present {
		id.DataDir = file.DataDir
	}
	dir := store.Open(id.DataDir)
	dir.LockWait = p.LockWait
	return &node{
		Enforcer: enforce.Enforcer{
			Dir:       dir,
			Drivers:   p.Drivers,
			Warn:      p.warn,
			Conntrack: p.Conntrack,
			Addresses: p.Addresses,
		},
		plugin:        p,
		netconf:       conf,
		network:       id.Network,
		cniVersion:    id.CNIVersion,
		pluginFile:    file,
		pluginFileErr: err,
	}
}

func (n *node) attachment(args *skel.CmdArgs) store.Attachment {
	return store.Attachment{Network: n.network, ContainerID: args.ContainerID, IfName: args.IfName}
}

func (n *node) source() policy.SourceID {
	return policy.SourceID{Kind: policy.Network, Name: n.network}
}

func (n *node) warnUnreadable(s store.State) {
	for _, f := range s.Unreadable {
		n.Warn(f.Err)
	}
}

// errUnlessNewer returns what is wrong with a chain, except that a newer version wrote its rules:
// those stay in force, with a warning.
func (n *node) errUnlessNewer(s *enforce.State, chain string) error {
	err := s.Err(chain)
	if errors.Is(err, store.ErrNewer) && s.Exists(chain) {
		n.Warn(err)
		return nil
	}
	return err
}

// resetLimit returns how long a verb resets connections, for the resets that are on record when it ends.
// Those that another process makes, an active reconciler or one that walks already, are left to it, unless
// this call wrote. The connections of former pods of these addresses are not: they end before the ADD
// returns, after the walks of other ADDs.
func (n *node) resetLimit(s *enforce.State, addresses []netip.Addr, wrote bool) time.Duration {
	const limit = 2 * time.Second
	if !s.ResetsDue() {
		return 0
	}
	if s.Passed(addresses) {
		return n.Dir.LockWait
	}
	if !wrote && (n.Dir.ReconcilerActive() || n.Dir.ResetsRunning()) {
		return 0
	}
	return limit
}

func (n *node) resetConnections(ctx context.Context, limit time.Duration) {
	if limit == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	_, _, err := n.ResetConnections(ctx)
	if err != nil {
		n.Warn(fmt.Errorf("connections that are older than a change of the rules may keep a wrong source "+
			"address, until ip-masq-reconciler or the next ADD, DEL or GC has reset them: %w", err))
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
	case errors.As(err, &conflict), errors.As(err, &bound):
		return types.ErrInvalidNetworkConfig
	// A dataDir that is refused, or a file in it, is a mistake in the configuration of the node. It comes
	// before what cannot be written, as to try again does not help.
	case errors.Is(err, enforce.ErrOtherDataDir), errors.Is(err, store.ErrRefused):
		return types.ErrInvalidNetworkConfig
	case errors.As(err, &unwritable), errors.Is(err, store.ErrBusy), errors.Is(err, netfilter.ErrBusy):
		return types.ErrTryAgainLater
	default:
		return codeRules
	}
}
