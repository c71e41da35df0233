// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Conflists is what the runtimes' configuration directory says of the networks of a node.
type Conflists interface {
	// HasEntry reports whether a conflist has a plugin entry for the network.
	HasEntry(network string) bool
	// LacksEntry reports whether none has. That is unknown, and false, while a file of the
	// directory cannot be read.
	LacksEntry(network string) bool
	// HasEntryWith reports whether that entry states this policy.
	HasEntryWith(network string, s policy.SourcePolicy) bool
}

// Proposal is the documents as they should become.
type Proposal struct {
	Sources []policy.Source
	Changed []policy.Source // those that differ from what is stored

	policies map[string]policy.Policy // of the chains that were merged
}

// NewProposal proposes what is stored.
func NewProposal(stored []policy.Source) *Proposal {
	return &Proposal{Sources: slices.Clone(stored)}
}

// Find returns the source, or nil.
func (p *Proposal) Find(id policy.SourceID) *policy.Source {
	for i := range p.Sources {
		if p.Sources[i].ID == id {
			return &p.Sources[i]
		}
	}
	return nil
}

// Chain returns the chain of a source, or "".
func (p *Proposal) Chain(id policy.SourceID) string {
	if s := p.Find(id); s != nil {
		return s.Policy.Chain
	}
	return ""
}

// Add adds or replaces a source. Of a network it keeps the stored policy if the new one
// is older than the conflist on disk; and a network that conflicts with it, and is in no
// conflist, is superseded. The error is the conflicts that remain, or a bound that is
// exceeded; the proposal is then unchanged.
func (p *Proposal) Add(own policy.Source, disk Conflists, warn func(error)) error {
	stored := p.Find(own.ID)
	if own.ID.Kind != policy.Network {
		if stored != nil && reflect.DeepEqual(*stored, own) {
			return nil
		}
		return p.change(own)
	}
	changed := stored == nil || !stored.Policy.Equal(own.Policy)
	if changed && stored != nil && disk.HasEntryWith(own.ID.Name, stored.Policy) {
		warn(fmt.Errorf("%s: this ADD has an older entry than the conflist on disk, which stays in force", own.ID))
		changed = false
	}
	next := *p
	if changed { // a changed source comes after those that are in force
		own.Order = 1 + lastOrder(p.Sources)
		if err := next.change(own); err != nil {
			return err
		}
	} else {
		own = *stored
	}
	if err := next.resolve(own, disk, warn); err != nil {
		return err
	}
	*p = next
	return nil
}

// change sets a source, unless its chain has too many rules then.
func (p *Proposal) change(own policy.Source) error {
	next := *p
	next.set(own)
	if err := checkBounds(next.merged(own.Policy.Chain)); err != nil {
		return fmt.Errorf("%s: %w", own.ID, err)
	}
	*p = next
	return nil
}

// AddAll adds networks, each as Add does, and returns the errors by source. If there is
// no conflict it merges once, and not once for each.
func (p *Proposal) AddAll(all []policy.Source, disk Conflists, warn func(error)) map[policy.SourceID]error {
	if next, ok := p.withoutConflict(all); ok {
		*p = next
		return nil
	}
	errs := map[policy.SourceID]error{}
	for _, c := range all {
		if err := p.Add(c, disk, warn); err != nil {
			errs[c.ID] = err
		}
	}
	return errs
}

// withoutConflict returns the proposal with these networks, and whether no network
// conflicts with another or is superseded.
func (p *Proposal) withoutConflict(all []policy.Source) (Proposal, bool) {
	next := Proposal{Sources: slices.Clone(p.Sources), Changed: slices.Clone(p.Changed)}
	at := map[policy.SourceID]int{}
	ok := true
	for i, c := range next.Sources {
		at[c.ID] = i
		ok = ok && !c.Superseded
	}
	order := lastOrder(p.Sources)
	for _, c := range all {
		i, stored := at[c.ID]
		if stored && next.Sources[i].Policy.Equal(c.Policy) {
			continue
		}
		order++
		c.Order = order
		next.Changed = append(next.Changed, c)
		if stored {
			next.Sources[i] = c
		} else {
			next.Sources = append(next.Sources, c)
		}
	}
	for _, merged := range next.merge(everyChain) {
		ofNetworks := func(e *policy.ConflictError) bool { return e.Superseded.Source.Kind == policy.Network }
		ok = ok && checkBounds(merged) == nil && !slices.ContainsFunc(merged.Conflicts, ofNetworks)
	}
	return next, ok
}

// checkBounds returns an error if the policy has too many rules. For a backend that is
// still to be chosen, addDesired checks that.
func checkBounds(p policy.Policy) error {
	return p.CheckBounds(policy.Layout{Sets: p.Backend.Value != policy.IPTables})
}

func (p *Proposal) set(c policy.Source) {
	chain := p.Chain(c.ID)
	p.policies = maps.Clone(p.policies)
	maps.DeleteFunc(p.policies, func(name string, _ policy.Policy) bool { return name == chain || name == c.Policy.Chain })
	p.Sources = WithSource(p.Sources, c)
	p.Changed = WithSource(p.Changed, c)
}

// WithSource returns the list with a source added or replaced.
func WithSource(list []policy.Source, c policy.Source) []policy.Source {
	out := slices.DeleteFunc(slices.Clone(list), func(x policy.Source) bool { return x.ID == c.ID })
	return append(out, c)
}

func lastOrder(list []policy.Source) int64 {
	var last int64
	for _, c := range list {
		last = max(last, c.Order)
	}
	return last
}

