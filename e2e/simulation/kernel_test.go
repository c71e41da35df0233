// SPDX-License-Identifier: Apache-2.0

package simulation_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"reflect"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var (
	inNFTables = netfilter.Choice{Backend: policy.NFTables}
	inIPTables = netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT}
	inLegacy   = netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantLegacy}
)

var errRefused = errors.New("simulated kernel: the operation is not supported")

// refusedAddress is in a prefix that this kernel accepts in no rule while refuses is set.
var refusedAddress = netip.MustParseAddr("198.18.0.1")

// kernel is the packet filter, the connections and the addresses of the simulated node. A caller sees each of its
// methods that is part of a port as one effect, or as several where the real one makes several calls.
type kernel struct {
	effect    func(text string, writes bool) error
	committed func(touched []string) // is told of each new generation, with the chains that it touched; "": an owned table
	deletes   func(*connection)      // is told of each connection that a walk deletes

	chains     map[netfilter.Choice]map[policy.ChainFamily]policy.Chain
	leftovers  map[policy.Family]int // sets in the owned table that no rule uses
	changes    int                   // of the owned table of masquerade chains
	guards     []policy.Guard
	guardsSeen int // changes of the guard tables
	generation netfilter.Generation
	seq        int // of all changes, those by other programs that touch nothing owned excepted

	connections []connection
	addresses   []policy.NodeAddress

	refuses  bool // see refusedAddress
	noGuards bool // it lacks what guards need
	legacy   bool // the variant of iptables that this host has
	noTables bool // it has no program iptables
}

// connection is a conntrack entry.
type connection struct {
	policy.Connection
	pod       *pod // that began it
	container int
	space     string
	tampered  bool // it began while rules were wrong
}

func (c *connection) translated() bool { return c.ReplyDst != c.Src }

// boot empties the kernel.
func (k *kernel) boot() {
	k.chains = map[netfilter.Choice]map[policy.ChainFamily]policy.Chain{inNFTables: {}, inIPTables: {}, inLegacy: {}}
	k.leftovers, k.guards, k.connections = map[policy.Family]int{}, nil, nil
	k.generation.Number = 1
	k.changes++
	k.guardsSeen++
	k.commit()
}

// has reports whether there is a chain of this name.
func (k *kernel) has(chain string) bool {
	for _, chains := range k.chains {
		for ref := range chains {
			if ref.Chain == chain {
				return true
			}
		}
	}
	return false
}

// commit counts a commit of nf_tables, with the chains that it touched.
func (k *kernel) commit(touched ...string) {
	k.seq++
	k.generation.Number++
	k.committed(touched)
}

func (k *kernel) drivers() netfilter.Drivers {
	return netfilter.Drivers{&driver{k, policy.IPTables}, &nftDriver{driver{k, policy.NFTables}}}
}

// Generation is cniplugin.Plugin.Generation.
func (k *kernel) Generation() (netfilter.Generation, error) {
	return k.generation, k.effect("read the generation", false)
}

// IsLocal implements policy.NodeRoutes.
func (k *kernel) IsLocal(a netip.Addr) bool {
	return slices.ContainsFunc(k.addresses, func(n policy.NodeAddress) bool { return n.Address == a })
}

// OutputInterface implements policy.NodeRoutes.
func (k *kernel) OutputInterface(_, _ netip.Addr) string { return "eth0" }

// Addresses is cniplugin.Plugin.Addresses.
func (k *kernel) Addresses(families []policy.Family) ([]policy.NodeAddress, error) {
	if err := k.effect("read addresses", false); err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(k.addresses), func(a policy.NodeAddress) bool {
		return !slices.Contains(families, policy.FamilyOf(a.Address))
	}), nil
}

// Conntrack is cniplugin.Plugin.Conntrack.
func (k *kernel) Conntrack(ctx context.Context, judge *policy.ConnectionJudge) (map[policy.ChainFamily]uint64, error) {
	if err := errors.Join(k.effect("walk connections", true), ctx.Err()); err != nil {
		return nil, err
	}
	deleted := map[policy.ChainFamily]uint64{}
	k.connections = slices.DeleteFunc(k.connections, func(c connection) bool {
		chain, stale := judge.Judge(&c.Connection, k)
		if stale {
			k.deletes(&c)
			deleted[policy.ChainFamily{Chain: chain, Family: policy.FamilyOf(c.Src)}]++
		}
		return stale
	})
	return deleted, nil
}

