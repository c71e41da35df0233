// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPrefixesAreApart checks that Prefixes returns n prefixes that are neither nested nor adjacent
// and contain neither Elsewhere nor addresses that are not forwarded.
func TestPrefixesAreApart(t *testing.T) {
	for _, n := range []int{0, 1, 4, 64, 1000, 10_000, 100_000} {
		for name, all := range map[string][]netip.Prefix{"mixed": Prefixes(n), "dual stack": DualStack(n)} {
			if len(all) != n {
				t.Fatalf("%s: %d prefixes, want %d", name, len(all), n)
			}
			slices.SortFunc(all, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
			for i, p := range all {
				if p != p.Masked() {
					t.Fatalf("%s has host bits", p)
				}
				if p.Contains(Elsewhere()) || p.Contains(PodAddress()) || p.Addr().Is4() && p.Addr().As4()[0] >= 127 {
					t.Fatalf("%s contains an address that must be outside all prefixes", p)
				}
				if i > 0 && all[i-1].Contains(p.Addr().Prev()) || i > 0 && all[i-1].Overlaps(p) {
					t.Fatalf("%s touches %s", all[i-1], p)
				}
			}
		}
	}
}

// TestPrefixesAreMixed checks that 64 or more prefixes have all lengths and no length dominates, and
// that few prefixes are spread over the lengths.
func TestPrefixesAreMixed(t *testing.T) {
	for _, n := range []int{64, 1000, 10_000, 100_000} {
		counts := byLength(Prefixes(n))
		for bits := 8; bits <= 32; bits++ {
			if c := counts[bits]; c == 0 || c*10 > n {
				t.Errorf("%d prefixes: %d are /%d, want between 1 and a tenth", n, c, bits)
			}
		}
	}
	if diff := cmp.Diff(map[int]int{8: 1, 16: 1, 24: 1, 32: 1}, byLength(Prefixes(4))); diff != "" {
		t.Errorf("lengths of 4 prefixes (-want +got):\n%s", diff)
	}
}

func byLength(all []netip.Prefix) map[int]int {
	counts := map[int]int{}
	for _, p := range all {
		counts[p.Bits()]++
	}
	return counts
}
