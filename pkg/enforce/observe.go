// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Observe reads the kernel and compares it with what the sources ask for. It writes nothing, and
// runs no program on nf_tables if the record has this boot's choices. It chooses a backend for a
// chain that is not on record, without recording it.
func (e *Enforcer) Observe(ctx context.Context, sources []policy.Source, rec store.Record) *State {
	return e.observe(ctx, policy.Merge(sources), rec)
}

func (e *Enforcer) observe(ctx context.Context, policies []policy.Policy, rec store.Record) *State {
	s := e.desire(ctx, policies, rec)
	e.read(ctx, s)
	s.compare()
	if e.findOtherChains(ctx, s); len(s.observed.orphans) > 0 {
		s.compare()
	}
	return s
}

// ObserveAgain observes with the same policies, record and backends.
func (e *Enforcer) ObserveAgain(ctx context.Context, s *State) *State {
	again := s.clone()
	again.Guard.readings = 0
	for i := range again.observed.tables {
		again.observed.tables[i].readings = 0
	}
	e.read(ctx, again)
	again.compare()
	e.findOtherChains(ctx, again)
	return again
}

// findOtherChains finds chains that no policy is about (AllBackends).
func (e *Enforcer) findOtherChains(ctx context.Context, s *State) {
	if !e.AllBackends {
		return
	}
	s.Duplicates = e.duplicates(ctx, s)
	owned := e.owned(ctx)
	s.OtherDataDirs, _ = otherDataDirs(owned, s.node.owner)
	s.observed.orphans = nil
	if len(s.onRecord.now.Chains) == 0 { // it was lost, and with it may be the documents that ask for them
		return
	}
	for _, o := range owned {
		if o.Owner == s.node.owner && !o.Guard && !owns(s.onRecord.now, o.Family, o.Chain, o.Choice) {
			s.observed.orphans = append(s.observed.orphans, store.OwnedChain{Chain: o.Chain, Family: o.Family, Backend: o.Choice.Backend, Variant: o.Choice.Variant})
		}
	}
}

// read reads the tables that are unread, or that differ and were read once.
func (e *Enforcer) read(ctx context.Context, s *State) {
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		if t.readings > 0 && (t.readings >= enoughReadings || !s.rulesDiffer(t)) {
			continue
		}
		var refs []policy.ChainFamily
		for _, c := range s.in(t.choice) {
			for _, d := range c.Desired.Chains {
				refs = append(refs, policy.ChainFamily{Chain: d.Name, Family: d.Family})
			}
		}
		b, err := e.Drivers.Open(t.choice)
		if err == nil {
			t.observation, err = b.Observe(ctx, refs)
		}
		t.err, t.readings = err, readingsAfter(t.readings, t.observation.Generation)
	}
	if g := &s.Guard; g.readings == 0 || g.readings < enoughReadings && s.guardDiffers() {
		e.readGuard(ctx, s)
		g.readings = readingsAfter(g.readings, g.Observed.Generation)
	}
}

// readingsAfter returns the number of readings with one more: a reading of one generation is not torn, and needs no second one.
func readingsAfter(readings int, generation uint32) int {
	if generation != 0 {
		return enoughReadings
	}
	return readings + 1
}

// compare compares what was read with what is desired. It is pure.
func (s *State) compare() {
	for i := range s.observed.tables {
		s.compareTables(&s.observed.tables[i])
	}
	s.Stale = s.stale()
	s.compareGuards()
}

// compareTables compares the chains of a backend, except those that must not be changed.
func (s *State) compareTables(t *tables) {
	t.diff = nil
	observed := t.observation.Rules
	staying := s.staying(t)
	desired := policy.Ruleset{Chains: staying}
	unchangeable := map[string]bool{}
	for _, c := range s.in(t.choice) {
		c.Diff = nil
		why := s.takeNote(c, t)
		unchangeable[c.Policy.Chain] = why != nil
		if why == nil {
			desired.Chains = append(desired.Chains, c.Desired.Chains...)
		}
		c.Err = cmp.Or(c.failed, why)
	}
	if len(desired.Chains) == len(staying) {
		return
	}
	observed.Chains = slices.DeleteFunc(slices.Clone(observed.Chains), func(o policy.Chain) bool { return unchangeable[o.Name] })
	for i := range observed.Chains { // or a rule that cannot be decoded, and so equals none, would fail each ADD
		if o := &observed.Chains[i]; s.node.keepsAll || !s.wants(o.Name, o.Family, t.choice) {
			o.Rules = recognized(o.Rules)
		}
	}
	for _, change := range policy.Compare(desired, observed) {
		if c := s.Find(change.Chain); c != nil && c.Choice == t.choice {
			c.Diff = append(c.Diff, change)
		} else {
			t.diff = append(t.diff, change)
		}
	}
}

