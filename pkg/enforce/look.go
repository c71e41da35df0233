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

// Enforcer makes sure of the rules of one node: a dataDir and the network
// namespace of the process.
type Enforcer struct {
	Dir     *store.Dir
	Drivers netfilter.Drivers
	// Warn takes what went wrong without making the work at hand fail.
	Warn func(error)
	// Prefer is the backend for chains of which nobody states one; "" or Auto
	// has no preference. What the record has of such a chain in another is moved
	// there, once: who has no preference follows the record.
	PreferredBackend policy.Backend
	// Node says which dataDir is the node's. It is not asked while the rules are right.
	Node NodeDataDir
	// Thorough also looks for chains of our names in forms other than ours, which
	// an agent may have made since, and for chains of other dataDirs. It costs a
	// question for each form.
	AllBackends bool
	// Follow keeps to what was chosen in this boot, although it cannot be written
	// here: somebody else chose it, who can. To choose again would leave what
	// stands there half.
	KeepBackend bool
}

// Observe reads the kernel and compares it with what the contributions ask for.
// It writes nothing, and with a record of this boot's choices runs no program
// on nf_tables. A chain without a recorded choice makes it choose; the choice is
// not recorded.
func (e *Enforcer) Observe(ctx context.Context, contributions []policy.Source, rec store.Record) *State {
	v := &State{Policies: policy.Merge(contributions)}
	rec = e.ofThisBoot(rec)
	for _, p := range v.Policies {
		choice, err := e.choose(ctx, rec, p)
		if err != nil {
			v.fail(p.Chain, fmt.Errorf("choose a backend for chain %s: %w", p.Chain, err))
			continue
		}
		e.join(v, p, choice)
	}
	for i := range v.Groups {
		e.observeGroup(ctx, v, &v.Groups[i], rec)
	}
	v.Stale = stale(rec, v)
	if e.AllBackends {
		v.Duplicates = e.elsewhere(ctx, v)
		v.OtherDataDirs, v.ReplaceOtherDataDirs = e.others(e.owned(ctx)), e.replaces()
	}
	return v
}

// elsewhere finds the chains of our names that stand in another form too, but
// for those that are stale and go anyway.
func (e *Enforcer) elsewhere(ctx context.Context, v *State) []Duplicate {
	var found []Duplicate
	for _, g := range v.Groups {
		for _, chain := range g.chains() {
			others, err := e.Drivers.Duplicates(ctx, chain, g.Choice)
			if err != nil && !errors.Is(err, netfilter.ErrUnusable) {
				e.warn(fmt.Errorf("look for chain %s in other backends: %w", chain, err))
			}
			for _, c := range others {
				known := slices.ContainsFunc(v.Stale, func(o store.OwnedChain) bool { return o.Chain == chain && choiceOf(o).SameBackend(c) })
				if !known {
					found = append(found, Duplicate{chain, c})
				}
			}
		}
	}
	return found
}

// ofThisBoot returns the record, or none where it is of an earlier boot: what
// it lists went with the kernel that held it.
func (e *Enforcer) ofThisBoot(rec store.Record) store.Record {
	if rec.Boot != e.Dir.Boot() {
		return store.Record{Boot: e.Dir.Boot()}
	}
	return rec
}

// choose returns the form in which to keep the chain of a policy.
func (e *Enforcer) choose(ctx context.Context, rec store.Record, p policy.Policy) (netfilter.Choice, error) {
	choose := func(backend policy.Backend) (netfilter.Choice, error) {
		if c, found := recordedChoice(rec, p.Chain, backend); found {
			return c, nil
		}
		return e.Drivers.Choose(ctx, p.Chain, backend)
	}
	if p.Backend.Value == policy.Auto && e.PreferredBackend != "" && e.PreferredBackend != policy.Auto {
		c, err := choose(e.PreferredBackend)
		if err == nil {
			return c, nil
		}
		e.warn(fmt.Errorf("chain %s is kept in another backend than %s, which is preferred: %w", p.Chain, e.PreferredBackend, err))
	}
	return choose(p.Backend.Value)
}

// recordedChoice returns the form in which the record has the chain, unless it
// is of another backend than the one that is asked for.
func recordedChoice(rec store.Record, chain string, backend policy.Backend) (netfilter.Choice, bool) {
	for _, o := range rec.Chains {
		wanted := backend == policy.Auto || backend == o.Backend
		if o.Chain == chain && wanted && !o.Stuck {
			return choiceOf(o), true
		}
	}
	return netfilter.Choice{}, false
}

// join adds the policy to the group of its choice.
func (e *Enforcer) join(v *State, p policy.Policy, c netfilter.Choice) {
	b, err := e.Drivers.Open(c)
	if err != nil {
		v.fail(p.Chain, err)
		return
	}
	if err := p.CheckBounds(b.Layout()); err != nil {
		v.fail(p.Chain, err)
		return
	}
	desired := policy.Desired([]policy.Policy{p}, b.Layout(), e.owner())
	for i := range v.Groups {
		if g := &v.Groups[i]; g.Choice == c {
			g.Desired.Chains = append(g.Desired.Chains, desired.Chains...)
			return
		}
	}
	v.Groups = append(v.Groups, Group{Choice: c, Desired: desired})
}

