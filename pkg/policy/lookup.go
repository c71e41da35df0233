// SPDX-License-Identifier: Apache-2.0

package policy

import "net/netip"

// Lookup returns the entry that decides about a destination, the one with the
// longest prefix that covers it, or nil: what no prefix covers is masqueraded.
func (p Policy) Lookup(dst netip.Addr) *Entry {
	var best *Entry
	for i := range p.Destinations {
		e := &p.Destinations[i]
		if e.Prefix.Contains(dst) && (best == nil || e.Prefix.Bits() > best.Prefix.Bits()) {
			best = e
		}
	}
	return best
}
