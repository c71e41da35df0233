// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Driver is the driver of the backend nftables. Its backends share one netlink socket, which it opens on
// first use, in the network namespace of the calling thread.
type Driver struct {
	conn *nfnetlink.Conn
	// guards tells that this kernel has, or had, guard tables: it does not lack what they need.
	guards bool
}

// Tables returns the names of the owned tables.
func Tables() []string { return []string{tableName, netfilter.GuardTable} }

// New returns the driver of the backend nftables.
func New() *Driver { return &Driver{} }

// Close closes the socket. Shortly after any commit this takes 8 to 16 ms in the kernel; a process that
// is about to exit need not call it.
func (d *Driver) Close() error {
	if d.conn == nil {
		return nil
	}
	defer func() { d.conn = nil }()
	return d.conn.Close()
}

// Generation returns the ruleset generation of nf_tables, which iptables-nft uses too.
func (d *Driver) Generation() (netfilter.Generation, error) {
	conn, err := d.dial()
	if err != nil {
		return netfilter.Generation{}, err
	}
	namespace, err := conn.Namespace()
	if err != nil {
		return netfilter.Generation{}, err
	}
	number, err := conn.Generation()
	if err != nil {
		return netfilter.Generation{}, usable(err)
	}
	load, err := moduleLoad()
	return netfilter.Generation{Namespace: namespace, ModuleLoad: load, Number: number}, err
}

// moduleLoad returns a number that changes when the kernel's module is loaded again: the inode of its
// directory in sysfs, which is not reused. It is constant if nf_tables is built into the kernel.
func moduleLoad() (uint64, error) {
	const dir = "/sys/module/nf_tables"
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("stat %s: %w", dir, err)
	}
	return st.Ino, nil
}

// Backend implements netfilter.Driver.
func (d *Driver) Backend() policy.Backend { return policy.NFTables }

// Open implements netfilter.Driver.
func (d *Driver) Open(netfilter.Choice) (netfilter.Backend, error) { return &backend{d}, nil }

// Render implements netfilter.Driver: one input of nft holds all families.
func (*Driver) Render(desired policy.Ruleset, families ...policy.Family) ([]byte, error) {
	return Render(desired, families...), nil
}

// FindChain implements netfilter.Driver.
func (d *Driver) FindChain(_ context.Context, chain string) ([]netfilter.Choice, error) {
	conn, err := d.dial()
	if err != nil {
		return nil, err
	}
	for _, f := range policy.Families() {
		_, err := conn.Chain(headerOf(f).link, tableName, chainPrefix+chain)
		if err == nil {
			return []netfilter.Choice{{Backend: policy.NFTables}}, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil, usable(err)
		}
	}
	return nil, nil
}

// HasKubeProxy reports whether kube-proxy runs in its mode nftables: it then has a table of its name
// for each family.
func (d *Driver) HasKubeProxy() bool {
	conn, err := d.dial()
	return err == nil && slices.ContainsFunc(policy.Families(), func(f policy.Family) bool {
		_, err := conn.Table(headerOf(f).link, "kube-proxy")
		return err == nil
	})
}

// Owned implements netfilter.Driver. It reads the rules of both tables without the sets.
func (d *Driver) Owned(context.Context) ([]netfilter.OwnedChain, error) {
	conn, err := d.dial()
	if err != nil {
		return nil, err
	}
	var owned, last []netfilter.OwnedChain
	_, err = conn.ConsistentRead(func() error {
		owned = nil
		for _, f := range policy.Families() {
			for _, table := range []string{tableName, netfilter.GuardTable} {
				rules, err := conn.Rules(headerOf(f).link, table, "")
				if err != nil {
					return err
				}
				for _, r := range rules {
					name, isChain := masqChainOf(r.Chain)
					guard := table == netfilter.GuardTable
					if guard {
						name, isChain = r.Chain, true
					}
					if o := policy.ParseOwner(r.Comment); isChain && o != (policy.Owner{}) {
						owned = append(owned, netfilter.OwnedChain{
							ChainFamily: policy.ChainFamily{Chain: name, Family: f},
							Choice:      netfilter.Choice{Backend: policy.NFTables}, Guard: guard, Owner: o,
						})
					}
				}
			}
		}
		return nil
	}, func() bool {
		same := last != nil && slices.Equal(last, owned)
		last = append([]netfilter.OwnedChain{}, owned...)
		return same
	})
	if err != nil {
		return nil, usable(err)
	}
	return owned, nil
}

// Probe implements netfilter.Driver. Reading takes the same privilege as writing.
func (d *Driver) Probe(context.Context, string) (netfilter.Choice, error) {
	conn, err := d.dial()
	if err == nil {
		_, err = conn.Generation()
	}
	if err != nil {
		return netfilter.Choice{}, usable(err)
	}
	return netfilter.Choice{Backend: policy.NFTables}, nil
}

func (d *Driver) dial() (*nfnetlink.Conn, error) {
	if d.conn == nil {
		conn, err := nfnetlink.Dial()
		if err != nil {
			return nil, usable(err)
		}
		d.conn = conn
	}
	return d.conn, nil
}

// usable adds to an error what the kernel needs. What a user needs is in nfnetlink's error.
func usable(err error) error {
	switch {
	case errors.Is(err, netfilter.ErrUnusable):
		return err
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("nftables: %w: %w", netfilter.ErrUnusable, err)
	}
	return fmt.Errorf("nftables: %w: %w; the kernel needs nf_tables (CONFIG_NF_TABLES, CONFIG_NFT_NAT, CONFIG_NFT_MASQ, "+
		"CONFIG_NFT_FIB); %s", netfilter.ErrUnusable, err, netfilter.HowToLoad("nf_tables"))
}

// refusedByKernel reports whether the kernel refused an operation because it lacks a chain type, an
// expression or a family.
func refusedByKernel(err error) (refused *nfnetlink.Error, lacks bool) {
	refused, _ = errors.AsType[*nfnetlink.Error](err)
	return refused, refused != nil && slices.Contains([]syscall.Errno{unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT}, refused.Errno)
}

// withModule adds to an error of a batch which part of the kernel is missing.
func withModule(err error) error {
	refused, lacks := refusedByKernel(err)
	if !lacks || !strings.Contains(refused.Op, ": add ") {
		return err
	}
	family := "ipv4"
	if refused.Family == nfnetlink.IPv6 {
		family = "ipv6"
	}
	needs, module := "CONFIG_NF_TABLES_"+strings.ToUpper(family), "nf_tables"
	switch {
	case strings.Contains(refused.Op, ": add chain "):
		needs, module = "CONFIG_NFT_NAT", "nft_chain_nat"
	case strings.Contains(refused.Op, ": add rule to ") && strings.HasSuffix(refused.Op, " "+baseChain):
		needs, module = "CONFIG_NFT_FIB_"+strings.ToUpper(family), "nft_fib_"+family
	case strings.Contains(refused.Op, ": add rule to "):
		needs, module = "CONFIG_NFT_MASQ", "nft_masq"
	}
	return fmt.Errorf("nftables: %w: %w; the kernel needs %s; %s, or set backend to iptables", netfilter.ErrUnusable, err, needs, netfilter.HowToLoad(module))
}
