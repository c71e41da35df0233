// SPDX-License-Identifier: Apache-2.0

package policy

// inChainOrder puts the entries of one family into an order in which the first
// that matches is the one with the longest prefix, and keeps the written order
// wherever order has no meaning.
//
// It has a meaning only between prefixes of which one lies within the other and
// whose actions differ. So each entry stays where it is written, unless it covers
// any of the other action: then all that it covers, as far as it has not come yet,
// comes right before it, longest first.
func inChainOrder(list []Entry) []Entry {
	covered := coveredByMixed(list)
	out := make([]Entry, 0, len(list))
	done := make([]bool, len(list))
	take := func(at int) {
		if !done[at] {
			done[at] = true
			out = append(out, list[at])
		}
	}
	longestFirst := func(i, j int) int {
		if longer := list[j].Prefix.Bits() - list[i].Prefix.Bits(); longer != 0 {
			return longer
		}
		return i - j
	}
	for at := range list {
		if done[at] {
			continue
		}
		for _, within := range sorted(covered[at], longestFirst) {
			take(within)
		}
		take(at)
	}
	return out
}

// coveredByMixed returns for the place of each entry that covers any of the other
// action the places of all that it covers.
func coveredByMixed(list []Entry) map[int][]int {
	places := make([]int, len(list))
	for i := range places {
		places[i] = i
	}
	// By address and then by length a prefix comes right before all it covers.
	places = sorted(places, func(i, j int) int { return comparePrefixes(list[i].Prefix, list[j].Prefix) })
	covered := map[int][]int{}
	var open []int // of the places, the positions of prefixes that the next may lie within
	mixed := make([]bool, len(list))
	shut := func(end int) {
		from := open[len(open)-1]
		open = open[:len(open)-1]
		if mixed[from] {
			covered[places[from]] = places[from+1 : end]
		}
	}
	for at, place := range places {
		e := list[place]
		for len(open) > 0 && !list[places[open[len(open)-1]]].Prefix.Contains(e.Prefix.Addr()) {
			shut(at)
		}
		for _, around := range open {
			mixed[around] = mixed[around] || list[places[around]].Action != e.Action
		}
		open = append(open, at)
	}
	for len(open) > 0 {
		shut(len(places))
	}
	return covered
}
