// SPDX-License-Identifier: Apache-2.0

// Package netfiltertest is a packet filter in memory, at the ports of package netfilter: netfilter.Driver,
// Backend and GuardTables. Tests of what decides about writes, and the simulation, use it in place of a
// kernel. It keeps what is written. As the kernel does, it refuses writes to the owned tables and the guard tables
// that were computed at an earlier generation, and none of iptables-restore. Before each call it says what the call
// is about to do.
package netfiltertest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The kernel keeps the chains of each of these apart.
//
//nolint:gochecknoglobals // they are constants
var (
	NFTables = netfilter.Choice{Backend: policy.NFTables}
	IPTables = netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT}
	Legacy   = netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantLegacy}
)

// Kernel is a packet filter.
type Kernel struct {
	// Before is called before each effect, with its text. Its error is that of the effect, which then does
	// not happen.
	Before func(effect string, writes bool) error
	// After is called after each write, with its text and the chains that it touched. "" is an owned table.
	After func(effect string, touched ...string)
	// Accepts returns why rules or guards cannot be written.
	Accepts func(policy.Ruleset, []policy.Guard) error
	// Unusable has the backends that cannot be used at all.
	Unusable map[netfilter.Choice]error

	Chains     map[netfilter.Choice]map[policy.ChainFamily]policy.Chain
	Guards     []policy.Guard
	Generation netfilter.Generation
	// So many coming readings of a backend, or of guards, have something that is gone, and no generation.
	Torn      int
	Leftovers map[policy.Family]int // sets in the owned table that no rule uses

	changes int // of the owned table of masquerade chains
}

// New returns a packet filter without rules, whose effects never fail.
func New() *Kernel {
	k := &Kernel{
		Before:   func(string, bool) error { return nil },
		After:    func(string, ...string) {},
		Accepts:  func(policy.Ruleset, []policy.Guard) error { return nil },
		Unusable: map[netfilter.Choice]error{},
	}
	k.Flush()
	return k
}

// Flush removes everything, as a boot or `nft flush ruleset` does. It is no effect.
func (k *Kernel) Flush() {
	k.Chains = map[netfilter.Choice]map[policy.ChainFamily]policy.Chain{
		NFTables: {}, IPTables: {}, Legacy: {},
	}
	k.Leftovers, k.Guards = map[policy.Family]int{}, nil
	k.Changed()
}

// Changed makes what was read of the chains before outdated. Tests call it after they have changed Chains.
func (k *Kernel) Changed() {
	k.changes++
	k.Generation.Number++
}

// Drivers returns both backends, of which nftables has the guard tables.
func (k *Kernel) Drivers() netfilter.Drivers {
	iptables := &driver{k: k, choice: IPTables, other: Legacy}
	nft := &tables{driver{k: k, choice: NFTables, other: NFTables}}
	return netfilter.Drivers{iptables, nft}
}

// Refs returns the chains of a backend in an order that is always the same.
func (k *Kernel) Refs(c netfilter.Choice) []policy.ChainFamily {
	return slices.SortedFunc(maps.Keys(k.Chains[c]), func(a, b policy.ChainFamily) int {
		return cmp.Or(cmp.Compare(a.Family, b.Family), cmp.Compare(a.Chain, b.Chain))
	})
}

// written takes note of a write.
func (k *Kernel) written(in netfilter.Choice, effect string, chains []string) {
	if in == NFTables {
		k.changes++
		chains = []string{""}
	}
	if in.HasGeneration() {
		k.Generation.Number++
	}
	k.After(effect, chains...)
}

// driver implements netfilter.Driver for a backend in its variants.
type driver struct {
	netfilter.NoRuleset
	netfilter.NoPrograms
	k      *Kernel
	choice netfilter.Choice
	other  netfilter.Choice // the other variant; choice itself if there is none
}

func (d *driver) Backend() policy.Backend { return d.choice.Backend }

func (d *driver) Open(c netfilter.Choice) (netfilter.Backend, error) { return &backend{d.k, c}, nil }

func (d *driver) choices() []netfilter.Choice {
	return slices.Compact([]netfilter.Choice{d.choice, d.other})
}

func (d *driver) FindChain(_ context.Context, chain string) (used []netfilter.Choice, err error) {
	if err := d.k.Before(fmt.Sprintf("find chain %s in %s", chain, d.Backend()), false); err != nil {
		return nil, err
	}
	for _, c := range d.choices() {
		if d.k.has(c, chain) {
			used = append(used, c)
		}
	}
	return used, nil
}

// has reports whether a backend has a chain, in any family.
func (k *Kernel) has(c netfilter.Choice, chain string) bool {
	for ref := range k.Chains[c] {
		if ref.Chain == chain {
			return true
		}
	}
	return false
}