// outcome is what becomes of a packet.
type outcome struct {
	translated bool
	from       netip.Addr // the address after translation, if a rule names it
	dropped    bool
}

func (o outcome) String() string {
	switch {
	case o.dropped:
		return "dropped"
	case o.translated && o.from.IsValid():
		return "translated to " + o.from.String()
	case o.translated:
		return "masqueraded"
	}
	return "not masqueraded"
}

func within(p netip.Addr, r policy.Ranges) bool {
	for _, x := range r {
		if !p.Less(x.From()) && !x.To().Less(p) {
			return true
		}
	}
	return false
}

func (k *kernel) matches(r *policy.Rule, src, dst netip.Addr, out string) bool {
	interfaceMatches := r.Out == "" || r.Out == out || len(r.Out) > 0 && r.Out[len(r.Out)-1] == '+' && len(out) >= len(r.Out)-1 && out[:len(r.Out)-1] == r.Out[:len(r.Out)-1]
	return (r.From == nil || within(src, r.From)) && (r.To == nil || within(dst, r.To)) && interfaceMatches &&
		(!r.NotFromLocal || !k.IsLocal(src)) && (!r.NotToLocal || !k.IsLocal(dst))
}

// packet returns what becomes of the first packet of a connection.
func (k *kernel) packet(src, dst netip.Addr) (o outcome) {
	const out = "eth0"
	family := policy.FamilyOf(src)
	bound := slices.ContainsFunc(k.guards, func(g policy.Guard) bool {
		return g.Family == family && g.Bound != nil && k.inScope(&g, out) && !k.IsLocal(dst) &&
			(within(src, g.Scope.Sources) && within(dst, g.Bound) || slices.ContainsFunc(g.ExemptPods, func(b policy.Binding) bool {
				return within(src, b.Sources) && (b.Destinations == nil || within(dst, b.Destinations))
			}))
	})
	for _, choice := range []netfilter.Choice{inIPTables, inLegacy, inNFTables} {
		for _, ref := range sortedRefs(k.chains[choice]) {
			if c := k.chains[choice][ref]; ref.Family == family && !o.translated && !bound {
				o.translated, o.from = k.walk(&c, src, dst, out)
			}
		}
	}
	for _, g := range k.guards {
		if g.Family == family && g.Mode == policy.GuardDrop && k.inScope(&g, out) && !k.IsLocal(dst) && within(src, g.Scope.Sources) &&
			!within(dst, g.Exempt) && !o.translated {
			o.dropped = true
		}
	}
	return o
}

func (k *kernel) walk(c *policy.Chain, src, dst netip.Addr, out string) (bool, netip.Addr) {
	if !slices.ContainsFunc(c.Jumps, func(j policy.Rule) bool { return k.matches(&j, src, dst, out) }) {
		return false, netip.Addr{}
	}
	for i := range c.Rules {
		if r := &c.Rules[i]; k.matches(r, src, dst, out) {
			return r.Verdict == policy.Masquerade, r.Address
		}
	}
	return false, netip.Addr{}
}

func (k *kernel) inScope(g *policy.Guard, out string) bool {
	return len(g.Scope.Interfaces) == 0 || slices.Contains(g.Scope.Interfaces, out)
}

// refusal returns why the kernel does not accept rules.
func (k *kernel) refusal(desired policy.Ruleset) error {
	for _, c := range desired.Chains {
		for _, r := range c.Rules {
			if k.refuses && within(refusedAddress, r.To) {
				return errRefused
			}
		}
	}
	return nil
}

// driver implements netfilter.Driver.
type driver struct {
	k       *kernel
	backend policy.Backend
}

// nftDriver implements netfilter.GuardTables, too.
type nftDriver struct{ driver }

