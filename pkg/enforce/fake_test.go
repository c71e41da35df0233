// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"reflect"
	"slices"
	"sort"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// kernel is a stateful stand-in for the packet filter: chains by the form they
// are kept in. It counts what is done to it and fails on demand.
type kernel struct {
	chains   map[netfilter.Choice]map[policy.ChainFamily]policy.Chain
	unusable map[netfilter.Choice]error // no writing, no choosing
	noRemove map[netfilter.Choice]error
	undone   int                        // the next writes that another program reverts at once, in part
	changed  int                        // so many coming writes to nftables fail with ErrChanged
	refused  map[netfilter.Choice]error // by writes, though CanWrite does not tell
	failing  map[netfilter.Choice]error // in writes, though CheckWrite does not tell
	lie      int                        // so many coming observations miss a rule
	unable   map[policy.Family]error    // to write, as Able tells before
	applied  int
	observed int
	removed  int

	guards         []policy.Guard
	guardsObserved int
	guardErr       error    // of reading and writing guards
	guardUnusable  error    // of writing guards
	guardWrites    error    // of writing guards, though CheckGuards does not tell
	guardsRefused  int      // so many coming writes of guards fail with ErrChanged
	log            []string // every write
}

var (
	nftChoice    = netfilter.Choice{Backend: policy.NFTables}
	iptChoice    = netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantNFT}
	legacyChoice = netfilter.Choice{Backend: policy.IPTables, Variant: netfilter.VariantLegacy}
)

func newKernel() *kernel {
	return &kernel{
		chains:   map[netfilter.Choice]map[policy.ChainFamily]policy.Chain{nftChoice: {}, iptChoice: {}, legacyChoice: {}},
		unusable: map[netfilter.Choice]error{},
		noRemove: map[netfilter.Choice]error{},
	}
}

func (k *kernel) drivers() netfilter.Drivers {
	return netfilter.Drivers{
		&fakeDriver{k, policy.IPTables, []netfilter.Choice{iptChoice, legacyChoice}},
		&fakeDriver{k, policy.NFTables, []netfilter.Choice{nftChoice}},
	}
}

// dump returns all chains in the kernel.
func (k *kernel) dump() string {
	var lines []string
	for choice, chains := range k.chains {
		for ref, c := range chains {
			head := fmt.Sprintf("%s %s %s", choice, ref.Family, ref.Chain)
			for _, j := range c.Jumps {
				lines = append(lines, fmt.Sprintf("%s: 0 %s", head, j))
			}
			for i, r := range c.Rules {
				lines = append(lines, fmt.Sprintf("%s: %d %s", head, i+1, r))
			}
		}
	}
	sort.Strings(lines)
	return strings.Join(lines, "\n")
}

type fakeDriver struct {
	k       *kernel
	backend policy.Backend
	forms   []netfilter.Choice
}

func (d *fakeDriver) Backend() policy.Backend { return d.backend }

func (d *fakeDriver) Open(c netfilter.Choice) (netfilter.Backend, error) {
	return &fakeBackend{d.k, c}, nil
}

func (d *fakeDriver) Render(policy.Ruleset, ...policy.Family) ([]byte, error) {
	return nil, fmt.Errorf("render %s: nothing here asks for that", d.backend)
}

func (d *fakeDriver) Owned(context.Context) ([]netfilter.OwnedChain, error) {
	var owned []netfilter.OwnedChain
	for _, c := range d.forms {
		for ref, chain := range d.k.chains[c] {
			if chain.Owner != (policy.Owner{}) {
				owned = append(owned, netfilter.OwnedChain{ChainFamily: ref, Choice: c, Owner: chain.Owner})
			}
		}
	}
	for _, g := range d.k.guards {
		if d.backend == policy.NFTables {
			ref := policy.ChainFamily{Chain: g.Chain, Family: g.Family}
			owned = append(owned, netfilter.OwnedChain{ChainFamily: ref, Choice: nftChoice, Guard: true, Owner: g.Owner})
		}
	}
	return owned, nil
}

func (d *fakeDriver) FindChain(_ context.Context, chain string) ([]netfilter.Choice, error) {
	var used []netfilter.Choice
	for _, c := range d.forms {
		for _, f := range policy.Families() {
			if _, ok := d.k.chains[c][policy.ChainFamily{Chain: chain, Family: f}]; ok {
				used = append(used, c)
				break
			}
		}
	}
	return used, nil
}

func (d *fakeDriver) Probe(_ context.Context, variant string) (netfilter.Choice, error) {
	var err error
	for _, c := range d.forms {
		if variant != "" && c.Variant != variant {
			continue
		}
		if err = d.k.unusable[c]; err == nil {
			return c, nil
		}
	}
	return netfilter.Choice{}, fmt.Errorf("probe %s: %w", d.backend, err)
}

type fakeBackend struct {
	k *kernel
	c netfilter.Choice
}

func (b *fakeBackend) Layout() policy.Layout { return policy.Layout{Sets: b.OwnsTables()} }
func (b *fakeBackend) OwnsTables() bool      { return b.c == nftChoice }

