// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// TestSetOperations holds the operations to what they mean for each address.
func TestSetOperations(t *testing.T) {
	draw := func(t *rapid.T, label string) Ranges {
		switch rapid.IntRange(0, 5).Draw(t, label+" kind") {
		case 0:
			return nil
		case 1:
			return Ranges{}
		}
		var prefixes []netip.Prefix
		for range rapid.IntRange(1, 4).Draw(t, label+" size") {
			a := netip.AddrFrom4([4]byte{10, 0, 0, rapid.Byte().Draw(t, label+" address")})
			prefixes = append(prefixes, netip.PrefixFrom(a, rapid.IntRange(24, 32).Draw(t, label+" length")).Masked())
		}
		return RangesOf(prefixes...)
	}
	normal := func(r Ranges) bool { return r == nil || r.Equal(Normalize(r)) }
	in := func(r Ranges, a netip.Addr) bool { return r == nil || r.Contains(a) }
	rapid.Check(t, func(t *rapid.T) {
		r, s := draw(t, "r"), draw(t, "s")
		both := r.Intersect(s)
		whole := r
		if whole == nil {
			whole = RangesOf(IPv4.All())
		}
		rest := whole.Without(s)
		if rest == nil || !normal(rest) || !normal(both) {
			t.Fatalf("%v and %v: both %v, rest %v", r, s, both, rest)
		}
		for i := range 256 {
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
			if in(both, a) != (in(r, a) && in(s, a)) {
				t.Fatalf("%v ∩ %v is %v, wrong about %v", r, s, both, a)
			}
			if in(rest, a) != (in(r, a) && !in(s, a)) {
				t.Fatalf("%v less %v is %v, wrong about %v", r, s, rest, a)
			}
		}
	})
}
