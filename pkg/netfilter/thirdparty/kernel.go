// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"errors"
	"math"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// hookPoint is where base chains decide about one thing.
type hookPoint struct {
	table, chain string // of iptables
	hook         uint32
	priority     int32 // of iptables
	before       int32 // base chains of a lower priority decide
}

// sourceNAT is where base chains translate the source of packets.
func sourceNAT() hookPoint {
	const priorityNAT = 100 // NF_IP_PRI_NAT_SRC
	return hookPoint{iptables.Table, "POSTROUTING", unix.NF_INET_POST_ROUTING, priorityNAT, math.MaxInt32}
}

type hook struct {
	table
	Place
}

// table reads the chains and sets of a table of nf_tables, or the chains of one of iptables-legacy.
type table struct {
	rules func(chain string) ([]nfnetlink.Rule, error)
	set   func(name string) (policy.Ranges, error)
}

// withTables runs the function with a connection to nf_tables, if the kernel has nf_tables.
func withTables(body func(*nfnetlink.Conn) error) error {
	var c nfnetlink.Conn
	err := errors.Join(body(&c), c.Close())
	if nfnetlink.Unsupported(err) {
		return nil
	}
	return err
}

// has reports whether a base chain of nf_tables is one of them.
func (p hookPoint) has(b *nfnetlink.Base) bool {
	return b != nil && b.Hook == p.hook && b.Priority < p.before && (p.table != iptables.Table || b.Type == iptables.Table)
}

// hooks returns the base chains in nf_tables, once for each family whose packets they meet.
func (p hookPoint) hooks(c *nfnetlink.Conn) (hooks []hook, err error) {
	for _, link := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		differs := func(f policy.Family) bool { return link != nfnetlink.Inet && link != netfilter.LinkOf(f) }
		families := slices.DeleteFunc(policy.Families(), differs)
		tables, errTables := c.Tables(link)
		chains, errChains := c.Chains(link, "")
		if err = errors.Join(errTables, errChains); err != nil {
			return hooks, err
		}
		for _, chain := range chains {
			name := chain.Table
			dormant := func(t nfnetlink.Table) bool { return t.Name == name && t.Dormant() }
			if !p.has(chain.Base) || slices.ContainsFunc(tables, dormant) {
				continue
			}
			read := table{
				func(chain string) ([]nfnetlink.Rule, error) { return c.Rules(link, name, chain) },
				func(set string) (policy.Ranges, error) {
					_, ranges, err := c.Ranges(link, name, set)
					return policy.Normalize(ranges), err
				},
			}
			at := Place{Backend: policy.NFTables, Table: name, Chain: chain.Name, Priority: chain.Base.Priority}
			if link != nfnetlink.Inet && name == p.table && chain.Name == p.chain {
				at.Backend, at.Variant = policy.IPTables, netfilter.VariantNFT
			}
			for _, at.Family = range families {
				hooks = append(hooks, hook{read, at})
			}
		}
	}
	return hooks, nil
}

// legacy returns the base chains of iptables-legacy.
func (p hookPoint) legacy() ([]hook, error) {
	var hooks []hook
	var errs []error
	for _, f := range policy.Families() {
		chains, err := iptables.Legacy(f, p.table)
		errs = append(errs, err)
		if len(chains) > 0 {
			at := Place{Backend: policy.IPTables, Variant: netfilter.VariantLegacy, Family: f,
				Table: p.table, Chain: p.chain, Priority: p.priority}
			hooks = append(hooks, hook{table{rules: func(chain string) ([]nfnetlink.Rule, error) { return chains[chain], nil }}, at})
		}
	}
	return hooks, errors.Join(errs...)
}
