// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	natTable = "nat"
	// postrouting is the built-in chain whose rules jump to the masquerade chains.
	postrouting = "POSTROUTING"
)

// table is what was read of one family's table nat.
type table struct {
	chains []policy.Chain // those of the named chains that exist
	// targets are the chains or targets of the rules of POSTROUTING, in order.
	targets []string
	fault   string // why the rules of POSTROUTING do not have their effect; "": they have
}

// chainRules are the rules of a chain, as nf_tables expressions in both variants.
type chainRules struct {
	exists bool
	count  int
	rule   func(i int) nfnetlink.Rule // valid until the next call
}

// read fills the table from a function that reads one chain. POSTROUTING is read
// last, and only if there are chains that it can jump to.
func (t *table) read(f policy.Family, names []string, rulesOf func(chain string) (chainRules, error)) error {
	for _, name := range names {
		rules, err := rulesOf(name)
		if err != nil {
			return err
		}
		if rules.exists {
			t.chains = append(t.chains, decodeChain(f, name, rules))
		}
	}
	if len(t.chains) == 0 {
		return nil
	}
	rules, err := rulesOf(postrouting)
	for i := range rules.count {
		e := decode(f, rules.rule(i))
		t.targets = append(t.targets, e.target)
		if c := t.chain(e.target); c != nil {
			c.Jumps = append(c.Jumps, e.rule)
		}
	}
	return err
}

func decodeChain(f policy.Family, name string, rules chainRules) policy.Chain {
	c := policy.Chain{Family: f, Name: name, Rules: make([]policy.Rule, rules.count)}
	for i := range c.Rules {
		e := decode(f, rules.rule(i))
		if e.rule.Verdict == policy.Jump { // policy has no jumps out of a masquerade chain
			e.rule = policy.Rule{Verdict: policy.Unrecognized, Text: e.text, Connections: e.rule.Connections}
		}
		c.Rules[i] = e.rule
		if e.owner != (policy.Owner{}) {
			c.Owner = e.owner
		}
	}
	return c
}

// chain returns a chain of the table, nil if it does not exist.
func (t *table) chain(name string) *policy.Chain {
	i := slices.IndexFunc(t.chains, func(c policy.Chain) bool { return c.Name == name })
	if i < 0 {
		return nil
	}
	return &t.chains[i]
}

// jumpLines takes the rules of POSTROUTING as `iptables -S` prints them and
// returns those that lead to the table's chains, by chain. It returns false if
// the lines are not those of the rules that were read.
func (t *table) jumpLines(lines []string) (map[string][]string, bool) {
	jumps := map[string][]string{}
	if len(lines) != len(t.targets) {
		return nil, false
	}
	for i, line := range lines {
		for _, c := range t.chains {
			leads := leadsTo(line, c.Name)
			if leads != (t.targets[i] == c.Name) {
				return nil, false
			}
			if leads {
				jumps[c.Name] = append(jumps[c.Name], line)
			}
		}
	}
	return jumps, true
}

// leadsTo reports whether a rule that `iptables -S` printed jumps or goes to the
// chain. Nothing follows the chain in such a line.
func leadsTo(line, chain string) bool {
	return strings.HasSuffix(line, " -j "+chain) || strings.HasSuffix(line, " -g "+chain)
}

// ruleLines returns the rules among the lines that `iptables -S` prints. It joins
// those of a comment with line feeds, which iptables prints as they are.
func ruleLines(lines []string) []string {
	var rules []string
	for _, line := range lines {
		if n := len(rules); n > 0 && inQuotes(rules[n-1]) {
			rules[n-1] += "\n" + line
		} else if strings.HasPrefix(line, "-A ") {
			rules = append(rules, line)
		}
	}
	return rules
}

// inQuotes reports whether a quotation is open at the end of the text.
func inQuotes(text string) bool {
	open := false
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] == '"':
			open = !open
		case text[i] == '\\' && open:
			i++
		}
	}
	return open
}
