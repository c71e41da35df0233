// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Enforcer syncs the rules of one node, which is a dataDir and the network namespace of the
// process.
type Enforcer struct {
	Dir     *store.Dir
	Drivers netfilter.Drivers
	// Warn is called with errors that do not fail the work at hand, and with nil.
	Warn func(error)
	// PreferredBackend is the backend for chains whose sources state none. A chain on record in
	// another backend moves there. With "" or Auto the record decides.
	PreferredBackend policy.Backend
	// Owned returns the chains and guard tables that name an owner. Nil reads them from the kernel.
	Owned func(context.Context) ([]netfilter.OwnedChain, error)
	// Conntrack deletes the connections that a judge calls stale, and returns how many there were. With
	// nil, resets end with ErrNoConntrack.
	Conntrack func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error)
	// AllBackends makes Observe look for chains of the same names in the other backends, where an
	// agent may have created them, and for chains of other dataDirs.
	AllBackends bool
	// KeepBackend keeps chains in the backend on record although this process cannot write there:
	// the plugin, which chose it, can.
	KeepBackend bool
}

// Observe reads the kernel and compares it with what the sources ask for. It writes nothing, and
// runs no program on nf_tables if the record has this boot's choices. It chooses a backend for a
// chain that is not on record, without recording it.
func (e *Enforcer) Observe(ctx context.Context, sources []policy.Source, rec store.Record) *State {
	return e.observe(ctx, policy.Merge(sources), rec)
}

func (e *Enforcer) observe(ctx context.Context, policies []policy.Policy, rec store.Record) *State {
	rec = e.currentBoot(rec)
	s := &State{Policies: policies, record: rec, Failed: map[string]error{}}
	for _, p := range s.Policies {
		choice, err := e.choose(ctx, rec, p)
		if err != nil {
			err = fmt.Errorf("choose a backend for chain %s: %w", p.Chain, err)
		} else {
			err = e.addDesired(s, p, choice)
		}
		if err != nil {
			s.fail(p.Chain, err)
		}
	}
	s.undesired = maps.Clone(s.Failed)
	e.desireGuards(s)
	e.read(ctx, s)
	return s
}

// ObserveAgain observes with the same policies, record and backends.
func (e *Enforcer) ObserveAgain(ctx context.Context, s *State) *State {
	return e.observeAgain(ctx, s, s.record)
}

func (e *Enforcer) observeAgain(ctx context.Context, s *State, rec store.Record) *State {
	again := &State{Policies: s.Policies, record: rec, undesired: s.undesired, change: s.change, keep: s.keep, Failed: maps.Clone(s.undesired)}
	for _, g := range s.Groups {
		again.Groups = append(again.Groups, Group{Choice: g.Choice, Desired: g.Desired})
	}
	again.Guard = GuardState{Desired: s.Guard.Desired, Inactive: s.Guard.Inactive, unusable: s.Guard.unusable}
	e.read(ctx, again)
	return again
}

// read reads the kernel and compares it with the desired rules.
func (e *Enforcer) read(ctx context.Context, s *State) {
	for i := range s.Groups {
		e.readGroup(ctx, s, &s.Groups[i])
	}
	e.readGuard(ctx, s)
	s.Stale = stale(s)
	if e.AllBackends {
		s.Duplicates = e.duplicates(ctx, s)
		s.OtherDataDirs, _ = e.otherDataDirs(ctx)
	}
}

// duplicates finds chains of the same names in other backends. Stale chains are not among them:
// those are removed anyway.
func (e *Enforcer) duplicates(ctx context.Context, s *State) []Duplicate {
	var found []Duplicate
	for _, g := range s.Groups {
		for _, chain := range g.chains() {
			others, err := e.Drivers.Duplicates(ctx, chain, g.Choice)
			if err != nil && !errors.Is(err, netfilter.ErrUnusable) {
				e.Warn(fmt.Errorf("look for chain %s in other backends: %w", chain, err))
			}
			for _, c := range others {
				isStale := func(o store.OwnedChain) bool { return o.Chain == chain && choiceOf(o).SameBackend(c) }
				if !slices.ContainsFunc(s.Stale, isStale) {
					found = append(found, Duplicate{chain, c})
				}
			}
		}
	}
	return found
}

// currentBoot returns the record, or an empty one if it is of an earlier boot: the kernel lost what
// that one lists.
func (e *Enforcer) currentBoot(rec store.Record) store.Record {
	if rec.Boot != e.Dir.Boot() {
		return store.Record{Boot: e.Dir.Boot()}
	}
	return rec
}

// choose returns the backend for the chain of a policy.
func (e *Enforcer) choose(ctx context.Context, rec store.Record, p policy.Policy) (netfilter.Choice, error) {
	choose := func(backend policy.Backend) (netfilter.Choice, error) {
		for _, o := range rec.Chains {
			if o.Chain == p.Chain && (backend == policy.Auto || backend == o.Backend) && !o.Stuck {
				return choiceOf(o), nil
			}
		}
		return e.Drivers.Choose(ctx, p.Chain, backend)
	}
	if p.Backend.Value == policy.Auto && e.PreferredBackend != "" && e.PreferredBackend != policy.Auto {
		c, err := choose(e.PreferredBackend)
		if err == nil {
			err = e.refused(ctx, rec, p, c)
		}
		if err == nil {
			return c, nil
		}
		e.warnNotPreferred(p.Chain, err)
	}
	return choose(p.Backend.Value)
}

