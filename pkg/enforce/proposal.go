// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Conflists is the runtimes' configuration directory. Functions return it, as most ADDs do not read it.
type Conflists interface {
	// HasEntry reports whether a conflist has a plugin entry for the network.
	HasEntry(network string) bool
	// LacksEntry reports whether none has. It is false while a file of the directory is unreadable.
	LacksEntry(network string) bool
	// HasEntryWith reports whether that entry states this policy.
	HasEntryWith(network string, s policy.SourcePolicy) bool
}

// Proposal is the documents as they should become: at first, those that are stored.
type Proposal struct {
	Sources []policy.Source
	Changed []policy.Source // those that differ from what is stored
	// Unreadable is how many documents cannot be read, whose sources are missing. What they may ask for stays.
	Unreadable int

	before   []policy.Source // before the first change, or nil
	policies []policy.Policy // merged from the sources, or nil
}

// Find returns the source, or nil.
func (p *Proposal) Find(id policy.SourceID) *policy.Source {
	return store.State{Sources: p.Sources}.Find(id)
}

// Chain returns the chain of a source, or "".
func (p *Proposal) Chain(id policy.SourceID) string {
	return cmp.Or(p.Find(id), &policy.Source{}).Policy.Chain
}

// Add adds or replaces a source. Of a network it keeps the stored policy if the new one is older
// than the conflist on disk; and a network that conflicts with it, and is in no conflist, is
// superseded. A network's PodSubnets are added to those that are stored; one with a ConfDir has none. The error is the
// conflicts that remain, or a bound that is exceeded; the proposal is then unchanged.
func (p *Proposal) Add(own policy.Source, disk func() Conflists, warn func(error)) error {
	stored, next := p.Find(own.ID), *p
	if own.ID.Kind != policy.Network {
		if stored != nil && reflect.DeepEqual(*stored, own) {
			return nil
		}
		next.set(own)
		return p.become(next, own)
	}
	changed, found := stored == nil || !stored.Policy.Equal(own.Policy), own.PodSubnets
	if changed && stored != nil && disk().HasEntryWith(own.ID.Name, stored.Policy) {
		warn(fmt.Errorf("%s: this ADD has an older entry than the conflist on disk, which stays in force", own.ID))
		changed, found = false, nil
	}
	from := own.ConfDir
	if changed { // a changed source comes after those that are in force
		own.Order = 1 + lastOrder(p.Sources)
	} else {
		own = *stored
	}
	own.PodSubnets = cmp.Or(stored, &policy.Source{}).PodSubnets
	isNew, _ := own.AddPodSubnets(found...) // the plugin warns of too many
	if from != "" {
		own.PodSubnets = nil
	}
	if changed || isNew || from != "" && own.ConfDir != from {
		own.ConfDir = from
		next.set(own)
	}
	if err := next.resolve(own, disk, warn); err != nil {
		return err
	}
	if changed {
		return p.become(next, own)
	}
	*p = next
	return nil
}

// become makes the proposal one with another policy of a source, unless the chain has too many rules then.
func (p *Proposal) become(next Proposal, changed policy.Source) error {
	if err := checkBounds(next.mergedChain(changed.Policy.Chain)); err != nil {
		return fmt.Errorf("%s: %w", changed.ID, err)
	}
	*p = next
	return nil
}

// checkBounds returns an error if the policy has too many rules. For a backend that is still to be
// chosen, addDesired checks that.
func checkBounds(p policy.Policy) error {
	return p.CheckBounds(policy.Layout{Sets: p.Backend.Value != policy.IPTables})
}

func (p *Proposal) set(changed ...policy.Source) {
	if p.before == nil {
		p.before = p.Sources
	}
	p.Sources, p.Changed, p.policies = WithSources(p.Sources, changed...), WithSources(p.Changed, changed...), nil
}

// WithSources returns the list with sources added or replaced.
func WithSources(list []policy.Source, changed ...policy.Source) []policy.Source {
	ids := make(map[policy.SourceID]bool, len(changed))
	for _, c := range changed {
		ids[c.ID] = true
	}
	out := slices.DeleteFunc(slices.Clone(list), func(x policy.Source) bool { return ids[x.ID] })
	return append(out, changed...)
}

func lastOrder(list []policy.Source) int64 {
	var last int64
	for _, c := range list {
		last = max(last, c.Order)
	}
	return last
}

