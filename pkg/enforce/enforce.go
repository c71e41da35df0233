// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	// Conntrack deletes the connections that a judge calls stale, and returns how many there were.
	Conntrack func(context.Context, *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error)
	// Addresses returns the addresses of the node, of these families.
	Addresses func([]policy.Family) ([]policy.NodeAddress, error)
	// Attachments are those whose records are read again to find out which pods are exempt, or with AllAttachments
	// those of all exempt pods. The others are as they are on record.
	Attachments    []store.Attachment
	AllAttachments bool
	// AllBackends makes Observe look for chains of the same names in the other backends, where an
	// agent may have created them, and for chains of other dataDirs.
	AllBackends bool
	// KeepBackend keeps chains in the backend on record although this process cannot write there:
	// the plugin, which chose it, can.
	KeepBackend bool
}

// Inputs returns a digest of all that decides which rules are desired, for a program and a plugin.toml: "" if a file is
// refused or the boot is unknown.
func (e *Enforcer) Inputs(r *store.Reading, program string, pluginFile any) string {
	digest, boot := r.Digest(), e.Dir.Boot()
	if program == "" || digest == "" || boot == "" {
		return ""
	}
	return store.Digest(digest, program, e.Dir.Path(), boot, fmt.Sprint(pluginFile))
}

// HasGeneration reports whether the kernel counts the changes of all owned chains.
func HasGeneration(rec store.Record) bool {
	return !slices.ContainsFunc(rec.Chains, func(o store.OwnedChain) bool { return !choiceOf(o).HasGeneration() })
}

// Verified returns what an observation found, for a verification cache: the zero value unless the rules are those that
// the documents ask for, and stay so for as long as the inputs and the generation do. The generation is one from before
// the rules were read.
func (s *State) Verified(inputs, generation string) store.VerificationCache {
	// While resets are pending, each ADD looks whether a reconciler makes them, which may have ended.
	if !s.InSync() || s.PendingResets() || inputs == "" || generation == "" || !HasGeneration(s.record) {
		return store.VerificationCache{}
	}
	return store.VerificationCache{Inputs: inputs, Generation: generation, Addresses: s.AddressDigest()}
}

// Observe reads the kernel and compares it with what the sources ask for. It writes nothing, and
// runs no program on nf_tables if the record has this boot's choices. It chooses a backend for a
// chain that is not on record, without recording it.
func (e *Enforcer) Observe(ctx context.Context, sources []policy.Source, rec store.Record) *State {
	return e.observe(ctx, policy.Merge(sources), rec)
}

func (e *Enforcer) observe(ctx context.Context, policies []policy.Policy, rec store.Record) *State {
	s := &State{record: e.currentBoot(rec), Chains: make([]Chain, len(policies))}
	var addressesErr error
	if items := policy.OutputItems(policies); len(items) > 0 {
		s.addresses, addressesErr = e.nodeAddresses(items)
	}
	var podsErr error
	s.exempt, podsErr = e.exemptPods(policies, s.record)
	exempt := store.Record{Pods: s.exempt.pods}.ExemptPods()
	for i, p := range policies {
		c := &s.Chains[i]
		if c.Policy = p; len(p.OutputAddresses.Value) > 0 {
			c.fail(addressesErr)
			c.Policy.Outputs, c.changed = chosenOutputs(s, &p)
		}
		if len(p.Namespaces) > 0 {
			c.fail(podsErr)
			c.Policy.SetExemptPods(exempt)
			c.changed = c.changed || !s.exempt.recorded(s.record)
		}
		choice, err := e.choose(ctx, s.record, c.Policy)
		if err != nil {
			err = fmt.Errorf("choose a backend for chain %s: %w", p.Chain, err)
		} else {
			err = e.desire(c, choice)
		}
		c.fail(err)
	}
	e.desireGuards(s)
	e.read(ctx, s)
	return s
}

// desire sets the backend of a chain and its desired rules there.
func (e *Enforcer) desire(c *Chain, choice netfilter.Choice) error {
	b, err := e.Drivers.Open(choice)
	if err == nil {
		err = c.Policy.CheckBounds(b.Layout())
	}
	if err == nil {
		c.Choice, c.Desired = choice, policy.Desired([]policy.Policy{c.Policy}, b.Layout(), e.owner())
	}
	return err
}

// ObserveAgain observes with the same policies, record and backends.
func (e *Enforcer) ObserveAgain(ctx context.Context, s *State) *State {
	again := *s
	again.Chains = slices.Clone(s.Chains)
	again.Guard = GuardState{Desired: s.Guard.Desired, Inactive: s.Guard.Inactive, unusable: s.Guard.unusable, final: s.Guard.final}
	if s.Guard.final {
		again.Guard.Err = s.Guard.Err
	}
	e.read(ctx, &again)
	return &again
}

// read reads the kernel and compares it with the desired rules.
func (e *Enforcer) read(ctx context.Context, s *State) {
	before := s.tables
	s.tables = nil
	for i := range s.Chains {
		c := &s.Chains[i]
		if !c.final {
			c.Err = nil
		}
		same := func(t tables) bool { return t.choice == c.Choice }
		if c.Choice == (netfilter.Choice{}) || slices.ContainsFunc(s.tables, same) {
			continue
		}
		t := tables{choice: c.Choice}
		if i := slices.IndexFunc(before, same); i >= 0 {
			t.kept = before[i].kept
		}
		s.tables = append(s.tables, t)
	}
	for i := range s.tables {
		e.readTables(ctx, s, &s.tables[i])
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
			isStale := func(o store.OwnedChain) bool { return o.Chain == name && choiceOf(o) == c }
			if !slices.ContainsFunc(s.Stale, isStale) {
				found = append(found, netfilter.OwnedChain{ChainFamily: policy.ChainFamily{Chain: name}, Choice: c})
			}
		}
	}
	return found
}

