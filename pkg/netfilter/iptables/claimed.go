// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nflink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Claimed implements netfilter.Driver. It reads all of table nat, of either
// variant.
func (d *Driver) Claimed(ctx context.Context, us policy.Owner) ([]string, error) {
	var claimed []string
	var errs []error
	for _, variant := range variants() {
		for _, f := range policy.Families() {
			found, err := d.claimedIn(ctx, f, variant, us)
			if err != nil {
				errs = append(errs, fmt.Errorf("look for our chains in %s of iptables (%s): %w", f, variant, err))
			}
			for _, name := range found {
				if !slices.Contains(claimed, name) {
					claimed = append(claimed, name)
				}
			}
		}
	}
	return claimed, errors.Join(errs...)
}

func (d *Driver) claimedIn(ctx context.Context, f policy.Family, variant string, us policy.Owner) ([]string, error) {
	list := d.link.userChains
	if variant == netfilter.VariantLegacy {
		list = func(f policy.Family) ([]string, error) { return d.legacyChains(ctx, f, natTable) }
	}
	names, err := list(f)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	b := &backend{choice: netfilter.Choice{Backend: policy.IPTables, Variant: variant}, programs: d.programs, link: d.link, terse: true}
	t, err := b.readKernel(f, names)
	if err != nil {
		return nil, err
	}
	var ours []string
	for _, c := range t.chains(f, names) {
		if c.Owner == us {
			ours = append(ours, c.Name)
		}
	}
	return ours, nil
}

// userChains returns the chains of iptables-nft's table nat that are not built
// in.
func (l *link) userChains(f policy.Family) ([]string, error) {
	var names []string
	err := l.use(func(c *nflink.Conn) error {
		chains, err := c.Chains(nflinkFamily(f), natTable)
		for _, chain := range chains {
			if chain.Base == nil {
				names = append(names, chain.Name)
			}
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) || notInKernel(err) {
		return nil, nil
	}
	return names, err
}
