// SPDX-License-Identifier: Apache-2.0

package enforce

import (
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// keepWhatExists makes desired what the kernel has, as some documents cannot be read: chains with rules stay
// as they are, get a missing jump, and their guards stay. Chains that do not exist are desired as the
// readable documents have it, and bind nothing, as it is not known what the others masquerade. If a newer
// version wrote a document that cannot be read, they are not created: the ADDs of its network pass and never
// write it again, and the chain would masquerade what it exempts.
func (s *State) keepWhatExists(newer error) {
	s.node.keepsAll = true
	exists := map[policy.ChainFamily]bool{}
	for i := range s.Chains {
		c := &s.Chains[i]
		kept := c.keep()
		for _, k := range kept {
			exists[k] = true
		}
		if newer != nil && len(kept) == 0 {
			c.fail(fmt.Errorf("chain %s does not exist, and is not created without all documents: %w",
				c.Policy.Chain, newer))
		}
	}
	for i := range s.observed.tables {
		t := &s.observed.tables[i]
		for _, o := range t.observation.Rules.Chains {
			if !s.wants(o.Name, o.Family, t.choice) {
				o.Rules = recognized(o.Rules)
				t.ofNoPolicy = append(t.ofNoPolicy, o)
			}
		}
	}
	s.keepGuards(exists)
	s.compare()
}

// keepGuards makes desired the guards that the kernel has, and those of the policies whose chains do not
// exist.
func (s *State) keepGuards(exists map[policy.ChainFamily]bool) {
	g := &s.Guard
	var desired []policy.Guard
	for _, o := range g.Observed.Guards {
		c := s.Find(o.Chain)
		if c != nil && c.lacksJump(o.Family) {
			o.Scope.Interfaces = c.Policy.Scope(o.Family).Interfaces // those of the jump that it gets
		}
		if c == nil || c.Err != nil || exists[policy.ChainFamily{Chain: o.Chain, Family: o.Family}] {
			desired = append(desired, o.Beside(s.policiesWithout(exists, o.Family)))
		}
	}
	for _, d := range g.Desired {
		isThere := exists[policy.ChainFamily{Chain: d.Chain, Family: d.Family}]
		if isThere || d.Mode == policy.GuardOff || s.Find(d.Chain).Err != nil {
			continue
		}
		d.Bound, d.MoreBindings = nil, nil
		desired = append(desired, d)
	}
	g.Desired = desired
}

// policiesWithout returns the policies whose chains do not exist in a family.
func (s *State) policiesWithout(exists map[policy.ChainFamily]bool, f policy.Family) []policy.Policy {
	var added []policy.Policy
	for _, p := range s.Policies() {
		if !exists[policy.ChainFamily{Chain: p.Chain, Family: f}] {
			added = append(added, p)
		}
	}
	return added
}

// recognized returns the rules that could be decoded.
func recognized(rules []policy.Rule) []policy.Rule {
	known := make([]policy.Rule, 0, len(rules))
	for _, r := range rules {
		if r.Verdict != policy.Unrecognized {
			known = append(known, r)
		}
	}
	return known
}

// lacksJump reports whether a chain has no jump to it.
func (c *Chain) lacksJump(f policy.Family) bool {
	have := c.Observed.Find(f, c.Policy.Chain)
	return have != nil && len(have.Jumps) == 0
}

// keep makes desired the rules that a chain has, with a missing jump, and returns the families in which it
// has some.
func (c *Chain) keep() (kept []policy.ChainFamily) {
	c.Desired.Chains = slices.Clone(c.Desired.Chains)
	for j, want := range c.Desired.Chains {
		have := c.Observed.Find(want.Family, want.Name)
		if have == nil || len(have.Rules) == 0 {
			continue
		}
		stays := *have
		stays.Rules = recognized(have.Rules)
		if len(have.Jumps) == 0 {
			stays.Jumps = want.Jumps
		}
		c.Desired.Chains[j] = stays
		kept = append(kept, policy.ChainFamily{Chain: want.Name, Family: want.Family})
	}
	return kept
}
