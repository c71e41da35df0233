// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Driver finds and opens one backend on this host.
type Driver interface {
	// Backend returns the name by which configuration names it.
	Backend() policy.Backend

	// Open returns the backend of a choice. It reads nothing and runs no program.
	Open(Choice) (Backend, error)

	// FindChain returns the choices in which a chain exists. It creates no table. Its error wraps ErrBusy if a
	// reading failed. Else the kernel lacks the backend (ErrUnusable) or forbids to read it (fs.ErrPermission).
	FindChain(ctx context.Context, chain string) ([]Choice, error)

	// Owned returns the chains with a comment of any owner. It creates no table. Its errors are as FindChain's.
	Owned(ctx context.Context) ([]OwnedChain, error)

	// Probe returns the choice, of a variant if one is given, that works on this host. Its errors
	// wrap ErrUnusable and say what to install or to change, or ErrBusy, which says nothing about the host.
	Probe(ctx context.Context, variant string) (Choice, error)

	// Programs returns the programs that list rules of a variant, one for each family; none if the backend
	// needs none. It runs them to learn their versions.
	Programs(ctx context.Context, variant string) []Program

	// Hanging returns an error that wraps ErrBusy if another process of ip-masq has recorded that a program of
	// this backend does not return.
	Hanging() error

	Ruleset
}

// Ruleset is the nf_tables ruleset as a whole. At most one of the drivers that are linked into a binary implements
// it: that of nftables, which reads and writes the owned tables of its backend and the guard tables by one socket.
// The others embed NoRuleset.
type Ruleset interface {
	// GuardTables returns the guard tables.
	GuardTables() (GuardTables, error)

	// Generation returns the generation of the ruleset.
	Generation() (Generation, error)

	// HasKubeProxy reports whether kube-proxy runs in its mode nftables. Its errors are as FindChain's.
	HasKubeProxy() (bool, error)
}

// NoRuleset is the Ruleset of a driver that has none.
type NoRuleset struct{}

var errNoRuleset = fmt.Errorf("nf_tables is not built into this binary: %w", ErrUnusable)

// GuardTables implements Ruleset.
func (NoRuleset) GuardTables() (GuardTables, error) { return nil, errNoRuleset }

// Generation implements Ruleset.
func (NoRuleset) Generation() (Generation, error) { return Generation{}, errNoRuleset }

// HasKubeProxy implements Ruleset.
func (NoRuleset) HasKubeProxy() (bool, error) { return false, nil }

// Program is a program of the host.
type Program struct {
	Family  policy.Family
	Path    string
	Version string
	Err     error // why there is no version, or no program
}

// NoPrograms has the methods of a Driver that needs no program of the host.
type NoPrograms struct{}

// Programs implements Driver.
func (NoPrograms) Programs(context.Context, string) []Program { return nil }

// Hanging implements Driver.
func (NoPrograms) Hanging() error { return nil }

// Drivers are all backends, in the order in which auto prefers them.
type Drivers []Driver

// Open opens the backend of a choice.
func (ds Drivers) Open(c Choice) (Backend, error) {
	d, err := ds.named(c.Backend)
	if err != nil {
		return nil, err
	}
	return d.Open(c)
}

// GuardTables returns the guard tables. The error wraps ErrUnusable.
func (ds Drivers) GuardTables() (GuardTables, error) {
	for _, d := range ds {
		tables, err := d.GuardTables()
		if !errors.Is(err, errNoRuleset) {
			return tables, err
		}
	}
	return nil, errNoRuleset
}

// Generation returns the generation of the nf_tables ruleset.
func (ds Drivers) Generation() (Generation, error) {
	for _, d := range ds {
		generation, err := d.Generation()
		if !errors.Is(err, errNoRuleset) {
			return generation, err
		}
	}
	return Generation{}, errNoRuleset
}

func (ds Drivers) named(b policy.Backend) (Driver, error) {
	for _, d := range ds {
		if d.Backend() == b {
			return d, nil
		}
	}
	return nil, fmt.Errorf("backend %s is not built into this binary: %w", b, ErrUnusable)
}

// Choose returns the choice for a chain: of the stated backend or, if that is auto, the one in which the node
// has the chain already, else nftables beside kube-proxy in its mode nftables, else the backend of the last boot
// ("" if there is none), else the first that works on this host and does not refuse the rules. Of a stated
// backend, too, the node keeps the variant that has the chain. The last candidate is not asked about the rules:
// the caller sees why it refuses them when it writes.
//
// A failed reading and a busy program choose nothing: the chain would leave another backend, where its old rules
// stay in force. The error wraps ErrBusy then.
//
// The boot unit chooses before kube-proxy runs: by the kernel alone, a chain would leave nftables at the
// first boot with the unit, for ever.
func (ds Drivers) Choose(
	ctx context.Context, chain string, stated, lastBoot policy.Backend, refuses func(Choice) error,
) (Choice, error) {
	candidates, err := ds.Candidates(stated)
	if err != nil {
		return Choice{}, err
	}
	for _, d := range candidates {
		c, found, err := inUse(ctx, d, chain)
		if found || err != nil {
			return c, err
		}
	}
	candidates, err = candidates.preferred(lastBoot)
	if err != nil {
		return Choice{}, err
	}
	return candidates.firstThatWorks(ctx, refuses)
}

