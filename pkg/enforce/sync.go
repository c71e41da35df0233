// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Sync applies the difference that an observation found and returns the state after it. The caller observed
// with the lock held, and not for the first time: a dump can be torn, so a difference is repaired only if the
// last one of several observations has it. Errors are reported per chain, in the State.
func (e *Enforcer) Sync(ctx context.Context, before *State, lock *store.Lock) *State {
	if before.InSync() {
		return before
	}
	return e.run(ctx, before.clone(), lock)
}

// CheckSync returns the state that a Sync would leave, and writes nothing: it asks the kernel whether it
// accepts the rules, and takes what it accepts as written. It does not ask whether files can be written.
func (e *Enforcer) CheckSync(ctx context.Context, before *State) *State {
	if before.InSync() {
		return before
	}
	return e.check(ctx, before.clone())
}

// Apply stores the documents of a proposal, if the kernel accepts what they ask for, and syncs the rules.
// With an error the rules are as before: it is why the kernel refuses the rules, or an UnwritableError. Some
// documents may be stored then, if another one could not be; any later sync applies them. What fails after
// that is in the State, and repaired by any later sync.
func (e *Enforcer) Apply(
	ctx context.Context, lock *store.Lock, stored store.State, p *Proposal,
) (*State, error) {
	s := e.observeChange(ctx, stored, p)
	if len(p.Changed) == 0 && s.InSync() {
		return s, nil
	}
	s = e.run(ctx, s, lock)
	return s, cmp.Or(s.progress.refused, s.RecordErr)
}

// CheckApply returns the state that an Apply would leave, as CheckSync does.
func (e *Enforcer) CheckApply(ctx context.Context, stored store.State, p *Proposal) *State {
	s := e.observeChange(ctx, stored, p)
	if len(p.Changed) == 0 && s.InSync() {
		return s
	}
	return e.check(ctx, s)
}

// observeChange observes what a proposal asks for, whose documents are to be stored.
func (e *Enforcer) observeChange(ctx context.Context, stored store.State, p *Proposal) *State {
	s := e.ObserveProposal(ctx, p, stored.Record)
	s.changes(stored.Sources, p)
	s.documents.restored = len(stored.Unreadable) > 0
	return s
}

// changes makes the documents of a proposal those that are to be stored.
func (s *State) changes(before []policy.Source, p *Proposal) {
	s.documents = documents{after: p.Sources, unstored: p.Changed}
	s.documents.before = append([]policy.Source{}, before...) // not nil, also without any
}

// run takes the steps from an observation.
func (e *Enforcer) run(ctx context.Context, s *State, lock *store.Lock) *State {
	if len(s.onRecord.now.Chains) == 0 {
		namespace, err := e.checkFirstWrite(ctx)
		if namespace != nil {
			defer func() { _ = namespace.Close() }()
		}
		if err != nil {
			for i := range s.Chains {
				s.Chains[i].fail(err)
			}
			return s
		}
	}
	s.begin(store.BootTime())
	s = takeSteps(ctx, s, does{e, lock})
	if s.RecordErr == nil && s.progress.refused == nil && !s.node.keepsAll {
		e.removeDuplicates(ctx, s, lock)
	}
	return s
}

// check takes the steps from an observation, and asks the kernel in place of writing. What it accepts no
// longer differs, and the errors say what it refuses. Only the difference of guards stays if they fail: it
// says which chains that is about.
func (e *Enforcer) check(ctx context.Context, s *State) *State {
	s.progress.asked = true
	s.begin(store.BootTime())
	s = takeSteps(ctx, s, asks{e})
	guardDiff := s.Guard.Diff
	s.discardDiff()
	if s.Guard.Err != nil {
		s.Guard.Diff = guardDiff
	}
	return s
}

// begin takes the tables as read often enough: the caller has observed twice what differs. Those of
// iptables-legacy have no generation, and would be read again before each write. The guard tables have one,
// and are read again if they could be torn.
func (s *State) begin(now int64) {
	s.progress.began, s.onRecord.before = now, s.onRecord.now
	for i := range s.observed.tables {
		s.observed.tables[i].readings = enoughReadings
	}
	s.plan()
}

// plan decides what is to be on record before anything is written: the chains that are about to be owned,
// besides those that are, and the resets that are due then.
func (s *State) plan() {
	planned := s.onRecord.now
	planned.Chains = s.plannedChains()
	planned.Outputs = s.outputs(s.onRecord.now)
	planned.Former = s.former(planned.Outputs)
	planned.ExemptPods = s.node.exempt.ExemptPods
	planned.NoRandomFully = s.noRandomFully()
	for i := range s.Chains {
		c := &s.Chains[i]
		c.failed = c.Err // also if it can be read later
	}
	planned.Resets = s.resets(s.progress.began)
	s.onRecord.planned = planned
}

// plannedChains returns the chains that are to be written, then the others on record: choose takes the first
// of a name. One that could not be removed, and is wanted again, has that mark until it is written.
func (s *State) plannedChains() []store.OwnedChain {
	var planned []store.OwnedChain
	for i := range s.Chains {
		c := &s.Chains[i]
		if c.Err != nil {
			continue
		}
		for _, d := range c.Desired.Chains {
			planned = append(planned, store.OwnedChain{
				Chain: d.Name, Family: d.Family, Backend: c.Choice.Backend, Variant: c.Choice.Variant,
				RemovalFailed: s.removalFailed(d.Name, d.Family, c.Choice),
			})
		}
	}
	for _, o := range s.onRecord.now.Chains {
		if !owns(store.Record{Chains: planned}, o.Family, o.Chain, ChoiceOf(o)) {
			planned = append(planned, o)
		}
	}
	return planned
}

// removalFailed reports whether the record has a chain as one that could not be removed.
func (s *State) removalFailed(chain string, f policy.Family, in netfilter.Choice) bool {
	for _, o := range s.onRecord.now.Chains {
		if o.Chain == chain && o.Family == f && ChoiceOf(o) == in && o.RemovalFailed {
			return true
		}
	}
	return false
}
