// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// removeDuplicates removes chains of the same names in other backends, once the desired rules are in place.
func (e *Enforcer) removeDuplicates(ctx context.Context, s *State, lock *store.Lock) {
	for _, d := range e.duplicates(ctx, s) {
		if s.Err(d.Chain) != nil {
			continue
		}
		err := e.removeDuplicate(ctx, d, lock)
		if errors.Is(err, ErrOtherDataDir) {
			s.Find(d.Chain).fail(err) // one chain would masquerade what the other exempts
		} else {
			e.Warn(err)
		}
	}
	e.findOtherChains(ctx, s)
}

// DuplicateErr returns why a chain that a policy has in another backend is not removed:
// netfilter.ErrNotOwned with the rules that no agent writes.
func (e *Enforcer) DuplicateErr(ctx context.Context, d netfilter.OwnedChain) error {
	chains, err := e.observeChains(ctx, d.Choice, d.Chain)
	if err != nil {
		return err
	}
	for i := range chains {
		if chains[i].Name != d.Chain {
			continue
		}
		if err := checkOwnership(&chains[i], d.Choice, e.owner(), false, thenRemoved); err != nil {
			return err
		}
	}
	return nil
}

// removeDuplicate removes a chain from a backend, in the families in which it is owned or an agent's.
func (e *Enforcer) removeDuplicate(ctx context.Context, d netfilter.OwnedChain, lock *store.Lock) error {
	chains, err := e.observeChains(ctx, d.Choice, d.Chain)
	if err != nil {
		return err
	}
	var errs []error
	var refs []policy.ChainFamily
	for i := range chains {
		c := &chains[i]
		if c.Name != d.Chain {
			continue
		}
		if err := checkOwnership(c, d.Choice, e.owner(), false, thenRemoved); err != nil {
			errs = append(errs, fmt.Errorf("in %s: %w", d.Choice, err))
			continue
		}
		refs = append(refs, policy.ChainFamily{Chain: c.Name, Family: c.Family})
	}
	if len(refs) > 0 {
		errs = append(errs, e.remove(ctx, d.Choice, lock, refs...))
	}
	return errors.Join(errs...)
}

// observeChains returns the chains of these names in a backend, and all chains of owned tables.
func (e *Enforcer) observeChains(
	ctx context.Context, in netfilter.Choice, names ...string,
) ([]policy.Chain, error) {
	b, err := e.Drivers.Open(in)
	if err != nil {
		return nil, err
	}
	var refs []policy.ChainFamily
	for _, name := range names {
		for _, f := range policy.Families() {
			refs = append(refs, policy.ChainFamily{Chain: name, Family: f})
		}
	}
	observed, err := b.Observe(ctx, refs)
	if err != nil {
		return nil, fmt.Errorf("read chain %s in %s: %w", strings.Join(names, ", "), in, err)
	}
	return observed.Rules.Chains, nil
}

// remove removes chains from a backend, and what interrupted writes left in its tables.
func (e *Enforcer) remove(
	ctx context.Context, c netfilter.Choice, lock *store.Lock, chains ...policy.ChainFamily,
) error {
	b, err := e.Drivers.Open(c)
	if err == nil {
		err = b.Remove(ctx, chains, lock.File())
	}
	if err == nil {
		return nil
	}
	if len(chains) == 0 {
		return fmt.Errorf("remove what an interrupted write left from %s: %w", c, err)
	}
	var names []string
	for _, ref := range chains {
		names = append(names, fmt.Sprintf("%s (%s)", ref.Chain, ref.Family))
	}
	return fmt.Errorf("remove chain %s from %s: %w", strings.Join(names, ", "), c, err)
}