func (d *nftDriver) Generation() (netfilter.Generation, error) { return d.k.Generation() }

func (d *driver) Backend() policy.Backend { return d.backend }

func (d *driver) Open(c netfilter.Choice) (netfilter.Backend, error) { return &backend{d.k, c}, nil }

func (d *driver) Render(policy.Ruleset, ...policy.Family) ([]byte, error) {
	return nil, errors.New("the simulation renders nothing")
}

func (d *driver) choices() []netfilter.Choice {
	if d.backend == policy.NFTables {
		return []netfilter.Choice{inNFTables}
	}
	return []netfilter.Choice{inIPTables, inLegacy}
}

func (d *driver) FindChain(_ context.Context, chain string) (used []netfilter.Choice, err error) {
	if err := d.k.effect("find chain "+chain+" in "+string(d.backend), false); err != nil {
		return nil, err
	}
	for _, c := range d.choices() {
		if slices.ContainsFunc(policy.Families(), func(f policy.Family) bool {
			_, has := d.k.chains[c][policy.ChainFamily{Chain: chain, Family: f}]
			return has
		}) {
			used = append(used, c)
		}
	}
	return used, nil
}

func (d *driver) Owned(context.Context) (owned []netfilter.OwnedChain, err error) {
	if err := d.k.effect("list owners in "+string(d.backend), false); err != nil {
		return nil, err
	}
	for _, c := range d.choices() {
		for _, ref := range sortedRefs(d.k.chains[c]) {
			if o := d.k.chains[c][ref].Owner; o != (policy.Owner{}) {
				owned = append(owned, netfilter.OwnedChain{ChainFamily: ref, Choice: c, Owner: o})
			}
		}
	}
	for _, g := range d.k.guards {
		if d.backend == policy.NFTables {
			owned = append(owned, netfilter.OwnedChain{
				ChainFamily: policy.ChainFamily{Chain: "guard-" + g.Chain, Family: g.Family}, Choice: inNFTables, Guard: true, Owner: g.Owner,
			})
		}
	}
	return owned, nil
}

func sortedRefs(chains map[policy.ChainFamily]policy.Chain) []policy.ChainFamily {
	return slices.SortedFunc(maps.Keys(chains), func(a, b policy.ChainFamily) int {
		return slices.Compare([]string{string(a.Family), a.Chain}, []string{string(b.Family), b.Chain})
	})
}

func (d *driver) Probe(_ context.Context, variant string) (netfilter.Choice, error) {
	if err := d.k.effect("probe "+string(d.backend), false); err != nil {
		return netfilter.Choice{}, err
	}
	if d.backend == policy.NFTables {
		return inNFTables, nil
	}
	has := inIPTables
	if d.k.legacy {
		has = inLegacy
	}
	if d.k.noTables || variant != "" && variant != has.Variant {
		return netfilter.Choice{}, fmt.Errorf("simulated host: no program iptables: %w", netfilter.ErrUnusable)
	}
	return has, nil
}

// backend implements netfilter.Backend.
type backend struct {
	k *kernel
	c netfilter.Choice
}

func (b *backend) Layout() policy.Layout { return policy.Layout{Sets: b.OwnsTables()} }

func (b *backend) OwnsTables() bool { return b.c == inNFTables }

func (b *backend) Observe(_ context.Context, wanted []policy.ChainFamily) (netfilter.Observation, error) {
	if err := b.k.effect("observe "+b.c.String(), false); err != nil {
		return netfilter.Observation{}, err
	}
	o := netfilter.Observation{Generation: b.k.generation.Number, State: b.k.changes}
	if !b.c.HasGeneration() {
		o.Generation = 0
	}
	for _, ref := range sortedRefs(b.k.chains[b.c]) {
		if b.OwnsTables() || slices.Contains(wanted, ref) {
			o.Rules.Chains = append(o.Rules.Chains, cloned(b.k.chains[b.c][ref]))
		}
	}
	for _, f := range policy.Families() {
		if b.OwnsTables() && b.k.leftovers[f] > 0 {
			o.Rules.Unrecognized = append(o.Rules.Unrecognized, policy.UnrecognizedObject{Family: f, Text: "set"})
		}
	}
	return o, nil
}

