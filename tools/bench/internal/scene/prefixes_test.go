// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"net/netip"
	"slices"
	"testing"
)

// TestPrefixesAreApart: as many as were asked for, of many lengths, neither within
// nor next to each other, and none holds what must match nothing.
func TestPrefixesAreApart(t *testing.T) {
	for _, n := range []int{0, 1, 4, 64, 1000, 10_000, 100_000} {
		for name, all := range map[string][]netip.Prefix{"mixed": Prefixes(n), "/32": PrefixesOf(n, 32)} {
			if len(all) != n {
				t.Fatalf("%s: %d prefixes, want %d", name, len(all), n)
			}
			slices.SortFunc(all, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
			lengths := map[int]int{}
			for i, p := range all {
				lengths[p.Bits()]++
				if p != p.Masked() {
					t.Fatalf("%s has host bits", p)
				}
				if p.Contains(Elsewhere()) || p.Contains(PodAddress()) {
					t.Fatalf("%s holds an address that none must hold", p)
				}
				if i > 0 && all[i-1].Contains(p.Addr().Prev()) || i > 0 && all[i-1].Overlaps(p) {
					t.Fatalf("%s touches %s", all[i-1], p)
				}
			}
			if name == "mixed" && n >= 1000 && len(lengths) < 9 {
				t.Errorf("of %d prefixes there are only the lengths %v", n, lengths)
			}
		}
	}
}
