// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Removal is a chain that was removed.
type RemovedChain struct {
	Chain  string
	Family policy.Family
	Choice netfilter.Choice
}

// RemoveAll removes the chains of these names that are ours, in whatever form
// they stand: those that say so themselves, and those that the record has. What
// belongs to others stays, with a warning.
func (e *Enforcer) RemoveAll(ctx context.Context, chains []string, rec store.Record, lock *store.Lock) ([]RemovedChain, error) {
	var removed []RemovedChain
	var errs []error
	rec = e.ofThisBoot(rec)
	chains = e.claimed(ctx, chains)
	for _, c := range e.forms(ctx, chains, rec) {
		gone, err := e.removeFrom(ctx, c, chains, rec, lock)
		removed = append(removed, gone...)
		if err != nil {
			errs = append(errs, err)
		}
	}
	e.RemoveLeftovers(ctx, lock)
	return removed, errors.Join(errs...)
}

// RemoveLeftovers removes what interrupted writes left in the tables that are ours
// alone: whatever no chain there uses.
func (e *Enforcer) RemoveLeftovers(ctx context.Context, lock *store.Lock) {
	for _, d := range e.Drivers {
		b, err := d.Open(netfilter.Choice{Backend: d.Backend()}) // iptables has no such tables, and wants a variant
		if err != nil || !b.OwnsTables() {
			continue
		}
		if _, err := d.Probe(ctx, ""); err != nil {
			continue
		}
		if err := b.Remove(ctx, nil, lock.File()); err != nil {
			e.warn(fmt.Errorf("remove what an interrupted write left in %s: %w", d.Backend(), err))
		}
	}
}

// claimed adds the chains that say themselves that they are ours.
func (e *Enforcer) claimed(ctx context.Context, chains []string) []string {
	chains = slices.Clone(chains)
	owned, err := e.Drivers.Owned(ctx)
	e.warn(err)
	for _, c := range owned {
		if c.Owner == e.owner() && !slices.Contains(chains, c.Name) {
			chains = append(chains, c.Name)
		}
	}
	return chains
}

// forms returns the forms in which one of the chains stands or should stand.
func (e *Enforcer) forms(ctx context.Context, chains []string, rec store.Record) []netfilter.Choice {
	var forms []netfilter.Choice
	add := func(c netfilter.Choice) {
		if !slices.ContainsFunc(forms, c.SameBackend) {
			forms = append(forms, c)
		}
	}
	for _, o := range rec.Chains {
		add(choiceOf(o))
	}
	for _, d := range e.Drivers {
		for _, chain := range chains {
			used, err := d.FindChain(ctx, chain)
			if err != nil && !errors.Is(err, netfilter.ErrUnusable) {
				e.warn(fmt.Errorf("look for chain %s in %s: %w", chain, d.Backend(), err))
			}
			for _, c := range used {
				add(c)
			}
		}
	}
	return forms
}

func notOurs(chain policy.Chain, c netfilter.Choice) error {
	if other := chain.Owner.DataDir; other != "" {
		return fmt.Errorf("chain %s (%s) in %s is kept from %s and stays: run cleanup with --data-dir %s",
			chain.Name, chain.Family, c, policy.Quote(other), policy.Quote(other))
	}
	return fmt.Errorf("chain %s (%s) in %s does not say that it is ours and stays", chain.Name, chain.Family, c)
}

func (e *Enforcer) removeFrom(ctx context.Context, c netfilter.Choice, chains []string, rec store.Record, lock *store.Lock) ([]RemovedChain, error) {
	b, err := e.Drivers.Open(c)
	if err != nil {
		return nil, err
	}
	observed, err := b.Observe(ctx, inEachFamily(chains...))
	if err != nil {
		return nil, fmt.Errorf("read what stands in %s: %w", c, err)
	}
	us := e.owner()
	var removed []RemovedChain
	var ours []netfilter.ChainRef
	for _, chain := range observed.Rules.Chains {
		switch {
		case chain.Owner == us || chain.Owner == (policy.Owner{}) && (b.OwnsTables() || owns(rec, chain.Family, chain.Name, c)):
			ours = append(ours, netfilter.ChainRef{Family: chain.Family, Name: chain.Name})
			removed = append(removed, RemovedChain{Chain: chain.Name, Family: chain.Family, Choice: c})
		case slices.Contains(chains, chain.Name):
			e.warn(notOurs(chain, c))
		}
	}
	if len(ours) == 0 {
		return nil, nil
	}
	if err := b.Remove(ctx, ours, lock.File()); err != nil {
		return nil, fmt.Errorf("remove chains from %s: %w", c, err)
	}
	return removed, nil
}