// resolve resolves the conflicts that a network loses: the other network is superseded if
// it is in no conflist and this one is. The error is the conflicts that remain.
func (p *Proposal) resolve(own policy.Source, disk Conflists, warn func(error)) error {
	blocking := p.lostConflicts(own.ID)
	if len(blocking) > 0 && disk.HasEntry(own.ID.Name) {
		asked := map[policy.SourceID]bool{}
		for _, e := range blocking {
			id := e.InForce.Source
			if asked[id] {
				continue
			}
			asked[id] = true
			if !disk.LacksEntry(id.Name) {
				continue
			}
			other := *p.Find(id)
			other.Superseded, own.Superseded = true, false
			p.set(other)
			p.set(own)
			warn(fmt.Errorf("%s is no longer in any conflist and is superseded by %s", other.ID, own.ID))
		}
		blocking = p.lostConflicts(own.ID)
	}
	if len(blocking) > 0 {
		return blocking
	}
	if own.Superseded {
		own.Superseded = false
		p.set(own)
	}
	return nil
}

// lostConflicts returns the conflicts in which the source is superseded.
func (p *Proposal) lostConflicts(id policy.SourceID) policy.ConflictErrors {
	var lost policy.ConflictErrors
	for _, e := range p.merged(p.Chain(id)).Conflicts {
		if e.Superseded.Source == id {
			lost = append(lost, e)
		}
	}
	return lost
}

// merged returns the policy of one chain.
func (p *Proposal) merged(chain string) policy.Policy {
	for _, merged := range p.merge(func(name string) bool { return name == chain }) {
		return merged
	}
	return policy.Policy{Chain: chain}
}

// merge returns the policies of these chains, as policy.Merge does. It merges a chain only
// after one of its sources changed.
func (p *Proposal) merge(of func(chain string) bool) []policy.Policy {
	byChain := map[string][]policy.Source{}
	for _, c := range p.Sources {
		if of(c.Policy.Chain) {
			byChain[c.Policy.Chain] = append(byChain[c.Policy.Chain], c)
		}
	}
	if p.policies == nil {
		p.policies = map[string]policy.Policy{}
	}
	var policies []policy.Policy
	for _, chain := range slices.Sorted(maps.Keys(byChain)) {
		if _, known := p.policies[chain]; !known {
			p.policies[chain] = policy.Merge(byChain[chain])[0]
		}
		policies = append(policies, p.policies[chain])
	}
	return policies
}

func everyChain(string) bool { return true }

// UnwritableError is why documents cannot be written. The rules may be right nevertheless.
type UnwritableError struct{ Err error }

func (e *UnwritableError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *UnwritableError) Unwrap() error { return e.Err }

// ApplyProposal puts a proposal in force: it writes the documents beside those in force,
// syncs the rules, then replaces the documents. If check returns an error for the state
// after the sync, the documents are discarded and the rules are rolled back. It returns
// the state after the attempt.
func (e *Enforcer) ApplyProposal(
	ctx context.Context, lock *store.Lock, stored store.State, p *Proposal, check func(*State) error,
) (*State, error) {
	var staged []*store.Staged
	each := func(do func(*store.Staged) error) error {
		var errs []error
		for _, s := range staged {
			errs = append(errs, do(s))
		}
		return errors.Join(errs...)
	}
	defer func() { e.warn(each((*store.Staged).Discard)) }()
	before := e.observe(ctx, p.merge(everyChain), stored.Record)
	for _, c := range p.Changed {
		one, err := lock.Stage(c)
		if err != nil {
			return before, &UnwritableError{err}
		}
		staged = append(staged, one)
	}
	after := e.sync(ctx, before, p.Changed, lock)
	if err := check(after); err != nil {
		if len(staged) > 0 && !lock.DryRun() {
			e.rollBack(ctx, before, stored.Record, lock)
		}
		return after, err
	}
	e.warn(each((*store.Staged).Commit)) // a document that lags behind the rules is written the next time
	return after, nil
}

// rollBack restores the rules that the documents in force ask for, and the chains of
// agents that were about to be adopted: one family may have been written, and the other
// not.
func (e *Enforcer) rollBack(ctx context.Context, before *State, rec store.Record, lock *store.Lock) {
	stored, err := e.Dir.Load()
	if err != nil {
		e.warn(err)
		return
	}
	now := stored.Record
	now.Chains = slices.Clone(now.Chains)
	for _, g := range before.Groups {
		b, err := e.Drivers.Open(g.Choice)
		if err != nil || b.OwnsTables() {
			continue
		}
		var adopted policy.Ruleset
		for _, c := range withoutChains(g.Observed, before.Failed).Chains {
			if !owns(rec, c.Family, c.Name, g.Choice) {
				adopted.Chains = append(adopted.Chains, c)
			}
		}
		if err := b.Apply(ctx, adopted, netfilter.Observation{}, lock.File()); err != nil {
			e.warn(fmt.Errorf("restore the rules in %s: %w", g.Choice, err))
		}
		now.Chains = slices.DeleteFunc(now.Chains, func(o store.OwnedChain) bool {
			return choiceOf(o).SameBackend(g.Choice) && adopted.Find(o.Family, o.Chain) != nil
		})
	}
	if err := lock.PutRecord(now); err != nil {
		e.warn(fmt.Errorf("record the owned chains: %w", err))
	}
	e.Sync(ctx, e.Observe(ctx, stored.Sources, now), lock)
}
