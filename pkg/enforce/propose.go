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
	Names(network string) bool
	// Lacks reports whether none has, which nobody knows while a file of the
	// directory cannot be read.
	Lacks(network string) bool
	// Has reports whether that entry states this.
	Has(network string, s policy.Statement) bool
}

// Proposal is the documents as they are to become.
type Proposal struct {
	Contributions []policy.Contribution
	Changed       []policy.Contribution // those that differ from what is stored
}

// NewProposal proposes what is stored.
func NewProposal(stored []policy.Contribution) *Proposal {
	return &Proposal{Contributions: slices.Clone(stored)}
}

// Find returns what the source contributes, or nil.
func (p *Proposal) Find(s policy.Source) *policy.Contribution {
	for i := range p.Contributions {
		if p.Contributions[i].Source == s {
			return &p.Contributions[i]
		}
	}
	return nil
}

// Chain returns the chain that a source of the proposal contributes to.
func (p *Proposal) Chain(s policy.Source) string {
	if c := p.Find(s); c != nil {
		return c.Statement.Chain
	}
	return ""
}

// Add puts what a source states among the documents. Of a network it keeps the
// stored statement where the new one is that of a conflist which has since been
// replaced, and makes a network yield that contradicts and that no conflist
// names. The error is that of the conflicts in which the network yields itself;
// then the proposal is as it was before.
func (p *Proposal) Add(own policy.Contribution, disk Conflists, warn func(error)) error {
	stored := p.Find(own.Source)
	if own.Source.Kind != policy.Network {
		if stored != nil && reflect.DeepEqual(*stored, own) {
			return nil
		}
		return p.change(own)
	}
	changed := stored == nil || !stored.Statement.Equal(own.Statement)
	if changed && stored != nil && disk.Has(own.Source.Name, stored.Statement) {
		warn(fmt.Errorf("%s: this ADD has an older entry than the conflist on disk, which stays in force", own.Source))
		changed = false
	}
	next := *p
	if changed { // a changed document is a newcomer: what others state was there before
		own.Order = 1 + lastOrder(p.Contributions)
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
func (p *Proposal) change(own policy.Contribution) error {
	next := *p
	next.put(own)
	if err := checkBounds(next.merged(own.Statement.Chain)); err != nil {
		return fmt.Errorf("%s: %w", own.Source, err)
	}
	*p = next
	return nil
}

// AddAll adds what networks state, each as Add does, and returns the errors by
// source. Where nothing has to be decided, it takes one merge and not one each.
func (p *Proposal) AddAll(all []policy.Contribution, disk Conflists, warn func(error)) map[policy.Source]error {
	if next, undisputed := p.withAll(all); undisputed {
		*p = next
		return nil
	}
	errs := map[policy.Source]error{}
	for _, c := range all {
		if err := p.Add(c, disk, warn); err != nil {
			errs[c.Source] = err
		}
	}
	return errs
}

// withAll returns the proposal with what networks state, and whether no network
// conflicts with another or has yielded.
func (p *Proposal) withAll(all []policy.Contribution) (Proposal, bool) {
	next := Proposal{slices.Clone(p.Contributions), slices.Clone(p.Changed)}
	at := map[policy.Source]int{}
	undisputed := true
	for i, c := range next.Contributions {
		at[c.Source] = i
		undisputed = undisputed && !c.Yields
	}
	order := lastOrder(p.Contributions)
	for _, c := range all {
		i, stored := at[c.Source]
		if stored && next.Contributions[i].Statement.Equal(c.Statement) {
			continue
		}
		order++
		c.Order = order
		next.Changed = append(next.Changed, c)
		if stored {
			next.Contributions[i] = c
		} else {
			next.Contributions = append(next.Contributions, c)
		}
	}
	for _, merged := range policy.Merge(next.Contributions) {
		ofNetworks := func(e *policy.ConflictError) bool { return e.Yields.Source.Kind == policy.Network }
		undisputed = undisputed && checkBounds(merged) == nil && !slices.ContainsFunc(merged.Conflicts, ofNetworks)
	}
	return next, undisputed
}

// checkBounds returns an error if the policy has too many rules. Where the
// backend is still to be chosen, that shows when it is.
func checkBounds(p policy.Policy) error {
	return p.CheckBounds(policy.Layout{Sets: p.Backend.Value != policy.IPTables})
}

func (p *Proposal) put(c policy.Contribution) {
	p.Contributions = With(p.Contributions, c)
	p.Changed = With(p.Changed, c)
}

// With returns the contributions with one in the place of its source's.
func With(list []policy.Contribution, c policy.Contribution) []policy.Contribution {
	out := slices.DeleteFunc(slices.Clone(list), func(x policy.Contribution) bool { return x.Source == c.Source })
	return append(out, c)
}

func lastOrder(list []policy.Contribution) int64 {
	var last int64
	for _, c := range list {
		last = max(last, c.Order)
	}
	return last
}

// settle resolves the conflicts in which the network yields to another: the
// other yields if it is gone from the disk and this one is there; else the error
// is all that is in its way.
func (p *Proposal) settle(own policy.Contribution, disk Conflists, warn func(error)) error {
	blocking := p.lostBy(own.Source)
	if len(blocking) > 0 && disk.Names(own.Source.Name) {
		asked := map[policy.Source]bool{}
		for _, e := range blocking {
			source := e.Holds.Source
			if asked[source] {
				continue
			}
			asked[source] = true
			if !disk.Lacks(source.Name) {
				continue
			}
			other := *p.Find(source)
			other.Yields, own.Yields = true, false
			p.put(other)
			p.put(own)
			warn(fmt.Errorf("%s is in no conflist any more and yields to %s", other.Source, own.Source))
		}
		blocking = p.lostBy(own.Source)
	}
	if len(blocking) > 0 {
		return blocking
	}
	if own.Yields {
		own.Yields = false
		p.put(own)
	}
	return nil
}

// lostBy returns the conflicts that the source loses to another.
func (p *Proposal) lostBy(s policy.Source) policy.ConflictErrors {
	var lost policy.ConflictErrors
	for _, e := range p.merged(p.Chain(s)).Conflicts {
		if e.Yields.Source == s {
			lost = append(lost, e)
		}
	}
	return lost
}

// merged returns the policy of one chain.
func (p *Proposal) merged(chain string) policy.Policy {
	var to []policy.Contribution
	for _, c := range p.Contributions {
		if c.Statement.Chain == chain {
			to = append(to, c)
		}
	}
	return policy.Merge(to)[0]
}
