// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

type backend struct{ driver *Driver }

// Layout implements netfilter.Backend.
func (b *backend) Layout() policy.Layout { return policy.Layout{Sets: true} }

// Exclusive implements netfilter.Backend.
func (b *backend) OwnsTables() bool { return true }

// Observe implements netfilter.Backend.
func (b *backend) Observe(context.Context, []netfilter.ChainRef) (netfilter.Observation, error) {
	var all policy.Ruleset
	tables, err := b.read()
	for _, f := range policy.Families() {
		if t := tables[f]; t != nil {
			rs := t.ruleset(f)
			all.Chains = append(all.Chains, rs.Chains...)
			all.Unrecognized = append(all.Unrecognized, rs.Unrecognized...)
		}
	}
	return netfilter.Observation{Rules: all}, err
}

func (b *backend) read() (map[policy.Family]*table, error) {
	conn, err := b.driver.dial()
	if err != nil {
		return nil, err
	}
	var tables map[policy.Family]*table
	err = conn.ConsistentRead(func() (err error) {
		tables = map[policy.Family]*table{}
		for _, f := range policy.Families() {
			if tables[f], err = read(conn, f); err != nil {
				return err
			}
		}
		return nil
	})
	return tables, err
}

// Apply implements netfilter.Backend. It needs no child, so nobody inherits the
// lock.
func (b *backend) Apply(_ context.Context, desired policy.Ruleset, _ netfilter.Observation, _ *os.File) error {
	return b.write(func(f policy.Family, t *table) *plan { return planTable(f, t, chainsOf(desired, f)) })
}

// Able implements netfilter.Backend: a program can make a table its own.
func (b *backend) CanWrite(_ context.Context, f policy.Family) error {
	conn, err := b.driver.dial()
	if err != nil {
		return err
	}
	t, err := conn.Table(headerOf(f).link, tableName)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return usable(err)
	}
	if t.Owner != 0 {
		return fmt.Errorf("nftables: %w: table %s %s is owned by another program (flags owner, netlink port %d, which is often its pid), "+
			"which alone may change it as long as it runs; end it", netfilter.ErrUnusable, headerOf(f).link, tableName, t.Owner)
	}
	return nil
}

// Remove implements netfilter.Backend: what else stands in the tables stays as
// it is, but for sets that no rule names; a table without a chain goes.
func (b *backend) Remove(_ context.Context, chains []netfilter.ChainRef, _ *os.File) error {
	return b.write(func(f policy.Family, t *table) *plan {
		return planRemoval(f, t, func(name string) bool {
			return slices.Contains(chains, netfilter.ChainRef{Family: f, Name: name})
		})
	})
}

// write carries out what is planned for the tables as they are. Where others
// changed meanwhile what the plan was about, it begins anew. What the kernel
// refuses all the same is written as new tables: what is wrong with those that
// are there may not show when they are read.
func (b *backend) write(planFor func(policy.Family, *table) *plan) error {
	const times = 3
	var err error
	for range times {
		err = b.writeOnce(planFor)
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrExist) {
			break
		}
	}
	var refused *nfnetlink.Error
	if errors.As(err, &refused) && !errors.Is(err, os.ErrPermission) {
		again := b.writeOnce(func(f policy.Family, t *table) *plan {
			p := planFor(f, t)
			if t.exists && !p.empty() {
				t.broken = true
				p = planFor(f, t)
			}
			return p
		})
		if again == nil {
			return nil
		}
	}
	if err != nil { // the next writer would find them too
		_ = b.writeOnce(leftovers)
	}
	return err
}

// leftovers plans the removal of what a writer left that ended between its batches.
func leftovers(f policy.Family, t *table) *plan {
	return planRemoval(f, t, func(string) bool { return false })
}

func (b *backend) writeOnce(planFor func(policy.Family, *table) *plan) error {
	conn, err := b.driver.dial()
	if err != nil {
		return err
	}
	tables, err := b.read()
	if err != nil {
		return err
	}
	var plans []*plan
	for _, f := range policy.Families() {
		plans = append(plans, planFor(f, tables[f]))
	}
	return commit(conn, plans)
}
