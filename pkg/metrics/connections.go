// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"hash/maphash"
	"maps"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
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
	netfilter.Choice
	family policy.Family
	chain  string
}

// counter identifies the counter of a rule in its chain: the nth of those that are alike.
type counter struct {
	rule uint64 // hash of its key
	nth  int
}

// connections adds up the kernel's counters, which begin at 0 when their rule is recreated, to totals
// that never fall. The first value of a counter counts in full, as the rule may be older than this
// process. What a counter counts between its last observation and its end is lost.
type connections struct {
	seed   maphash.Seed
	last   map[place]map[counter]uint64
	totals map[series]uint64
	chains names
}

// observe adds what was counted since the state before. It ignores nil.
func (c *connections) observe(s *enforce.State) {
	if s == nil {
		return
	}
	seen := map[place]bool{}
	for _, g := range s.Groups {
		for _, chain := range g.Observed.Chains {
			p := place{g.Choice, chain.Family, chain.Name}
			seen[p] = true
			c.chain(p, chain.Rules)
		}
	}
	// A chain that could not be observed may still exist: its counters must not count twice.
	maps.DeleteFunc(c.last, func(p place, _ map[counter]uint64) bool { return !seen[p] && s.Failed[p.chain] == nil })
}

func (c *connections) chain(p place, rules []policy.Rule) {
	name := c.chains.admit(label(p.chain))
	actions := map[policy.Verdict]policy.Action{policy.Return: policy.ActionExempt, policy.Masquerade: policy.ActionMasquerade}
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
		if p.Backend == policy.NFTables { // the elements of a set change while the rule and its counter stay
			r = r.WithoutElements()
		}
		k := counter{rule: maphash.Comparable(c.seed, r.Key())}
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
