// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// cells are the model of a family's addresses: its first and last 16, and all
// between them as one. A set of ranges between cells is a set of cells.
const cells, middle = 33, 16

func cell(f policy.Family, i int) netipx.IPRange {
	all := netipx.RangeOfPrefix(f.All())
	first, last := all.From(), all.To()
	for range min(i, middle) {
		first = first.Next()
	}
	for range cells - 1 - max(i, middle) {
		last = last.Prev()
	}
	switch {
	case i < middle:
		return netipx.IPRangeFrom(first, first)
	case i > middle:
		return netipx.IPRangeFrom(last, last)
	}
	return netipx.IPRangeFrom(first, last)
}

type model [cells]bool

// genRanges draws ranges, in any order, with overlaps, and their model.
func genRanges(t *rapid.T, f policy.Family, label string) ([]netipx.IPRange, model) {
	var out []netipx.IPRange
	var m model
	for range rapid.IntRange(0, 6).Draw(t, label) {
		from := rapid.IntRange(0, cells-1).Draw(t, "from")
		to := min(cells-1, from+rapid.IntRange(0, 4).Draw(t, "more"))
		out = append(out, netipx.IPRangeFrom(cell(f, from).From(), cell(f, to).To()))
		for i := from; i <= to; i++ {
			m[i] = true
		}
	}
	return out, m
}

// ranges writes the model as the fewest ranges, in ascending order.
func (m model) ranges(f policy.Family) policy.Ranges {
	out := policy.Ranges{}
	for i := 0; i < cells; i++ {
		if !m[i] {
			continue
		}
		from := i
		for i+1 < cells && m[i+1] {
			i++
		}
		out = append(out, netipx.IPRangeFrom(cell(f, from).From(), cell(f, i).To()))
	}
	return out
}

func TestRangesAgainstAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := genFamily().Draw(t, "family")
		rawA, modelA := genRanges(t, f, "a")
		rawB, modelB := genRanges(t, f, "b")
		before := slices.Clone(rawA)
		a, b := policy.Normalize(rawA), policy.Normalize(rawB)
		if !slices.Equal(rawA, before) {
			t.Fatalf("Normalize changed its argument to %v", rawA)
		}
		if want := modelA.ranges(f); !a.Equal(want) {
			t.Fatalf("Normalize(%v) = %v, want %v", rawA, a, want)
		}
		if again := policy.Normalize(a); !again.Equal(a) {
			t.Fatalf("Normalize(%v) = %v", a, again)
		}
		overlap := false
		for i := range cells {
			for _, addr := range []netip.Addr{cell(f, i).From(), cell(f, i).To()} {
				if a.Contains(addr) != modelA[i] {
					t.Fatalf("%v contains %s: %v", a, addr, a.Contains(addr))
				}
			}
			overlap = overlap || modelA[i] && modelB[i]
		}
		if a.Overlaps(b) != overlap || b.Overlaps(a) != overlap {
			t.Fatalf("%v overlaps %v: %v and %v, want %v", a, b, a.Overlaps(b), b.Overlaps(a), overlap)
		}
		if a.Equal(b) != (modelA == modelB) {
			t.Fatalf("%v equals %v: %v", a, b, a.Equal(b))
		}
		checkMinus(t, a, b)
	})
}

// What b lacks of a and has beyond it are elements that turn b into a.
func checkMinus(t *rapid.T, a, b policy.Ranges) {
	add, remove := a.ElementsNotIn(b), b.ElementsNotIn(a)
	turned := append(policy.Ranges{}, add...)
	for _, x := range b {
		if !slices.Contains(remove, x) {
			turned = append(turned, x)
		}
	}
	slices.SortFunc(turned, func(x, y netipx.IPRange) int { return x.From().Compare(y.From()) })
	if !turned.Equal(a) {
		t.Fatalf("%v without %v and with %v is %v, want %v", b, remove, add, turned, a)
	}
	for _, x := range add {
		if slices.Contains(b, x) {
			t.Fatalf("%v is in both %v and %v", x, a, b)
		}
	}
}