func cloned(c policy.Chain) policy.Chain {
	c.Jumps, c.Rules = slices.Clone(c.Jumps), slices.Clone(c.Rules)
	return c
}

func (b *backend) Apply(_ context.Context, desired policy.Ruleset, from netfilter.Observation, held *os.File) error {
	if held == nil {
		panic("simulation: a write without the lock")
	}
	k := b.k
	if b.OwnsTables() {
		return b.applyTables(desired, from)
	}
	for _, f := range policy.Families() {
		of := slices.DeleteFunc(slices.Clone(desired.Chains), func(c policy.Chain) bool { return c.Family != f })
		if len(of) == 0 || !b.differs(of) {
			continue
		}
		if err := k.effect(fmt.Sprintf("write %s %s", b.c, f), true); err != nil {
			return err
		}
		if err := k.refusal(policy.Ruleset{Chains: of}); err != nil {
			return err
		}
		for _, c := range of {
			k.chains[b.c][policy.ChainFamily{Chain: c.Name, Family: f}] = cloned(c)
		}
		k.written(b.c, of...)
	}
	return nil
}

func (b *backend) differs(desired []policy.Chain) bool {
	return slices.ContainsFunc(desired, func(c policy.Chain) bool {
		have, is := b.k.chains[b.c][policy.ChainFamily{Chain: c.Name, Family: c.Family}]
		return !is || !reflect.DeepEqual(rulesOf(have), rulesOf(c))
	})
}

