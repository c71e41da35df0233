// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/netip"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// policyKeys is the table of the keys that state policy, in every kind of document and as
// flags. For another key see "Add a key" in CONTRIBUTING.md.
func policyKeys(s *policy.SourcePolicy, parseChain func(string) (string, error)) []Key {
	cidrs := func(to *[]netip.Prefix) Value { return list(to, "10.0.0.0/8", policy.ParsePrefix) }
	return []Key{
		{"nonMasqueradeCIDRs", cidrs(&s.NonMasqueradeCIDRs),
			"`CIDRS` not to masquerade, separated by commas; empty for none (default: the private ranges)"},
		{"masqueradeCIDRs", cidrs(&s.MasqueradeCIDRs),
			"`CIDRS` to masquerade inside wider exempt ones, separated by commas (default: none)"},
		{"nomasqAllReservedRanges", optional(&s.NomasqAllReservedRanges),
			"exempt every range that an RFC reserves, where no source states nonMasqueradeCIDRs"},
		{"masqLinkLocal", optional(&s.MasqLinkLocal), "masquerade 169.254.0.0/16 too"},
		{"masqLinkLocalIPv6", optional(&s.MasqLinkLocalIPv6), "masquerade fe80::/10 too"},
		{"enableIPv6", optional(&s.EnableIPv6), "manage IPv6 too, for all agent files"},
		{"sourceCIDRs", cidrs(&s.SourceCIDRs), "`CIDRS` of the sources in scope, separated by commas (default: any)"},
		{"nonMasqueradeSourceCIDRs", cidrs(&s.NonMasqueradeSourceCIDRs), "`CIDRS` of exempt sources, separated by commas (default: none)"},
		{"outputInterfaces", list(&s.OutputInterfaces, "eth0", anyText[string]),
			"`INTERFACES` in scope, separated by commas; wg+ for all that begin with wg (default: any)"},
		{"masqueradeHost", optional(&s.MasqueradeHost), "masquerade the node's own traffic too; =false exempts it (default: true)"},
		{"randomFully", optional(&s.RandomFully), "choose source ports at random, where the kernel can (default: true)"},
		{"toPorts", text(&s.ToPorts, "1024-29999,32768-65535", parsePorts),
			"source `PORTS` to use, such as 1024-29999,32768-65535 (default: any)"},
		{"masqChain", text(&s.Chain, policy.DefaultChain, parseChain),
			"`NAME` of the chain (default: IP-MASQ-AGENT)"},
		{"backend", backend(&s.Backend), "backend of this chain: auto, iptables or nftables"},
		{"podCIDRs", cidrs(&s.PodCIDRs),
			"`CIDRS` of pods for guard, staleConnections and enforceExempt (default: sourceCIDRs, else the pods' subnets)"},
		{"guard", oneOf(&s.Guard, policy.GuardOff, policy.GuardCount, policy.GuardDrop),
			"`MODE` for packets that NAT rules miss: off, count or drop (default: off)"},
		{"staleConnections", oneOf(&s.StaleConnections, policy.KeepConnections, policy.ResetConnections),
			"`MODE` for connections whose verdict has changed: keep or reset (default: keep, or reset with guard drop)"},
		{"enforceExempt", optional(&s.EnforceExempt), "keep exempt traffic of pods exempt beside third-party rules"},
		{"bypassMark", text(&s.BypassMark, "0x6000", parseMark),
			"`MASK` of packet marks that enforceExempt does not apply to; 0 for none (default: 0x6000)"},
	}
}

func parsePorts(s string) (*policy.Ports, error) {
	p, err := policy.ParsePorts(s)
	return &p, err
}

func parseMark(s string) (*policy.Mark, error) {
	m, err := policy.ParseMark(s)
	return &m, err
}

func backend(to *policy.Backend) Value {
	return oneOf(to, policy.Auto, policy.IPTables, policy.NFTables)
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
	return append(policyKeys(&a.Policy, parseChain), Key{
		"cidrLimit", count(&a.CIDRLimit, 1, policy.MaxCIDRLimit), "most CIDRs, `N`, in the two lists of destinations together (default: 64)",
	})
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