// takeNote takes note of what was read of a chain, and returns why it is not known or must not be changed, or nil.
func (s *State) takeNote(c *Chain, t *tables) (why error) {
	c.Observed = policy.Ruleset{Unrecognized: t.observation.Rules.Unrecognized}
	if t.err != nil {
		why = fmt.Errorf("read the rules of chain %s in %s: %w", c.Policy.Chain, t.choice, t.err)
	}
	recorded := func(d policy.Chain) bool { return owns(s.onRecord.now, d.Family, d.Name, t.choice) }
	c.Recorded = !slices.ContainsFunc(c.Desired.Chains, func(d policy.Chain) bool { return !recorded(d) })
	for _, o := range t.observation.Rules.Chains {
		if o.Name != c.Policy.Chain && !t.whole { // Apply would remove a chain of an owned table
			continue
		}
		if o.Name == c.Policy.Chain {
			c.Observed.Chains = append(c.Observed.Chains, o)
		}
		why = cmp.Or(why, checkOwnership(&o, t.choice, s.node.owner, t.whole || recorded(o)))
	}
	return why
}

// duplicates finds chains of the same names in other backends. Stale chains are not among them:
// those are removed anyway.
func (e *Enforcer) duplicates(ctx context.Context, s *State) (found []netfilter.OwnedChain) {
	for _, chain := range s.Chains {
		if chain.Choice == (netfilter.Choice{}) {
			continue
		}
		name := chain.Policy.Chain
		others, err := e.Drivers.Duplicates(ctx, name, chain.Choice)
		if err != nil && !errors.Is(err, netfilter.ErrUnusable) {
			e.Warn(fmt.Errorf("look for chain %s in other backends: %w", name, err))
		}
		for _, c := range others {
			isStale := func(o store.OwnedChain) bool { return o.Chain == name && ChoiceOf(o) == c }
			if !slices.ContainsFunc(s.Stale, isStale) {
				found = append(found, netfilter.OwnedChain{ChainFamily: policy.ChainFamily{Chain: name}, Choice: c})
			}
		}
	}
	return found
}

// checkOwnership returns why a chain of the right name must not be changed, or nil. A chain may be
// changed if it is owned, even after another program changed it, or if it has only rules that the agents
// write.
func checkOwnership(c *policy.Chain, in netfilter.Choice, us policy.Owner, owned bool) error {
	err := checkOwner(netfilter.OwnedChain{ChainFamily: policy.ChainFamily{Chain: c.Name, Family: c.Family}, Choice: in, Owner: c.Owner}, us)
	if err != nil || c.Owner == us || owned {
		return err
	}
	others := c.NotOfAgents()
	if len(others) == 0 {
		return nil
	}
	return fmt.Errorf("chain %s (%s): %w: neither ip-masq nor its agents write %s; delete it, or choose another masqChain",
		c.Name, c.Family, netfilter.ErrNotOwned, describeRules(c, in, others))
}

// describeRules returns rules of a chain in iptables, each with the command that deletes it. The last one comes first, so that
// the numbers in the commands stay right.
func describeRules(c *policy.Chain, in netfilter.Choice, numbers []int) string {
	const most = 8
	var texts []string
	for _, i := range slices.Backward(numbers) {
		if len(texts) == most {
			texts = append(texts, fmt.Sprintf("and %d more", len(numbers)-most))
			break
		}
		text := c.Rules[i].String()
		if len(c.Printed) == len(c.Rules) {
			text = policy.Printable(c.Printed[i])
		}
		number := i + 1
		command := netfilter.DeleteCommand(in, c.Family, c.Name, number)
		texts = append(texts, fmt.Sprintf("rule %d `%s` (%s)", number, text, command))
	}
	return strings.Join(texts, ", ")
}