// resolve resolves the conflicts that a network loses: the other network is superseded if it is in
// no conflist and this one is. The error is the conflicts that remain.
func (p *Proposal) resolve(own policy.Source, disk func() Conflists, warn func(error)) error {
	blocking := p.lostConflicts(own.ID)
	if len(blocking) > 0 && disk().HasEntry(own.ID.Name) {
		asked := map[policy.SourceID]bool{}
		for _, e := range blocking {
			id := e.InForce.Source
			if asked[id] {
				continue
			}
			asked[id] = true
			if !disk().LacksEntry(id.Name) {
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
	conflicts := p.mergedChain(p.Chain(id)).Conflicts
	return slices.DeleteFunc(slices.Clone(conflicts), func(e *policy.ConflictError) bool { return e.Superseded.Source != id })
}

// mergedChain returns the policy of one chain.
func (p *Proposal) mergedChain(chain string) policy.Policy {
	for _, merged := range p.merged() {
		if merged.Chain == chain {
			return merged
		}
	}
	return policy.Policy{Chain: chain}
}

// merged returns the policies of all chains. It merges only after a source changed.
func (p *Proposal) merged() []policy.Policy {
	if p.policies == nil {
		p.policies = policy.Merge(p.Sources)
	}
	return p.policies
}

// UnwritableError is why documents cannot be written. The rules may be right nevertheless.
type UnwritableError struct{ Err error }

func (e *UnwritableError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *UnwritableError) Unwrap() error { return e.Err }

// ObserveProposal is Observe for what a proposal asks for.
func (e *Enforcer) ObserveProposal(ctx context.Context, p *Proposal, rec store.Record) *State {
	s := e.observe(ctx, p.merged(), rec)
	if len(s.Drift()) > 0 {
		s = e.ObserveAgain(ctx, s) // the dump may have been torn
	}
	if p.Unreadable > 0 {
		before := s
		if p.before != nil {
			before = e.Observe(ctx, p.before, rec)
		}
		s.keepUnknown(before, p.Unreadable)
	}
	return s
}

// keepUnknown makes desired what unreadable documents may ask for: the chains without a policy, and those that hold
// more than the policies ask for. A chain of a changed policy must hold what the policy before asked for; and the
// chains without a policy must be as many as the documents, or one of these may ask for the same.
func (s *State) keepUnknown(before *State, documents int) {
	s.keep, s.Stale, s.Duplicates = true, nil, nil
	holdMore := func(of *State) map[policy.ChainFamily]bool {
		chains := map[policy.ChainFamily]bool{}
		for _, c := range of.Diff() {
			if c.Unexpected {
				chains[policy.ChainFamily{Chain: c.Chain, Family: c.Family}] = true
			}
		}
		return chains
	}
	unknown, was := holdMore(s), holdMore(before)
	others := map[string]bool{}
	for _, o := range s.record.Chains {
		if s.Find(o.Chain) == nil && before.Find(o.Chain) == nil && !o.Stuck {
			others[o.Chain] = true
		}
	}
	if len(others) >= documents {
		maps.DeleteFunc(unknown, func(c policy.ChainFamily, _ bool) bool { return before.Find(c.Chain) != nil && !was[c] })
	}
	kept := func(chain string, f policy.Family) bool {
		return s.Find(chain) == nil || unknown[policy.ChainFamily{Chain: chain, Family: f}]
	}
	s.Guard.Desired = slices.DeleteFunc(s.Guard.Desired, func(g policy.Guard) bool { return kept(g.Chain, g.Family) })
	for _, g := range s.Guard.Observed.Guards {
		if kept(g.Chain, g.Family) {
			s.Guard.Desired = append(s.Guard.Desired, g)
		}
	}
	s.Guard.Diff = slices.DeleteFunc(s.Guard.Diff, func(c policy.Change) bool { return kept(c.Chain, c.Family) })
	for i := range s.Chains {
		c := &s.Chains[i]
		c.Desired.Chains = slices.Clone(c.Desired.Chains)
		for j, want := range c.Desired.Chains {
			have := c.Observed.Find(want.Family, want.Name)
			if have == nil || len(have.Rules) == 0 || !kept(want.Name, want.Family) {
				continue
			}
			stays := *have
			if len(have.Jumps) == 0 {
				stays.Jumps = want.Jumps
			}
			c.Desired.Chains[j] = stays
			c.Diff = slices.DeleteFunc(c.Diff, func(d policy.Change) bool { return d.Family == want.Family })
			c.Diff = append(c.Diff, policy.CompareChain(&stays, have)...)
		}
	}
	for i := range s.tables {
		t := &s.tables[i]
		t.diff = slices.DeleteFunc(slices.Clone(t.diff), func(c policy.Change) bool { return c.Kind != policy.UnrecognizedChange })
		for _, o := range t.observation.Rules.Chains {
			if c := s.Find(o.Name); c == nil || c.Choice != t.choice {
				t.kept = append(t.kept, o)
			}
		}
	}
}

// ApplyProposal applies a proposal: it writes the documents beside those in force, syncs the
// rules, then replaces the documents. If check returns an error for the state after the sync, the
// documents are discarded and the rules are rolled back. It returns the state after the attempt.
func (e *Enforcer) ApplyProposal(
	ctx context.Context, lock *store.Lock, stored store.State, p *Proposal, check func(*State) error,
) (*State, error) {
	var staged []*store.Staged
	defer func() {
		for _, one := range staged {
			e.Warn(one.Discard())
		}
	}()
	before := e.ObserveProposal(ctx, p, stored.Record)
	before.change = changeOf(stored.Sources, p.Sources)
	for _, c := range p.Changed {
		one, err := lock.Stage(c)
		if err != nil {
			return before, &UnwritableError{err}
		}
		staged = append(staged, one)
	}
	after := before
	if p.Unreadable == 0 || len(before.Diff()) > 0 {
		after = e.sync(ctx, before, p.changedPolicies(stored), lock)
	}
	if err := check(after); err != nil {
		if (len(staged) > 0 || !before.PodsRecorded()) && !lock.DryRun() {
			e.rollBack(ctx, before, p.Unreadable, stored.Record, lock)
		}
		return after, err
	}
	for i, c := range p.Changed {
		if chain := after.Find(c.Policy.Chain); chain == nil || chain.Err == nil { // else a newer version owns its rules
			e.Warn(staged[i].Commit()) // a document that lags behind the rules is written the next time
		}
	}
	if !lock.DryRun() && !slices.Equal(before.exempt.namespaces, before.record.Namespaces) {
		// An ADD may have recorded its pod since the attachments were listed, and read the documents before they changed.
		rec := after.record
		rec.Namespaces = nil
		after = e.Sync(ctx, e.ObserveProposal(ctx, p, rec), lock)
	}
	return after, nil
}

// changedPolicies returns the changed sources whose policy is another one.
func (p *Proposal) changedPolicies(stored store.State) []policy.Source {
	return slices.DeleteFunc(slices.Clone(p.Changed), func(c policy.Source) bool {
		was := cmp.Or(stored.Find(c.ID), &policy.Source{})
		c.PodSubnets, c.ConfDir = was.PodSubnets, was.ConfDir
		return reflect.DeepEqual(*was, c)
	})
}

// rollBack restores the rules that the documents in force ask for, and the chains of agents that
// were about to be adopted: one family may have been written, and the other not.
func (e *Enforcer) rollBack(ctx context.Context, before *State, unreadable int, rec store.Record, lock *store.Lock) {
	stored, err := e.Dir.Load()
	if err != nil {
		e.Warn(err)
		return
	}
	now, rest := stored.Record, *e
	now.Chains, now.Namespaces, now.Pods = slices.Clone(now.Chains), rec.Namespaces, rec.Pods
	rest.Attachments = nil // those of this ADD stay out
	for _, c := range before.Chains {
		b, err := e.Drivers.Open(c.Choice)
		if c.Err != nil || err != nil || b.OwnsTables() {
			continue
		}
		var adopted policy.Ruleset
		for _, o := range c.Observed.Chains {
			if !owns(rec, o.Family, o.Name, c.Choice) {
				adopted.Chains = append(adopted.Chains, o)
			}
		}
		if len(adopted.Chains) == 0 {
			continue
		}
		if err := b.Apply(ctx, adopted, netfilter.Observation{}, lock.File()); err != nil {
			e.Warn(fmt.Errorf("restore the rules of chain %s in %s: %w", c.Policy.Chain, c.Choice, err))
		}
		now.Chains = slices.DeleteFunc(now.Chains, func(o store.OwnedChain) bool {
			return choiceOf(o) == c.Choice && adopted.Find(o.Family, o.Chain) != nil
		})
	}
	if err := lock.PutRecord(now); err != nil {
		e.Warn(fmt.Errorf("record the owned chains: %w", err))
	}
	rest.Sync(ctx, rest.ObserveProposal(ctx, &Proposal{Sources: stored.Sources, Unreadable: unreadable}, now), lock)
}
