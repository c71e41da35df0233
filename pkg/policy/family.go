// SPDX-License-Identifier: Apache-2.0

package policy

import "net/netip"

// Family is an address family that rules are kept for.
type Family string

// The families, named as in the documents and in messages.
const (
	IPv4 Family = "ipv4"
	IPv6 Family = "ipv6"
)

// Families returns every family, in the order in which rules are written.
func Families() []Family { return []Family{IPv4, IPv6} }

// FamilyOf returns the family of an address.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// All returns the prefix that covers every address of the family.
func (f Family) All() netip.Prefix {
	if f == IPv4 {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// LinkLocal returns the family's link-local prefix (RFC 3927, RFC 4291 2.5.6).
func (f Family) LinkLocal() netip.Prefix {
	if f == IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{169, 254}), 16)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfe, 0x80}), 10)
}

// ofFamily returns the prefixes of one family, in their order.
func ofFamily(prefixes []netip.Prefix, f Family) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		if FamilyOf(p.Addr()) == f {
			out = append(out, p)
		}
	}
	return out
}
