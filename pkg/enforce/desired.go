// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// desire computes what the policies ask for on this node. Of the kernel it reads nothing but addresses, and what it takes
// to choose a backend.
func (e *Enforcer) desire(ctx context.Context, policies []policy.Policy, rec store.Record) *State {
	s := &State{
		Chains:   make([]Chain, len(policies)),
		node:     node{owner: e.owner(), triesAgain: e.AllBackends},
		onRecord: onRecord{now: e.currentBoot(rec)},
	}
	var addressesErr error
	if items := neededItems(policies, s.onRecord.now); len(items) > 0 {
		s.node.addresses, addressesErr = e.nodeAddresses(items.Families())
	}
	for i, p := range policies {
		c := &s.Chains[i]
		if c.Policy = p; len(p.OutputAddresses.Value) > 0 {
			c.fail(addressesErr)
			c.Policy.Outputs, c.changed = chosenOutputs(s, &p)
		}
	}
	owned := sync.OnceValue(func() []netfilter.OwnedChain {
		all, _ := e.Drivers.Owned(ctx) // an error is one of the choice, too
		return all
	})
	for i := range s.Chains {
		c := &s.Chains[i]
		choice, err := e.choose(ctx, s.onRecord.now, c.Policy, owned)
		if err != nil {
			c.fail(fmt.Errorf("choose a backend for chain %s: %w", c.Policy.Chain, err))
			continue
		}
		c.Choice = choice
		if !slices.ContainsFunc(s.observed.tables, func(t tables) bool { return t.choice == choice }) {
			b, err := e.Drivers.Open(choice)
			s.observed.tables = append(s.observed.tables, tables{choice: choice, whole: err == nil && b.OwnsTables()})
		}
	}
	e.desireChains(s)
	return s
}

// desireChains sets the desired rules and guards, in which the exempt pods are.
func (e *Enforcer) desireChains(s *State) {
	e.exemptPods(s)
	for i := range s.Chains {
		s.Chains[i].fail(e.desireRules(&s.Chains[i]))
	}
	s.desireGuards()
}

func (e *Enforcer) desireRules(c *Chain) error {
	if c.Choice == (netfilter.Choice{}) {
		return nil
	}
	b, err := e.Drivers.Open(c.Choice)
	if err == nil {
		err = c.Policy.CheckBounds(b.Layout())
	}
	if err != nil {
		c.Choice = netfilter.Choice{}
		return err
	}
	c.Desired = policy.Desired([]policy.Policy{c.Policy}, b.Layout(), e.owner())
	return nil
}

// desirePods lists the pods again, and desires what their exemption asks for.
func (e *Enforcer) desirePods(s *State) {
	if s.node.keepsAll { // what exists stays as it is
		return
	}
	s.onRecord.now.Namespaces = nil // so that all attachments are listed
	e.desireChains(s)
	s.onRecord.now.Namespaces = s.onRecord.planned.Namespaces
	s.plan() // and, if that is new, recordFirst compares
}

// currentBoot returns the record, or an empty one if it is of an earlier boot: the kernel lost what
// that one lists.
func (e *Enforcer) currentBoot(rec store.Record) store.Record {
	if rec.Boot != e.Dir.Boot() {
		return store.Record{Boot: e.Dir.Boot(), Outputs: rec.Outputs}
	}
	return rec
}

// choose returns the backend for the chain of a policy: the one on record, or in which the kernel has the chain, else the
// first that would accept its rules.
func (e *Enforcer) choose(
	ctx context.Context, rec store.Record, p policy.Policy, owned func() []netfilter.OwnedChain,
) (netfilter.Choice, error) {
	stated := p.Backend.Value
	for _, o := range rec.Chains {
		if o.Chain == p.Chain && (stated == policy.Auto || stated == o.Backend) && !o.Stuck {
			return ChoiceOf(o), nil
		}
	}
	if c, chosen := e.chosen[p.Chain]; chosen && (stated == policy.Auto || stated == c.Backend) {
		return c, nil
	}
	// Where the record was lost, the chain in the kernel tells.
	for _, o := range owned() {
		if !o.Guard && o.Chain == p.Chain && o.Owner == e.owner() && (stated == policy.Auto || stated == o.Choice.Backend) {
			return o.Choice, nil
		}
	}
	c, err := e.Drivers.Choose(ctx, p.Chain, stated, func(c netfilter.Choice) error {
		b, err := e.Drivers.Open(c)
		if err != nil {
			return err
		}
		return b.CheckWrite(ctx, policy.Desired([]policy.Policy{p}, b.Layout(), e.owner()), netfilter.Observation{})
	})
	if err == nil {
		if e.chosen == nil {
			e.chosen = map[string]netfilter.Choice{}
		}
		e.chosen[p.Chain] = c
	}
	return c, err
}
