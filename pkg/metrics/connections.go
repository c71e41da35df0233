// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"hash/maphash"
	"maps"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// series are the labels of a number of connections or prefixes.
type series struct {
	chain  string
	family policy.Family
	action policy.Action
}

func (s series) compare(t series) int {
	return cmp.Or(cmp.Compare(s.chain, t.chain), cmp.Compare(s.family, t.family), cmp.Compare(s.action, t.action))
}

// actions returns the actions of destinations, and so of rules.
func actions() []policy.Action { return []policy.Action{policy.Exempt, policy.Masqueraded} }

func actionOf(v policy.Verdict) (policy.Action, bool) {
	switch v {
	case policy.Return:
		return policy.Exempt, true
	case policy.Masquerade:
		return policy.Masqueraded, true
	}
	return "", false
}

// place is where a chain stands in the kernel.
type place struct {
	backend policy.Backend
	variant string
	family  policy.Family
	chain   string
}

// counter names one counter of a chain from one reading to the next: that of
// the nth rule of its like.
type counter struct {
	rule uint64
	nth  int
}

// total is how many connections were counted in one series.
type total struct {
	series
	count uint64
}

// connections adds up what the counters of the kernel say, which begin at 0
// again whenever their rule is made anew, into totals that never fall. What a
// counter said when it was first seen counts in full: the rule may be older than
// this process. Lost is what it counted between its last reading and its end.
//
// The zero value is ready for use.
type connections struct {
	seed   maphash.Seed
	last   map[place]map[counter]uint64
	totals map[series]uint64
	chains names
}

// observe takes a reading in. A nil one says nothing.
func (c *connections) observe(v *enforce.State) {
	if v == nil {
		return
	}
	if c.last == nil {
		c.seed, c.last, c.totals = maphash.MakeSeed(), map[place]map[counter]uint64{}, map[series]uint64{}
	}
	seen := map[place]bool{}
	for _, g := range v.Groups {
		for i := range g.Observed.Chains {
			chain := &g.Observed.Chains[i]
			p := place{g.Choice.Backend, g.Choice.Variant, chain.Family, chain.Name}
			seen[p] = true
			c.chain(p, chain.Rules)
		}
	}
	// Of a chain that failed nobody knows whether it went: its counters may
	// be met again as they were, and must not count twice.
	maps.DeleteFunc(c.last, func(p place, _ map[counter]uint64) bool { return !seen[p] && v.Failed[p.chain] == nil })
}

func (c *connections) chain(p place, rules []policy.Rule) {
	name := c.chains.admit(label(p.chain))
	for _, a := range actions() {
		c.totals[series{name, p.family, a}] += 0 // there from the beginning
	}
	before, now := c.last[p], make(map[counter]uint64, len(rules))
	alike := make(map[uint64]int, len(rules))
	for _, r := range rules {
		action, counts := actionOf(r.Verdict)
		if !counts {
			continue
		}
		k := counter{rule: c.identify(r, p.backend)}
		k.nth = alike[k.rule]
		alike[k.rule]++
		more := r.Connections
		if last := before[k]; last <= more {
			more -= last
		} // else it has begun anew since
		c.totals[series{name, p.family, action}] += more
		now[k] = r.Connections
	}
	c.last[p] = now
}

// identify returns what a rule is known by from one reading to the next. With
// nftables the addresses are no part of it: elements come to a set and go while
// the rule that uses it, and its counter, stay. Two that are taken for one
// another are told apart by their order.
func (c *connections) identify(r policy.Rule, b policy.Backend) uint64 {
	var h maphash.Hash
	h.SetSeed(c.seed)
	for _, addresses := range []policy.Ranges{r.From, r.To} {
		if addresses == nil {
			maphash.WriteComparable(&h, false)
			continue
		}
		maphash.WriteComparable(&h, true)
		if b == policy.NFTables {
			continue
		}
		maphash.WriteComparable(&h, len(addresses))
		for _, a := range addresses {
			maphash.WriteComparable(&h, a)
		}
	}
	maphash.WriteComparable(&h, shape{r.Out, r.NotFromLocal, r.NotToLocal, r.Protocol, r.Share, r.Verdict, r.Ports, r.RandomFully})
	return h.Sum64()
}

// shape is all of a rule that can be compared.
type shape struct {
	out                      string
	notFromLocal, notToLocal bool
	protocol                 policy.Protocol
	share                    uint32
	verdict                  policy.Verdict
	ports                    policy.PortRange
	randomFully              bool
}

// list returns the totals, sorted.
func (c *connections) list() []total {
	var out []total
	for s, n := range c.totals {
		out = append(out, total{s, n})
	}
	slices.SortFunc(out, func(a, b total) int { return a.compare(b.series) })
	return out
}
