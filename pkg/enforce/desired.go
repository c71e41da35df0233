// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// desire computes what the policies ask for on this node. Of the kernel it reads nothing but addresses, and
// what it takes to choose a backend.
func (e *Enforcer) desire(ctx context.Context, policies []policy.Policy, rec store.Record) *State {
	s := &State{
		Chains:   make([]Chain, len(policies)),
		node:     node{owner: e.owner(), triesAgain: e.AllBackends},
		onRecord: onRecord{now: e.currentBoot(rec)},
	}
	for i, p := range policies {
		s.Chains[i].Policy = p
	}
	e.desireOutputs(s)
	owned := ownedChains{drivers: e.Drivers, of: map[policy.Backend]ownedReading{}}
	for i := range s.Chains {
		c := &s.Chains[i]
		e.desireBackend(ctx, s, c, e.lastBoot(rec, c.Policy.Chain), &owned)
	}
	e.desireChains(s, recordedPods)
	return s
}

// desireBackend chooses the backend of a chain.
func (e *Enforcer) desireBackend(
	ctx context.Context, s *State, c *Chain, lastBoot policy.Backend, owned *ownedChains,
) {
	choice, err := e.choose(ctx, s.onRecord.now, c.Policy, lastBoot, owned)
	if err != nil {
		c.fail(fmt.Errorf("choose a backend for chain %s: %w", c.Policy.Chain, err))
		return
	}
	c.Choice = choice
	if s.tablesOf(choice) == nil {
		t := tables{choice: choice}
		b, err := e.Drivers.Open(choice)
		if err == nil { // else desireRules fails
			t.whole = b.OwnsTables()
			t.layout = layoutOf(b, choice, s.onRecord.now)
		}
		s.observed.tables = append(s.observed.tables, t)
	}
}

// desireChains sets the desired rules and guards, in which the exempt pods are.
func (e *Enforcer) desireChains(s *State, listing podListing) {
	e.desireExemption(s, listing)
	for i := range s.Chains {
		c := &s.Chains[i]
		c.fail(e.desireRules(s, c))
	}
	s.desireGuards()
}

func (e *Enforcer) desireRules(s *State, c *Chain) error {
	if c.Choice == (netfilter.Choice{}) {
		return nil
	}
	layout := s.tablesOf(c.Choice).layout
	_, err := e.Drivers.Open(c.Choice)
	if err == nil {
		err = c.Policy.CheckBounds(layout)
	}
	if err != nil {
		c.Choice = netfilter.Choice{}
		return err
	}
	c.Desired = policy.Desired([]policy.Policy{c.Policy}, layout, e.owner())
	return nil
}

// desirePods lists the pods again, and desires what their exemption asks for.
func (e *Enforcer) desirePods(s *State) {
	if s.node.keepsAll { // what exists stays as it is
		return
	}
	e.desireChains(s, allPods)
	s.plan() // and, if that is new, recordFirst compares
}

// desireRecorded desires the rules with the exempt pods and the addresses of outputAddresses that are on
// record.
func (e *Enforcer) desireRecorded(s *State) {
	s.node.exempt = exemption{ExemptPods: s.onRecord.now.ExemptPods}
	for i := range s.Chains {
		c := &s.Chains[i]
		c.Policy.SetExemptPods(s.node.exempt.Addresses())
		c.Policy.Outputs = nil
		for _, o := range outputsOf(s.onRecord.now, c.Policy.Chain) {
			c.Policy.Outputs = append(c.Policy.Outputs, o.Addresses...)
		}
		c.changed = false
		c.fail(e.desireRules(s, c))
	}
	s.desireGuards()
}

// currentBoot returns the record as it counts in this boot: of one of an earlier boot only the chosen
// addresses stay, so that a boot chooses no others. The kernel lost what else it lists.
func (e *Enforcer) currentBoot(rec store.Record) store.Record {
	if rec.Boot != e.Dir.Boot() {
		return store.Record{Boot: e.Dir.Boot(), Outputs: rec.Outputs}
	}
	return rec
}

