// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Driver detects and opens iptables on this host. It implements netfilter.Driver.
type Driver struct {
	netfilter.NoRuleset

	programs *programs
	nft      *nftReader
}

// New returns the driver. It looks for programs in the directories of a path as in $PATH.
func New(path string) *Driver {
	return &Driver{programs: newPrograms(path), nft: &nftReader{}}
}

// Backend implements netfilter.Driver.
func (*Driver) Backend() policy.Backend { return policy.IPTables }

// Open implements netfilter.Driver.
func (d *Driver) Open(c netfilter.Choice) (netfilter.Backend, error) {
	if c.Backend != policy.IPTables || !slices.Contains(variants(), c.Variant) {
		return nil, fmt.Errorf("open %s: no such variant of iptables; there are nft and legacy", c)
	}
	return &backend{choice: c, programs: d.programs, reader: d.reader(c.Variant)}, nil
}

func variants() []string { return []string{netfilter.VariantNFT, netfilter.VariantLegacy} }

// reader reads the rules of one variant from the kernel.
type reader interface {
	// read reads POSTROUTING and the named chains of table nat.
	read(f policy.Family, names []string) (table, error)
	// chainNames returns the names of the chains of a table, or that of one chain if it exists.
	chainNames(f policy.Family, table, only string) ([]string, error)
	// refuses returns why the kernel refuses for good what programs of the variant need to list
	// rules of a family or, if there are chains, to write them. It returns nil if it does not, or
	// that is not known.
	refuses(f policy.Family, chains []policy.Chain) error
}

func (d *Driver) reader(variant string) reader {
	if variant == netfilter.VariantLegacy {
		return legacyReader{}
	}
	return d.nft
}

// FindChain implements netfilter.Driver.
func (d *Driver) FindChain(_ context.Context, chain string) ([]netfilter.Choice, error) {
	var found []netfilter.Choice
	var errs []error
	for _, variant := range variants() {
		exists, err := d.has(variant, Table, chain)
		if err != nil {
			errs = append(errs, fmt.Errorf("look for chain %s in iptables (%s): %w", chain, variant, err))
		}
		if exists {
			found = append(found, netfilter.Choice{Backend: policy.IPTables, Variant: variant})
		}
	}
	return found, errors.Join(errs...)
}

// has reports whether one of the chains exists in the table, in any family.
func (d *Driver) has(variant, table string, chains ...string) (bool, error) {
	var errs []error
	for _, f := range policy.Families() {
		for _, c := range chains {
			found, err := d.reader(variant).chainNames(f, table, c)
			if len(found) > 0 {
				return true, nil
			}
			if errors.Is(err, fs.ErrPermission) {
				return false, readError(err) // it is the same for each chain, and is said once
			}
			if err != nil {
				errs = append(errs, readError(err))
			}
		}
	}
	return false, errors.Join(errs...)
}

// readError tells a reading of the kernel that failed from one that the kernel forbids.
func readError(err error) error {
	if errors.Is(err, fs.ErrPermission) {
		return err
	}
	return fmt.Errorf("%w: %w", err, netfilter.ErrBusy)
}

// Owned implements netfilter.Driver.
func (d *Driver) Owned(context.Context) ([]netfilter.OwnedChain, error) {
	var owned []netfilter.OwnedChain
	var errs []error
	for _, variant := range variants() {
		c := netfilter.Choice{Backend: policy.IPTables, Variant: variant}
		for _, f := range policy.Families() {
			found, err := d.ownedIn(c, f)
			if err != nil {
				errs = append(errs, fmt.Errorf("read %s of %s: %w", f, c, readError(err)))
			}
			owned = append(owned, found...)
		}
	}
	return owned, errors.Join(errs...)
}

