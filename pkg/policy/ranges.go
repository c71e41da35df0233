// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
)

// Ranges is a set of addresses of one family: ranges in ascending order that neither
// overlap nor touch. In a Rule nil is every address, and Intersect, Overlaps, Equal
// and key take it so. Other methods take a nil receiver for the empty set.
type Ranges []netipx.IPRange

// RangesOf returns the addresses that the prefixes cover.
func RangesOf(prefixes ...netip.Prefix) Ranges {
	if len(prefixes) == 1 {
		return Ranges{netipx.RangeOfPrefix(prefixes[0])}
	}
	return build(func(b *netipx.IPSetBuilder) {
		for _, p := range prefixes {
			b.AddPrefix(p)
		}
	})
}

// Normalize returns the union of ranges in any order.
func Normalize(ranges []netipx.IPRange) Ranges {
	for i := 1; i < len(ranges); i++ {
		if next := ranges[i-1].To().Next(); !next.IsValid() || !next.Less(ranges[i].From()) {
			return build(func(b *netipx.IPSetBuilder) { addRanges(b, ranges) })
		}
	}
	return append(Ranges{}, ranges...)
}

func addRanges(b *netipx.IPSetBuilder, ranges []netipx.IPRange) {
	for _, r := range ranges {
		b.AddRange(r)
	}
}

// build cannot fail: the builder's errors are about invalid prefixes and ranges,
// which no caller has.
func build(add func(*netipx.IPSetBuilder)) Ranges {
	var b netipx.IPSetBuilder
	add(&b)
	set, err := b.IPSet()
	if err != nil {
		panic("policy: invalid range among valid ones: " + err.Error())
	}
	return append(Ranges{}, set.Ranges()...)
}

// Intersect returns the addresses that are in both sets, nil being every one.
func (r Ranges) Intersect(s Ranges) Ranges {
	switch {
	case r == nil:
		return s
	case s == nil:
		return r
	}
	out := Ranges{}
	for i, j := 0, 0; i < len(r) && j < len(s); {
		from, to := r[i].From(), r[i].To()
		if from.Less(s[j].From()) {
			from = s[j].From()
		}
		if s[j].To().Less(to) {
			to = s[j].To()
			j++
		} else {
			i++
		}
		if !to.Less(from) {
			out = append(out, netipx.IPRangeFrom(from, to))
		}
	}
	return out
}

// Without returns the addresses of r that are not in s, which may be nil for every
// address. r must not be nil: use RangesOf(f.All()) for every address of a family.
func (r Ranges) Without(s Ranges) Ranges {
	if s == nil {
		return Ranges{}
	}
	return build(func(b *netipx.IPSetBuilder) {
		addRanges(b, r)
		for _, x := range s {
			b.RemoveRange(x)
		}
	})
}

// Contains reports whether the address is in the set.
func (r Ranges) Contains(a netip.Addr) bool {
	i := r.firstFrom(a)
	return i < len(r) && r[i].Contains(a)
}

// firstFrom returns the index of the first range that does not end before an address.
func (r Ranges) firstFrom(a netip.Addr) int {
	i, _ := slices.BinarySearchFunc(r, a, func(x netipx.IPRange, a netip.Addr) int { return x.To().Compare(a) })
	return i
}

// Equal reports whether both are the same set. nil equals nothing but nil.
func (r Ranges) Equal(s Ranges) bool { return (r == nil) == (s == nil) && slices.Equal(r, s) }

// Overlaps reports whether the sets have an address in common.
func (r Ranges) Overlaps(s Ranges) bool {
	if len(r) == 1 && len(s) == 1 {
		return r[0].Overlaps(s[0])
	}
	common := r.Intersect(s)
	return common == nil || len(common) > 0
}

// overlapsPrefix reports whether the set has an address of the prefix.
func (r Ranges) overlapsPrefix(p netip.Prefix) bool {
	all := netipx.RangeOfPrefix(p)
	i := r.firstFrom(all.From())
	return i < len(r) && r[i].Overlaps(all)
}

// ElementsNotIn returns the ranges of r that s does not have with the same ends: the
// elements to add to a set of the kernel that has the elements s.
func (r Ranges) ElementsNotIn(s Ranges) Ranges {
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

// key returns the same text for sets that are Equal, and for no others.
func (r Ranges) key() string {
	if r == nil {
		return "any"
	}
	var key strings.Builder // which makes no copy
	key.Grow(32 * len(r))
	for _, x := range r {
		from, to := x.From().As16(), x.To().As16()
		key.Write(from[:])
		key.Write(to[:])
	}
	return key.String()
}

// String returns prefixes where a range is one, and FIRST-LAST elsewhere.
func (r Ranges) String() string {
	var parts []string
	for _, x := range r {
		if p, ok := x.Prefix(); ok {
			parts = append(parts, p.String())
		} else {
			parts = append(parts, x.String())
		}
	}
	if len(r) == 1 {
		return parts[0]
	}
	return "{" + firstOf(parts) + "}"
}
