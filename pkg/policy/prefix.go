// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// ParsePrefix reads a CIDR (RFC 4632, RFC 4291 2.3) and accepts only its one
// proper spelling. The error says what to write instead where that is clear.
func ParsePrefix(s string) (netip.Prefix, error) {
	if strings.TrimSpace(s) == "" {
		return netip.Prefix{}, errors.New("is empty; write a CIDR such as 10.0.0.0/8, or drop the item")
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, describeBadPrefix(s)
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return netip.Prefix{}, errors.New("mixes an IPv4 address with an IPv6 prefix length; write the IPv4 prefix itself")
		}
		v4 := netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96).Masked()
		return netip.Prefix{}, fmt.Errorf("is an IPv4 prefix written as IPv6; did you mean %s?", v4)
	}
	if m := p.Masked(); m != p {
		return netip.Prefix{}, fmt.Errorf("has host bits set; did you mean %s?", m)
	}
	return p, nil
}

func describeBadPrefix(s string) error {
	if t := strings.TrimSpace(s); t != s {
		return fmt.Errorf("has white space around it; write %s", Quote(t))
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return fmt.Errorf("is an address, not a CIDR; did you mean %s?", netip.PrefixFrom(a, a.BitLen()))
	}
	return errors.New("is not a CIDR; write address/length, such as 10.0.0.0/8 or fd00::/8")
}