// lastBoot returns the backend of a chain by a record of an earlier boot, or "".
func (e *Enforcer) lastBoot(rec store.Record, chain string) policy.Backend {
	if rec.Boot == e.Dir.Boot() {
		return ""
	}
	for _, o := range rec.Chains {
		if o.Chain == chain && !o.RemovalFailed {
			return o.Backend
		}
	}
	return ""
}

// choose returns the backend for the chain of a policy: the one on record, or in which the kernel has the
// chain, else that of the last boot, else the first that would accept its rules.
//
// A backend is chosen once in a boot, by asking each candidate, and kept: a program that fails once must not
// move a chain. Where the record was lost, the chain in the kernel tells, and a failed reading chooses
// nothing: in another backend the chain would stay in force beside the new one, with the old policy. The
// plugin chooses, because it sees the host, and the reconciler follows: its image may lack the programs.
func (e *Enforcer) choose(
	ctx context.Context, rec store.Record, p policy.Policy, lastBoot policy.Backend,
	owned *ownedChains,
) (netfilter.Choice, error) {
	stated := p.Backend.Value
	accepts := func(b policy.Backend) bool { return stated == policy.Auto || stated == b }
	for _, o := range rec.Chains {
		if o.Chain == p.Chain && !o.RemovalFailed && accepts(o.Backend) {
			return ChoiceOf(o), nil
		}
	}
	chosen, wasChosen := e.chosen[p.Chain]
	if wasChosen && accepts(chosen.Backend) {
		return chosen, nil
	}
	all, err := owned.in(ctx, stated)
	for _, o := range all {
		isOurs := o.Owner == e.owner() && !o.Guard
		if isOurs && o.Chain == p.Chain {
			return o.Choice, nil
		}
	}
	if err != nil {
		return netfilter.Choice{}, err
	}
	ask := func(c netfilter.Choice) error { return e.wouldAccept(ctx, c, p) }
	choice, err := e.Drivers.Choose(ctx, p.Chain, stated, lastBoot, ask)
	if err != nil {
		return choice, err
	}
	if e.chosen == nil {
		e.chosen = map[string]netfilter.Choice{}
	}
	e.chosen[p.Chain] = choice
	return choice, nil
}

// ownedChains are the chains in the kernel that name an owner. They are read once for each backend that
// policies state, as a backend that none of them may use must not fail the choice.
type ownedChains struct {
	drivers netfilter.Drivers
	of      map[policy.Backend]ownedReading
}

type ownedReading struct {
	chains []netfilter.OwnedChain
	err    error
}

// in returns the chains in a stated backend, or for auto in all of them.
func (o *ownedChains) in(ctx context.Context, stated policy.Backend) ([]netfilter.OwnedChain, error) {
	known, isKnown := o.of[stated]
	if isKnown {
		return known.chains, known.err
	}
	drivers, err := o.drivers.Candidates(stated)
	if err != nil {
		return nil, err
	}
	chains, err := drivers.Owned(ctx)
	o.of[stated] = ownedReading{chains, err}
	return chains, err
}

// wouldAccept returns why a backend does not accept the rules of a policy, or nil. It asks the kernel.
func (e *Enforcer) wouldAccept(ctx context.Context, c netfilter.Choice, p policy.Policy) error {
	b, err := e.Drivers.Open(c)
	if err != nil {
		return err
	}
	layout, err := b.Supported(ctx)
	if err != nil {
		return err
	}
	desired := policy.Desired([]policy.Policy{p}, layout, e.owner())
	err = b.CheckWrite(ctx, desired, netfilter.Observation{})
	if err != nil {
		return err
	}
	for _, f := range p.Families() {
		err = b.CanList(ctx, f)
		if err != nil {
			return err
		}
	}
	return nil
}