// ownedIn reads the chains of one variant and family whose names are valid for masquerade chains,
// which those of kube-proxy are not.
func (d *Driver) ownedIn(c netfilter.Choice, f policy.Family) ([]netfilter.OwnedChain, error) {
	r := d.reader(c.Variant)
	all, err := r.chainNames(f, Table, "")
	if err != nil {
		return nil, err
	}
	var names []string
	for _, name := range all {
		if policy.ValidateChainName(name) == nil {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil, nil
	}
	t, err := r.read(f, names)
	if err != nil {
		return nil, err
	}
	var owned []netfilter.OwnedChain
	for _, chain := range t.Chains {
		if chain.Owner == (policy.Owner{}) {
			continue
		}
		owned = append(owned, netfilter.OwnedChain{
			ChainFamily: policy.ChainFamily{Chain: chain.Name, Family: f},
			Choice:      c,
			Owner:       chain.Owner,
		})
	}
	return owned, nil
}

// Probe implements netfilter.Driver. Without a variant it takes the preferred one, unless the kernel refuses it.
func (d *Driver) Probe(ctx context.Context, variant string) (netfilter.Choice, error) {
	c := netfilter.Choice{Backend: policy.IPTables, Variant: variant}
	if variant != "" {
		return d.probed(ctx, c)
	}
	var err error
	c.Variant, err = d.preferred(ctx)
	if err == nil {
		err = d.probe(ctx, c)
	}
	if err == nil {
		return c, nil
	}
	mayUseOther := errors.Is(err, netfilter.ErrUnusable) && !d.hidesRules(c)
	if !mayUseOther {
		return netfilter.Choice{}, unusable(c, err)
	}
	other, failure := d.probed(ctx, otherVariant(c)) // nft, if none is preferred
	if failure == nil || errors.Is(failure, netfilter.ErrBusy) {
		return other, failure
	}
	return netfilter.Choice{}, unusable(c, err)
}

// probed returns the choice if it works.
func (d *Driver) probed(ctx context.Context, c netfilter.Choice) (netfilter.Choice, error) {
	err := d.probe(ctx, c)
	if err != nil {
		return netfilter.Choice{}, unusable(c, err)
	}
	return c, nil
}

func otherVariant(c netfilter.Choice) netfilter.Choice {
	if c.Variant == netfilter.VariantNFT {
		c.Variant = netfilter.VariantLegacy
	} else {
		c.Variant = netfilter.VariantNFT
	}
	return c
}

// hidesRules reports whether the kernel has a table nat of nf_tables, which the preferred iptables-nft cannot list.
// Rules that iptables-legacy wrote beside it would be in force, and people who run `iptables -L` would not see them.
func (d *Driver) hidesRules(preferred netfilter.Choice) bool {
	if preferred.Variant != netfilter.VariantNFT {
		return false
	}
	_, err := d.nft.conn.Table(netfilter.LinkOf(policy.IPv4), Table)
	return err == nil
}

// probe returns why a variant does not work, with netfilter.ErrUnusable if the kernel lacks what it
// needs. Of iptables-legacy it asks only whether there is a program, unless table nat is in use: to
// list the table would create it. Only a node that uses IPv6 needs ip6tables.
func (d *Driver) probe(ctx context.Context, c netfilter.Choice) error {
	_, err := d.programs.locate(ctx, policy.IPv4, c.Variant, "")
	if err == nil {
		_, err = d.programs.list(ctx, policy.IPv4, c.Variant, postrouting)
	}
	return unusableIfRefused(d.reader(c.Variant), policy.IPv4, nil, err)
}

// Programs implements netfilter.Driver.
func (d *Driver) Programs(ctx context.Context, variant string) []netfilter.Program {
	var list []netfilter.Program
	for _, f := range policy.Families() {
		program := netfilter.Program{Family: f}
		program.Path, program.Err = d.programs.locate(ctx, f, variant, "")
		if program.Err == nil {
			program.Version, program.Err = d.programs.version(ctx, f, variant)
		}
		list = append(list, program)
	}
	return list
}

// Hanging implements netfilter.Driver.
func (d *Driver) Hanging() error {
	for _, f := range policy.Families() {
		for _, variant := range []string{"", "-" + netfilter.VariantNFT, "-" + netfilter.VariantLegacy} {
			for _, suffix := range []string{"", "-restore"} {
				path, err := d.programs.finder.find(baseName(f) + variant + suffix)
				if err == nil && d.programs.hangMark(path).isSet(d.programs.finder.trusted) {
					return hangsElsewhere(path)
				}
			}
		}
	}
	return nil
}

func unusable(c netfilter.Choice, err error) error {
	if errors.Is(err, netfilter.ErrBusy) {
		return fmt.Errorf("%s: %w", c, err)
	}
	return fmt.Errorf("%s cannot keep rules on this host: %w: %w", c, netfilter.ErrUnusable, err)
}

// preferred returns the variant that kubelet uses on this node, else that of the program iptables.
func (d *Driver) preferred(ctx context.Context) (string, error) {
	for _, variant := range variants() {
		// kubelet creates these chains to show other programs the variant (KEP-3178).
		hinted, err := d.has(variant, "mangle", "KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
		if err != nil {
			return "", fmt.Errorf("look for kubelet's chains in iptables (%s): %w", variant, err)
		}
		if hinted {
			return variant, nil
		}
	}
	path, err := d.programs.finder.find("iptables", "iptables-nft", "iptables-legacy")
	if err != nil {
		return "", err
	}
	return d.programs.variantOf(ctx, path)
}
