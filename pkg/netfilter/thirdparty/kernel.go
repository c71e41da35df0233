// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const natTable = "nat"

// hookPoint is where base chains decide about one thing.
type hookPoint struct {
	includes     func(*nfnetlink.Base) bool
	table, chain string // of iptables
	priority     int32  // of iptables
}

// Priorities in the kernel (enum nf_ip_hook_priorities).
const (
	priorityRaw       = -300
	priorityConntrack = -200
	priorityNAT       = 100
)

// sourceNAT is where base chains translate the source of packets.
func sourceNAT() hookPoint {
	return hookPoint{
		func(b *nfnetlink.Base) bool { return b.Type == "nat" && b.Hook == unix.NF_INET_POST_ROUTING },
		natTable, "POSTROUTING", priorityNAT,
	}
}

// beforeTracking is where base chains decide which packets of pods are tracked.
func beforeTracking() hookPoint {
	return hookPoint{
		func(b *nfnetlink.Base) bool {
			return b.Hook == unix.NF_INET_PRE_ROUTING && b.Priority < priorityConntrack
		},
		"raw", "PREROUTING", priorityRaw,
	}
}

// hook is a base chain.
type hook struct {
	chains
	Place
	drops bool // its policy is drop
}

// withTables runs the function with a connection to nf_tables, if the kernel has nf_tables.
func withTables(body func(*nfnetlink.Conn) error) error {
	c, err := nfnetlink.Dial()
	if err == nil {
		err = errors.Join(body(c), c.Close())
	}
	if nfnetlink.Unsupported(err) {
		return nil
	}
	return err
}

// hooks returns the base chains in nf_tables.
func (p hookPoint) hooks(c *nfnetlink.Conn) ([]hook, error) {
	var hooks []hook
	for _, link := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		tables, err := c.Tables(link)
		if err != nil {
			return hooks, err
		}
		families := map[nfnetlink.Family][]policy.Family{
			nfnetlink.IPv4: {policy.IPv4}, nfnetlink.IPv6: {policy.IPv6}, nfnetlink.Inet: policy.Families(),
		}[link]
		for _, t := range tables {
			if t.Dormant() {
				continue
			}
			chains, err := c.Chains(link, t.Name)
			if err != nil {
				return hooks, err
			}
			for _, chain := range chains {
				b := chain.Base
				if b == nil || !p.includes(b) {
					continue
				}
				at := Place{Backend: policy.NFTables, Table: t.Name, Chain: chain.Name, Priority: b.Priority}
				if link != nfnetlink.Inet && t.Name == p.table && chain.Name == p.chain {
					at.Backend, at.Variant = policy.IPTables, netfilter.VariantNFT
				}
				for _, at.Family = range families {
					read := &table{conn: c, family: link, name: t.Name, known: map[string][]nfnetlink.Rule{}}
					hooks = append(hooks, hook{read, at, b.Policy == nfnetlink.Drop})
				}
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
		t := table{known: chains}
		if len(chains) > 0 {
			at := Place{Backend: policy.IPTables, Variant: netfilter.VariantLegacy, Family: f,
				Table: p.table, Chain: p.chain, Priority: p.priority}
			hooks = append(hooks, hook{&t, at, false})
		}
	}
	return hooks, errors.Join(errs...)
}

// table is a table of nf_tables, whose chains are read when a walk reaches them, or one of
// iptables-legacy, whose chains are all known and refer to no sets.
type table struct {
	conn   *nfnetlink.Conn // nil for iptables-legacy
	family nfnetlink.Family
	name   string
	known  map[string][]nfnetlink.Rule // by chain
}

func (t *table) rules(chain string) ([]nfnetlink.Rule, error) {
	rules, known := t.known[chain]
	if known || t.conn == nil {
		return rules, nil
	}
	rules, err := t.conn.Rules(t.family, t.name, chain)
	if err == nil {
		t.known[chain] = rules
	}
	return rules, err
}

func (t *table) set(name string) (policy.Ranges, error) {
	_, ranges, err := t.conn.Ranges(t.family, t.name, name)
	return policy.Normalize(ranges), err
}
