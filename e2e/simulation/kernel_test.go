// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var errRefused = errors.New("simulated kernel: the operation is not supported")

// refusedAddress is in a prefix that this kernel accepts in no rule while refuses is set.
var refusedAddress = netip.MustParseAddr("198.18.0.1")

// kernel is the packet filter, the connections and the addresses of the simulated node. A caller sees each of its
// methods that is part of a port as one effect, or as several where the real one makes several calls.
type kernel struct {
	*netfiltertest.Kernel
	committed func(touched []string) // is told of each new generation, with the chains that it touched; "": an owned table
	deletes   func(*connection)      // is told of each connection that a walk deletes
	told      uint32                 // the generation that was told last
	seq       int                    // of all changes, those by other programs that touch nothing owned excepted

	connections []connection
	addresses   []policy.NodeAddress

	refuses string // "prefixes", those with refusedAddress, "walks" through the connections, "guards", or nothing
}

// newKernel returns the kernel of a host, which has one variant of iptables or none.
func newKernel(s *scenario) *kernel {
	k := &kernel{Kernel: netfiltertest.New(), addresses: slices.Clone(nodeAddresses)}
	k.After = func(_ string, touched ...string) { k.written(touched...) }
	k.Accepts = k.refusal
	for _, c := range []netfilter.Choice{netfiltertest.IPTables, netfiltertest.Legacy} {
		if !s.tables || (c == netfiltertest.Legacy) != s.legacy {
			k.Unusable[c] = fmt.Errorf("simulated host: no program iptables: %w", netfilter.ErrUnusable)
		}
	}
	return k
}

// connection is a conntrack entry.
type connection struct {
	policy.Connection
	pod       *pod // that began it
	container int
	space     string
	began     int        // seq
	policies  []*version // that were in force then; nil: not certain
	tampered  bool       // it began while rules were wrong
	between   bool       // and they became wrong while a process was at work, which may have read them before
	stale     bool       // a chain that could not be removed may have translated it
	left      bool       // the node has lost the address that it leaves with, maybe for a time
}

func (c *connection) translated() bool { return c.ReplyDst != c.Src }

// boot empties the kernel. Others may have committed as often as in the boot before.
func (k *kernel) boot(generation uint32) {
	k.connections = nil
	k.Flush()
	k.Generation.Number, k.told = generation, 0
	k.written()
}

// has reports whether there is a chain of this name, or any for "".
func (k *kernel) has(chain string) bool {
	return k.some(func(ref policy.ChainFamily) bool { return chain == "" || ref.Chain == chain })
}

// some reports whether something is true of a chain.
func (k *kernel) some(is func(policy.ChainFamily) bool) bool {
	for choice := range k.Chains {
		if slices.ContainsFunc(k.Refs(choice), is) {
			return true
		}
	}
	return false
}

// written takes note of a write. Nothing tells of those in iptables-legacy.
func (k *kernel) written(touched ...string) {
	k.seq++
	if k.told != k.Generation.Number {
		k.told = k.Generation.Number
		k.committed(touched)
	}
}

// IsLocal implements policy.NodeRoutes.
func (k *kernel) IsLocal(a netip.Addr) bool {
	return slices.ContainsFunc(k.addresses, func(n policy.NodeAddress) bool { return n.Address == a })
}

// OutputInterface implements policy.NodeRoutes.
func (k *kernel) OutputInterface(_, _ netip.Addr) string { return outInterface }

// Addresses is cniplugin.Plugin.Addresses.
func (k *kernel) Addresses(families []policy.Family) ([]policy.NodeAddress, error) {
	isOther := func(a policy.NodeAddress) bool { return !slices.Contains(families, policy.FamilyOf(a.Address)) }
	err := k.Before("read addresses", false)
	return slices.DeleteFunc(slices.Clone(k.addresses), isOther), err
}

// Conntrack is cniplugin.Plugin.Conntrack.
func (k *kernel) Conntrack(ctx context.Context, judge *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
	if err := errors.Join(k.Before("walk connections", true), ctx.Err()); err != nil {
		return nil, err
	}
	if k.refuses == "walks" {
		return nil, errRefused
	}
	deleted := map[policy.ChainFamily]uint64{}
	k.connections = slices.DeleteFunc(k.connections, func(c connection) bool {
		chain, stale := judge.Judge(&c.Connection, k)
		if stale {
			k.deletes(&c)
			deleted[policy.ChainFamily{Chain: chain, Family: policy.FamilyOf(c.Src)}]++
		}
		return stale
	})
	return deleted, nil
}

// refusal returns why the kernel does not accept rules or guards.
func (k *kernel) refusal(rules policy.Ruleset, guards []policy.Guard) error {
	if k.refuses == "guards" && len(guards) > 0 {
		return fmt.Errorf("simulated kernel: %w", netfilter.ErrUnusable)
	}
	refused := slices.ContainsFunc(guards, func(g policy.Guard) bool { return g.Exempt.Contains(refusedAddress) && g.Mode != policy.GuardOff })
	for _, c := range rules.Chains {
		refused = refused || slices.ContainsFunc(c.Rules, func(r policy.Rule) bool { return r.To.Contains(refusedAddress) })
	}
	if refused && k.refuses == "prefixes" {
		return errRefused
	}
	return nil
}

// outcome is what becomes of a packet.
type outcome struct {
	translated bool
	from       netip.Addr // the address after translation, if a rule names it
	dropped    bool
}

// outInterface is the one by which packets leave.
const outInterface = "eth0"

func (k *kernel) matches(r *policy.Rule, src, dst netip.Addr) bool {
	return (r.From == nil || r.From.Contains(src)) && (r.To == nil || r.To.Contains(dst)) && (r.Out == "" || r.Out == outInterface) &&
		(!r.NotFromLocal || !k.IsLocal(src)) && (!r.NotToLocal || !k.IsLocal(dst))
}

// packet returns what becomes of the first packet of a connection.
func (k *kernel) packet(src, dst netip.Addr) (o outcome) {
	family := policy.FamilyOf(src)
	bound := slices.ContainsFunc(k.Guards, func(g policy.Guard) bool {
		return g.Family == family && g.Bound != nil && !k.IsLocal(dst) &&
			(g.Scope.Sources.Contains(src) && g.Bound.Contains(dst) || slices.ContainsFunc(g.MoreBindings, func(b policy.Binding) bool {
				return b.Sources.Contains(src) && (b.Destinations == nil || b.Destinations.Contains(dst))
			}))
	})
	for _, choice := range []netfilter.Choice{netfiltertest.IPTables, netfiltertest.Legacy, netfiltertest.NFTables} {
		for _, ref := range k.Refs(choice) {
			if c := k.Chains[choice][ref]; ref.Family == family && !o.translated && !bound {
				o.translated, o.from = k.walk(&c, src, dst)
			}
		}
	}
	for _, g := range k.Guards {
		if g.Family == family && g.Mode == policy.GuardDrop && !k.IsLocal(dst) && g.Scope.Sources.Contains(src) && !g.Exempt.Contains(dst) && !o.translated {
			o.dropped = true
		}
	}
	return o
}

// walk returns whether the rules of a chain translate a packet, and to which address if they name it.
func (k *kernel) walk(c *policy.Chain, src, dst netip.Addr) (bool, netip.Addr) {
	matches := func(r policy.Rule) bool { return k.matches(&r, src, dst) }
	i := slices.IndexFunc(c.Rules, matches)
	if i < 0 || !slices.ContainsFunc(c.Jumps, matches) {
		return false, netip.Addr{}
	}
	return c.Rules[i].Verdict == policy.Masquerade, c.Rules[i].Address
}