func (d *driver) Owned(context.Context) (owned []netfilter.OwnedChain, err error) {
	if err := d.k.Before("list owners in "+string(d.Backend()), false); err != nil {
		return nil, err
	}
	for _, c := range d.choices() {
		for _, ref := range d.k.Refs(c) {
			if o := d.k.Chains[c][ref].Owner; o != (policy.Owner{}) {
				owned = append(owned, netfilter.OwnedChain{ChainFamily: ref, Choice: c, Owner: o})
			}
		}
	}
	if d.choice != NFTables {
		return owned, nil
	}
	for _, g := range d.k.Guards {
		ref := policy.ChainFamily{Chain: "guard-" + g.Chain, Family: g.Family}
		owned = append(owned, netfilter.OwnedChain{
			ChainFamily: ref, Choice: NFTables, Guard: true, Owner: g.Owner,
		})
	}
	return owned, nil
}

func (d *driver) Probe(_ context.Context, variant string) (netfilter.Choice, error) {
	if err := d.k.Before("probe "+string(d.Backend()), false); err != nil {
		return netfilter.Choice{}, fmt.Errorf("probe %s: %w", d.Backend(), err)
	}
	for _, c := range d.choices() {
		isAsked := variant == "" || variant == c.Variant
		if isAsked && d.k.Unusable[c] == nil {
			return c, nil
		}
	}
	err := cmp.Or(d.k.Unusable[d.choice], netfilter.ErrUnusable)
	return netfilter.Choice{}, fmt.Errorf("probe %s: %w", d.Backend(), err)
}

// backend implements netfilter.Backend.
type backend struct {
	k *Kernel
	c netfilter.Choice
}

// reading is what Observe read of a backend. It is the State of an observation.
type reading struct {
	changes    int    // Kernel.changes
	generation uint32 // 0 if it is not of one
	chains     []policy.Chain
}

func (b *backend) Layout() policy.Layout { return policy.Layout{Sets: b.OwnsTables()} }

func (b *backend) Supported(context.Context) (policy.Layout, error) { return b.Layout(), nil }

func (b *backend) OwnsTables() bool { return b.c == NFTables }

func (b *backend) Observe(
	_ context.Context, wanted []policy.ChainFamily,
) (o netfilter.Observation, err error) {
	if err := b.k.Before("observe "+b.c.String(), false); err != nil {
		return o, err
	}
	if b.OwnsTables() {
		o.Generation = b.k.Generation.Number
	}
	isTorn := b.k.Torn > 0
	if isTorn {
		b.k.Torn--
		o.Generation = 0
	}
	for _, ref := range b.k.Refs(b.c) {
		if !b.OwnsTables() && !slices.Contains(wanted, ref) {
			continue
		}
		c := cloned(b.k.Chains[b.c][ref])
		isFirst := len(o.Rules.Chains) == 0
		if isTorn && isFirst {
			c.Rules = append(c.Rules, policy.Rule{Verdict: policy.Unrecognized})
		}
		o.Rules.Chains = append(o.Rules.Chains, c)
	}
	o.State = reading{b.k.changes, o.Generation, slices.Clone(o.Rules.Chains)}
	for _, f := range policy.Families() {
		if b.OwnsTables() && b.k.Leftovers[f] > 0 {
			set := policy.UnrecognizedObject{Family: f, Text: "set"}
			o.Rules.Unrecognized = append(o.Rules.Unrecognized, set)
		}
	}
	return o, nil
}

func ref(c *policy.Chain) policy.ChainFamily {
	return policy.ChainFamily{Chain: c.Name, Family: c.Family}
}

func cloned(c policy.Chain) policy.Chain {
	c.Jumps, c.Rules = slices.Clone(c.Jumps), slices.Clone(c.Rules)
	return c
}

func (b *backend) Apply(
	_ context.Context, desired policy.Ruleset, from netfilter.Observation, held *os.File,
) error {
	if held == nil {
		panic("netfiltertest: a write without the lock")
	}
	if err := b.k.Unusable[b.c]; err != nil {
		return err
	}
	if b.OwnsTables() {
		return b.applyTables(desired, from)
	}
	for _, f := range policy.Families() {
		if err := b.restore(f, netfilter.ChainsOf(desired, f)); err != nil {
			return err
		}
	}
	return nil
}

