// SPDX-License-Identifier: Apache-2.0

package policy

import "net/netip"

// Defaults of the scalars of a policy, and of the limits on a document.
const (
	DefaultChain     = "IP-MASQ-AGENT"
	DefaultCIDRLimit = 64
	MaxCIDRLimit     = 1_000_000
)

// DefaultNonMasqueradeCIDRs returns the destinations that are left alone when
// no source names any: private address space (RFC 1918) or, where reserved is
// set, every IPv4 range that an RFC reserves, in the order in which
// ip-masq-agent has them.
func DefaultNonMasqueradeCIDRs(reserved bool) []netip.Prefix {
	private := []netip.Prefix{
		netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("172.16.0.0/12"),
		netip.MustParsePrefix("192.168.0.0/16"),
	}
	if !reserved {
		return private
	}
	return append(private,
		netip.MustParsePrefix("100.64.0.0/10"),   // shared address space, RFC 6598
		netip.MustParsePrefix("192.0.0.0/24"),    // IETF protocol assignments, RFC 6890
		netip.MustParsePrefix("192.0.2.0/24"),    // TEST-NET-1, RFC 5737
		netip.MustParsePrefix("192.88.99.0/24"),  // 6to4 relay anycast, RFC 7526
		netip.MustParsePrefix("198.18.0.0/15"),   // benchmarking, RFC 2544
		netip.MustParsePrefix("198.51.100.0/24"), // TEST-NET-2, RFC 5737
		netip.MustParsePrefix("203.0.113.0/24"),  // TEST-NET-3, RFC 5737
		netip.MustParsePrefix("240.0.0.0/4"),     // former class E, RFC 1112
	)
}
