// SPDX-License-Identifier: Apache-2.0

package config

import (
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// OwnPolicy is the File of the places of what [agent] and the agents' flags
// state.
const OwnPolicy = "[agent] of the reconciler's settings"

// Dialect is which of the agents the agents' files are written for.
type Dialect string

// The values of agent_dialect. They differ in a file that is there and does not
// have the key nonMasqueradeCIDRs: with ip-masq-agent it leaves the list to
// others, with ip-masq-agent-v2 it means none.
const (
	DialectV1 Dialect = "v1"
	DialectV2 Dialect = "v2"
)

// AgentPolicy is what [agent] and the agents' flags state: policy beside the
// files.
type AgentPolicy struct {
	Policy    policy.SourcePolicy // its Chain is "" where none is stated
	CIDRLimit int                 // 0 for DefaultCIDRLimit

	Written Document // where the file has its keys; flags have no lines
}

// Equal reports whether both state the same, wherever it is written.
func (a AgentPolicy) Equal(b AgentPolicy) bool {
	return a.Policy.Equal(b.Policy) && a.CIDRLimit == b.CIDRLimit
}

// Keys is the table of what an agent document and [agent] have in common.
func (a *AgentPolicy) Keys() []Key {
	keys := append(policyKeys(&a.Policy), Key{"cidrLimit", count(&a.CIDRLimit, 1, policy.MaxCIDRLimit)})
	for i := range keys {
		if keys[i].Name == "masqChain" {
			// No chain is one that is not stated, so a name that is empty has to be refused here.
			keys[i].Read = text(policy.DefaultChain, parseChain, func(c string) { a.Policy.Chain = c })
		}
	}
	return keys
}

func parseChain(s string) (string, error) { return s, policy.ValidateChainName(s) }

// Validate judges the policy by itself. IPv6 tells whether it is enabled for it.
func (a AgentPolicy) Validate(f *Document, ipv6 bool) {
	s, limit := a.Policy, a.CIDRLimit
	if s.Chain == "" {
		s.Chain = policy.DefaultChain
	}
	if limit == 0 {
		limit = policy.DefaultCIDRLimit
	}
	s.EnableIPv6 = &ipv6
	f.ValidatePolicy(s, limit)
}
