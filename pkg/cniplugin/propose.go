// SPDX-License-Identifier: Apache-2.0

package cniplugin

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// proposal is the documents as an ADD wants them.
type proposal struct {
	contributions []policy.Contribution
	changed       []policy.Contribution // those that differ from what is stored
}

func (p *proposal) own(s policy.Source) policy.Contribution {
	i := slices.IndexFunc(p.contributions, func(c policy.Contribution) bool { return c.Source == s })
	return p.contributions[i]
}

func (p *proposal) put(c policy.Contribution) {
	p.contributions = with(p.contributions, c)
	p.changed = with(p.changed, c)
}

// with returns the contributions with one in the place of its source's.
func with(list []policy.Contribution, c policy.Contribution) []policy.Contribution {
	out := slices.DeleteFunc(slices.Clone(list), func(x policy.Contribution) bool { return x.Source == c.Source })
	return append(out, c)
}

// propose puts the network's statement among the documents. It keeps the stored
// one where the statement is that of a conflist which has since been replaced,
// and makes a network yield that contradicts and that no conflist names.
func (n *node) propose(s store.State, own policy.Contribution) (*proposal, error) {
	p := &proposal{contributions: slices.Clone(s.Contributions)}
	disk := n.conflists()
	stored := s.Find(own.Source)
	changed := stored == nil || !stored.Statement.Equal(own.Statement)
	if changed && stored != nil && disk.has(n.network, stored.Statement) {
		n.Warn(fmt.Errorf("network %s: this ADD has an older entry than the conflist on disk, which stays in force", policy.Quote(n.network)))
		changed = false
	}
	if changed { // a changed document is a newcomer: what others state was there before
		own.Order = 1 + lastOrder(s.Contributions)
		p.put(own)
	} else {
		own = *stored
	}
	return p, n.settle(p, own, disk)
}

func lastOrder(list []policy.Contribution) int64 {
	var last int64
	for _, c := range list {
		last = max(last, c.Order)
	}
	return last
}

// settle resolves the conflicts in which the network yields to another: the
// other yields if it is gone from the disk and this one is there; else the ADD
// fails, with all that is in its way.
func (n *node) settle(p *proposal, own policy.Contribution, disk *conflists) error {
	blocking := p.lostBy(own.Source)
	if len(blocking) > 0 && disk.names(own.Source) {
		for _, e := range blocking {
			if other := p.own(e.Holds.Source); disk.lacks(other.Source) {
				other.Yields = true
				p.put(other)
				own.Yields = false
				p.put(own)
				n.Warn(fmt.Errorf("%s is in no conflist any more and yields to %s", other.Source, own.Source))
			}
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
func (p *proposal) lostBy(s policy.Source) []*policy.ConflictError {
	var lost []*policy.ConflictError
	for _, merged := range policy.Merge(p.contributions) {
		for _, e := range merged.Conflicts {
			if e.Yields.Source == s {
				lost = append(lost, e)
			}
		}
	}
	return lost
}

// conflists is the conf directory of the runtimes, read when first asked for:
// an ADD whose document stands does without it.
type conflists struct {
	dir  string
	warn func(error)
	read *config.ConfDir
}

func (n *node) conflists() *conflists {
	return &conflists{dir: n.guard.CNIConfDir, warn: n.Warn}
}

func (c *conflists) load() *config.ConfDir {
	if c.read == nil {
		dir, err := config.ReadConfDir(c.dir)
		if !errors.Is(err, os.ErrNotExist) {
			c.warn(err)
		}
		c.read = &dir
	}
	return c.read
}

func (c *conflists) names(s policy.Source) bool { return c.load().Names(s.Name) }

// lacks tells that no conflist names the source, which nobody knows while a file
// cannot be read.
func (c *conflists) lacks(s policy.Source) bool { return c.load().Err() == nil && !c.names(s) }

func (c *conflists) has(network string, s policy.Statement) bool {
	onDisk, found := c.load().Statement(network)
	return found && onDisk.Equal(s)
}

func stage(lock *store.Lock, changed []policy.Contribution) (staged []*store.Staged, err error) {
	for _, c := range changed {
		one, err := lock.Stage(c)
		if err != nil {
			return nil, errors.Join(err, discard(staged))
		}
		staged = append(staged, one)
	}
	return staged, nil
}

func commit(staged []*store.Staged) error {
	var errs []error
	for _, s := range staged {
		errs = append(errs, s.Commit())
	}
	return errors.Join(errs...)
}

func discard(staged []*store.Staged) error {
	var errs []error
	for _, s := range staged {
		errs = append(errs, s.Discard())
	}
	return errors.Join(errs...)
}
