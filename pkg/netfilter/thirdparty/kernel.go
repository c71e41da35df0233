// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	natTable    = "nat"
	mangleTable = "mangle"
	postrouting = "POSTROUTING"
	// iptablesPriority is that of iptables' table nat at the hook (NF_IP_PRI_NAT_SRC).
	iptablesPriority = 100
)

// hook is a base chain of type nat at the hook postrouting.
type hook struct {
	chains
	Place
	priority int32
	drops    bool // its policy is drop
}

func (h hook) failed(err error) error {
	return fmt.Errorf("read the NAT rules of table %s (%s): %w", plain(h.Table), h.Family, err)
}

// withHooks runs the function with all base chains. Those of nf_tables are read at one
// generation, for which the function may run again. Base chains that could not be read are
// in the error.
func withHooks(ctx context.Context, body func([]hook) error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := ctx.Err(); err != nil {
		return err
	}
	legacy, errLegacy := legacyHooks()
	read := false
	err := withTables(func(c *nfnetlink.Conn) error {
		read = true
		_, err := c.ConsistentRead(func() error {
			hooks, err := tableHooks(c)
			return errors.Join(err, body(append(slices.Clip(legacy), hooks...)))
		})
		return err
	})
	if !read { // a kernel without nf_tables
		err = errors.Join(err, body(legacy))
	}
	return errors.Join(err, errLegacy)
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

// tableHooks returns the base chains in nf_tables.
func tableHooks(c *nfnetlink.Conn) ([]hook, error) {
	var hooks []hook
	for _, link := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6, nfnetlink.Inet} {
		tables, err := c.Tables(link)
		if err != nil {
			return hooks, err
		}
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
				if b == nil || b.Type != "nat" || b.Hook != unix.NF_INET_POST_ROUTING {
					continue
				}
				at := Place{Backend: policy.NFTables, Table: t.Name, Chain: chain.Name}
				if link != nfnetlink.Inet && t.Name == natTable && chain.Name == postrouting {
					at.Backend, at.Variant = policy.IPTables, netfilter.VariantNFT
				}
				for _, f := range familiesOf(link) {
					at.Family = f
					hooks = append(hooks, hook{&linkTable{conn: c, family: link, table: t.Name}, at, b.Priority, b.Policy == nfnetlink.Drop})
				}
			}
		}
	}
	return hooks, nil
}

func familiesOf(link nfnetlink.Family) []policy.Family {
	switch link {
	case nfnetlink.IPv4:
		return []policy.Family{policy.IPv4}
	case nfnetlink.IPv6:
		return []policy.Family{policy.IPv6}
	}
	return policy.Families()
}

// linkTable is a table of nf_tables. Its chains are read when a walk reaches them.
type linkTable struct {
	conn   *nfnetlink.Conn
	family nfnetlink.Family
	table  string
	known  map[string][]nfnetlink.Rule
}

func (t *linkTable) rules(chain string) ([]nfnetlink.Rule, error) {
	if rules, there := t.known[chain]; there {
		return rules, nil
	}
	rules, err := t.conn.Rules(t.family, t.table, chain)
	if err != nil {
		return nil, err
	}
	if t.known == nil {
		t.known = map[string][]nfnetlink.Rule{}
	}
	t.known[chain] = rules
	return rules, nil
}

func (t *linkTable) set(name string) (policy.Ranges, error) {
	_, ranges, err := t.conn.Ranges(t.family, t.table, name)
	if err != nil {
		return nil, err
	}
	return policy.Normalize(ranges), nil
}

func (*linkTable) device(index uint32) (string, error) {
	i, err := net.InterfaceByIndex(int(index))
	if err != nil {
		return "", err
	}
	return i.Name, nil
}

// legacyHooks returns POSTROUTING of iptables-legacy.
func legacyHooks() ([]hook, error) {
	var hooks []hook
	var errs []error
	for _, f := range policy.Families() {
		chains, err := iptables.Legacy(f, natTable)
		errs = append(errs, err)
		t := legacyTable{}
		for _, c := range chains {
			t[c.Name] = c.Rules
		}
		if len(t) > 0 {
			at := Place{Backend: policy.IPTables, Variant: netfilter.VariantLegacy, Family: f, Table: natTable, Chain: postrouting}
			hooks = append(hooks, hook{t, at, iptablesPriority, false})
		}
	}
	return hooks, errors.Join(errs...)
}

// legacyTable has the chains of a table of iptables-legacy by name.
type legacyTable map[string][]nfnetlink.Rule

func (t legacyTable) rules(chain string) ([]nfnetlink.Rule, error) { return t[chain], nil }

func (legacyTable) set(string) (policy.Ranges, error) { return nil, fs.ErrNotExist }

func (legacyTable) device(uint32) (string, error) { return "", fs.ErrNotExist }

// Usage is what a variant of iptables is used for in a network namespace.
type Usage struct {
	Variant  string
	NATRules int  // in table nat, of both families and all programs
	Kubelet  bool // kubelet keeps its chains there
}

// Variants returns the usage of each variant of iptables, in the network
// namespace of the calling thread. It creates no table.
func Variants(ctx context.Context) ([]Usage, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	nft, legacy := Usage{Variant: netfilter.VariantNFT}, Usage{Variant: netfilter.VariantLegacy}
	err := withTables(func(c *nfnetlink.Conn) error {
		for _, f := range []nfnetlink.Family{nfnetlink.IPv4, nfnetlink.IPv6} {
			if err := nft.countTables(c, f); err != nil {
				return err
			}
		}
		return nil
	})
	for _, f := range policy.Families() {
		err = errors.Join(err, legacy.countLegacy(f))
	}
	return []Usage{nft, legacy}, err
}

// kubeletChains are the chains that kubelet creates in table mangle, to show other programs
// which variant it uses and to detect a flush of the tables.
func kubeletChains() []string { return []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"} }

func (u *Usage) countTables(c *nfnetlink.Conn, f nfnetlink.Family) error {
	rules, err := c.Rules(f, natTable, "")
	if err != nil {
		return err
	}
	u.NATRules += len(rules)
	for _, name := range kubeletChains() {
		_, err := c.Chain(f, mangleTable, name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		u.Kubelet = u.Kubelet || err == nil
	}
	return nil
}

func (u *Usage) countLegacy(f policy.Family) error {
	nat, errNAT := iptables.Legacy(f, natTable)
	for _, c := range nat {
		u.NATRules += len(c.Rules)
	}
	mangle, errMangle := iptables.Legacy(f, mangleTable)
	u.Kubelet = u.Kubelet || slices.ContainsFunc(mangle, func(c iptables.LegacyChain) bool {
		return slices.Contains(kubeletChains(), c.Name)
	})
	return errors.Join(errNAT, errMangle)
}
