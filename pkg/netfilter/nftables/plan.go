// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"maps"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// plan is what has to be done to a table. The new sets are made and filled in a
// first batch; rules are switched to them in a second. In one batch packets
// were seen to meet the set empty.
type plan struct {
	family  policy.Family
	replace bool // take the whole table away first
	drop    bool // and leave it away

	newSets []set   // first batch
	deltas  []delta // second batch, alone

	rewrite    []rewritten // chains
	hook       bool        // make the base chain
	rehook     bool        // write the jumps anew
	jumps      []rewritten // to write there, by target
	goneJumps  []uint64    // handles of rules of the base chain
	goneChains []string
	goneSets   []string
}

type set struct {
	name   string
	ranges policy.Ranges
}

// delta is a change of the elements of a live set.
type delta struct {
	set      string
	add, del policy.Ranges
}

// rewritten is a chain, or the jumps to one, with the sets that its rules name.
type rewritten struct {
	chain *policy.Chain
	fresh bool // it is not there yet
	sets  []string
}

func (p *plan) empty() bool {
	return !p.replace && !p.drop && len(p.newSets)+len(p.deltas)+len(p.rewrite)+len(p.goneJumps)+len(p.goneChains)+len(p.goneSets) == 0 &&
		!p.hook && !p.rehook
}

// planTable finds the least that makes the table hold the desired chains and
// nothing else.
func planTable(f policy.Family, have *table, desired []policy.Chain) *plan {
	p := &plan{family: f}
	switch {
	case len(desired) == 0:
		p.drop = have.exists
		return p
	case have.broken:
		p.replace = true
		have = &table{}
	}
	if d, only := onlyElements(have, desired); only {
		p.deltas = d
		return p
	}
	p.goneSets = slices.Clone(have.straySets)
	for _, name := range have.strayChains {
		wanted := func(c policy.Chain) bool { return chainPrefix+c.Name == name }
		if !slices.ContainsFunc(desired, wanted) { // one without rules is a stray, too
			p.goneChains = append(p.goneChains, name)
		}
	}
	p.hook = !have.hooked
	names := namer{taken: maps.Clone(have.sets), plan: p}
	p.chains(have, desired, &names)
	p.jumpRules(have, desired, &names)
	for name := range have.sets {
		if !names.kept[name] && !anonymous(name) && !slices.Contains(p.goneSets, name) {
			p.goneSets = append(p.goneSets, name)
		}
	}
	slices.Sort(p.goneSets)
	return p
}

// planRemoval finds how to take chains away, and what a writer left that ended
// between its two batches, and to leave the rest as it is.
func planRemoval(f policy.Family, have *table, gone func(masqChain string) bool) *plan {
	p := &plan{family: f}
	used := map[string]bool{} // by what stays
	for name, c := range have.chains {
		if gone(name) {
			p.goneChains = append(p.goneChains, chainPrefix+name)
			continue
		}
		for _, s := range c.sets {
			used[s] = true
		}
	}
	if len(p.goneChains) == len(have.chains) && (len(have.chains) > 0 || have.leftover()) {
		return &plan{family: f, drop: true}
	}
	for _, j := range have.jumps {
		if j.target != "" && gone(j.target) {
			p.goneJumps = append(p.goneJumps, j.handle)
		} else {
			used[j.set] = true
		}
	}
	for name := range have.sets {
		if !used[name] && ownSet(name) {
			p.goneSets = append(p.goneSets, name)
		}
	}
	slices.Sort(p.goneChains)
	slices.Sort(p.goneSets)
	return p
}

// chains decides which chains are written anew and which go.
func (p *plan) chains(have *table, desired []policy.Chain, names *namer) {
	wanted := map[string]bool{}
	for i := range desired {
		want := &desired[i]
		wanted[want.Name] = true
		there := have.chains[want.Name]
		if there != nil && len(policy.CompareChain(rulesOnly(want), &policy.Chain{Rules: there.rules, Owner: there.owner})) == 0 {
			names.keep(there.sets)
			continue
		}
		r := rewritten{chain: want, fresh: there == nil}
		for _, rule := range want.Rules {
			r.sets = append(r.sets, names.forRule(rule, want.Name, sourceSet))
		}
		p.rewrite = append(p.rewrite, r)
	}
	for name := range have.chains {
		if !wanted[name] {
			p.goneChains = append(p.goneChains, chainPrefix+name)
			p.rehook = true // what jumps to it has to go before it
		}
	}
	slices.Sort(p.goneChains)
}

// jumpRules decides whether the jumps are written anew: all of them or none.
func (p *plan) jumpRules(have *table, desired []policy.Chain, names *namer) {
	right := have.hooked
	total := 0
	for i := range desired {
		want := &policy.Chain{Jumps: desired[i].Jumps}
		right = right && len(policy.CompareChain(want, &policy.Chain{Jumps: have.jumpsTo(desired[i].Name)})) == 0
		total += len(desired[i].Jumps)
	}
	if right && total == len(have.jumps) && !p.rehook {
		for _, j := range have.jumps {
			names.keep([]string{j.set})
		}
		return
	}
	p.rehook = true
	for i := range desired {
		r := rewritten{chain: &desired[i]}
		for _, j := range desired[i].Jumps {
			r.sets = append(r.sets, names.forRule(j, desired[i].Name, scopeSet))
		}
		p.jumps = append(p.jumps, r)
	}
}

func rulesOnly(c *policy.Chain) *policy.Chain {
	return &policy.Chain{Family: c.Family, Name: c.Name, Rules: c.Rules, Owner: c.Owner}
}

// namer finds for the addresses of a rule a set that holds them, or orders one.
type namer struct {
	taken map[string]policy.Ranges
	kept  map[string]bool
	plan  *plan
}

func (n *namer) keep(sets []string) {
	if n.kept == nil {
		n.kept = map[string]bool{}
	}
	for _, s := range sets {
		n.kept[s] = true
	}
}

// forRule returns the set that the rule is to name, "" for none. Rules of ours
// match sources or destinations by a set, never both.
func (n *namer) forRule(r policy.Rule, masqChain, sources string) string {
	kind, ranges := sources, r.From
	if r.From == nil {
		kind, ranges = exemptSet, r.To
	}
	if ranges == nil {
		return ""
	}
	for name, held := range n.taken {
		if held != nil && nameIs(name, kind, masqChain) && held.Equal(ranges) {
			n.keep([]string{name})
			return name
		}
	}
	name := freeName(kind, masqChain, n.taken)
	if n.taken == nil {
		n.taken = map[string]policy.Ranges{}
	}
	n.taken[name] = ranges
	n.keep([]string{name})
	n.plan.newSets = append(n.plan.newSets, set{name, ranges})
	return name
}
