// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"hash/maphash"
	"maps"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// series are the labels of a number of connections or prefixes.
type series struct {
	chain  string
	family policy.Family
	action policy.Action
}

func (s series) labels() []string { return []string{s.chain, string(s.family), string(s.action)} }

// place is a chain in the kernel.
type place struct {
	backend policy.Backend
	variant string
	family  policy.Family
	chain   string
}

// counter identifies the counter of a rule in its chain: the nth of those that are alike.
type counter struct {
	rule uint64
	nth  int
}

// connections adds up the kernel's counters, which begin at 0 when their rule is recreated, to totals
// that never fall. The first value of a counter counts in full, as the rule may be older than this
// process. What a counter counts between its last observation and its end is lost. The zero value is
// ready for use.
type connections struct {
	seed   maphash.Seed
	last   map[place]map[counter]uint64
	totals map[series]uint64
	chains names
}

// observe adds what was counted since the state before. It ignores nil.
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
	// A chain that could not be observed may still exist: its counters must not count twice.
	maps.DeleteFunc(c.last, func(p place, _ map[counter]uint64) bool { return !seen[p] && v.Failed[p.chain] == nil })
}

func (c *connections) chain(p place, rules []policy.Rule) {
	name := c.chains.admit(label(p.chain))
	actions := map[policy.Verdict]policy.Action{policy.Return: policy.Exempt, policy.Masquerade: policy.Masqueraded}
	for _, a := range actions {
		c.totals[series{name, p.family, a}] += 0 // exported from the beginning
	}
	before, now := c.last[p], make(map[counter]uint64, len(rules))
	alike := make(map[uint64]int, len(rules))
	for _, r := range rules {
		action, counts := actions[r.Verdict]
		if !counts {
			continue
		}
		k := counter{rule: c.identify(r, p.backend)}
		k.nth = alike[k.rule]
		alike[k.rule]++
		more := r.Connections
		if last := before[k]; last <= more {
			more -= last
		} // otherwise it was recreated
		c.totals[series{name, p.family, action}] += more
		now[k] = r.Connections
	}
	c.last[p] = now
}

// identify returns a hash that identifies a rule in later observations. In nftables, addresses are not
// part of it: the elements of a set change while the rule and its counter stay. Rules with the same
// hash are distinguished by their order.
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

// shape is what of a rule can be compared.
type shape struct {
	out                      string
	notFromLocal, notToLocal bool
	protocol                 policy.Protocol
	share                    uint32
	verdict                  policy.Verdict
	ports                    policy.PortRange
	randomFully              bool
}