// RemoveAll removes the owned chains of these names, and those whose comment names this dataDir, in
// every backend. Other chains of these names stay, with a warning.
func (e *Enforcer) RemoveAll(
	ctx context.Context, chains []string, rec store.Record, lock *store.Lock,
) ([]netfilter.OwnedChain, error) {
	rec = e.currentBoot(rec)
	chains = slices.Clone(chains)
	owned, err := e.Drivers.Owned(ctx)
	e.Warn(err)
	for _, c := range owned {
		if c.Owner == e.owner() && !c.Guard && !slices.Contains(chains, c.Chain) {
			chains = append(chains, c.Chain)
		}
	}
	removed, err := e.removeGuards(ctx) // first, or it drops what is not masqueraded any more
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, choice := range e.choicesOf(ctx, chains, rec) {
		gone, err := e.removeOwned(ctx, choice, chains, rec, lock)
		for _, ref := range gone {
			removed = append(removed, netfilter.OwnedChain{ChainFamily: ref, Choice: choice})
		}
		errs = append(errs, err)
	}
	e.removeUnused(ctx, lock)
	return removed, errors.Join(errs...)
}

// removeOwned removes the owned chains of one backend, and returns them. It warns of others with these names.
func (e *Enforcer) removeOwned(
	ctx context.Context, in netfilter.Choice, names []string, rec store.Record, lock *store.Lock,
) ([]policy.ChainFamily, error) {
	chains, err := e.observeChains(ctx, in, names...)
	if err != nil {
		return nil, err
	}
	var refs []policy.ChainFamily
	for _, c := range chains {
		namesNobody := c.Owner == policy.Owner{}
		// Tables of nftables are owned whole.
		isOnRecord := in.Backend == policy.NFTables || owns(rec, c.Family, c.Name, in)
		if c.Owner == e.owner() || namesNobody && isOnRecord {
			refs = append(refs, policy.ChainFamily{Chain: c.Name, Family: c.Family})
			continue
		}
		if namesNobody && slices.Contains(names, c.Name) {
			e.Warn(fmt.Errorf("chain %s (%s) in %s is not owned by ip-masq and is not removed",
				c.Name, c.Family, in))
		}
	}
	if len(refs) == 0 {
		return nil, nil
	}
	if err := e.remove(ctx, in, lock, refs...); err != nil {
		return nil, err
	}
	return refs, nil
}

// RemoveLeftovers removes from the owned tables everything that no chain uses, which interrupted writes left,
// and the guard tables.
func (e *Enforcer) RemoveLeftovers(ctx context.Context, lock *store.Lock) {
	_, err := e.removeGuards(ctx)
	e.Warn(err)
	e.removeUnused(ctx, lock)
}

func (e *Enforcer) removeUnused(ctx context.Context, lock *store.Lock) {
	for _, d := range e.Drivers {
		// iptables owns no table, and needs a variant.
		b, err := d.Open(netfilter.Choice{Backend: d.Backend()})
		if err != nil || !b.OwnsTables() {
			continue
		}
		if _, err := d.Probe(ctx, ""); err != nil {
			continue
		}
		e.Warn(e.remove(ctx, netfilter.Choice{Backend: d.Backend()}, lock))
	}
}

// choicesOf returns the backends that have one of the chains or are on record for one.
func (e *Enforcer) choicesOf(ctx context.Context, chains []string, rec store.Record) []netfilter.Choice {
	var choices []netfilter.Choice
	for _, o := range rec.Chains {
		choices = append(choices, ChoiceOf(o))
	}
	for _, d := range e.Drivers {
		for _, chain := range chains {
			used, err := d.FindChain(ctx, chain)
			if err != nil && !errors.Is(err, netfilter.ErrUnusable) {
				e.Warn(fmt.Errorf("look for chain %s in %s: %w", chain, d.Backend(), err))
			}
			choices = append(choices, used...)
		}
	}
	return withoutRepetitions(choices)
}

func withoutRepetitions(choices []netfilter.Choice) []netfilter.Choice {
	var once []netfilter.Choice
	for _, c := range choices {
		if !slices.Contains(once, c) {
			once = append(once, c)
		}
	}
	return once
}
