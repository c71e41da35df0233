// SPDX-License-Identifier: Apache-2.0

package policy

import "slices"

// Ruleset is the rules of the masquerade chains, desired or observed, in the
// terms that all backends have in common.
type Ruleset struct {
	Chains []Chain
	// Unrecognized is what else stands where only we may write.
	Unrecognized []UnrecognizedObject
}

// UnrecognizedObject is something that is not a rule of a chain of ours: a chain, a
// set, a flag of a table.
type UnrecognizedObject struct {
	Family Family
	Text   string
}

// Chain is one masquerade chain of one family, with the jumps that lead to it
// from POSTROUTING.
type Chain struct {
	Family Family
	Name   string
	Jumps  []Rule
	Rules  []Rule
	Owner  Owner
}

// Find returns the chain, or nil.
func (rs *Ruleset) Find(f Family, name string) *Chain {
	for i := range rs.Chains {
		if c := &rs.Chains[i]; c.Family == f && c.Name == name {
			return c
		}
	}
	return nil
}

// finder returns Find for who looks for many chains.
func (rs *Ruleset) finder() func(f Family, name string) *Chain {
	const few = 16
	if len(rs.Chains) <= few {
		return rs.Find
	}
	type id struct {
		family Family
		name   string
	}
	chains := make(map[id]*Chain, len(rs.Chains))
	for i := range rs.Chains {
		c := &rs.Chains[i]
		chains[id{c.Family, c.Name}] = c
	}
	return func(f Family, name string) *Chain { return chains[id{f, name}] }
}

// HoldsOnly reports whether every rule of the chain has one of the verdicts.
func (c *Chain) HoldsOnly(verdicts ...Verdict) bool {
	return !slices.ContainsFunc(c.Rules, func(r Rule) bool { return !slices.Contains(verdicts, r.Verdict) })
}

// Walk returns the rule that decides about the packet, jumps and all, or nil
// where it passes the chain by or through.
func (c *Chain) Walk(p Packet) *Rule {
	for _, j := range c.Jumps {
		if !j.Matches(p) {
			continue
		}
		for i := range c.Rules {
			if c.Rules[i].Matches(p) {
				return &c.Rules[i]
			}
		}
	}
	return nil
}
