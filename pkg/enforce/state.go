// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"fmt"
	"reflect"
	"slices"
	"sort"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// State is what is desired of a node, what was observed, what is on record, and what happened in a run. It
// determines the next step.
//
// Of owned chains, one is unwanted in a backend or family in which no policy wants it. It is stale if this
// process is to remove it, and removable as soon as it may go. A chain stays if it is in tables that are
// written, and is not written itself. Of addresses of pods, one is taken if an attachment had it before, and
// moved if the pod of that one has another namespace; it has passed if its pod has another verdict now. Of
// outputAddresses, one is former if it was in force and is on the node, and has left if it is not.
type State struct {
	// Chains are the chains of the policies, sorted by name as policy.Merge sorts them.
	Chains []Chain
	// Guard is the tables ip-masq-guard.
	Guard GuardState
	// Stale are the owned chains that no policy wants where they are, and that are to be removed.
	Stale []store.OwnedChain
	// RecordErr is the reason why nothing was written, or only what is on record: the record or a document
	// cannot be written. The rules can still be correct.
	RecordErr error
	// Duplicates are chains of the same names in other backends (AllBackends).
	Duplicates []netfilter.OwnedChain
	// OtherDataDirs are the chains and guard tables that name another dataDir (AllBackends).
	OtherDataDirs []netfilter.OwnedChain

	node      node
	observed  observed
	onRecord  onRecord
	documents documents
	progress  progress
}

// node is what is desired of the node, besides the rules of each chain and the guards.
type node struct {
	owner      policy.Owner
	addresses  []policy.NodeAddress // nil if no policy needs them, or they cannot be read
	exempt     exemption
	triesAgain bool // to remove what could not be removed: a reconciler
	keepsAll   bool // some documents cannot be read: what exists stays, and nothing is stale
}

// observed is what the kernel has, besides the guard tables.
type observed struct {
	tables     []tables           // one for each backend that a chain is in
	unrecorded []store.OwnedChain // that name this dataDir as their owner, and are not on record
}

// onRecord is the record of this boot.
type onRecord struct {
	now     store.Record // as it is on disk, or would be if recordLast had not failed
	before  store.Record // as it was before the run
	planned store.Record // to be on record before anything is written
}

// documents are those that the run stores.
type documents struct {
	before   []policy.Source // all that were stored before the change; nil: there is none
	after    []policy.Source // all that are to be stored
	unstored []policy.Source // those that are still to be stored
	restored bool            // one could not be read before: ADDs beside it left the rules as they were
}

// progress is what happened in the run.
type progress struct {
	began          int64 // CLOCK_BOOTTIME in nanoseconds
	asked          bool
	refused        error              // why a policy would not be accepted
	keepsToRecord  bool               // a repair does only what is on record, which cannot be written
	overtaken      int                // how often another program interfered, see maxOvertaken
	removed        []store.OwnedChain // chains that no policy wants
	failedRemovals []store.OwnedChain // those that could not be removed
}

// Chain is the masquerade chain of a policy in all its families: what a sync writes as a whole or not at all.
type Chain struct {
	Policy            policy.Policy
	Choice            netfilter.Choice // its backend; zero if none can be chosen
	Recorded          bool             // the record of this boot has it there
	Desired, Observed policy.Ruleset   // Observed.Unrecognized is that of all tables of the backend
	Diff              policy.Diff
	// Err is why its rules are not known to be right, must not be changed or could not be written.
	Err error

	failed    error             // that part of Err which observing again does not change
	overLimit []store.ExemptPod // that the chain cannot exempt
	limitErr  error             // why
	changed   bool              // the record has other addresses of outputAddresses, or other exempt pods
}

// fail sets the reason for which a sync does not write the chain, unless there is one. Nil is no reason.
func (c *Chain) fail(err error) {
	if c.Err == nil {
		c.Err, c.failed = err, err
	}
}

// tables are what was read of one backend.
type tables struct {
	choice      netfilter.Choice
	whole       bool // they belong to ip-masq, and hold nothing but what is desired
	layout      policy.Layout
	observation netfilter.Observation
	err         error          // why they cannot be read
	readings    int            // how often they were read since they were written, enoughReadings at most
	writes      int            // how often they were written
	diff        policy.Diff    // what is in them and belongs to no chain of a policy
	ofNoPolicy  []policy.Chain // that stay as they are, see keepWhatExists
}