// observe reads the group's chains and compares them, but for those that may
// not be touched.
func (e *Enforcer) observeGroup(ctx context.Context, v *State, g *Group, rec store.Record) {
	b, err := e.Drivers.Open(g.Choice)
	if err == nil {
		g.observation, err = b.Observe(ctx, g.refs())
		g.Observed = g.observation.Rules
	}
	if err != nil {
		for _, chain := range g.chains() {
			v.fail(chain, fmt.Errorf("read the rules of chain %s in %s: %w", chain, g.Choice, err))
		}
		return
	}
	for i := range g.Observed.Chains {
		c := &g.Observed.Chains[i]
		err := e.judge(c, g.Choice, b.OwnsTables() || owns(rec, c.Family, c.Name, g.Choice))
		if err == nil {
			continue
		}
		if !b.OwnsTables() {
			v.fail(c.Name, err)
			continue
		}
		for _, chain := range g.chains() { // what we apply would take it away
			v.fail(chain, err)
		}
	}
	g.Recorded = true
	for _, c := range g.Desired.Chains {
		g.Recorded = g.Recorded && owns(rec, c.Family, c.Name, g.Choice)
	}
	if desired := withoutChains(g.Desired, v.Failed); len(desired.Chains) > 0 {
		g.Diff = policy.Compare(desired, withoutChains(g.Observed, v.Failed))
	}
}

// judge tells why a chain that stands under our name may not be touched. Ours
// are those that we wrote, whatever became of them since, and those of another
// dataDir where this one is the node's; others are taken over only if they hold
// nothing but what the agents write.
func (e *Enforcer) judge(c *policy.Chain, in netfilter.Choice, ours bool) error {
	us := e.owner()
	switch {
	case c.Owner.Schema > policy.RulesSchema:
		return newerRules(c)
	case c.Owner.Differs(us) && e.replaces():
		return nil
	case c.Owner.Differs(us):
		return otherOwner(ownedChain(c, in), us)
	case c.Owner == us || ours || c.HoldsOnly(policy.Return, policy.Masquerade):
		return nil
	}
	return fmt.Errorf("chain %s (%s): %w: it holds rules that neither ip-masq nor its agents write; "+
		"choose another masqChain, or remove the chain", c.Name, c.Family, netfilter.ErrNotOwned)
}

func ownedChain(c *policy.Chain, in netfilter.Choice) netfilter.OwnedChain {
	return netfilter.OwnedChain{ChainRef: netfilter.ChainRef{Family: c.Family, Name: c.Name}, Choice: in, Owner: c.Owner}
}

func owns(rec store.Record, f policy.Family, chain string, c netfilter.Choice) bool {
	return slices.ContainsFunc(rec.Chains, func(o store.OwnedChain) bool {
		return o.Family == f && o.Chain == chain && choiceOf(o).SameBackend(c)
	})
}

func choiceOf(o store.OwnedChain) netfilter.Choice {
	return netfilter.Choice{Backend: o.Backend, Variant: o.Variant, PlainPorts: o.PlainPorts}
}

// stale returns what the record has and no group wants. What belongs to a chain
// that failed is not stale: nothing stands yet in its stead. Nor is what could
// not be removed before: that is for the reconciler to try again.
func stale(rec store.Record, v *State) []store.OwnedChain {
	var out []store.OwnedChain
	for _, o := range rec.Chains {
		wanted := slices.ContainsFunc(v.Groups, func(g Group) bool {
			return g.Choice.SameBackend(choiceOf(o)) && g.Desired.Find(o.Family, o.Chain) != nil
		})
		if !wanted && !o.Stuck && v.Failed[o.Chain] == nil {
			out = append(out, o)
		}
	}
	return out
}

// Able tells why the rules of chains could not be written again, by chain: what
// is right now need not be right for ever.
func (e *Enforcer) Unwritable(ctx context.Context, v *State) map[string]error {
	return e.unableOf(ctx, v, func(*Group, string) bool { return true })
}

func (e *Enforcer) unableOf(ctx context.Context, v *State, about func(g *Group, chain string) bool) map[string]error {
	unable := map[string]error{}
	for i := range v.Groups {
		g := &v.Groups[i]
		for _, c := range g.Desired.Chains {
			if unable[c.Name] != nil || !about(g, c.Name) {
				continue
			}
			if err := e.able(ctx, g.Choice, []policy.Family{c.Family}); err != nil {
				unable[c.Name] = unwritten(c.Name, g.Choice, err)
			}
		}
	}
	return unable
}

func (e *Enforcer) able(ctx context.Context, c netfilter.Choice, families []policy.Family) error {
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
