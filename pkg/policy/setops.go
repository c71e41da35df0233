// SPDX-License-Identifier: Apache-2.0

package policy

import "go4.org/netipx"

// Intersect returns the addresses that are in both sets, nil being every one.
func (r Ranges) Intersect(s Ranges) Ranges {
	switch {
	case r == nil:
		return s
	case s == nil:
		return r
	}
	b := r.builder()
	set := s.set()
	b.Intersect(set)
	return rangesFrom(b)
}

// Without returns the addresses of r that are not in s. Of every address (nil)
// the family has to be known: take RangesOf(f.All()) for that.
func (r Ranges) Without(s Ranges) Ranges {
	if s == nil {
		return Ranges{}
	}
	b := r.builder()
	b.RemoveSet(s.set())
	return rangesFrom(b)
}

func (r Ranges) builder() *netipx.IPSetBuilder {
	var b netipx.IPSetBuilder
	for _, x := range r {
		b.AddRange(x)
	}
	return &b
}

func (r Ranges) set() *netipx.IPSet {
	set, err := r.builder().IPSet()
	if err != nil {
		panic("policy: invalid range: " + err.Error())
	}
	return set
}