// enoughReadings is how often tables are read that differ before they are written.
const enoughReadings = 2

// clone returns a copy that steps may change.
func (s *State) clone() *State {
	c := *s
	c.Chains = slices.Clone(s.Chains)
	c.observed.tables = slices.Clone(s.observed.tables)
	return &c
}

// Find returns the chain of this name, or nil.
func (s *State) Find(chain string) *Chain {
	i := sort.Search(len(s.Chains), func(i int) bool { return s.Chains[i].Policy.Chain >= chain })
	if i < len(s.Chains) && s.Chains[i].Policy.Chain == chain {
		return &s.Chains[i]
	}
	return nil
}

// Policies returns the policies of the chains.
func (s *State) Policies() []policy.Policy {
	policies := make([]policy.Policy, len(s.Chains))
	for i := range s.Chains {
		policies[i] = s.Chains[i].Policy
	}
	return policies
}

func (s *State) in(c netfilter.Choice) []*Chain {
	var chains []*Chain
	for i := range s.Chains {
		if s.Chains[i].Choice == c {
			chains = append(chains, &s.Chains[i])
		}
	}
	return chains
}

// tablesOf returns the tables of a backend, or nil if no chain is in it.
func (s *State) tablesOf(c netfilter.Choice) *tables {
	for i := range s.observed.tables {
		if s.observed.tables[i].choice == c {
			return &s.observed.tables[i]
		}
	}
	return nil
}

// desired returns the chains to be in tables: those that did not fail, and those that stay as they are.
func (s *State) desired(t *tables) policy.Ruleset {
	rules := policy.Ruleset{Chains: s.staying(t)}
	for _, c := range s.in(t.choice) {
		if c.Err == nil {
			rules.Chains = append(rules.Chains, c.Desired.Chains...)
		}
	}
	return rules
}

// staying returns the chains of tables that are not to be written: those that stay, those on record that are
// removed when others have taken their place, and those whose place in another backend could not be taken.
func (s *State) staying(t *tables) []policy.Chain {
	staying := slices.Clone(t.ofNoPolicy)
	isUnwanted := map[policy.ChainFamily]bool{}
	for _, o := range s.unwanted() {
		if ChoiceOf(o) == t.choice {
			isUnwanted[policy.ChainFamily{Chain: o.Chain, Family: o.Family}] = true
		}
	}
	for _, o := range t.observation.Rules.Chains {
		c := s.Find(o.Name)
		failedElsewhere := c != nil && c.Err != nil && c.Choice != t.choice
		mustStay := failedElsewhere && !s.node.keepsAll // with keepsAll it is in ofNoPolicy
		if mustStay || isUnwanted[policy.ChainFamily{Chain: o.Name, Family: o.Family}] {
			o.Rules = recognized(o.Rules)
			staying = append(staying, o)
		}
	}
	return staying
}

// rulesDiffer reports whether tables differ in what can be written.
func (s *State) rulesDiffer(t *tables) bool {
	for _, c := range s.in(t.choice) {
		if c.Err == nil && len(c.Diff)+len(t.diff) > 0 {
			return true
		}
	}
	return false
}

// differing returns the families in which tables differ in what can be written. A new chain that cannot be
// written in one of its families keeps all chains of its tables from being written.
func (s *State) differing(t *tables) (d differing) {
	for _, f := range policy.Families() {
		differs, isNew := hasFamily(t.diff, f), false
		for _, c := range s.in(t.choice) {
			if c.Err == nil && hasFamily(c.Diff, f) {
				differs = true
				isNew = isNew || !owns(s.onRecord.before, f, c.Policy.Chain, t.choice)
			}
		}
		if differs {
			d.all = append(d.all, f)
		}
		if isNew {
			d.isNew = append(d.isNew, f)
		}
	}
	return d
}

func hasFamily(d policy.Diff, f policy.Family) bool {
	return slices.ContainsFunc(d, func(c policy.Change) bool { return c.Family == f })
}

