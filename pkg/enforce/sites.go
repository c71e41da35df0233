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

// noteSites puts on record what is about to be made beside the chains of the
// view: what they stand in together with those of others, where it is missing.
// What was noted before stays, for who made it first makes no difference to who
// comes after.
func (e *Enforcer) noteSites(ctx context.Context, owned *store.Record, v *State) {
	for _, g := range v.Groups {
		if len(g.Diff) == 0 {
			continue
		}
		b, err := e.Drivers.Open(g.Choice)
		if err != nil {
			continue // and apply says so
		}
		desired := withoutChains(g.Desired, v.Failed)
		for _, f := range policy.Families() {
			if !slices.ContainsFunc(desired.Chains, func(c policy.Chain) bool { return c.Family == f }) {
				continue
			}
			missing, err := b.Lacks(ctx, f)
			e.warn(err)
			if missing != netfilter.SiteThere {
				noteSite(owned, store.MadeSite{
					Family: f, Backend: g.Choice.Backend, Variant: g.Choice.Variant, Site: string(missing),
				})
			}
		}
	}
}

func noteSite(owned *store.Record, m store.MadeSite) {
	owned.Made = slices.Clone(owned.Made)
	for i, before := range owned.Made {
		if before.Family == m.Family && placeOf(before).SamePlace(placeOf(m)) {
			if m.Site == string(netfilter.SiteTable) { // which has the chain in it
				owned.Made[i] = m
			}
			return
		}
	}
	owned.Made = append(owned.Made, m)
}

func placeOf(m store.MadeSite) netfilter.Choice {
	return netfilter.Choice{Backend: m.Backend, Variant: m.Variant}
}

// vacate takes away what was made for chains of ours where the record has none
// any more, unless others use it by now. What fails stays on record.
func (e *Enforcer) vacate(ctx context.Context, owned *store.Record) error {
	var left []store.MadeSite
	var errs []error
	for _, m := range owned.Made {
		inUse := slices.ContainsFunc(owned.Chains, func(o store.OwnedChain) bool {
			return o.Family == m.Family && choiceOf(o).SamePlace(placeOf(m))
		})
		if !inUse {
			b, err := e.Drivers.Open(placeOf(m))
			if err == nil {
				err = b.Vacate(ctx, m.Family, netfilter.Site(m.Site))
			}
			if err == nil {
				continue
			}
			errs = append(errs, fmt.Errorf("leave %s as it was: %w", placeOf(m), err))
		}
		left = append(left, m)
	}
	owned.Made = left
	return errors.Join(errs...)
}
