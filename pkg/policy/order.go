// SPDX-License-Identifier: Apache-2.0

package policy

// inChainOrder puts the entries of one family into an order in which the first
// that matches is the one with the longest prefix, and keeps the written order
// wherever order has no meaning.
//
// It has a meaning only among prefixes that lie within one another and differ
// in action. So the entries are grouped by the widest prefix that covers them;
// a group whose members all agree stays as it is, and one whose members do not
// is sorted, longest first, within the places that it holds.
func inChainOrder(list []Entry) []Entry {
	out := append([]Entry(nil), list...)
	for _, places := range mixedGroups(list) {
		members := make([]Entry, len(places))
		for i, at := range places {
			members[i] = list[at]
		}
		members = sorted(members, func(a, b Entry) int { return b.Prefix.Bits() - a.Prefix.Bits() })
		for i, at := range places {
			out[at] = members[i]
		}
	}
	return out
}

// mixedGroups returns the places, ascending, of the entries that a common
// widest prefix covers, for each such group that holds both actions.
func mixedGroups(list []Entry) [][]int {
	places := make([]int, len(list))
	for i := range places {
		places[i] = i
	}
	// By address and then by length a prefix comes right before all it covers.
	places = sorted(places, func(i, j int) int { return comparePrefixes(list[i].Prefix, list[j].Prefix) })
	var mixed [][]int
	for start := 0; start < len(places); {
		root := list[places[start]]
		end, differs := start, false
		for ; end < len(places) && root.Prefix.Contains(list[places[end]].Prefix.Addr()); end++ {
			differs = differs || list[places[end]].Action != root.Action
		}
		if differs {
			mixed = append(mixed, sorted(places[start:end], func(i, j int) int { return i - j }))
		}
		start = end
	}
	return mixed
}
