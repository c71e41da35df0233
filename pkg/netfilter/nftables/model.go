// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"slices"
	"strconv"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	tableName   = "ip-masq"
	baseChain   = "postrouting"
	chainPrefix = "masq-" // nft cannot parse every name bare: not 10, ip or set
	priority    = 101
)

// table is one of our tables as it was read.
type table struct {
	exists bool
	hooked bool // the base chain is there as we make it
	broken bool // it holds what only making it anew gets rid of
	jumps  []jump
	chains map[string]*chain        // by the name of the masquerade chain
	sets   map[string]policy.Ranges // nil for those that are not as we make them
	// strays are the chains and sets that no rule of ours has a use for.
	strayChains, straySets []string
	aliens                 []string // what is wrong, for people
}

// chain is a masquerade chain in a table.
type chain struct {
	rules []policy.Rule
	sets  []string // those that its rules name
	owner policy.Owner
}

// jump is a rule of the base chain.
type jump struct {
	handle uint64
	target string // the masquerade chain; "" for a rule that is none of ours
	rule   policy.Rule
	set    string
}

// jumpsTo returns the jumps to a chain.
func (t *table) jumpsTo(name string) []policy.Rule {
	var rules []policy.Rule
	for _, j := range t.jumps {
		if j.target == name {
			rules = append(rules, j.rule)
		}
	}
	return rules
}

// ruleset returns the table in the terms of policy.
func (t *table) ruleset(f policy.Family) policy.Ruleset {
	var rs policy.Ruleset
	for name, c := range t.chains {
		rs.Chains = append(rs.Chains, policy.Chain{
			Family: f, Name: name, Jumps: t.jumpsTo(name), Rules: c.rules, Owner: c.owner,
		})
	}
	for _, text := range t.aliens {
		rs.Unrecognized = append(rs.Unrecognized, policy.UnrecognizedObject{Family: f, Text: text})
	}
	return rs
}

// The sets of a chain, by what they match. A set that is about to replace
// another has a number at its end, as both are there for a moment.
const (
	exemptSet = "exempt" // destinations
	sourceSet = "source" // sources left alone
	scopeSet  = "scope"  // sources that are looked at
)

// leftover reports whether the table holds nothing but what a writer leaves that
// ends between its two batches, or nothing at all.
func (t *table) leftover() bool {
	thirdParty := func(set string) bool { return !ownSet(set) }
	return t.exists && !t.broken && len(t.jumps)+len(t.chains)+len(t.strayChains) == 0 && !slices.ContainsFunc(t.straySets, thirdParty)
}

// ownSet reports whether a set has a name that freeName gives.
func ownSet(name string) bool {
	kind, _, _ := strings.Cut(name, "-")
	return kind == exemptSet || kind == sourceSet || kind == scopeSet
}

// freeName returns a name for a new set that no other has.
func freeName(kind, masqChain string, taken map[string]policy.Ranges) string {
	name := kind + "-" + masqChain
	for n := 2; ; n++ {
		if _, used := taken[name]; !used {
			return name
		}
		name = kind + "-" + masqChain + "." + strconv.Itoa(n)
	}
}

// anonymous reports whether a set belongs to a rule, and goes with it.
func anonymous(set string) bool { return strings.HasPrefix(set, "__") }

// masqChainOf returns which masquerade chain a chain of our table is.
func masqChainOf(name string) (string, bool) { return strings.CutPrefix(name, chainPrefix) }

// nameIs reports whether a set is of the kind, for the chain.
func nameIs(name, kind, masqChain string) bool {
	rest, ok := strings.CutPrefix(name, kind+"-"+masqChain)
	if !ok || rest == "" {
		return ok
	}
	number, ok := strings.CutPrefix(rest, ".")
	_, err := strconv.Atoi(number)
	return ok && err == nil
}