// restore writes the chains of a family as one iptables-restore does.
func (b *backend) restore(f policy.Family, chains []policy.Chain) error {
	var differ []string
	for _, c := range chains {
		if b.differs(c) {
			differ = append(differ, c.Name)
		}
	}
	if differ == nil {
		return nil
	}
	effect := fmt.Sprintf("write %s %s", b.c, f)
	err := cmp.Or(b.k.Before(effect, true), b.accepts(policy.Ruleset{Chains: chains}))
	if err != nil {
		return err
	}
	for _, c := range chains {
		b.k.Chains[b.c][ref(&c)] = cloned(c)
	}
	b.k.written(b.c, effect, differ)
	return nil
}

// differs reports whether the kernel has a chain otherwise or not at all.
func (b *backend) differs(c policy.Chain) bool {
	have, is := b.k.Chains[b.c][ref(&c)]
	return !is || !reflect.DeepEqual(kept(have), kept(c))
}

// accepts returns why chains cannot be written. A chain that stays as it is can.
func (b *backend) accepts(desired policy.Ruleset) error {
	var changed []policy.Chain
	for _, c := range desired.Chains {
		if b.differs(c) {
			changed = append(changed, c)
		}
	}
	desired.Chains = changed
	return b.k.Accepts(desired, nil)
}

// kept returns what the kernel keeps of a chain.
func kept(c policy.Chain) policy.Chain {
	c = cloned(c)
	for _, rules := range [][]policy.Rule{c.Jumps, c.Rules} {
		for i := range rules {
			rules[i].PrefixAction, rules[i].Connections = nil, 0
		}
	}
	if len(c.Jumps) == 0 {
		c.Jumps = nil
	}
	return c
}

// applyTables writes the difference between the observation of the owned tables and the desired chains. New sets
// are filled by a batch of their own.
func (b *backend) applyTables(desired policy.Ruleset, from netfilter.Observation) error {
	k := b.k
	w := tableWriter{k: k, seen: k.changes}
	was, isObserved := from.State.(reading)
	w.anyGeneration = isObserved && was.generation == 0
	if isObserved && was.changes != k.changes && !w.anyGeneration {
		return errors.Join(k.Before("write nftables, refused", true), netfilter.ErrChanged)
	}
	if err := b.accepts(desired); err != nil {
		return errors.Join(k.Before("write nftables, not supported", true), err)
	}
	hasNewSets := false
	for _, c := range desired.Chains {
		_, exists := k.Chains[NFTables][ref(&c)]
		hasNewSets = hasNewSets || !exists
	}
	if hasNewSets {
		err := w.commit("fill sets of nftables", func() {
			for _, f := range policy.Families() {
				k.Leftovers[f]++
			}
		})
		if err != nil {
			return err
		}
	}
	if !isObserved { // Apply reads the kernel itself
		was.chains = slices.Collect(maps.Values(k.Chains[NFTables]))
	}
	return w.commit("write nftables", func() {
		k.Leftovers, k.Chains[NFTables] = map[policy.Family]int{}, was.change(desired, k.Chains[NFTables])
	})
}

// change returns the chains of the kernel after the chains that were read became the desired ones. What another
// program changed since then stays as it made it where the reading was as desired.
func (r *reading) change(
	desired policy.Ruleset, now map[policy.ChainFamily]policy.Chain,
) map[policy.ChainFamily]policy.Chain {
	after := maps.Clone(now)
	read := policy.Ruleset{Chains: r.chains}
	for _, c := range r.chains {
		if desired.Find(c.Family, c.Name) == nil {
			delete(after, ref(&c))
		}
	}
	for _, c := range desired.Chains {
		held := read.Find(c.Family, c.Name)
		isAsDesired := held != nil && reflect.DeepEqual(kept(*held), kept(c))
		if !isAsDesired {
			after[ref(&c)] = cloned(c)
		}
	}
	return after
}

// tableWriter commits to the owned tables as they were seen.
type tableWriter struct {
	k             *Kernel
	seen          int  // Kernel.changes
	anyGeneration bool // the kernel accepts the commits although other programs made some since then
}

func (w *tableWriter) commit(effect string, do func()) error {
	if err := w.k.Before(effect, true); err != nil {
		return err
	}
	if w.seen != w.k.changes && !w.anyGeneration {
		return netfilter.ErrChanged
	}
	do()
	w.k.written(NFTables, effect, nil)
	w.seen = w.k.changes
	return nil
}

func (b *backend) Remove(_ context.Context, chains []policy.ChainFamily, held *os.File) error {
	if held == nil {
		panic("netfiltertest: a removal without the lock")
	}
	effect := fmt.Sprintf("remove %v from %s", chains, b.c)
	if err := b.k.Before(effect, true); err != nil {
		return err
	}
	var removed []string
	for _, ref := range chains {
		if _, is := b.k.Chains[b.c][ref]; is {
			removed = append(removed, ref.Chain)
		}
		delete(b.k.Chains[b.c], ref)
	}
	if b.OwnsTables() {
		b.k.Leftovers = map[policy.Family]int{}
	}
	if removed != nil {
		b.k.written(b.c, effect, removed)
	}
	return nil
}