func (b *fakeBackend) Observe(_ context.Context, refs []policy.ChainFamily) (netfilter.Observation, error) {
	b.k.observed++
	var rs policy.Ruleset
	wanted := map[policy.ChainFamily]bool{}
	for _, r := range refs {
		wanted[r] = true
	}
	for ref, c := range b.k.chains[b.c] {
		if wanted[ref] || b.OwnsTables() {
			if b.k.lie > 0 {
				b.k.lie--
				c.Rules = c.Rules[1:]
			}
			rs.Chains = append(rs.Chains, c)
		}
	}
	return netfilter.Observation{Rules: rs}, nil
}

func (b *fakeBackend) Apply(_ context.Context, desired policy.Ruleset, _ netfilter.Observation, held *os.File) error {
	if held == nil {
		return fmt.Errorf("apply without the lock")
	}
	if err := b.k.unusable[b.c]; err != nil {
		return err
	}
	if err := cmp.Or(b.k.refused[b.c], b.k.failing[b.c]); err != nil {
		return err
	}
	if b.OwnsTables() && b.k.changed > 0 {
		b.k.changed--
		return netfilter.ErrChanged
	}
	b.k.applied++
	if b.OwnsTables() {
		b.k.chains[b.c] = map[policy.ChainFamily]policy.Chain{}
	}
	for _, c := range desired.Chains {
		if b.k.undone > 0 {
			c.Jumps = nil
		}
		b.k.chains[b.c][policy.ChainFamily{Chain: c.Name, Family: c.Family}] = c
	}
	b.k.undone--
	b.k.log = append(b.k.log, "rules of "+b.c.String())
	return nil
}

func (b *fakeBackend) Remove(_ context.Context, refs []policy.ChainFamily, held *os.File) error {
	if held == nil {
		return fmt.Errorf("remove without the lock")
	}
	if err := b.k.noRemove[b.c]; err != nil {
		return err
	}
	for _, r := range refs {
		if _, there := b.k.chains[b.c][r]; there {
			b.k.log = append(b.k.log, "remove "+r.Chain)
			delete(b.k.chains[b.c], r)
			b.k.removed++
		}
	}
	return nil
}

func (b *fakeBackend) CanWrite(_ context.Context, f policy.Family) error { return b.k.unable[f] }

func (b *fakeBackend) CheckWrite(context.Context, policy.Ruleset, netfilter.Observation) error {
	return b.k.refused[b.c]
}

func (d *fakeDriver) ObserveGuards(context.Context) (netfilter.GuardObservation, error) {
	d.k.guardsObserved++
	o := netfilter.GuardObservation{Exists: len(d.k.guards) > 0, State: d.k.guards}
	o.Guards = append(o.Guards, d.k.guards...)
	return o, d.k.guardErr
}

func (d *fakeDriver) CompareGuards(desired []policy.Guard, observed netfilter.GuardObservation) (diff policy.Diff) {
	have, _ := observed.State.([]policy.Guard)
	find := func(in []policy.Guard, g policy.Guard) *policy.Guard {
		for i := range in {
			if in[i].Chain == g.Chain && in[i].Family == g.Family {
				return &in[i]
			}
		}
		return nil
	}
	for _, g := range desired {
		o := find(have, g)
		kind := policy.GuardChange
		if o != nil {
			if reflect.DeepEqual(*o, g) {
				continue
			}
			rest := g
			if rest.Scope.Sources, rest.Exempt, rest.Bound = o.Scope.Sources, o.Exempt, o.Bound; reflect.DeepEqual(rest, *o) {
				kind = policy.ElementChange
			}
		}
		diff = append(diff, policy.Change{Kind: kind, Family: g.Family, Chain: g.Chain, Text: "guard"})
	}
	for _, o := range have {
		if find(desired, o) == nil {
			diff = append(diff, policy.Change{Kind: policy.GuardChange, Family: o.Family, Chain: o.Chain, Unexpected: true, Text: "guard"})
		}
	}
	return diff
}

func (d *fakeDriver) ApplyGuards(_ context.Context, desired []policy.Guard, from netfilter.GuardObservation) error {
	if err := cmp.Or(d.k.guardErr, d.k.guardUnusable, d.k.guardWrites); err != nil {
		return err
	}
	if d.k.guardsRefused > 0 || !reflect.DeepEqual(from.State, any(d.k.guards)) {
		d.k.guardsRefused--
		return netfilter.ErrChanged
	}
	d.k.guards = slices.Clone(desired)
	text := "guards:"
	for _, g := range desired {
		text += fmt.Sprintf(" %s %s pods %v exempt %v", g.Chain, g.Mode, g.Scope.Sources, g.Exempt)
		if g.Bound != nil {
			text += fmt.Sprintf(" bound %v", g.Bound)
		}
		if g.Scope.Interfaces != nil {
			text += fmt.Sprintf(" out %v", g.Scope.Interfaces)
		}
	}
	d.k.log = append(d.k.log, text)
	return nil
}

func (d *fakeDriver) CheckGuards(context.Context, []policy.Guard, netfilter.GuardObservation) error {
	return d.k.guardUnusable
}

func (d *fakeDriver) RenderGuards([]policy.Guard, ...policy.Family) []byte { return nil }