// refused returns why a chain that is on record in another backend only cannot move to this one, which
// may seem to work until it writes.
func (e *Enforcer) refused(ctx context.Context, rec store.Record, p policy.Policy, c netfilter.Choice) error {
	elsewhere := false
	for _, o := range rec.Chains {
		switch {
		case o.Chain != p.Chain:
		case o.Backend == c.Backend:
			return nil
		default:
			elsewhere = true
		}
	}
	if !elsewhere {
		return nil
	}
	b, err := e.Drivers.Open(c)
	if err != nil {
		return err
	}
	if err = p.CheckBounds(b.Layout()); err == nil {
		err = b.CheckWrite(ctx, policy.Desired([]policy.Policy{p}, b.Layout(), e.owner()))
	}
	if errors.Is(err, netfilter.ErrUnusable) {
		return writeError(p.Chain, c, err)
	}
	return nil // the write or addDesired reports other errors
}

func (e *Enforcer) warnNotPreferred(chain string, cause error) {
	e.Warn(fmt.Errorf("chain %s cannot be kept in the preferred backend %s: %w", chain, e.PreferredBackend, cause))
}

// addDesired adds the desired chains of a policy to the group of its backend.
func (e *Enforcer) addDesired(s *State, p policy.Policy, c netfilter.Choice) error {
	b, err := e.Drivers.Open(c)
	if err != nil {
		return err
	}
	if err := p.CheckBounds(b.Layout()); err != nil {
		return err
	}
	desired := policy.Desired([]policy.Policy{p}, b.Layout(), e.owner())
	i := slices.IndexFunc(s.Groups, func(g Group) bool { return g.Choice == c })
	if i < 0 {
		i = len(s.Groups)
		s.Groups = append(s.Groups, Group{Choice: c})
	}
	s.Groups[i].Desired.Chains = append(s.Groups[i].Desired.Chains, desired.Chains...)
	return nil
}

// readGroup reads a group's chains and compares them, except those that must not be changed.
func (e *Enforcer) readGroup(ctx context.Context, s *State, g *Group) {
	b, err := e.Drivers.Open(g.Choice)
	if err == nil {
		g.observation, err = b.Observe(ctx, g.refs())
		g.Observed = g.observation.Rules
	}
	if err != nil {
		for _, chain := range g.chains() {
			s.fail(chain, fmt.Errorf("read the rules of chain %s in %s: %w", chain, g.Choice, err))
		}
		return
	}
	for i := range g.Observed.Chains {
		c := &g.Observed.Chains[i]
		err := e.checkOwnership(c, g.Choice, b.OwnsTables() || owns(s.record, c.Family, c.Name, g.Choice))
		switch {
		case err == nil:
		case b.OwnsTables(): // Apply would remove the chain
			for _, chain := range g.chains() {
				s.fail(chain, err)
			}
		default:
			s.fail(c.Name, err)
		}
	}
	unrecorded := func(c policy.Chain) bool { return !owns(s.record, c.Family, c.Name, g.Choice) }
	g.Recorded = !slices.ContainsFunc(g.Desired.Chains, unrecorded)
	if desired := withoutChains(g.Desired, s.Failed); len(desired.Chains) > 0 {
		g.Diff = policy.Compare(desired, withoutChains(g.Observed, s.Failed))
	}
}

// checkOwnership returns why a chain of the right name must not be changed, or nil. A chain may be
// changed if it is owned, whatever others made of it since, and if it holds nothing but what the
// agents write.
func (e *Enforcer) checkOwnership(c *policy.Chain, in netfilter.Choice, owned bool) error {
	switch us := e.owner(); {
	case c.Owner.Schema > policy.RulesSchema:
		return fmt.Errorf("chain %s (%s): %w: its rules have form %d and this program knows forms up to %d; "+
			"install the version that wrote them, or run its ip-masq-reconciler cleanup",
			c.Name, c.Family, store.ErrNewer, c.Owner.Schema, policy.RulesSchema)
	case c.Owner.Differs(us):
		return OtherDataDirError{ownedChain(c, in), e.Dir.Path()}
	case c.Owner == us || owned || c.HoldsOnly(policy.Return, policy.Masquerade):
		return nil
	}
	return fmt.Errorf("chain %s (%s): %w: it holds rules that neither ip-masq nor its agents write; "+
		"choose another masqChain, or remove the chain", c.Name, c.Family, netfilter.ErrNotOwned)
}

// Unwritable returns, by chain, why its rules could not be written now. It is about the chains for
// which a function returns true.
func (e *Enforcer) Unwritable(ctx context.Context, s *State, about func(g *Group, chain string) bool) map[string]error {
	errs := map[string]error{}
	for i := range s.Groups {
		g := &s.Groups[i]
		for _, c := range g.Desired.Chains {
			if errs[c.Name] != nil || !about(g, c.Name) {
				continue
			}
			if err := e.canWrite(ctx, g.Choice, []policy.Family{c.Family}); err != nil {
				errs[c.Name] = writeError(c.Name, g.Choice, err)
			}
		}
	}
	return errs
}

func (e *Enforcer) canWrite(ctx context.Context, c netfilter.Choice, families []policy.Family) error {
	b, err := e.Drivers.Open(c)
	if err != nil {
		return err
	}
	for _, f := range families {
		if err := b.CanWrite(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

func writeError(chain string, in netfilter.Choice, err error) error {
	return fmt.Errorf("write the rules of chain %s in %s: %w", chain, in, err)
}