// rulesOf returns what the kernel keeps of a chain.
func rulesOf(c policy.Chain) policy.Chain {
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

// written counts a write.
func (k *kernel) written(in netfilter.Choice, chains ...policy.Chain) {
	switch in {
	case inNFTables:
		k.changes++
		k.commit("")
	case inIPTables:
		var names []string
		for _, c := range chains {
			names = append(names, c.Name)
		}
		k.commit(names...)
	default:
		k.seq++
	}
}

// applyTables writes all chains of the owned tables, which the observation has as they are. New sets are filled by a
// batch of their own.
func (b *backend) applyTables(desired policy.Ruleset, from netfilter.Observation) error {
	k := b.k
	if seen, is := from.State.(int); is && seen != k.changes {
		if err := k.effect("write nftables, refused", true); err != nil {
			return err
		}
		return netfilter.ErrChanged
	}
	seen := k.changes
	have := map[policy.ChainFamily]policy.Chain{}
	newSets := false
	for _, c := range desired.Chains {
		ref := policy.ChainFamily{Chain: c.Name, Family: c.Family}
		have[ref] = cloned(c)
		_, exists := k.chains[inNFTables][ref]
		newSets = newSets || !exists
	}
	if err := k.refusal(desired); err != nil {
		return errors.Join(k.effect("write nftables, not supported", true), err)
	}
	if newSets {
		if err := k.effect("fill sets of nftables", true); err != nil {
			return err
		}
		if seen != k.changes {
			return netfilter.ErrChanged
		}
		for _, f := range policy.Families() {
			k.leftovers[f]++
		}
		k.written(inNFTables)
		seen = k.changes
	}
	if err := k.effect("write nftables", true); err != nil {
		return err
	}
	if seen != k.changes {
		return netfilter.ErrChanged
	}
	k.leftovers, k.chains[inNFTables] = map[policy.Family]int{}, have
	k.written(inNFTables)
	return nil
}

func (b *backend) Remove(_ context.Context, chains []policy.ChainFamily, held *os.File) error {
	if held == nil {
		panic("simulation: a removal without the lock")
	}
	if err := b.k.effect(fmt.Sprintf("remove %v from %s", chains, b.c), true); err != nil {
		return err
	}
	var removed []policy.Chain
	for _, ref := range chains {
		if _, is := b.k.chains[b.c][ref]; is {
			removed = append(removed, policy.Chain{Name: ref.Chain})
		}
		delete(b.k.chains[b.c], ref)
	}
	if b.OwnsTables() {
		b.k.leftovers = map[policy.Family]int{}
	}
	if len(removed) > 0 {
		b.k.written(b.c, removed...)
	}
	return nil
}

func (b *backend) CanWrite(context.Context, policy.Family) error {
	if b.c.Backend == policy.IPTables && b.k.noTables {
		return fmt.Errorf("simulated host: no program iptables: %w", netfilter.ErrUnusable)
	}
	return b.k.effect("ask for the right to write "+b.c.String(), false)
}

func (b *backend) CheckWrite(_ context.Context, desired policy.Ruleset, _ netfilter.Observation) error {
	if err := b.k.effect("ask for a write of "+b.c.String(), false); err != nil {
		return err
	}
	return b.k.refusal(desired)
}

func (d *nftDriver) ObserveGuards(context.Context) (netfilter.GuardObservation, error) {
	if err := d.k.effect("observe guards", false); err != nil {
		return netfilter.GuardObservation{}, err
	}
	return netfilter.GuardObservation{
		Guards: slices.Clone(d.k.guards), Exists: len(d.k.guards) > 0, Generation: d.k.generation.Number,
		State: guardReading{slices.Clone(d.k.guards), d.k.guardsSeen},
	}, nil
}

type guardReading struct {
	guards []policy.Guard
	seen   int
}

func (d *nftDriver) CompareGuards(desired []policy.Guard, observed netfilter.GuardObservation) (diff policy.Diff) {
	reading, _ := observed.State.(guardReading)
	find := func(in []policy.Guard, g *policy.Guard) *policy.Guard {
		i := slices.IndexFunc(in, func(o policy.Guard) bool { return o.Chain == g.Chain && o.Family == g.Family })
		if i < 0 {
			return nil
		}
		return &in[i]
	}
	for _, g := range desired {
		have := find(reading.guards, &g)
		if have != nil && reflect.DeepEqual(*have, g) {
			continue
		}
		kind := policy.GuardChange
		if rest := g; have != nil {
			rest.Scope.Sources, rest.Exempt, rest.Bound, rest.ExemptPods = have.Scope.Sources, have.Exempt, have.Bound, have.ExemptPods
			if reflect.DeepEqual(rest, *have) && (g.Bound == nil) == (have.Bound == nil) {
				kind = policy.ElementChange
			}
		}
		diff = append(diff, policy.Change{Kind: kind, Family: g.Family, Chain: g.Chain, Text: "guard"})
	}
	for _, o := range reading.guards {
		if find(desired, &o) == nil {
			diff = append(diff, policy.Change{Kind: policy.GuardChange, Family: o.Family, Chain: o.Chain, Unexpected: true, Text: "guard"})
		}
	}
	return diff
}

func (d *nftDriver) ApplyGuards(_ context.Context, desired []policy.Guard, from netfilter.GuardObservation) error {
	if err := d.k.effect("write guards", true); err != nil {
		return err
	}
	if err := d.guardRefusal(desired); err != nil {
		return err
	}
	reading, is := from.State.(guardReading)
	if is && reading.seen != d.k.guardsSeen {
		return netfilter.ErrChanged
	}
	d.k.guards = slices.Clone(desired)
	d.k.guardsSeen++
	d.k.commit("")
	return nil
}

func (d *nftDriver) guardRefusal(desired []policy.Guard) error {
	if d.k.noGuards && len(desired) > 0 {
		return fmt.Errorf("simulated kernel: %w", netfilter.ErrUnusable)
	}
	for _, g := range desired {
		if d.k.refuses && within(refusedAddress, g.Exempt) && g.Mode != policy.GuardOff {
			return errRefused
		}
	}
	return nil
}

func (d *nftDriver) CheckGuards(_ context.Context, desired []policy.Guard, _ netfilter.GuardObservation) error {
	if err := d.k.effect("ask for a write of guards", false); err != nil {
		return err
	}
	return d.guardRefusal(desired)
}

func (d *nftDriver) RenderGuards([]policy.Guard, ...policy.Family) []byte { return nil }
