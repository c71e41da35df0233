// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	tableName   = "ip-masq"
	baseChain   = "postrouting"
	chainPrefix = "masq-" // because nft cannot parse every bare name: 10, ip or set
)

// The kinds of sets, which begin their names.
const (
	exemptSet = "exempt" // destinations
	sourceSet = "source" // sources that are never masqueraded
	scopeSet  = "scope"  // sources in scope
)

// masqChainOf returns the name of the masquerade chain that a chain of the table is.
func masqChainOf(name string) (string, bool) { return strings.CutPrefix(name, chainPrefix) }

// ownsSet reports whether a set of the table has a name that ip-masq gives.
func (t *table) ownsSet(name string) bool {
	if t.name == netfilter.GuardTable {
		return name == selfSet || masqChainOfGuard(name) != ""
	}
	kind, _, _ := strings.Cut(name, "-")
	return kind == exemptSet || kind == sourceSet || kind == scopeSet
}

// masqTable returns the table with these chains that the existing one is to become, or nil for none. The
// kernel changes the elements of one set in use at once, but not those of two sets, nor those of a set and a
// rule. So at first the sets in use keep their names. If then at most one of them differs, its elements are
// changed in place. Else the table is built again, and each set with other elements gets another name.
func masqTable(f policy.Family, chains []policy.Chain, have *table) *table {
	if have.broken {
		have = newTable(tableName)
	}
	t := buildMasqTable(f, chains, have, usedSets(have.chains))
	if t == nil || t.differsAtMostInOneSet(have) {
		return t
	}
	return buildMasqTable(f, chains, have, nil)
}

// differsAtMostInOneSet reports whether another table has the same chains, and the same sets but for one.
func (t *table) differsAtMostInOneSet(have *table) bool {
	if len(t.chains) != len(have.chains) {
		return false
	}
	for name, c := range t.chains {
		held := have.chains[name]
		if held == nil || c.differs(held) {
			return false
		}
	}
	different := 0
	for name, ranges := range t.sets {
		if !ranges.Equal(have.sets[name]) {
			different++
		}
	}
	return different <= 1
}

// buildMasqTable returns a table with these chains, or nil for none. Its sets have the names of existing ones
// with the same elements, or of those whose elements may change, or new ones.
func buildMasqTable(f policy.Family, chains []policy.Chain, have *table, mayChange map[string]bool) *table {
	if len(chains) == 0 {
		return nil
	}
	b := builder{table: newTable(tableName), have: have, mayChange: mayChange}
	b.addChain(baseChain)
	for _, c := range chains {
		b.addChain(chainPrefix + c.Name)
		for i, r := range c.Rules {
			comment := ""
			isLast := i == len(c.Rules)-1
			if isLast { // it names the owner, where nft list shows it
				comment = c.Owner.Comment()
			}
			set := b.setOf(r, c.Name, sourceSet)
			b.add(chainPrefix+c.Name, comment, statements(f, r, set, "")...)
		}
	}
	for _, c := range chains {
		for _, j := range c.Jumps {
			set := b.setOf(j, c.Name, scopeSet)
			b.add(baseChain, "", statements(f, j, set, chainPrefix+c.Name)...)
		}
	}
	return b.table
}

// builder builds a table that the existing one is to become.
type builder struct {
	*table
	have      *table
	mayChange map[string]bool // existing sets that may get other elements
}

// setOf adds the set of a rule's addresses and returns its name, "" if the rule has none. A rule of an owned
// chain matches sources or destinations by a set, never both. Sources is the kind of a set of sources.
func (b *builder) setOf(r policy.Rule, masqChain, sources string) string {
	ranges, kind := r.To, exemptSet
	if r.From != nil {
		ranges, kind = r.From, sources
	}
	if ranges == nil {
		return ""
	}
	name := b.nameSet(kind, masqChain, ranges)
	b.addSet(name, ranges)
	return name
}

// nameSet returns the name of a set that has these ranges or may get them, else the first free name: a set
// and the one that replaces it both exist for a moment.
func (b *builder) nameSet(kind, masqChain string, ranges policy.Ranges) string {
	names := b.setNames(kind, masqChain)
	for _, name := range slices.Backward(names) {
		if b.mayHave(name, ranges) {
			return name
		}
	}
	for _, name := range names {
		if b.isFree(name) {
			return name
		}
	}
	return ""
}

