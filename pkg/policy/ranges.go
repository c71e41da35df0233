// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"net/netip"
	"slices"
	"sort"
	"strings"

	"go4.org/netipx"
)

// Ranges is a set of addresses of one family: ranges in ascending order that
// neither overlap nor touch. In a Rule nil stands for every address, while an
// empty set holds none.
type Ranges []netipx.IPRange

// RangesOf returns the set of the addresses that the prefixes cover.
func RangesOf(prefixes ...netip.Prefix) Ranges {
	if len(prefixes) == 1 {
		return Ranges{netipx.RangeOfPrefix(prefixes[0])}
	}
	var b netipx.IPSetBuilder
	for _, p := range prefixes {
		b.AddPrefix(p)
	}
	return rangesFrom(&b)
}

// Normalize returns the set that the ranges make up, whatever their order and
// overlaps.
func Normalize(ranges []netipx.IPRange) Ranges {
	if isNormal(ranges) {
		return append(Ranges{}, ranges...)
	}
	var b netipx.IPSetBuilder
	for _, r := range ranges {
		b.AddRange(r)
	}
	return rangesFrom(&b)
}

func isNormal(ranges []netipx.IPRange) bool {
	for i := 1; i < len(ranges); i++ {
		if next := ranges[i-1].To().Next(); !next.IsValid() || !next.Less(ranges[i].From()) {
			return false
		}
	}
	return true
}

// rangesFrom cannot fail: the builder's errors are about invalid prefixes and
// ranges, which no caller can make.
func rangesFrom(b *netipx.IPSetBuilder) Ranges {
	set, err := b.IPSet()
	if err != nil {
		panic("policy: invalid range among valid prefixes: " + err.Error())
	}
	return append(Ranges{}, set.Ranges()...)
}

// Contains reports whether the address is in the set.
func (r Ranges) Contains(a netip.Addr) bool {
	i := sort.Search(len(r), func(i int) bool { return !r[i].To().Less(a) })
	return i < len(r) && r[i].Contains(a)
}

// Equal reports whether both are the same set, nil being none but nil.
func (r Ranges) Equal(s Ranges) bool {
	return (r == nil) == (s == nil) && slices.Equal(r, s)
}

// Overlaps reports whether the sets have an address in common.
func (r Ranges) Overlaps(s Ranges) bool {
	if r == nil || s == nil {
		return true
	}
	for i, j := 0, 0; i < len(r) && j < len(s); {
		if r[i].Overlaps(s[j]) {
			return true
		}
		if r[i].To().Less(s[j].To()) {
			i++
		} else {
			j++
		}
	}
	return false
}

// Minus returns those ranges of r that s does not hold in the same extent: what
// has to be added to the elements s to make them r.
func (r Ranges) Minus(s Ranges) Ranges {
	var out Ranges
	for _, x := range r {
		for len(s) > 0 && s[0].From().Less(x.From()) {
			s = s[1:]
		}
		if len(s) == 0 || s[0] != x {
			out = append(out, x)
		}
	}
	return out
}

// String writes prefixes where a range is one, and FIRST-LAST elsewhere.
func (r Ranges) String() string {
	const most = 8
	parts := make([]string, 0, most+1)
	for _, x := range r[:min(len(r), most)] {
		if p, ok := x.Prefix(); ok {
			parts = append(parts, p.String())
		} else {
			parts = append(parts, x.String())
		}
	}
	if len(r) > most {
		parts = append(parts, "…")
	}
	if len(r) == 1 {
		return parts[0]
	}
	return "{" + strings.Join(parts, ", ") + "}"
}
