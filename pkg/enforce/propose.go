// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Conflists is what the configuration directory of the runtimes says of the
// networks of a node.
type Conflists interface {
	// Names reports whether a conflist has an entry of ours for the network.
	HasEntry(network string) bool
	// Lacks reports whether none has, which nobody knows while a file of the
	// directory cannot be read.
	LacksEntry(network string) bool
	// Has reports whether that entry states this.
	HasEntryWith(network string, s policy.SourcePolicy) bool
}

// Proposal is the documents as they are to become.
type Proposal struct {
	Sources []policy.Source
	Changed []policy.Source // those that differ from what is stored
}

// NewProposal proposes what is stored.
func NewProposal(stored []policy.Source) *Proposal {
	return &Proposal{Sources: slices.Clone(stored)}
}

// Find returns what the source contributes, or nil.
func (p *Proposal) Find(s policy.SourceID) *policy.Source {
	for i := range p.Sources {
		if p.Sources[i].ID == s {
			return &p.Sources[i]
		}
	}
	return nil
}

// Chain returns the chain that a source of the proposal contributes to.
func (p *Proposal) Chain(s policy.SourceID) string {
	if c := p.Find(s); c != nil {
		return c.Policy.Chain
	}
	return ""
}

// Add puts what a source states among the documents. Of a network it keeps the
// stored statement where the new one is that of a conflist which has since been
// replaced, and makes a network yield that contradicts and that no conflist
// names. The error is that of the conflicts in which the network yields itself;
// then the proposal is as it was before.
func (p *Proposal) Add(own policy.Source, disk Conflists, warn func(error)) error {
	stored := p.Find(own.ID)
	if own.ID.Kind != policy.Network {
		if stored != nil && reflect.DeepEqual(*stored, own) {
			return nil
		}
		return p.change(own)
	}
	changed := stored == nil || !stored.Policy.Equal(own.Policy)
	if changed && stored != nil && disk.HasEntryWith(own.ID.Name, stored.Policy) {
		warn(fmt.Errorf("%s: this ADD has an older entry than the conflist on disk, which stays in force", own.ID))
		changed = false
	}
	next := *p
	if changed { // a changed document is a newcomer: what others state was there before
		own.Order = 1 + lastOrder(p.Sources)
		if err := next.change(own); err != nil {
			return err
		}
	} else {
		own = *stored
	}
	if err := next.settle(own, disk, warn); err != nil {
		return err
	}
	*p = next
	return nil
}

// change puts in what a source states, unless its chain has too many rules then.
func (p *Proposal) change(own policy.Source) error {
	next := *p
	next.put(own)
	if err := checkBounds(next.merged(own.Policy.Chain)); err != nil {
		return fmt.Errorf("%s: %w", own.ID, err)
	}
	*p = next
	return nil
}

// AddAll adds what networks state, each as Add does, and returns the errors by
// source. Where nothing has to be decided, it takes one merge and not one each.
func (p *Proposal) AddAll(all []policy.Source, disk Conflists, warn func(error)) map[policy.SourceID]error {
	if next, undisputed := p.withAll(all); undisputed {
		*p = next
		return nil
	}
	errs := map[policy.SourceID]error{}
	for _, c := range all {
		if err := p.Add(c, disk, warn); err != nil {
			errs[c.ID] = err
		}
	}
	return errs
}

// withAll returns the proposal with what networks state, and whether no network
// conflicts with another or has yielded.
func (p *Proposal) withAll(all []policy.Source) (Proposal, bool) {
	next := Proposal{slices.Clone(p.Sources), slices.Clone(p.Changed)}
	at := map[policy.SourceID]int{}
	undisputed := true
	for i, c := range next.Sources {
		at[c.ID] = i
		undisputed = undisputed && !c.Superseded
	}
	order := lastOrder(p.Sources)
	for _, c := range all {
		i, stored := at[c.ID]
		if stored && next.Sources[i].Policy.Equal(c.Policy) {
			continue
		}
		order++
		c.Order = order
		next.Changed = append(next.Changed, c)
		if stored {
			next.Sources[i] = c
		} else {
			next.Sources = append(next.Sources, c)
		}
	}
	for _, merged := range policy.Merge(next.Sources) {
		ofNetworks := func(e *policy.ConflictError) bool { return e.Superseded.Source.Kind == policy.Network }
		undisputed = undisputed && checkBounds(merged) == nil && !slices.ContainsFunc(merged.Conflicts, ofNetworks)
	}
	return next, undisputed
}

// checkBounds returns an error if the policy has too many rules. Where the
// backend is still to be chosen, that shows when it is.
func checkBounds(p policy.Policy) error {
	return p.CheckBounds(policy.Layout{Sets: p.Backend.Value != policy.IPTables})
}

func (p *Proposal) put(c policy.Source) {
	p.Sources = WithSource(p.Sources, c)
	p.Changed = WithSource(p.Changed, c)
}

// With returns the contributions with one in the place of its source's.
func WithSource(list []policy.Source, c policy.Source) []policy.Source {
	out := slices.DeleteFunc(slices.Clone(list), func(x policy.Source) bool { return x.ID == c.ID })
	return append(out, c)
}

func lastOrder(list []policy.Source) int64 {
	var last int64
	for _, c := range list {
		last = max(last, c.Order)
	}
	return last
}

// settle resolves the conflicts in which the network yields to another: the
// other yields if it is gone from the disk and this one is there; else the error
// is all that is in its way.
func (p *Proposal) settle(own policy.Source, disk Conflists, warn func(error)) error {
	blocking := p.lostBy(own.ID)
	if len(blocking) > 0 && disk.HasEntry(own.ID.Name) {
		asked := map[policy.SourceID]bool{}
		for _, e := range blocking {
			source := e.InForce.Source
			if asked[source] {
				continue
			}
			asked[source] = true
			if !disk.LacksEntry(source.Name) {
				continue
			}
			other := *p.Find(source)
			other.Superseded, own.Superseded = true, false
			p.put(other)
			p.put(own)
			warn(fmt.Errorf("%s is in no conflist any more and yields to %s", other.ID, own.ID))
		}
		blocking = p.lostBy(own.ID)
	}
	if len(blocking) > 0 {
		return blocking
	}
	if own.Superseded {
		own.Superseded = false
		p.put(own)
	}
	return nil
}

// lostBy returns the conflicts that the source loses to another.
func (p *Proposal) lostBy(s policy.SourceID) policy.ConflictErrors {
	var lost policy.ConflictErrors
	for _, e := range p.merged(p.Chain(s)).Conflicts {
		if e.Superseded.Source == s {
			lost = append(lost, e)
		}
	}
	return lost
}

// merged returns the policy of one chain.
func (p *Proposal) merged(chain string) policy.Policy {
	var to []policy.Source
	for _, c := range p.Sources {
		if c.Policy.Chain == chain {
			to = append(to, c)
		}
	}
	return policy.Merge(to)[0]
}
