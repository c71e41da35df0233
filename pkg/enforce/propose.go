// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"errors"
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
// Where the backend is still to be chosen, that shows when it is.
func (p *Proposal) change(own policy.Contribution) error {
	next := *p
	next.put(own)
	merged := next.merged(own.Statement.Chain)
	if err := merged.CheckBounds(policy.Layout{Sets: merged.Backend.Value != policy.IPTables}); err != nil {
		return fmt.Errorf("%s: %w", own.Source, err)
	}
	*p = next
	return nil
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
		for _, e := range blocking {
			other := *p.Find(e.Holds.Source)
			if !disk.Lacks(other.Source.Name) {
				continue
			}
			other.Yields, own.Yields = true, false
			p.put(other)
			p.put(own)
			warn(fmt.Errorf("%s is in no conflist any more and yields to %s", other.Source, own.Source))
		}
		blocking = p.lostBy(own.Source)
	}
	var errs []error
	for _, e := range blocking {
		errs = append(errs, e)
	}
	if len(errs) == 0 && own.Yields {
		own.Yields = false
		p.put(own)
	}
	return errors.Join(errs...)
}

// lostBy returns the conflicts that the source loses to another.
func (p *Proposal) lostBy(s policy.Source) []*policy.ConflictError {
	var lost []*policy.ConflictError
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
