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
	if e.limitLayouts(ctx, s) {
		s.compare()
	}
	e.findOtherChains(ctx, s)
	if len(s.observed.unrecorded) > 0 {
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

// findOtherChains finds what other backends have of the policies' chains, the chains of other dataDirs, and
// those of this one that are not on record (AllBackends).
func (e *Enforcer) findOtherChains(ctx context.Context, s *State) {
	if !e.AllBackends {
		return
	}
	s.Duplicates = e.duplicates(ctx, s)
	owned := e.owned(ctx)
	s.OtherDataDirs, _ = otherDataDirs(owned, s.node.owner)
	s.observed.unrecorded = nil
	if len(s.onRecord.now.Chains) == 0 { // it was lost, and with it may be the documents that ask for them
		return
	}
	for _, o := range owned {
		isOurs := o.Owner == s.node.owner && !o.Guard
		if isOurs && !owns(s.onRecord.now, o.Family, o.Chain, o.Choice) {
			s.observed.unrecorded = append(s.observed.unrecorded, store.OwnedChain{
				Chain: o.Chain, Family: o.Family, Backend: o.Choice.Backend, Variant: o.Choice.Variant,
			})
		}
	}
}

// read reads the tables that are unread, or that differ and were read once.
func (e *Enforcer) read(ctx context.Context, s *State) {
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		if !isReadEnough(t.readings, s.rulesDiffer(t)) {
			e.readTables(ctx, s, t)
		}
	}
	g := &s.Guard
	if !isReadEnough(g.readings, s.guardDiffers()) {
		e.readGuard(ctx, s)
		g.readings = readingsAfter(g.readings, g.Observed.Generation)
	}
}

// readTables reads the chains of a backend that policies are about.
func (e *Enforcer) readTables(ctx context.Context, s *State, t *tables) {
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

// readingsAfter returns the number of readings with one more: a reading of one generation is not torn, and
// needs no second one.
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

// compareTables compares the chains of a backend, except those that must not be changed. If all must not, the
// tables are not written, so nothing is compared.
func (s *State) compareTables(t *tables) {
	t.diff = nil
	desired := policy.Ruleset{Chains: s.staying(t)}
	unchangeable := map[string]bool{}
	canChange := false
	for _, c := range s.in(t.choice) {
		c.Diff = nil
		c.Recorded = s.isRecorded(c.Desired.Chains, t.choice)
		c.Observed = observedOf(c.Policy.Chain, t)
		why := s.mustNotChange(c, t)
		c.Err = cmp.Or(c.failed, why)
		if why != nil {
			unchangeable[c.Policy.Chain] = true
			continue
		}
		canChange = true
		desired.Chains = append(desired.Chains, c.Desired.Chains...)
	}
	if !canChange {
		return
	}
	for _, change := range policy.Compare(desired, s.comparable(t, unchangeable)) {
		c := s.Find(change.Chain)
		if c != nil && c.Choice == t.choice {
			c.Diff = append(c.Diff, change)
		} else {
			t.diff = append(t.diff, change)
		}
	}
}

// comparable returns what was read of a backend without the chains that must not be changed. Rules that
// cannot be decoded equal none, so they would fail each ADD in a chain that stays as it is: it is compared
// without them.
func (s *State) comparable(t *tables, unchangeable map[string]bool) policy.Ruleset {
	observed := t.observation.Rules
	observed.Chains = nil
	for _, o := range t.observation.Rules.Chains {
		if unchangeable[o.Name] {
			continue
		}
		staysAsItIs := s.node.keepsAll || !s.wants(o.Name, o.Family, t.choice)
		if staysAsItIs {
			o.Rules = recognized(o.Rules)
		}
		observed.Chains = append(observed.Chains, o)
	}
	return observed
}

// observedOf returns what was read of a chain, in each family.
func observedOf(chain string, t *tables) policy.Ruleset {
	observed := policy.Ruleset{Unrecognized: t.observation.Rules.Unrecognized}
	for _, o := range t.observation.Rules.Chains {
		if o.Name == chain {
			observed.Chains = append(observed.Chains, o)
		}
	}
	return observed
}

// mustNotChange returns why a chain must not be changed, or nil: its rules are not known, or another owner
// has them. In tables that belong to ip-masq no other chain may have another owner either, as Apply would
// remove it.
func (s *State) mustNotChange(c *Chain, t *tables) error {
	if t.err != nil {
		return fmt.Errorf("read the rules of chain %s in %s: %w", c.Policy.Chain, t.choice, t.err)
	}
	for _, o := range t.observation.Rules.Chains {
		if o.Name != c.Policy.Chain && !t.whole {
			continue
		}
		owned := t.whole || owns(s.onRecord.now, o.Family, o.Name, t.choice)
		if err := checkOwnership(&o, t.choice, s.node.owner, owned, orRename); err != nil {
			return err
		}
	}
	return nil
}

// isRecorded reports whether the record has all of these chains in a backend.
func (s *State) isRecorded(chains []policy.Chain, in netfilter.Choice) bool {
	for _, c := range chains {
		if !owns(s.onRecord.now, c.Family, c.Name, in) {
			return false
		}
	}
	return true
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
		for _, in := range others {
			if !s.isStale(name, in) {
				ref := policy.ChainFamily{Chain: name}
				found = append(found, netfilter.OwnedChain{ChainFamily: ref, Choice: in})
			}
		}
	}
	return found
}

