// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// Table is the table that has masquerade chains, beside other programs' chains.
	Table = "nat"
	// postrouting is the built-in chain whose rules jump to the masquerade chains.
	postrouting = "POSTROUTING"
)

// table is the part of one family's table nat that was read.
type table struct {
	policy.Ruleset // the named chains that exist
	// targets are those of the rules of POSTROUTING, in order: the chain that each leads to.
	targets []string
	// fault is why the rules of POSTROUTING do not have their usual effect, or cannot be written.
	fault      string
	ownerError error // another program owns the table
}

// obstacle is why rules cannot be written before somebody removes it from the table.
type obstacle struct{ error }

// Unwrap returns the error.
func (o obstacle) Unwrap() error { return o.error }

// rulesReader returns the rules of one chain, with fs.ErrNotExist if there is none.
type rulesReader func(chain string) ([]nfnetlink.Rule, error)

// read fills the table from a function that reads one chain, with fs.ErrNotExist if there is none.
// It reads POSTROUTING last, and only if one of the named chains exists.
func (t *table) read(f policy.Family, names []string, rulesOf rulesReader) error {
	buffer := make([]nfnetlink.Condition, 0, 8)
	for _, name := range names {
		rules, err := rulesOf(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		t.Chains = append(t.Chains, decodeChain(f, name, rules, buffer))
		if slices.Contains(otherHooks(), name) {
			t.findOtherJumps(f, name, names, rules, buffer)
		}
	}
	if len(t.Chains) == 0 {
		return nil
	}
	rules, err := rulesOf(postrouting)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	for _, r := range rules {
		e := decode(f, r, buffer)
		t.targets = append(t.targets, e.Target)
		if c := t.Find(f, e.Target); c != nil {
			c.Jumps = append(c.Jumps, e.Rule)
		}
	}
	return err
}

// findOtherJumps takes note of a jump to one of the named chains from a built-in chain for which
// MASQUERADE is not made.
func (t *table) findOtherJumps(
	f policy.Family, from string, names []string, rules []nfnetlink.Rule, buffer []nfnetlink.Condition,
) {
	for _, r := range rules {
		to := decode(f, r, buffer).Target
		if slices.Contains(names, to) {
			t.fault = fmt.Sprintf("chain %s of table %s has a jump to chain %s, "+
				"so the kernel accepts no MASQUERADE there; remove the jump", from, Table, to)
		}
	}
}

// otherHooks are the built-in chains for which MASQUERADE is not made.
func otherHooks() []string { return []string{"PREROUTING", "INPUT", "OUTPUT"} }

func decodeChain(
	f policy.Family, name string, rules []nfnetlink.Rule, buffer []nfnetlink.Condition,
) policy.Chain {
	c := policy.Chain{Family: f, Name: name, Rules: make([]policy.Rule, len(rules))}
	for i, r := range rules {
		e := decode(f, r, buffer)
		if e.Verdict == policy.Jump { // policy has no jumps out of a masquerade chain
			e.Unrecognize()
		}
		c.Rules[i] = e.Rule
		if e.Owner != (policy.Owner{}) {
			c.Owner = e.Owner
		}
	}
	return c
}

// writable returns why iptables cannot write masquerade chains, as far as it was read.
func (t *table) writable() error {
	if t.fault != "" {
		return obstacle{errors.New(t.fault)}
	}
	if t.ownerError != nil {
		return obstacle{t.ownerError}
	}
	return nil
}

// jumpLines takes the rules of POSTROUTING as `iptables -S` prints them, and returns those that
// lead to the table's chains, by chain. It fails if they are not the rules that were read: another
// program writes.
func (t *table) jumpLines(lines []string) (map[string][]string, error) {
	errChanging := errors.New("iptables -S does not show the rules that the kernel has: " +
		"stop the program that rewrites them")
	jumps := map[string][]string{}
	if len(lines) != len(t.targets) {
		return nil, errChanging
	}
	for i, line := range lines {
		for _, c := range t.Chains {
			leads := strings.HasSuffix(line, " -j "+c.Name) || strings.HasSuffix(line, " -g "+c.Name)
			if leads != (t.targets[i] == c.Name) {
				return nil, errChanging
			}
			if leads {
				jumps[c.Name] = append(jumps[c.Name], line)
			}
		}
	}
	return jumps, nil
}

// decode decodes a rule of iptables-nft, also in the native form in which nft prints and loads it.
// The conditions use the array of buffer.
func decode(f policy.Family, rule nfnetlink.Rule, buffer []nfnetlink.Condition) netfilter.DecodedRule {
	decoded := nfnetlink.Decode(netfilter.LinkOf(f), rule, buffer)
	return netfilter.DecodeRule(decoded, prefixOf)
}

// prefixOf returns the addresses of a condition, nil for all, and whether they are one prefix.
func prefixOf(c nfnetlink.Condition) (policy.Ranges, bool) {
	p, isPrefix := c.Range.Prefix()
	if p.Bits() <= 0 {
		return nil, isPrefix
	}
	return policy.Ranges{c.Range}, isPrefix
}
