// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Restore puts chains that were about to be taken over back to what a view has
// of them, and returns the record without them: of what an agent left nothing is
// to be lost because we could not do better. The record before tells what was
// ours already; that is for Ensure to bring back.
func (e *Enforcer) Restore(ctx context.Context, was *State, before, now store.Record, lock *store.Lock) store.Record {
	now.Chains = slices.Clone(now.Chains)
	for _, g := range was.Groups {
		b, err := e.Drivers.Open(g.Choice)
		if err != nil || b.OwnsTables() {
			continue
		}
		var adopted policy.Ruleset
		for _, c := range withoutChains(g.Observed, was.Failed).Chains {
			if !owns(before, c.Family, c.Name, g.Choice) {
				adopted.Chains = append(adopted.Chains, c)
			}
		}
		if err := b.Apply(ctx, adopted, netfilter.Observation{}, lock.File()); err != nil {
			e.warn(fmt.Errorf("put back what stood in %s: %w", g.Choice, err))
		}
		now.Chains = slices.DeleteFunc(now.Chains, func(o store.OwnedChain) bool {
			return choiceOf(o).SameBackend(g.Choice) && adopted.Find(o.Family, o.Chain) != nil
		})
	}
	if err := lock.PutRecord(now); err != nil {
		e.warn(fmt.Errorf("record what is owned: %w", err))
	}
	return now
}