func (b *backend) CanWrite(_ context.Context, f policy.Family) error {
	effect := fmt.Sprintf("ask for the right to write %s %s", b.c, f)
	return cmp.Or(b.k.Unusable[b.c], b.k.Before(effect, false))
}

func (b *backend) CanList(context.Context, policy.Family) error { return nil }

func (b *backend) CheckWrite(_ context.Context, desired policy.Ruleset, _ netfilter.Observation) error {
	return cmp.Or(b.k.Before("ask for a write of "+b.c.String(), false), b.accepts(desired))
}

// tables is the driver with the ruleset: it implements netfilter.Ruleset and netfilter.GuardTables, too.
type tables struct{ driver }

func (d *tables) GuardTables() (netfilter.GuardTables, error) { return d, nil }

func (d *tables) Generation() (netfilter.Generation, error) {
	return d.k.Generation, d.k.Before("read the generation", false)
}

func (d *tables) ObserveGuards(context.Context) (netfilter.GuardObservation, error) {
	if err := d.k.Before("observe guards", false); err != nil {
		return netfilter.GuardObservation{}, err
	}
	o := netfilter.GuardObservation{
		Guards:     append([]policy.Guard(nil), d.k.Guards...),
		Exists:     len(d.k.Guards) > 0,
		Generation: d.k.Generation.Number,
		State:      append([]policy.Guard(nil), d.k.Guards...),
	}
	if d.k.Torn > 0 {
		d.k.Torn--
		gone := policy.Guard{Chain: "GONE", Family: policy.IPv4, Mode: policy.GuardDrop}
		o.Guards, o.Exists, o.Generation = append(o.Guards, gone), true, 0
	}
	return o, nil
}

func (d *tables) CompareGuards(
	desired []policy.Guard, observed netfilter.GuardObservation,
) (diff policy.Diff) {
	for _, g := range desired {
		o := find(observed.Guards, &g)
		if o == nil || !reflect.DeepEqual(*o, g) {
			kind := kindOfChange(&g, o)
			diff = append(diff, policy.Change{Kind: kind, Family: g.Family, Chain: g.Chain, Text: "guard"})
		}
	}
	for _, o := range observed.Guards {
		if find(desired, &o) == nil {
			diff = append(diff, policy.Change{
				Kind: policy.GuardChange, Family: o.Family, Chain: o.Chain, Unexpected: true, Text: "guard",
			})
		}
	}
	return diff
}

// find returns the guard of the same chain, nil if there is none.
func find(in []policy.Guard, of *policy.Guard) *policy.Guard {
	for i := range in {
		if in[i].Chain == of.Chain && in[i].Family == of.Family {
			return &in[i]
		}
	}
	return nil
}

// kindOfChange returns what a change of a guard is about: elements if its rules stay. Nil is no guard.
func kindOfChange(desired, observed *policy.Guard) policy.ChangeKind {
	if observed == nil || (desired.Bound == nil) != (observed.Bound == nil) {
		return policy.GuardChange
	}
	rest := *desired
	rest.Scope.Sources, rest.Exempt = observed.Scope.Sources, observed.Exempt
	rest.Bound, rest.MoreBindings = observed.Bound, observed.MoreBindings
	if reflect.DeepEqual(rest, *observed) {
		return policy.ElementChange
	}
	return policy.GuardChange
}

func (d *tables) ApplyGuards(
	_ context.Context, desired []policy.Guard, from netfilter.GuardObservation,
) error {
	err := cmp.Or(d.k.Before("write guards", true), d.k.Accepts(policy.Ruleset{}, desired))
	if err != nil {
		return err
	}
	was, isObserved := from.State.([]policy.Guard)
	hasAny := len(was)+len(d.k.Guards) > 0 // to DeepEqual, nil and an empty slice differ
	if isObserved && hasAny && !reflect.DeepEqual(was, d.k.Guards) {
		return netfilter.ErrChanged
	}
	d.k.Guards = append([]policy.Guard(nil), desired...)
	d.k.Generation.Number++
	d.k.After("write guards", "")
	return nil
}

func (d *tables) CheckGuards(_ context.Context, desired []policy.Guard, _ netfilter.GuardObservation) error {
	return cmp.Or(d.k.Before("ask for a write of guards", false), d.k.Accepts(policy.Ruleset{}, desired))
}
