// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"net/netip"
	"slices"
)

// outOfOrder returns the observed rules that stand before one which the desired
// order has before them, where that has a meaning. Both lists hold the same.
func outOfOrder(desired, observed []Rule) []Rule {
	places := map[string][]int{}
	for i, r := range desired {
		places[r.key()] = append(places[r.key()], i)
	}
	behind := newRulesBehind(observed)
	var out []Rule
	for _, r := range slices.Backward(observed) {
		k := r.key()
		last := len(places[k]) - 1
		rank := len(desired) - places[k][last] // the first of the desired order has the highest
		places[k] = places[k][:last]
		if behind.outrank(r, rank) {
			out = append(out, r)
		}
		behind.add(r, rank)
	}
	slices.Reverse(out)
	return out
}

// rulesBehind holds rules with their ranks, to tell if one of a higher rank is
// among them whose order to another rule has a meaning.
//
// Two rules that match one prefix at most, of sources or of destinations, match
// the same packets only if the prefix of one lies within that of the other: such
// rules are found by their prefixes. Others are compared one by one. Only
// backends with sets have them, and few rules.
type rulesBehind struct {
	sources, destinations rulesByPrefix
	effects               map[effect]int // numbers, from 1
	others                []rankedRule
}

// effect is what rules have in common whose order among them has no meaning.
type effect struct {
	verdict     Verdict
	ports       PortRange
	randomFully bool
	share       int // another one for each rule with a share of the packets
}

type rankedRule struct {
	rule Rule
	rank int
}

func newRulesBehind(rules []Rule) *rulesBehind {
	b := &rulesBehind{newRulesByPrefix(), newRulesByPrefix(), map[effect]int{}, nil}
	for _, r := range rules {
		if !b.sources.admit(r.From) || !b.destinations.admit(r.To) || r.From != nil && r.To != nil {
			return &rulesBehind{}
		}
	}
	return b
}

func (b *rulesBehind) add(r Rule, rank int) {
	if b.effects == nil {
		b.others = append(b.others, rankedRule{r, rank})
		return
	}
	e := effect{r.Verdict, r.Ports, r.RandomFully, 0}
	if r.Share != 0 {
		e.share = 1 + len(b.effects)
	}
	if b.effects[e] == 0 {
		b.effects[e] = 1 + len(b.effects)
	}
	b.sources.add(r.From, r.Protocol, rank, b.effects[e])
	b.destinations.add(r.To, r.Protocol, rank, b.effects[e])
}

// outrank reports whether there is such a rule.
func (b *rulesBehind) outrank(r Rule, rank int) bool {
	if b.effects == nil {
		return slices.ContainsFunc(b.others, func(s rankedRule) bool { return s.rank > rank && !r.commutes(s.rule) })
	}
	own := 0
	if r.Share == 0 {
		own = b.effects[effect{r.Verdict, r.Ports, r.RandomFully, 0}]
	}
	if r.From != nil {
		return b.sources.highest(r.From, r.Protocol, own) > rank
	}
	return b.destinations.highest(r.To, r.Protocol, own) > rank
}

// rulesByPrefix has for each prefix the ranks of the rules that match it. Those
// that match any address have the zero Prefix.
type rulesByPrefix struct {
	at   map[netip.Prefix]*prefixRanks
	bits [1 + 128]bool // lengths that prefixes have
}

// prefixRanks is the ranks of the rules of a prefix, and of those together with
// the rules of all prefixes within it.
type prefixRanks struct{ own, within ranks }

func newRulesByPrefix() rulesByPrefix {
	return rulesByPrefix{at: map[netip.Prefix]*prefixRanks{{}: {}}}
}

// admit makes room for the rules of a prefix, and returns false for another set.
func (m *rulesByPrefix) admit(r Ranges) bool {
	if r == nil {
		return true
	}
	if len(r) != 1 {
		return false
	}
	p, ok := r[0].Prefix()
	if ok && m.at[p] == nil {
		m.at[p], m.bits[p.Bits()] = &prefixRanks{}, true
	}
	return ok
}

// covering returns the ranks of a prefix and of those that cover it, the longest
// first.
func (m *rulesByPrefix) covering(r Ranges) []*prefixRanks {
	var all []*prefixRanks
	if r != nil {
		p, _ := r[0].Prefix()
		for bits := p.Bits(); bits >= 0; bits-- {
			if m.bits[bits] {
				if at := m.at[netip.PrefixFrom(p.Addr(), bits).Masked()]; at != nil {
					all = append(all, at)
				}
			}
		}
	}
	return append(all, m.at[netip.Prefix{}])
}

func (m *rulesByPrefix) add(r Ranges, p Protocol, rank, effect int) {
	for i, at := range m.covering(r) {
		at.within.add(p, rank, effect)
		if i == 0 {
			at.own.add(p, rank, effect)
		}
	}
}

// highest returns the highest rank of those rules, of all effects but one, that
// match packets which one of the prefix and protocol matches; or 0.
func (m *rulesByPrefix) highest(r Ranges, p Protocol, but int) int {
	highest := 0
	for i, at := range m.covering(r) {
		if i == 0 {
			highest = at.within.highest(p, but)
		} else {
			highest = max(highest, at.own.highest(p, but))
		}
	}
	return highest
}

// ranks has by protocol, any being the first, the two highest ranks of rules that
// differ in their effect.
type ranks [4][2]struct{ rank, effect int }

func (s *ranks) add(p Protocol, rank, effect int) {
	top := &s[1+slices.Index(Protocols(), p)]
	switch {
	case effect == top[0].effect:
		top[0].rank = max(top[0].rank, rank)
	case rank > top[0].rank:
		top[0], top[1] = struct{ rank, effect int }{rank, effect}, top[0]
	case rank > top[1].rank:
		top[1].rank, top[1].effect = rank, effect
	}
}

func (s *ranks) highest(p Protocol, but int) int {
	highest := 0
	for i, top := range s {
		switch {
		case p != "" && i > 0 && Protocols()[i-1] != p: // no packet has both
		case top[0].effect != but:
			highest = max(highest, top[0].rank)
		default:
			highest = max(highest, top[1].rank)
		}
	}
	return highest
}