func (s *State) isStale(chain string, in netfilter.Choice) bool {
	for _, o := range s.Stale {
		if o.Chain == chain && ChoiceOf(o) == in {
			return true
		}
	}
	return false
}

// What follows "delete it" in a message about a rule or a jump of another program. A policy with another
// masqChain would leave a chain in another backend in force.
const (
	orRename    = ", or choose another masqChain"
	thenRemoved = ", and ip-masq removes the chain"
)

// checkOwnership returns why a chain of the right name must not be changed, or nil. A chain may be
// changed if it is owned, even after another program changed it, or if it has only rules and jumps that the
// agents write.
func checkOwnership(c *policy.Chain, in netfilter.Choice, us policy.Owner, owned bool, remedy string) error {
	ref := policy.ChainFamily{Chain: c.Name, Family: c.Family}
	err := checkOwner(netfilter.OwnedChain{ChainFamily: ref, Choice: in, Owner: c.Owner}, us)
	if err != nil || c.Owner == us || owned || c.IsOfAgents() {
		return err
	}
	texts := describeRules(c, in)
	if c.HasOtherJumps() {
		texts = append(texts, describeJumps(c, in)...)
	}
	const most = 8
	if more := len(texts) - most; more > 0 {
		texts = append(texts[:most], fmt.Sprintf("and %d more", more))
	}
	return fmt.Errorf("chain %s (%s): %w: neither ip-masq nor its agents write %s; delete it%s",
		c.Name, c.Family, netfilter.ErrNotOwned, strings.Join(texts, ", "), remedy)
}

// describeRules returns the rules of a chain in iptables that no agent writes, each with the command that
// deletes it. The last one comes first, so that the numbers in the commands stay right.
func describeRules(c *policy.Chain, in netfilter.Choice) (texts []string) {
	for _, i := range slices.Backward(c.NotOfAgents()) {
		text := c.Rules[i].String()
		if len(c.Printed) == len(c.Rules) {
			text = policy.Printable(c.Printed[i])
		}
		number := i + 1
		command := netfilter.DeleteCommand(in, c.Family, c.Name, number)
		texts = append(texts, fmt.Sprintf("rule %d `%s` (%s)", number, text, command))
	}
	return texts
}

// describeJumps returns the jumps to a chain likewise.
func describeJumps(c *policy.Chain, in netfilter.Choice) (texts []string) {
	for _, j := range slices.Backward(c.PrintedJumps) {
		command := netfilter.DeleteCommand(in, c.Family, j.From, j.Number)
		text := policy.Printable(j.Text)
		texts = append(texts, fmt.Sprintf("rule %d of %s `%s` (%s)", j.Number, j.From, text, command))
	}
	if len(c.PrintedJumps) > 0 {
		return texts
	}
	for _, j := range c.Jumps {
		texts = append(texts, fmt.Sprintf("the jump `%s`", j))
	}
	return texts
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
