// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Owned implements netfilter.Driver. Of table nat it reads the chains that can
// have the name of a masqChain: the thousands of kube-proxy cannot.
func (d *Driver) Owned(ctx context.Context) ([]netfilter.OwnedChain, error) {
	var owned []netfilter.OwnedChain
	var errs []error
	for _, variant := range variants() {
		choice := netfilter.Choice{Backend: policy.IPTables, Variant: variant}
		for _, f := range policy.Families() {
			chains, err := d.masqChains(ctx, f, choice)
			if err != nil {
				errs = append(errs, fmt.Errorf("read %s of %s: %w", f, choice, err))
			}
			for _, c := range chains {
				if c.Owner != (policy.Owner{}) {
					ref := netfilter.ChainRef{Family: f, Name: c.Name}
					owned = append(owned, netfilter.OwnedChain{ChainRef: ref, Choice: choice, Owner: c.Owner})
				}
			}
		}
	}
	return owned, errors.Join(errs...)
}

// masqChains reads the chains of one family whose names are those of masqChains.
func (d *Driver) masqChains(ctx context.Context, f policy.Family, choice netfilter.Choice) ([]policy.Chain, error) {
	list := d.link.userChains
	if choice.Variant == netfilter.VariantLegacy {
		list = func(f policy.Family) ([]string, error) { return d.legacyChains(ctx, f, natTable) }
	}
	names, err := list(f)
	names = slices.DeleteFunc(names, func(name string) bool { return policy.ValidateChainName(name) != nil })
	if err != nil || len(names) == 0 {
		return nil, err
	}
	t, err := (&backend{choice: choice, programs: d.programs, link: d.link, terse: true}).readKernel(f, names)
	return t.chains(f, names), err
}

// userChains returns the chains of iptables-nft's table nat that are not built
// in.
func (l *link) userChains(f policy.Family) ([]string, error) {
	var names []string
	err := l.use(func(c *nfnetlink.Conn) error {
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
