// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"net/netip"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// policyKeys returns the keys that state policy, in every kind of document and as flags.
func policyKeys(s *policy.SourcePolicy, parseChain func(string) (string, error)) []Key {
	var keys []Key
	for _, k := range policy.Keys(s) {
		keys = append(keys, keyOf(k, valueOf(k, parseChain)))
	}
	return keys
}

// keyOf returns the key of a row, with what its flag needs.
func keyOf(k policy.Key, v Value) Key {
	usage := k.Help
	if len(k.Type.Choices) > 0 {
		usage += ": " + policy.JoinOr(k.Type.Choices)
	}
	if k.Default != "false" {
		usage += " (default: " + k.Default + ")"
	}
	return Key{k.Name, v, k.Type.Placeholder, usage}
}

// valueOf returns the decoder of a field.
func valueOf(k policy.Key, parseChain func(string) (string, error)) Value {
	switch to := k.Field.(type) {
	case **bool:
		return optional(to)
	case *[]netip.Prefix:
		return list(to, k.Type.Example, policy.ParsePrefix)
	case *[]string:
		return list(to, k.Type.Example, anyText[string])
	case **policy.Ports:
		return optionalText(to, k.Type.Example, policy.ParsePorts)
	case **policy.Mark:
		return optionalText(to, k.Type.Example, policy.ParseMark)
	case *string:
		return text(to, k.Type.Example, parseChain)
	case policy.Word:
		return oneOf(to, k.Type.Choices...)
	}
	panic("config: no decoder for " + k.Name)
}

// The keys of a plugin entry that state no policy. Agent files have the first of them.
func cidrLimitKey() policy.Key {
	return policy.Key{
		Name: "cidrLimit", Type: policy.Type{Name: "number", Placeholder: "N"}, Default: fmt.Sprint(policy.DefaultCIDRLimit),
		Help:        "most CIDRs in nonMasqueradeCIDRs and masqueradeCIDRs together",
		Combination: policy.Combination{Sources: "each source on its own"},
	}
}

// EntryKeys is the table of the keys of a plugin entry, without those of the CNI protocol.
func EntryKeys() []policy.Key {
	return append(policy.Keys(new(policy.SourcePolicy)), cidrLimitKey(), policy.Key{
		Name: "requireAgentConfig", Type: policy.Type{Name: "boolean"}, Default: "false", Help: "ADD fails until the agent files were read once",
		Combination: policy.Combination{Sources: "each network on its own"},
	}, policy.Key{
		Name: "dataDir", Type: policy.Type{Name: "path"}, Default: DefaultDataDir, Help: "directory of the state",
		Combination: policy.Combination{Sources: "one for each node"},
	})
}

// OwnPolicy is the File of values that [agent] and the agents' flags state.
const OwnPolicy = "[agent] of the reconciler's settings"

// Dialect is the agent for which the agents' files are written.
type Dialect string

// The values of agent_dialect: in a file without nonMasqueradeCIDRs, ip-masq-agent (v1) leaves
// the list to the other files; for ip-masq-agent-v2 it is empty.
const (
	DialectV1 Dialect = "v1"
	DialectV2 Dialect = "v2"
)

// AgentPolicy is the policy that [agent] and the agents' flags state beside the files.
type AgentPolicy struct {
	Policy    policy.SourcePolicy // its Chain is "" if none is stated
	CIDRLimit int                 // 0 for DefaultCIDRLimit

	WrittenIn string              // reconciler.toml
	Written   map[string]Position // where its keys are there; flags have no position
}

// Equal reports whether both state the same, wherever it is written.
func (a AgentPolicy) Equal(b AgentPolicy) bool {
	return a.Policy.Equal(b.Policy) && a.CIDRLimit == b.CIDRLimit
}

// Keys is the table of the keys that agent files and [agent] have in common.
func (a *AgentPolicy) Keys() []Key {
	// An empty Chain stands for none, so an empty name is refused here.
	parseChain := func(s string) (string, error) { return s, policy.ValidateChainName(s) }
	return append(policyKeys(&a.Policy, parseChain), keyOf(cidrLimitKey(), count(&a.CIDRLimit, 1, policy.MaxCIDRLimit)))
}

// Validate validates the policy on its own. The caller says whether IPv6 is enabled.
func (a AgentPolicy) Validate(d *Document, ipv6 bool) {
	s, limit := a.Policy, a.CIDRLimit
	if s.Chain == "" {
		s.Chain = policy.DefaultChain
	}
	if limit == 0 {
		limit = policy.DefaultCIDRLimit
	}
	s.EnableIPv6 = &ipv6
	d.ValidatePolicy(s, limit)
}