// failTables fails the chains of a backend that differ, or that lack what belongs to no chain.
func (s *State) failTables(t *tables, err error) {
	for _, c := range s.in(t.choice) {
		if len(c.Diff)+len(t.diff) > 0 {
			c.fail(fmt.Errorf("write the rules of chain %s in %s: %w", c.Policy.Chain, t.choice, err))
		}
	}
}

// isWritten reports whether the rules of a chain are in the kernel as they are desired.
func (s *State) isWritten(c *Chain) bool { return c.Err == nil && len(s.ChainDiff(c)) == 0 }

func (s *State) isAllWritten() bool {
	for i := range s.Chains {
		if !s.isWritten(&s.Chains[i]) {
			return false
		}
	}
	return true
}

// InSync reports whether nothing is left to do, such as to write the record.
func (s *State) InSync() bool {
	if s.Guard.Err != nil || s.Failed() || s.Differs() {
		return false
	}
	for i := range s.Chains {
		if !s.Chains[i].Recorded {
			return false
		}
	}
	return s.outputsRecorded() && s.PodsRecorded()
}

// outputsRecorded reports whether the record has the addresses of outputAddresses that are and were in force.
func (s *State) outputsRecorded() bool {
	rec := s.onRecord.now
	outputs := s.outputs(rec)
	return reflect.DeepEqual(outputs, rec.Outputs) && slices.Equal(s.former(outputs), rec.Former)
}

// PodsRecorded reports whether the record has the pods that are to be exempt. A run that could not write it
// may have left out some.
func (s *State) PodsRecorded() bool {
	return s.RecordErr == nil && s.node.exempt.recorded(s.onRecord.now)
}

// Failed reports whether a chain could not be read, must not be changed or could not be written.
func (s *State) Failed() bool {
	for i := range s.Chains {
		if s.Chains[i].Err != nil {
			return true
		}
	}
	return false
}

// Differs reports whether there are rules to write or to remove.
func (s *State) Differs() bool { return len(s.Diff())+len(s.Stale)+len(s.Duplicates) > 0 }

// Diff returns how the kernel differs from what is desired, in all backends and the guard tables.
func (s *State) Diff() policy.Diff { return append(s.rulesDiff(anyChain), s.Guard.Diff...) }

// Drift returns the part of Diff that concerns chains that were written before, and the other objects in
// their tables.
func (s *State) Drift() policy.Diff {
	drift := s.rulesDiff((*Chain).wasWritten)
	if len(s.onRecord.now.Chains) == 0 {
		return drift
	}
	for _, change := range s.Guard.Diff {
		c := s.Find(change.Chain)
		if c == nil || c.wasWritten() {
			drift = append(drift, change)
		}
	}
	return drift
}

func anyChain(*Chain) bool { return true }

// wasWritten reports whether the chain was written before as it is desired now.
func (c *Chain) wasWritten() bool { return c.Recorded && !c.changed }

// rulesDiff returns the differences of the chains that count, and of what belongs to no chain in their
// tables.
func (s *State) rulesDiff(counts func(*Chain) bool) policy.Diff {
	var all policy.Diff
	for i := range s.Chains {
		if counts(&s.Chains[i]) {
			all = append(all, s.Chains[i].Diff...)
		}
	}
	for _, t := range s.observed.tables {
		if slices.ContainsFunc(s.in(t.choice), counts) {
			all = append(all, t.diff...)
		}
	}
	return all
}

// discardDiff takes the differences as done: a dry run leaves them, as nothing was written.
func (s *State) discardDiff() {
	s.Stale, s.Duplicates, s.OtherDataDirs, s.Guard.Diff = nil, nil, nil, nil
	for i := range s.Chains {
		s.Chains[i].Diff = nil
	}
	for i := range s.observed.tables {
		s.observed.tables[i].diff = nil
	}
}

// Err returns why the rules of a chain are not known to be as desired, or nil.
func (s *State) Err(chain string) error {
	c := s.Find(chain)
	if c == nil {
		return fmt.Errorf("no policy is about chain %s", chain)
	}
	if c.Err != nil {
		return c.Err
	}
	if diff := s.ChainDiff(c); len(diff) > 0 {
		return &DriftError{diff}
	}
	return s.Guard.err(chain)
}

