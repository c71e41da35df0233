// SPDX-License-Identifier: Apache-2.0

package config

import (
	"cmp"
	"fmt"
	"net/netip"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// keysOf returns the keys of rows, for every kind of document. Each ADD calls it, so that flags get their usage later.
func keysOf(rows []policy.Key) []Key {
	keys := make([]Key, len(rows))
	for i, k := range rows {
		key := &keys[i]
		key.Name = k.Name
		switch to := k.Field.(type) {
		case **bool:
			key.Value = optional(to)
		case *bool:
			key.Value = boolean(to)
		case *[]netip.Prefix:
			key.Value, key.Placeholder = list(to, "10.0.0.0/8", policy.ParsePrefix), "CIDR,..."
		case *policy.AddressItems:
			key.Value, key.Placeholder = list((*[]netip.Prefix)(to), "192.0.2.0/24", policy.ParseAddressItem), "CIDR,..."
		case *[]string:
			key.Value, key.Placeholder = list(to, "eth0", anyText[string]), "NAME,..."
		case *policy.Namespaces:
			key.Value, key.Placeholder = list((*[]string)(to), "kube-system", policy.ParseNamespace), "NAME,..."
		case **policy.Ports:
			key.Value, key.Placeholder = optionalText(to, "1024-29999,32768-65535", policy.ParsePorts), "PORTS"
		case **policy.Mark:
			key.Value, key.Placeholder = optionalText(to, "0x6000", policy.ParseMark), "MASK"
		case *string:
			key.Value, key.Placeholder = text(to, policy.DefaultChain, parseChain), "NAME"
		case policy.Word:
			key.Value, key.Placeholder = oneOf(to), "VALUE"
		case *int:
			key.Value, key.Placeholder = count(to, 1, policy.MaxCIDRLimit), "N"
		}
	}
	return keys
}

// usageOf returns the help of a flag.
func usageOf(k policy.Key) string {
	usage := k.Help
	if word, is := k.Field.(policy.Word); is {
		usage += ": " + policy.JoinOr(word.Choices())
	}
	if k.Default != "false" {
		usage += " (default: " + k.Default + ")"
	}
	return usage
}

func parseChain(s string) (string, error) { return s, policy.ValidateChainName(s) }

// limitKey is the row of a key that states no policy, and that plugin entries and agent files have.
func limitKey(to *int) policy.Key {
	return policy.Key{Name: "cidrLimit", Default: fmt.Sprint(policy.DefaultCIDRLimit), Help: "most CIDRs in nonMasqueradeCIDRs and masqueradeCIDRs together",
		Combination: policy.Combination{Sources: "each source on its own", Field: to}}
}

// Keys is the table of the keys of a plugin entry, without those that every verb needs.
func (e *Entry) Keys() []policy.Key {
	return append(policy.Keys(&e.Policy), limitKey(&e.CIDRLimit), policy.Key{Name: "requireAgentConfig", Default: "false",
		Help: "ADD fails until the agent files were read once", Combination: policy.Combination{Sources: "each network on its own", Field: &e.RequireAgentConfig}})
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
}

// Equal reports whether both state the same policy, regardless of where they state it.
func (a AgentPolicy) Equal(b AgentPolicy) bool {
	return a.Policy.Equal(b.Policy) && a.CIDRLimit == b.CIDRLimit
}

// Keys is the table of the keys that agent files and [agent] have in common.
func (a *AgentPolicy) Keys() []Key {
	rows := append(policy.Keys(&a.Policy), limitKey(&a.CIDRLimit))
	keys := keysOf(rows)
	for i, k := range rows {
		keys[i].Usage = usageOf(k)
	}
	return keys
}

// Validate validates the policy on its own. The caller says whether IPv6 is enabled.
func (a AgentPolicy) Validate(d *Document, ipv6 bool) {
	s := a.Policy
	s.Chain, s.EnableIPv6 = cmp.Or(s.Chain, policy.DefaultChain), &ipv6
	d.ValidatePolicy(s, cmp.Or(a.CIDRLimit, policy.DefaultCIDRLimit))
}
