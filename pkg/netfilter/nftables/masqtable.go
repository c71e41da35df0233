// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"fmt"
	"maps"
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

// ownSet reports whether a set has a name as nameSet returns.
func ownSet(name string) bool {
	kind, _, _ := strings.Cut(name, "-")
	return kind == exemptSet || kind == sourceSet || kind == scopeSet
}

// masqTable returns the table with these chains that the existing one is to become, or nil for none. The
// kernel changes the elements of one set in use at once, but not those of two sets, nor those of a set and a
// rule. So if anything but one set differs, a set with other elements has another name.
func masqTable(f policy.Family, chains []policy.Chain, have *table) *table {
	if have.broken {
		have = newTable(tableName)
	}
	if t := buildMasqTable(f, chains, have, usedSets(have.chains)); t == nil || t.differsInOneSet(have) {
		return t
	}
	return buildMasqTable(f, chains, have, nil)
}

// differsInOneSet reports whether another table has the same chains, and the sets that they use but for one.
func (t *table) differsInOneSet(have *table) bool {
	if !maps.EqualFunc(t.chains, have.chains, func(c, held *chain) bool { return !c.differs(held) }) {
		return false
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
// with the same elements, or of those that are to change, or new ones.
func buildMasqTable(f policy.Family, chains []policy.Chain, have *table, change map[string]bool) *table {
	if len(chains) == 0 {
		return nil
	}
	t := newTable(tableName)
	// A rule of an owned chain matches sources or destinations by a set, never both.
	setOf := func(r policy.Rule, masqChain, sources string) string {
		ranges, kind := r.To, exemptSet
		if r.From != nil {
			ranges, kind = r.From, sources
		}
		if ranges == nil {
			return ""
		}
		name := t.nameSet(kind, masqChain, ranges, have, change)
		t.addSet(name, ranges)
		return name
	}
	t.addChain(baseChain)
	for _, c := range chains {
		t.addChain(chainPrefix + c.Name)
		for i, r := range c.Rules {
			comment := ""
			if i == len(c.Rules)-1 { // the last rule names the owner
				comment = c.Owner.Comment()
			}
			t.add(chainPrefix+c.Name, comment, statements(f, r, setOf(r, c.Name, sourceSet), "")...)
		}
	}
	for _, c := range chains {
		for _, j := range c.Jumps {
			t.add(baseChain, "", statements(f, j, setOf(j, c.Name, scopeSet), chainPrefix+c.Name)...)
		}
	}
	return t
}

// nameSet returns the name of a set of this table, else of the existing one, with these ranges,
// else the first free one: a set and the one that replaces it both exist for a moment. The sets
// that are to change have any ranges.
func (t *table) nameSet(kind, masqChain string, ranges policy.Ranges, have *table, change map[string]bool) (free string) {
	for number := len(have.sets) + len(t.sets) + 1; number > 0; number-- {
		name := kind + "-" + masqChain
		if number > 1 {
			name += "." + strconv.Itoa(number)
		}
		held, exists := t.sets[name]
		if !exists {
			held, exists = have.sets[name]
			if change[name] && held != nil {
				held = ranges
			}
		}
		switch {
		case !exists:
			free = name
		case held.Equal(ranges):
			return name
		}
	}
	return free
}

// ruleset returns the table as it was read in the terms of policy.
func (t *table) ruleset(f policy.Family) (rs policy.Ruleset) {
	jumps, unrecognized := map[string][]policy.Rule{}, slices.Clone(t.unrecognized)
	for _, raw := range cmp.Or(t.chains[baseChain], &chain{}).rules {
		r := decode(f, raw, t.sets)
		if chain, masq := masqChainOf(r.Target); masq {
			jumps[chain] = append(jumps[chain], r.Rule)
		} else {
			unrecognized = append(unrecognized, fmt.Sprintf("chain %s: %s", baseChain, r.Rule))
		}
	}
	for _, name := range t.order {
		masqChain, masq := masqChainOf(name)
		if !masq {
			if name != baseChain {
				unrecognized = append(unrecognized, "chain "+policy.Quote(name))
			}
			continue
		}
		c := policy.Chain{Family: f, Name: masqChain, Jumps: jumps[masqChain], Rules: []policy.Rule{}, Owner: t.chains[name].owner()}
		for _, raw := range t.chains[name].rules {
			r := decode(f, raw, t.sets)
			if r.Verdict == policy.Jump {
				r.Unrecognize()
			}
			c.Rules = append(c.Rules, r.Rule)
		}
		rs.Chains = append(rs.Chains, c)
	}
	used := usedSets(t.chains)
	for _, name := range sorted(t.sets, nil) {
		switch {
		case used[name] || t.sets[name] == nil: // that is reported
		case ownSet(name):
			unrecognized = append(unrecognized, "set "+policy.Quote(name)+" of ip-masq, which no rule uses")
		default:
			unrecognized = append(unrecognized, "set "+policy.Quote(name))
		}
	}
	for _, text := range unrecognized {
		rs.Unrecognized = append(rs.Unrecognized, policy.UnrecognizedObject{Family: f, Text: text})
	}
	return rs
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