// ChainDiff returns the differences of a chain, and of what belongs to no chain in the tables of its backend.
func (s *State) ChainDiff(c *Chain) policy.Diff {
	t := s.tablesOf(c.Choice)
	if t == nil {
		return slices.Clone(c.Diff)
	}
	return slices.Concat(c.Diff, t.diff)
}

// DriftError is a difference that remains after a sync, or that a caller must not repair.
type DriftError struct{ Diff policy.Diff }

// Error lists the difference, rule by rule.
func (e *DriftError) Error() string {
	const most = 50
	return "rules differ from what is desired:\n" + e.Diff.Summary(most)
}

// Exists reports whether the kernel has the chain, regardless of its rules, and a jump to it, in every
// desired family.
func (s *State) Exists(chain string) bool {
	c := s.Find(chain)
	if c == nil {
		return false
	}
	for _, want := range c.Desired.Chains {
		have := c.Observed.Find(want.Family, chain)
		if have == nil || len(have.Jumps) == 0 && len(want.Jumps) > 0 {
			return false
		}
	}
	return len(c.Desired.Chains) > 0
}

// LinearChains returns the chains in iptables that have more prefixes in one family than a list without sets
// should have.
func (s *State) LinearChains() (slow []error) {
	for _, c := range s.Chains {
		most := max(c.Policy.CountDestinations(policy.IPv4), c.Policy.CountDestinations(policy.IPv6))
		if most > policy.DefaultCIDRLimit && c.Choice.Backend == policy.IPTables {
			slow = append(slow, fmt.Errorf("chain %s has %d prefixes, and iptables evaluates these rules one "+
				"by one for each new connection; use backend nftables", c.Policy.Chain, most))
		}
	}
	return slow
}

// ChoiceOf returns where a chain on record is.
func ChoiceOf(o store.OwnedChain) netfilter.Choice {
	return netfilter.Choice{Backend: o.Backend, Variant: o.Variant}
}

func owns(rec store.Record, f policy.Family, chain string, c netfilter.Choice) bool {
	for _, o := range rec.Chains {
		if o.Family == f && o.Chain == chain && ChoiceOf(o) == c {
			return true
		}
	}
	return false
}

// unwanted returns the owned chains that are in a backend or family in which no policy wants them: those on
// record, and those that name this dataDir. A chain that failed stays wanted everywhere, as nothing has
// replaced it.
//
// On a node without policies only the record says which chains to remove. If it is lost while the last
// network is dropped, that chain stays until cleanup. If it is lost while a chain gets another name, a guard
// that begins then drops what the former chain exempts, until that is removed; and from nftables, whose
// tables hold nothing but what is desired, the former chain goes before the new one is in iptables.
func (s *State) unwanted() []store.OwnedChain {
	if s.node.keepsAll {
		return nil
	}
	var unwanted []store.OwnedChain
	for _, o := range slices.Concat(s.onRecord.now.Chains, s.observed.unrecorded) {
		c := s.Find(o.Chain)
		failed := c != nil && c.Err != nil
		if !failed && !slices.Contains(s.progress.removed, o) && !s.wants(o.Chain, o.Family, ChoiceOf(o)) {
			unwanted = append(unwanted, o)
		}
	}
	return unwanted
}

// wants reports whether a policy wants a chain of a family in a backend.
func (s *State) wants(chain string, f policy.Family, in netfilter.Choice) bool {
	c := s.Find(chain)
	return c != nil && c.Choice == in && c.Desired.Find(f, chain) != nil
}

// stale returns the unwanted chains that are to be removed: the verbs leave alone those whose removal failed.
func (s *State) stale() []store.OwnedChain {
	var stale []store.OwnedChain
	for _, o := range s.unwanted() {
		isLeft := o.RemovalFailed && !s.node.triesAgain
		if !isLeft && !slices.Contains(s.progress.failedRemovals, o) {
			stale = append(stale, o)
		}
	}
	return stale
}

// FailedRemovals returns the owned chains that could not be removed.
func (s *State) FailedRemovals() []store.OwnedChain {
	var failed []store.OwnedChain
	for _, o := range s.onRecord.now.Chains {
		if o.RemovalFailed {
			failed = append(failed, o)
		}
	}
	return failed
}