// checkOwner returns why a chain must not be changed that a newer version or another dataDir owns.
func checkOwner(c netfilter.OwnedChain, us policy.Owner) error {
	switch {
	case c.Owner.Schema > policy.RulesSchema:
		return fmt.Errorf("%s: %w: its rules have form %d and this program knows forms up to %d; "+
			"install the version that wrote them, or run its ip-masq-reconciler cleanup",
			c, store.ErrNewer, c.Owner.Schema, policy.RulesSchema)
	case c.Owner.Differs(us):
		return otherDataDir(c, us.DataDir)
	}
	return nil
}

// keepWhatExists makes desired what the kernel has, as some documents cannot be read: chains with rules stay as they are,
// get a missing jump, and their guards stay. Chains that do not exist are desired as the readable documents have it,
// and bind nothing, as it is not known what the others masquerade. They are not created without a document of a newer
// version, if that is the reason: its network's ADDs pass and never write it again, and the chain would masquerade what it
// exempts.
func (s *State) keepWhatExists(newer error) {
	s.node.keepsAll = true
	exists := map[policy.ChainFamily]bool{}
	for i := range s.Chains {
		c := &s.Chains[i]
		kept := c.keep()
		for _, k := range kept {
			exists[k] = true
		}
		if newer != nil && len(kept) == 0 {
			c.fail(fmt.Errorf("chain %s does not exist, and is not created without all documents: %w", c.Policy.Chain, newer))
		}
	}
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		for _, o := range t.observation.Rules.Chains {
			if !s.wants(o.Name, o.Family, t.choice) {
				o.Rules = recognized(o.Rules)
				t.kept = append(t.kept, o)
			}
		}
	}
	s.keepGuards(exists)
	s.compare()
}

// keepGuards makes desired the guards that the kernel has, and those of the policies whose chains do not exist.
func (s *State) keepGuards(exists map[policy.ChainFamily]bool) {
	g := &s.Guard
	var desired []policy.Guard
	for _, o := range g.Observed.Guards {
		isThere := func(p policy.Policy) bool { return exists[policy.ChainFamily{Chain: p.Chain, Family: o.Family}] }
		c := s.Find(o.Chain)
		if c != nil && c.lacksJump(o.Family) {
			o.Scope.Interfaces = c.Policy.Scope(o.Family).Interfaces // those of the jump that it gets
		}
		if c == nil || c.Err != nil || isThere(c.Policy) {
			desired = append(desired, o.Beside(slices.DeleteFunc(s.Policies(), isThere)))
		}
	}
	for _, d := range g.Desired {
		if s.Find(d.Chain).Err == nil && !exists[policy.ChainFamily{Chain: d.Chain, Family: d.Family}] {
			d.Bound, d.Bindings = nil, nil
			if d.Mode != policy.GuardOff {
				desired = append(desired, d)
			}
		}
	}
	g.Desired = desired
}

// recognized returns the rules that could be decoded.
func recognized(rules []policy.Rule) []policy.Rule {
	return slices.DeleteFunc(slices.Clone(rules), func(r policy.Rule) bool { return r.Verdict == policy.Unrecognized })
}

// lacksJump reports whether a chain has no jump to it.
func (c *Chain) lacksJump(f policy.Family) bool {
	have := c.Observed.Find(f, c.Policy.Chain)
	return have != nil && len(have.Jumps) == 0
}

// keep makes desired the rules that a chain has, with a missing jump, and returns the families in which it has some.
func (c *Chain) keep() (kept []policy.ChainFamily) {
	c.Desired.Chains = slices.Clone(c.Desired.Chains)
	for j, want := range c.Desired.Chains {
		have := c.Observed.Find(want.Family, want.Name)
		if have == nil || len(have.Rules) == 0 {
			continue
		}
		stays := *have
		stays.Rules = recognized(have.Rules)
		if len(have.Jumps) == 0 {
			stays.Jumps = want.Jumps
		}
		c.Desired.Chains[j] = stays
		kept = append(kept, policy.ChainFamily{Chain: want.Name, Family: want.Family})
	}
	return kept
}