func TestRangesNilIsEveryAddress(t *testing.T) {
	var every policy.Ranges
	none := policy.Ranges{}
	if every.Equal(none) || none.Equal(every) || !every.Equal(nil) || !none.Equal(policy.Ranges{}) {
		t.Error("nil, every address, is taken for the empty set")
	}
	some := ranges("10.0.0.0/8")
	if !every.Overlaps(some) || !some.Overlaps(every) || !every.Overlaps(every) {
		t.Error("every address does not overlap a set")
	}
	if some.Overlaps(none) || none.Overlaps(some) || none.Contains(addr("10.0.0.1")) {
		t.Error("the empty set has an address")
	}
	if some.Contains(addr("::ffff:10.0.0.1")) || some.Contains(addr("fd00::1")) {
		t.Error("an IPv4 set has an IPv6 address")
	}
}

func TestRangesString(t *testing.T) {
	for _, tt := range []struct {
		ranges policy.Ranges
		want   string
	}{
		{policy.Ranges{}, "{}"},
		{ranges("10.0.0.0/8"), "10.0.0.0/8"},
		{ranges("10.0.0.0/8", "fd00::/8"), "{10.0.0.0/8, fd00::/8}"},
		{ranges("10.0.0.0/31", "10.0.0.2/32"), "10.0.0.0-10.0.0.2"},
		{
			ranges("10.0.0.0/32", "10.0.0.2/32", "10.0.0.4/32", "10.0.0.6/32", "10.0.0.8/32", "10.0.0.10/32", "10.0.0.12/32", "10.0.0.14/32"),
			"{10.0.0.0/32, 10.0.0.2/32, 10.0.0.4/32, 10.0.0.6/32, 10.0.0.8/32, 10.0.0.10/32, 10.0.0.12/32, 10.0.0.14/32}",
		},
		{
			ranges("10.0.0.0/32", "10.0.0.2/32", "10.0.0.4/32", "10.0.0.6/32", "10.0.0.8/32", "10.0.0.10/32", "10.0.0.12/32", "10.0.0.14/32", "10.1.0.0/16"),
			"{10.0.0.0/32, 10.0.0.2/32, 10.0.0.4/32, 10.0.0.6/32, 10.0.0.8/32, 10.0.0.10/32, 10.0.0.12/32, 10.0.0.14/32, and 1 more}",
		},
	} {
		assert.Equal(t, fmt.Sprintf("%v is written", []netipx.IPRange(tt.ranges)), tt.ranges.String(), tt.want)
	}
}

// TestSetOperations holds the operations to what they mean for each address.
func TestSetOperations(t *testing.T) {
	draw := func(t *rapid.T, label string) policy.Ranges {
		switch rapid.IntRange(0, 5).Draw(t, label+" kind") {
		case 0:
			return nil
		case 1:
			return policy.Ranges{}
		}
		var prefixes []netip.Prefix
		for range rapid.IntRange(1, 4).Draw(t, label+" size") {
			a := netip.AddrFrom4([4]byte{10, 0, 0, rapid.Byte().Draw(t, label+" address")})
			prefixes = append(prefixes, netip.PrefixFrom(a, rapid.IntRange(24, 32).Draw(t, label+" length")).Masked())
		}
		return policy.RangesOf(prefixes...)
	}
	normal := func(r policy.Ranges) bool { return r == nil || r.Equal(policy.Normalize(r)) }
	in := func(r policy.Ranges, a netip.Addr) bool { return r == nil || r.Contains(a) }
	rapid.Check(t, func(t *rapid.T) {
		r, s := draw(t, "r"), draw(t, "s")
		both := r.Intersect(s)
		whole := r
		if whole == nil {
			whole = policy.RangesOf(policy.IPv4.All())
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