// setNames returns the names that sets of a chain can have: at least one more than there are sets.
func (b *builder) setNames(kind, masqChain string) []string {
	first := kind + "-" + masqChain
	names := []string{first}
	for number := 2; number <= len(b.have.sets)+len(b.sets)+1; number++ {
		names = append(names, first+"."+strconv.Itoa(number))
	}
	return names
}

// mayHave reports whether the name is of a set that has the ranges, or of an existing one that may get them.
func (b *builder) mayHave(name string, ranges policy.Ranges) bool {
	own, isOfThisTable := b.sets[name]
	if isOfThisTable {
		return own.Equal(ranges)
	}
	held, exists := b.have.sets[name]
	isOfAnotherForm := held == nil
	mayChange := b.mayChange[name] && !isOfAnotherForm
	return exists && (mayChange || held.Equal(ranges))
}

func (b *builder) isFree(name string) bool {
	_, isOfThisTable := b.sets[name]
	_, exists := b.have.sets[name]
	return !isOfThisTable && !exists
}

// ruleset returns the table as it was read in the terms of policy.
func (t *table) ruleset(f policy.Family) (rs policy.Ruleset) {
	jumps, others := t.jumps(f)
	unrecognized := slices.Concat(t.unrecognized, others)
	for _, name := range t.order {
		masqChain, isMasq := masqChainOf(name)
		switch {
		case isMasq:
			c := t.readMasqChain(f, name)
			c.Name, c.Jumps = masqChain, jumps[masqChain]
			rs.Chains = append(rs.Chains, c)
		case name != baseChain:
			unrecognized = append(unrecognized, "chain "+policy.Quote(name))
		}
	}
	used := usedSets(t.chains)
	for _, name := range namesIn(t.sets, nil) {
		isReported := t.sets[name] == nil
		if used[name] || isReported {
			continue
		}
		text := "set " + policy.Quote(name)
		if t.ownsSet(name) {
			text += " of ip-masq, which no rule uses"
		}
		unrecognized = append(unrecognized, text)
	}
	for _, text := range unrecognized {
		rs.Unrecognized = append(rs.Unrecognized, policy.UnrecognizedObject{Family: f, Text: text})
	}
	return rs
}

// jumps returns the jumps of the base chain, by masquerade chain, and its other rules.
func (t *table) jumps(f policy.Family) (to map[string][]policy.Rule, others []string) {
	to = map[string][]policy.Rule{}
	base := t.chains[baseChain]
	if base == nil {
		return to, nil
	}
	for _, raw := range base.rules {
		r := decode(f, raw, t.sets)
		chain, isMasq := masqChainOf(r.Target)
		if isMasq {
			to[chain] = append(to[chain], r.Rule)
		} else {
			others = append(others, fmt.Sprintf("chain %s: %s", baseChain, r.Rule))
		}
	}
	return to, others
}

// readMasqChain returns a masquerade chain of the table, without its name and the jumps to it.
func (t *table) readMasqChain(f policy.Family, name string) policy.Chain {
	c := policy.Chain{Family: f, Rules: []policy.Rule{}, Owner: t.chains[name].owner()}
	for _, raw := range t.chains[name].rules {
		r := decode(f, raw, t.sets)
		if r.Verdict == policy.Jump {
			r.Unrecognize()
		}
		c.Rules = append(c.Rules, r.Rule)
	}
	return c
}

// decode returns the rule that was encoded. A rule that statements does not write is unrecognized, as is one
// with a set that differs from nfnetlink.AddressRanges.
func decode(f policy.Family, r rule, sets map[string]policy.Ranges) netfilter.DecodedRule {
	set := ""
	d := nfnetlink.Decode(netfilter.LinkOf(f), nfnetlink.Rule{Exprs: r.exprs}, nil)
	d.Packets = r.packets
	return netfilter.DecodeRule(d, func(c nfnetlink.Condition) (policy.Ranges, bool) {
		if c.Set == "" || set != "" {
			return nil, false
		}
		set = c.Set
		return sets[set], sets[set] != nil
	})
}
