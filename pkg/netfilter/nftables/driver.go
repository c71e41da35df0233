// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Driver keeps one netlink socket for all that it opens, made when first needed
// in the network namespace of the thread that needs it.
type Driver struct{ conn *nfnetlink.Conn }

// New returns the driver of the backend nftables.
func New() *Driver { return &Driver{} }

// Close closes the socket, if there is one. Soon after anybody's commit the
// kernel makes that wait for 8 to 16 ms; a process about to end can leave it out.
func (d *Driver) Close() error {
	if d.conn == nil {
		return nil
	}
	conn := d.conn
	d.conn = nil
	return conn.Close()
}

// Generation returns the state that the rules in nf_tables are in, whoever keeps them
// there: iptables-nft does too.
func (d *Driver) Generation() (netfilter.Generation, error) {
	conn, err := d.dial()
	if err != nil {
		return netfilter.Generation{}, err
	}
	namespace, err := conn.Namespace()
	if err != nil {
		return netfilter.Generation{}, err
	}
	generation, err := conn.Generation()
	if err != nil {
		return netfilter.Generation{}, usable(err)
	}
	load, err := moduleLoad()
	if err != nil {
		return netfilter.Generation{}, err
	}
	return netfilter.Generation{Namespace: namespace, ModuleLoad: load, Number: generation}, nil
}

// moduleLoad is a number that is another one each time that the kernel's module is
// loaded: the inode of its directory in sysfs, of which none comes again. What is
// built into the kernel has no such directory, or always the same.
func moduleLoad() (uint64, error) {
	const dir = "/sys/module/nf_tables"
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look at %s: %w", dir, err)
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

// Owned implements netfilter.Driver. It reads rules alone, not the sets.
func (d *Driver) Owned(context.Context) ([]netfilter.OwnedChain, error) {
	conn, err := d.dial()
	if err != nil {
		return nil, err
	}
	var owned []netfilter.OwnedChain
	_, err = conn.ConsistentRead(func() error {
		owned = nil
		for _, f := range policy.Families() {
			rules, err := conn.Rules(headerOf(f).link, tableName, "")
			if err != nil {
				return err
			}
			for _, r := range rules {
				name, isChain := masqChainOf(r.Chain)
				if o := policy.ParseOwner(r.Comment); isChain && o != (policy.Owner{}) {
					owned = append(owned, netfilter.OwnedChain{
						ChainRef: netfilter.ChainRef{Family: f, Name: name},
						Choice:   netfilter.Choice{Backend: policy.NFTables}, Owner: o,
					})
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, usable(err)
	}
	return owned, nil
}

// Probe implements netfilter.Driver. The kernel lets nobody read who may not
// write, so reading tells.
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

// usable says what to do about a kernel that cannot. What a user lacks nfnetlink says.
func usable(err error) error {
	if !errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w; the kernel needs nf_tables (CONFIG_NF_TABLES, CONFIG_NFT_NAT, CONFIG_NFT_MASQ, CONFIG_NFT_FIB); try: modprobe nf_tables", err)
	}
	return fmt.Errorf("nftables: %w: %w", netfilter.ErrUnusable, err)
}