// currentBoot returns the record, or an empty one if it is of an earlier boot: the kernel lost what
// that one lists.
func (e *Enforcer) currentBoot(rec store.Record) store.Record {
	if rec.Boot != e.Dir.Boot() {
		return store.Record{Boot: e.Dir.Boot(), Outputs: rec.Outputs}
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
			err = e.cannotMove(ctx, rec, p, c)
		}
		if err == nil {
			return c, nil
		}
		e.warnNotPreferred(p.Chain, err)
	}
	return choose(p.Backend.Value)
}

// cannotMove returns why a chain that is on record in another backend only cannot move to this one, which
// may seem to work until it writes.
func (e *Enforcer) cannotMove(ctx context.Context, rec store.Record, p policy.Policy, c netfilter.Choice) error {
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
		err = b.CheckWrite(ctx, policy.Desired([]policy.Policy{p}, b.Layout(), e.owner()), netfilter.Observation{})
	}
	if errors.Is(err, netfilter.ErrUnusable) {
		return writeError(p.Chain, c, err)
	}
	return nil // the write or addDesired reports other errors
}

func (e *Enforcer) warnNotPreferred(chain string, cause error) {
	e.Warn(fmt.Errorf("chain %s cannot be kept in the preferred backend %s: %w", chain, e.PreferredBackend, cause))
}

// readTables reads the chains of a backend and compares them, except those that must not be changed.
func (e *Enforcer) readTables(ctx context.Context, s *State, t *tables) {
	chains := s.in(t.choice)
	var refs []policy.ChainFamily
	for _, c := range chains {
		for _, d := range c.Desired.Chains {
			refs = append(refs, policy.ChainFamily{Chain: d.Name, Family: d.Family})
		}
	}
	b, err := e.Drivers.Open(t.choice)
	if err == nil {
		t.observation, err = b.Observe(ctx, refs)
	}
	observed := t.observation.Rules
	desired := policy.Ruleset{Chains: slices.Clone(t.kept)}
	unchangeable := map[string]bool{}
	for _, c := range chains {
		c.Observed, c.Diff = policy.Ruleset{Unrecognized: observed.Unrecognized}, nil
		var why error
		if err != nil {
			why = fmt.Errorf("read the rules of chain %s in %s: %w", c.Policy.Chain, t.choice, err)
		}
		recorded := func(d policy.Chain) bool { return owns(s.record, d.Family, d.Name, t.choice) }
		c.Recorded = !slices.ContainsFunc(c.Desired.Chains, func(d policy.Chain) bool { return !recorded(d) })
		for _, o := range observed.Chains {
			if o.Name != c.Policy.Chain && !b.OwnsTables() { // Apply would remove a chain of an owned table
				continue
			}
			if o.Name == c.Policy.Chain {
				c.Observed.Chains = append(c.Observed.Chains, o)
			}
			why = cmp.Or(why, e.checkOwnership(&o, t.choice, b.OwnsTables() || recorded(o)))
		}
		if unchangeable[c.Policy.Chain] = why != nil; why == nil {
			desired.Chains = append(desired.Chains, c.Desired.Chains...)
		} else if !c.final {
			c.Err = why
		}
	}
	if len(desired.Chains) == len(t.kept) {
		return
	}
	observed.Chains = slices.DeleteFunc(slices.Clone(observed.Chains), func(o policy.Chain) bool { return unchangeable[o.Name] })
	for _, change := range policy.Compare(desired, observed) {
		if c := s.Find(change.Chain); c != nil && c.Choice == t.choice {
			c.Diff = append(c.Diff, change)
		} else {
			t.diff = append(t.diff, change)
		}
	}
}

// checkOwnership returns why a chain of the right name must not be changed, or nil. A chain may be
// changed if it is owned, whatever others made of it since, and if it holds nothing but what the
// agents write.
func (e *Enforcer) checkOwnership(c *policy.Chain, in netfilter.Choice, owned bool) error {
	err := e.checkOwner(ownedChain(c, in))
	if err != nil || c.Owner == e.owner() || owned || c.IsAgents() {
		return err
	}
	return fmt.Errorf("chain %s (%s): %w: it holds rules that neither ip-masq nor its agents write; "+
		"choose another masqChain, or remove the chain", c.Name, c.Family, netfilter.ErrNotOwned)
}

// checkOwner returns why a chain must not be changed that a newer version or another dataDir owns.
func (e *Enforcer) checkOwner(c netfilter.OwnedChain) error {
	switch {
	case c.Owner.Schema > policy.RulesSchema:
		return fmt.Errorf("%s: %w: its rules have form %d and this program knows forms up to %d; "+
			"install the version that wrote them, or run its ip-masq-reconciler cleanup",
			c, store.ErrNewer, c.Owner.Schema, policy.RulesSchema)
	case c.Owner.Differs(e.owner()):
		return OtherDataDirError{c, e.Dir.Path()}
	}
	return nil
}

// CanWrite returns why the rules of a chain could not be written now, as far as that is known without writing.
func (e *Enforcer) CanWrite(ctx context.Context, c *Chain) error {
	for _, d := range c.Desired.Chains {
		if err := e.canWrite(ctx, c.Choice, []policy.Family{d.Family}); err != nil {
			return writeError(c.Policy.Chain, c.Choice, err)
		}
	}
	return nil
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
