// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"hash/maphash"
	"maps"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// series are the labels of a number of connections, packets or prefixes.
type series struct {
	chain  string
	family policy.Family
	action string
}

// labels returns the values that the series has.
func (s series) labels() []string {
	empty := func(label string) bool { return label == "" }
	return slices.DeleteFunc([]string{s.chain, string(s.family), s.action}, empty)
}

// collect exports numbers by their labels.
func collect[N int | uint64](numbers map[series]N, to sample) {
	for s, n := range numbers {
		to(float64(n), s.labels()...)
	}
}

// kernelChain is a chain in the kernel.
type kernelChain struct {
	netfilter.Choice
	family policy.Family
	chain  string
}

// counter identifies a counter in its chain: the nth of the rules that are alike.
type counter struct {
	rule uint64 // hash of the key
	nth  int
}

// count is the value of a counter, and what its rule does.
type count struct {
	n      uint64
	action string
}

// totals adds up the kernel's counters, which begin at 0 when their rule is recreated, to totals
// that never fall. The first value of a counter counts in full, as the rule may be older than this
// process. What a counter counts between its last observation and its end is lost.
type totals struct {
	last   map[kernelChain]map[counter]count
	sums   map[series]uint64
	chains names
}

func newTotals() totals {
	return totals{map[kernelChain]map[counter]count{}, map[series]uint64{}, names{}}
}

// export begins the series of a chain with 0.
func (t *totals) export(p kernelChain, actions ...string) {
	name := t.chains.admit(label(p.chain))
	for _, a := range actions {
		t.sums[series{name, p.family, a}] += 0
	}
}

// add adds what the counters of a chain counted since their last observation.
func (t *totals) add(p kernelChain, counters map[counter]count) {
	name := t.chains.admit(label(p.chain))
	for k, c := range counters {
		more := c.n
		if last := t.last[p][k].n; last <= c.n {
			more -= last
		} // otherwise it was recreated
		t.sums[series{name, p.family, c.action}] += more
	}
	t.last[p] = counters
}

func (t *totals) forget(gone func(kernelChain) bool) {
	maps.DeleteFunc(t.last, func(p kernelChain, _ map[counter]count) bool { return gone(p) })
}

// connections are the totals of the masquerade chains.
type connections struct {
	totals
	seed maphash.Seed
}

// observe adds what was counted since the state before. It ignores nil.
func (c *connections) observe(s *enforce.State) {
	if s == nil {
		return
	}
	seen := map[kernelChain]bool{}
	for _, chain := range s.Chains {
		for _, observed := range chain.Observed.Chains {
			p := kernelChain{chain.Choice, observed.Family, observed.Name}
			seen[p] = true
			c.export(p, string(policy.ActionExempt), string(policy.ActionMasquerade))
			c.add(p, c.counters(chain.Choice, observed.Rules))
		}
	}
	for bound, n := range s.Guard.Observed.Bound { // before the masquerade chain sees them
		if s.Find(bound.Chain) == nil {
			continue
		}
		p := kernelChain{family: bound.Family, chain: bound.Chain}
		seen[p] = true
		c.add(p, map[counter]count{{}: {n, string(policy.ActionExempt)}})
	}
	// A chain that could not be observed may still exist: its counters must not count twice.
	c.forget(func(p kernelChain) bool {
		chain := s.Find(p.chain)
		if p.Choice == (netfilter.Choice{}) {
			return !seen[p] && s.Guard.Err == nil
		}
		return !seen[p] && (chain == nil || chain.Err == nil)
	})
}

func (c *connections) counters(choice netfilter.Choice, rules []policy.Rule) map[counter]count {
	actions := map[policy.Verdict]policy.Action{policy.Return: policy.ActionExempt, policy.Masquerade: policy.ActionMasquerade}
	counters := make(map[counter]count, len(rules))
	alike := make(map[uint64]int, len(rules))
	for _, r := range rules {
		action, counts := actions[r.Verdict]
		if !counts {
			continue
		}
		if choice.Backend == policy.NFTables { // the elements of a set change while the rule and its counter stay
			r = r.WithoutElements()
		}
		rule := maphash.Comparable(c.seed, r.Key())
		counters[counter{rule, alike[rule]}] = count{r.Connections, string(action)}
		alike[rule]++
	}
	return counters
}

// observeGuards adds the packets that guards counted or dropped since the state before. It ignores nil.
func (t *totals) observeGuards(s *enforce.State) {
	if s == nil {
		return
	}
	seen := map[kernelChain]bool{}
	for _, g := range s.Guard.Desired {
		if g.Mode == policy.GuardOff {
			continue
		}
		p, action := kernelChain{family: g.Family, chain: g.Chain}, string(g.Mode)
		t.export(p, action)
		n, counted := s.Guard.Observed.Packets[policy.ChainFamily{Chain: g.Chain, Family: g.Family}]
		if !counted {
			continue
		}
		if last, known := t.last[p][counter{}]; known && len(s.Guard.Diff) > 0 {
			action = last.action // of the rule in the kernel, which may be the one of another mode
		}
		seen[p] = true
		t.add(p, map[counter]count{{}: {n, action}})
	}
	t.forget(func(p kernelChain) bool { return !seen[p] && s.Guard.Err == nil })
}
