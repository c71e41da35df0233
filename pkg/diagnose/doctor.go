// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"cmp"
	"context"
	"net"
	"path/filepath"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Node is what is examined. The zero value of a field is right for a host that
// has nothing of it.
type Host struct {
	// Root is put before the paths below /proc, /sys, /etc, /run and /var; "" is
	// the root directory. What is below /proc/sys/net is that of the process's
	// own network namespace all the same.
	Root string

	Rules *enforce.State // of the State, or nil
	State store.State

	ConfDir    config.ConfDir
	ConfDirErr error // of reading it
	// BinDir is the runtime's directory of plugins, and DataDir the reconciler's; what is
	// "" is not examined.
	BinDir, DataDir string
	Guard           config.PluginFile

	// Drivers find chains of ours that are left in another backend.
	Drivers netfilter.Drivers

	// What is read of the kernel. Nil reads it in the network namespace of the
	// calling thread.
	ThirdParty func(context.Context) ([]thirdparty.Rule, error)
	Variants   func(context.Context) ([]thirdparty.Usage, error)
	Interfaces func() ([]string, error)
}

// examination is a node with what several checks look at.
type examination struct {
	Host
	ctx       context.Context
	lists     []list // what could be read of the conflists
	processes []process
	pods      []podNetwork
	problems  []string // what could not be looked at
}

// check looks for one situation. What has no detail was not found. Its error is about what it could not look at.
type check func(*examination) ([]Finding, error)

func checks() []check {
	return []check{
		foreignRules,
		leftoverChains, chainsOfOtherDataDirs,
		overlappingChains, policyConflicts, failedChains, slowLists,
		mainPluginMasquerade, duplicateEntries, refusedEntries, brokenConflists, conflistWithoutUs,
		entryPositions, otherDataDirs, missingPlugin,
		podNetworksNotExempt,
		agentRunning, firewallManagers,
		ebpfMasquerade,
		missingCapabilities, forwardingOff,
		mixedVariants,
		savedRulesets,
		documents,
	}
}

// Examine returns what was found, sorted by severity and then by ID.
func Examine(ctx context.Context, n Host) []Finding {
	n.Root = cmp.Or(n.Root, "/")
	e := &examination{Host: n, ctx: ctx}
	if e.ThirdParty == nil {
		e.ThirdParty = func(ctx context.Context) ([]thirdparty.Rule, error) {
			return thirdparty.Scan(ctx, Owned(n.Rules, n.State.Record, n.DataDir))
		}
	}
	if e.Variants == nil {
		e.Variants = thirdparty.Variants
	}
	if e.Interfaces == nil {
		e.Interfaces = interfaces
	}
	for _, gather := range []func() error{e.readLists, e.readProcesses, e.readPodNetworks} {
		e.note(gather())
	}
	var all []Finding
	for _, c := range checks() {
		found, err := c(e)
		e.note(err)
		all = append(all, slices.DeleteFunc(found, func(f Finding) bool { return len(f.Detail) == 0 })...)
	}
	if len(e.problems) > 0 {
		all = append(all, Finding{ID: "not-examined", Severity: SeverityNotice, Summary: "Some of the node could not be examined.",
			Detail: e.problems, Remedy: "Run as root on the host, or see what the messages ask for; findings may be missing."})
	}
	slices.SortStableFunc(all, Finding.compare)
	return all
}

// note keeps an error for the finding about what could not be examined.
func (e *examination) note(err error) {
	if err == nil {
		return
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			e.note(err)
		}
		return
	}
	// That a backend is unusable says nothing without what it was joined with.
	if !slices.Contains(e.problems, err.Error()) && err.Error() != netfilter.ErrUnusable.Error() {
		e.problems = append(e.problems, err.Error())
	}
}

// path returns a path below the root.
func (e *examination) path(parts ...string) string {
	return filepath.Join(append([]string{e.Root}, parts...)...)
}

// policies returns those in force.
func (e *examination) policies() []policy.Policy {
	if e.Rules == nil {
		return nil
	}
	return e.Rules.Policies
}

// managesIPv6 reports whether a policy does.
func (e *examination) managesIPv6() bool {
	return slices.ContainsFunc(e.policies(), func(p policy.Policy) bool { return p.EnableIPv6.Value })
}

// choices returns the forms in which chains of ours are kept.
func (e *examination) choices() []netfilter.Choice {
	var out []netfilter.Choice
	if e.Rules != nil {
		for _, g := range e.Rules.Groups {
			out = append(out, g.Choice)
		}
	}
	return out
}

func interfaces() ([]string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, i := range all {
		names = append(names, i.Name)
	}
	return names, nil
}
