// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"net/netip"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// policyKeys is the table of the keys that state policy, in whatever kind of
// document: each with what reads its value into the statement.
func policyKeys(s *policy.SourcePolicy) []Key {
	cidrs := func(to *[]netip.Prefix) reader { return list(to, "10.0.0.0/8", policy.ParsePrefix) }
	flag := func(to **bool) reader { return boolean(optional(to)) }
	return []Key{
		{"nonMasqueradeCIDRs", cidrs(&s.NonMasqueradeCIDRs)},
		{"masqueradeCIDRs", cidrs(&s.MasqueradeCIDRs)},
		{"nomasqAllReservedRanges", flag(&s.NomasqAllReservedRanges)},
		{"masqLinkLocal", flag(&s.MasqLinkLocal)},
		{"masqLinkLocalIPv6", flag(&s.MasqLinkLocalIPv6)},
		{"enableIPv6", flag(&s.EnableIPv6)},
		{"sourceCIDRs", cidrs(&s.SourceCIDRs)},
		{"nonMasqueradeSourceCIDRs", cidrs(&s.NonMasqueradeSourceCIDRs)},
		{"outputInterfaces", list(&s.OutputInterfaces, "eth0", unjudged)},
		{"masqueradeHost", flag(&s.MasqueradeHost)},
		{"randomFully", flag(&s.RandomFully)},
		{"toPorts", text("1024-29999,32768-65535", policy.ParsePorts, func(p policy.Ports) { s.ToPorts = &p })},
		{"masqChain", text(policy.DefaultChain, unjudged, func(c string) { s.Chain = c })},
		{"backend", text(string(policy.Auto), parseBackend, func(b policy.Backend) { s.Backend = b })},
	}
}

func parseBackend(s string) (policy.Backend, error) {
	switch b := policy.Backend(s); b {
	case policy.Auto, policy.IPTables, policy.NFTables:
		return b, nil
	case "":
		return "", errors.New("is empty; write auto, iptables or nftables, or leave the key out")
	}
	return "", errors.New("is not a backend; write auto, iptables or nftables")
}