// Candidates returns the drivers of a stated backend, which for auto are all of them.
func (ds Drivers) Candidates(stated policy.Backend) (Drivers, error) {
	if stated == policy.Auto {
		return ds, nil
	}
	d, err := ds.named(stated)
	if err != nil {
		return nil, err
	}
	return Drivers{d}, nil
}

// inUse returns the choice in which a driver has the chain. One that does not work on this host is not found.
func inUse(ctx context.Context, d Driver, chain string) (c Choice, found bool, err error) {
	used, err := d.FindChain(ctx, chain)
	if err != nil && !lacksChains(err) {
		return Choice{}, false, fmt.Errorf("look for chain %s in %s: %w", chain, d.Backend(), err)
	}
	for _, u := range used {
		c, err = d.Probe(ctx, u.Variant)
		if err == nil {
			return c, true, nil
		}
		if !errors.Is(err, ErrUnusable) {
			return Choice{}, false, err
		}
	}
	return Choice{}, false, nil
}

// lacksChains reports whether an error of FindChain or Owned says that the kernel lacks the backend, or forbids
// to read its chains, as opposed to a reading that failed.
func lacksChains(err error) bool {
	isRefusal := errors.Is(err, ErrUnusable) || errors.Is(err, fs.ErrPermission)
	return isRefusal && !errors.Is(err, ErrBusy)
}

// firstThatWorks returns the choice of the first driver that works on this host and does not refuse the rules.
func (ds Drivers) firstThatWorks(ctx context.Context, refuses func(Choice) error) (Choice, error) {
	var failures []error
	for i, d := range ds {
		c, err := d.Probe(ctx, "")
		if err != nil && !errors.Is(err, ErrUnusable) {
			return Choice{}, err
		}
		isLast := i == len(ds)-1
		if err == nil && !isLast {
			err = refuses(c)
		}
		if err == nil {
			return c, nil
		}
		saysNothing := errors.Is(err, ErrBusy) || errors.Is(err, ErrChanged)
		if saysNothing {
			return Choice{}, err
		}
		failures = append(failures, err)
	}
	return Choice{}, errors.Join(failures...)
}

// preferred returns the drivers in an order in which that of kube-proxy's rules is the first, else that of the
// last boot.
func (ds Drivers) preferred(lastBoot policy.Backend) (Drivers, error) {
	for i, d := range ds {
		beside, err := d.HasKubeProxy()
		if err != nil && !lacksChains(err) {
			return nil, fmt.Errorf("look for kube-proxy in %s: %w", d.Backend(), err)
		}
		if beside {
			return ds.startingWith(i), nil
		}
	}
	for i, d := range ds {
		if d.Backend() == lastBoot {
			return ds.startingWith(i), nil
		}
	}
	return ds, nil
}

func (ds Drivers) startingWith(i int) Drivers { return slices.Concat(ds[i:i+1], ds[:i], ds[i+1:]) }

// Duplicates returns every other choice in which a chain exists: an agent wrote it there, or an earlier choice
// of the backend left it. What the kernel lacks has none.
func (ds Drivers) Duplicates(ctx context.Context, chain string, chosen Choice) ([]Choice, error) {
	var others []Choice
	var errs []error
	for _, d := range ds {
		used, err := d.FindChain(ctx, chain)
		isLacking := errors.Is(err, ErrUnusable) && lacksChains(err)
		if err != nil && !isLacking {
			errs = append(errs, err)
		}
		for _, c := range used {
			if c != chosen {
				others = append(others, c)
			}
		}
	}
	return others, errors.Join(errs...)
}

// Owned returns the chains that name an owner. A backend that the kernel lacks or forbids has none.
func (ds Drivers) Owned(ctx context.Context) ([]OwnedChain, error) {
	var owned []OwnedChain
	var errs []error
	for _, d := range ds {
		found, err := d.Owned(ctx)
		owned = append(owned, found...)
		if err != nil && !lacksChains(err) {
			errs = append(errs, fmt.Errorf("list the chains in %s that name a dataDir: %w", d.Backend(), err))
		}
	}
	return owned, errors.Join(errs...)
}

// Hanging returns an error if another process of ip-masq has recorded that a program does not return.
func (ds Drivers) Hanging() error {
	for _, d := range ds {
		if err := d.Hanging(); err != nil {
			return err
		}
	}
	return nil
}

// Programs returns the programs that list rules of a choice.
func (ds Drivers) Programs(ctx context.Context, c Choice) []Program {
	d, err := ds.named(c.Backend)
	if err != nil {
		return nil
	}
	return d.Programs(ctx, c.Variant)
}
