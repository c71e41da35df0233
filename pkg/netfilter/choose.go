// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Drivers are the backends there are, in the order in which auto prefers them.
type Drivers []Driver

// Open opens the backend of a choice.
func (ds Drivers) Open(c Choice) (Backend, error) {
	d, err := ds.named(c.Backend)
	if err != nil {
		return nil, err
	}
	return d.Open(c)
}

// Render writes the rules as input of the tool of a backend, as the method of
// its Driver does.
func (ds Drivers) Render(b policy.Backend, desired policy.Ruleset, families ...policy.Family) ([]byte, error) {
	d, err := ds.named(b)
	if err != nil {
		return nil, err
	}
	return d.Render(desired, families...)
}

func (ds Drivers) named(b policy.Backend) (Driver, error) {
	for _, d := range ds {
		if d.Backend() == b {
			return d, nil
		}
	}
	return nil, fmt.Errorf("backend %s is not part of this program: %w", b, ErrUnusable)
}

// Choose returns the form in which to keep a chain: in the stated backend, and
// where that is auto in what the node uses for the chain already, else in the
// first backend that works on this host.
func (ds Drivers) Choose(ctx context.Context, chain string, stated policy.Backend) (Choice, error) {
	candidates := ds
	if stated != policy.Auto {
		d, err := ds.named(stated)
		if err != nil {
			return Choice{}, err
		}
		candidates = Drivers{d}
	}
	for _, d := range candidates {
		inUse, _ := d.FindChain(ctx, chain)
		for _, c := range inUse {
			if c, err := d.Probe(ctx, c.Variant); err == nil {
				return c, nil
			}
		}
	}
	var failures []error // what failed above fails here once more
	for _, d := range candidates {
		c, err := d.Probe(ctx, "")
		if err == nil {
			return c, nil
		}
		failures = append(failures, err)
	}
	return Choice{}, errors.Join(failures...)
}

// Others returns every form but the chosen one in which a chain of the name
// stands: leftovers of an agent or of an earlier choice.
func (ds Drivers) Duplicates(ctx context.Context, chain string, chosen Choice) ([]Choice, error) {
	var others []Choice
	var errs []error
	for _, d := range ds {
		inUse, err := d.FindChain(ctx, chain)
		errs = append(errs, err)
		for _, c := range inUse {
			if !c.SameBackend(chosen) {
				others = append(others, c)
			}
		}
	}
	return others, errors.Join(errs...)
}

// Owned returns the chains that name an owner, in every form. A backend that is
// unusable, or that this process may not read and so not write, has none.
func (ds Drivers) Owned(ctx context.Context) ([]OwnedChain, error) {
	var owned []OwnedChain
	var errs []error
	for _, d := range ds {
		found, err := d.Owned(ctx)
		owned = append(owned, found...)
		if err != nil && !errors.Is(err, ErrUnusable) && !errors.Is(err, fs.ErrPermission) {
			errs = append(errs, fmt.Errorf("list the chains in %s that name a dataDir: %w", d.Backend(), err))
		}
	}
	return owned, errors.Join(errs...)
}
