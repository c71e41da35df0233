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

// Driver drives the backend nftables by one socket in the namespace of the thread that opens it.
type Driver struct {
	netfilter.NoPrograms
	conn nfnetlink.Conn
	// hadGuards tells that this kernel has, or had, rules of guards: it does not lack what they need.
	hadGuards bool
	module    string // the directory of the kernel module in sysfs
}

// Tables returns the names of the owned tables.
func Tables() []string { return []string{tableName, netfilter.GuardTable} }

// New returns the driver of the backend nftables.
func New() *Driver { return &Driver{module: "/sys/module/nf_tables"} }

// Close closes the socket. Shortly after any commit this takes 8 to 16 ms in the kernel; a process
// that is about to exit need not call it.
func (d *Driver) Close() error { return d.conn.Close() }

// GuardTables implements netfilter.Ruleset.
func (d *Driver) GuardTables() (netfilter.GuardTables, error) { return d, nil }

// Generation implements netfilter.Ruleset. Iptables-nft raises the generation, too.
func (d *Driver) Generation() (netfilter.Generation, error) {
	number, err := d.conn.Generation()
	if err != nil {
		return netfilter.Generation{}, readError(err)
	}
	namespace, err := d.conn.Namespace()
	if err != nil {
		return netfilter.Generation{}, err
	}
	// The kernel does not reuse inodes of sysfs. A module that is built in has no directory.
	var st unix.Stat_t
	if err := unix.Stat(d.module, &st); err != nil && !errors.Is(err, unix.ENOENT) {
		return netfilter.Generation{}, fmt.Errorf("stat %s: %w", d.module, err)
	}
	return netfilter.Generation{Namespace: namespace, ModuleLoad: st.Ino, Number: number}, nil
}

// Backend implements netfilter.Driver.
func (d *Driver) Backend() policy.Backend { return policy.NFTables }

// Open implements netfilter.Driver.
func (d *Driver) Open(netfilter.Choice) (netfilter.Backend, error) { return &backend{d}, nil }

// FindChain implements netfilter.Driver.
func (d *Driver) FindChain(_ context.Context, chain string) ([]netfilter.Choice, error) {
	for _, f := range policy.Families() {
		_, err := d.conn.Chain(netfilter.LinkOf(f), tableName, chainPrefix+chain)
		if err == nil {
			return []netfilter.Choice{{Backend: policy.NFTables}}, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return nil, readError(err)
		}
	}
	return nil, nil
}

// HasKubeProxy implements netfilter.Ruleset: in its mode nftables kube-proxy has a table of its name.
func (d *Driver) HasKubeProxy() (bool, error) {
	for _, f := range policy.Families() {
		_, err := d.conn.Table(netfilter.LinkOf(f), "kube-proxy")
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, os.ErrNotExist) {
			return false, readError(err)
		}
	}
	return false, nil
}

// Owned implements netfilter.Driver. It reads the rules of both tables without the sets.
func (d *Driver) Owned(context.Context) ([]netfilter.OwnedChain, error) {
	var owned []netfilter.OwnedChain
	for _, f := range policy.Families() {
		for _, table := range Tables() {
			rules, err := d.conn.Rules(netfilter.LinkOf(f), table, "")
			if err != nil {
				return nil, readError(err)
			}
			for _, r := range rules {
				chain, isOwned := ownedChain(f, table, r)
				if isOwned {
					owned = append(owned, chain)
				}
			}
		}
	}
	return owned, nil
}

// ownedChain returns the chain of a rule whose comment names the owner.
func ownedChain(f policy.Family, table string, r nfnetlink.Rule) (chain netfilter.OwnedChain, isOwned bool) {
	name, isMasq := masqChainOf(r.Chain)
	isGuard := table == netfilter.GuardTable
	if isGuard {
		name = r.Chain
	}
	owner := policy.ParseOwner(r.Comment)
	if owner == (policy.Owner{}) || !isGuard && !isMasq {
		return netfilter.OwnedChain{}, false
	}
	return netfilter.OwnedChain{
		ChainFamily: policy.ChainFamily{Chain: name, Family: f},
		Choice:      netfilter.Choice{Backend: policy.NFTables},
		Guard:       isGuard,
		Owner:       owner,
	}, true
}

// Probe implements netfilter.Driver. Reading takes the same privilege as writing.
func (d *Driver) Probe(context.Context, string) (netfilter.Choice, error) {
	if _, err := d.conn.Generation(); err != nil {
		return netfilter.Choice{}, readError(err)
	}
	return netfilter.Choice{Backend: policy.NFTables}, nil
}

// readError tells an error of a kernel that lacks nf_tables, or forbids to use it, from a reading that failed.
func readError(err error) error {
	switch {
	case errors.Is(err, os.ErrPermission): // the error of nfnetlink says what a user needs
		return fmt.Errorf("nftables: %w: %w", netfilter.ErrUnusable, err)
	case nfnetlink.Unsupported(err):
		return unsupported(err)
	default:
		return fmt.Errorf("nftables: %w: %w", err, netfilter.ErrBusy)
	}
}

// unsupported adds to an error what the kernel needs.
func unsupported(err error) error {
	return fmt.Errorf("nftables: %w: %w; the kernel needs nf_tables (CONFIG_NF_TABLES, CONFIG_NFT_NAT, "+
		"CONFIG_NFT_MASQ, CONFIG_NFT_FIB); %s", netfilter.ErrUnusable, err, netfilter.HowToLoad("nf_tables"))
}

// lacking adds what is missing to the error of a kernel without a chain type, expression or family.
func lacking(err error, options, modules, otherwise string) error {
	refused, _ := errors.AsType[*nfnetlink.Error](err)
	if refused == nil {
		return err
	}
	switch refused.Errno {
	case unix.ENOENT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT:
		return fmt.Errorf("nftables: %w: %w; the kernel needs %s; %s%s",
			netfilter.ErrUnusable, err, options, netfilter.HowToLoad(modules), otherwise)
	}
	return err
}
