// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Options are what a Driver can be told. The zero value is right for a host.
type Options struct {
	// Path replaces $PATH as the list of directories in which programs are
	// looked for.
	Path string
	// Terse shows rules of others as they were read from the kernel. To show
	// them as iptables does takes a program, which is a long time where a
	// repair waits for it.
	Terse bool
}

// Driver finds out about iptables on this host. It implements netfilter.Driver.
type Driver struct {
	programs *programs
	link     *link
	terse    bool
}

// New returns the driver. It reads nothing and runs no program.
func New(o Options) *Driver {
	if o.Path == "" {
		o.Path = os.Getenv("PATH")
	}
	return &Driver{programs: newPrograms(o.Path), link: &link{}, terse: o.Terse}
}

// Backend implements netfilter.Driver.
func (*Driver) Backend() policy.Backend { return policy.IPTables }

// Open implements netfilter.Driver.
func (d *Driver) Open(c netfilter.Choice) (netfilter.Backend, error) {
	if c.Backend != policy.IPTables || !slices.Contains(variants(), c.Variant) {
		return nil, fmt.Errorf("open %s: no such variant of iptables; there are nft and legacy", c)
	}
	return &backend{choice: c, programs: d.programs, link: d.link, terse: d.terse}, nil
}

// Render implements netfilter.Driver: iptables-restore and ip6tables-restore
// take one family each.
func (*Driver) Render(desired policy.Ruleset, families ...policy.Family) ([]byte, error) {
	if len(families) == 0 {
		families = []policy.Family{policy.IPv4}
	}
	if len(families) > 1 {
		return nil, fmt.Errorf("render %v: one input of iptables-restore holds one family; render each by itself", families)
	}
	return Render(desired, families[0]), nil
}

func variants() []string { return []string{netfilter.VariantNFT, netfilter.VariantLegacy} }

// Uses implements netfilter.Driver. It runs a program only where a table of
// iptables-legacy cannot be read without.
func (d *Driver) FindChain(ctx context.Context, chain string) ([]netfilter.Choice, error) {
	var found []netfilter.Choice
	var errs []error
	for _, variant := range variants() {
		there, err := d.has(ctx, variant, natTable, chain)
		if err != nil {
			errs = append(errs, fmt.Errorf("look for chain %s in iptables (%s): %w", chain, variant, err))
		}
		if there {
			found = append(found, netfilter.Choice{Backend: policy.IPTables, Variant: variant})
		}
	}
	return found, errors.Join(errs...)
}

// has reports whether one of the chains stands in the table, in any family.
func (d *Driver) has(ctx context.Context, variant, tableName string, chains ...string) (bool, error) {
	var failed error
	for _, f := range policy.Families() {
		there, err := d.familyHas(ctx, f, variant, tableName, chains)
		if there {
			return true, nil
		}
		failed = cmp.Or(failed, err) // the other family's is the same
	}
	return false, failed
}

func (d *Driver) familyHas(ctx context.Context, f policy.Family, variant, tableName string, chains []string) (bool, error) {
	if variant == netfilter.VariantLegacy {
		names, err := d.legacyChains(ctx, f, tableName)
		return slices.ContainsFunc(chains, func(c string) bool { return slices.Contains(names, c) }), err
	}
	for _, c := range chains {
		if there, err := d.link.hasChain(f, tableName, c); there || err != nil {
			return there, err
		}
	}
	return false, nil
}

// legacyChains returns the names of the chains in a table of iptables-legacy.
func (d *Driver) legacyChains(ctx context.Context, f policy.Family, tableName string) ([]string, error) {
	used, err := legacyInUse(f, tableName)
	if err != nil || !used {
		return nil, err
	}
	b, err := readBlob(f, tableName)
	if err == nil {
		return b.userChains()
	}
	o, errOpen := d.programs.open(ctx, f, netfilter.VariantLegacy)
	if errOpen != nil {
		return nil, errors.Join(err, errOpen)
	}
	names, errList := o.ListChains(tableName)
	if errList != nil {
		return nil, errors.Join(err, o.explain(errList))
	}
	return names, nil
}
