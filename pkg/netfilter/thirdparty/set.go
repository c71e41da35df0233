// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"bytes"
	"slices"
	"sort"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// set is a set or map of nf_tables whose elements can be looked up.
type set struct {
	nfnetlink.Contents
	unreadable bool
	// ranges are the elements that are not a concatenation with intervals, in ascending order.
	ranges []keyRange
	// fields are the elements that are one: each field of a key has a range of its own.
	fields   []*nfnetlink.Element
	catchAll *nfnetlink.Element
}

// keyRange is an element that stands for the keys from first to last, as memcmp orders them.
type keyRange struct {
	first, last []byte
	element     *nfnetlink.Element
}

// newSet sorts the elements of a set.
func newSet(c nfnetlink.Contents) *set {
	s := &set{Contents: c}
	var keys []*nfnetlink.Element
	for i := range s.Elements {
		e := &s.Elements[i]
		switch {
		case e.CatchAll:
			s.catchAll = e
		case uint32(len(e.Key)) != s.KeyLen:
			s.unreadable = true
		case e.KeyEnd != nil:
			s.fields = append(s.fields, e)
		default:
			keys = append(keys, e)
		}
	}
	slices.SortFunc(keys, compareElements)
	hasIntervals := s.Flags&unix.NFT_SET_INTERVAL != 0 && s.Fields == nil
	for i, e := range keys {
		if e.End { // of the range before it
			continue
		}
		last := e.Key
		if hasIntervals {
			last = lastKey(e, keys[i+1:])
		}
		s.ranges = append(s.ranges, keyRange{e.Key, last, e})
	}
	return s
}

// compareElements orders elements by their keys. Of one key, the end of a range comes before a beginning.
func compareElements(a, b *nfnetlink.Element) int {
	order := bytes.Compare(a.Key, b.Key)
	if order != 0 || a.End == b.End {
		return order
	}
	if a.End {
		return -1
	}
	return 1
}

// lastKey returns the last key of the range that an element begins. As in the kernel it lasts up to the next
// key, whether that ends it or begins another range.
func lastKey(e *nfnetlink.Element, behind []*nfnetlink.Element) []byte {
	if len(behind) == 0 {
		return allKnown(len(e.Key)) // the highest
	}
	return before(behind[0].Key)
}

// before returns the key before another one.
func before(key []byte) []byte {
	last := bytes.Clone(key)
	for i := len(last) - 1; i >= 0; i-- {
		last[i]--
		if last[i] != 0xff {
			break
		}
	}
	return last
}

// canFind reports whether all elements that may have such a key are known.
func (s *set) canFind(key bits) bool {
	isDynamic := s.Flags&unix.NFT_SET_EVAL != 0 // packets add elements
	isOfKeys := uint32(len(key.value)) == s.KeyLen
	return !s.unreadable && !isDynamic && isOfKeys
}

// has reports whether an element has a key.
func (s *set) has(key bits) Answer {
	if !s.canFind(key) {
		return Perhaps
	}
	has := s.states(key)
	if s.catchAll != nil {
		has = max(has, answerOf(s.catchAll, Yes))
	}
	return has
}

// states reports whether an element has a key, other than the one that has all keys.
func (s *set) states(key bits) Answer {
	has := s.isInRange(key)
	for _, e := range s.fields {
		has = max(has, answerOf(e, key.withinFields(s.Fields, e)))
	}
	return has
}

// isInRange reports whether a range has a key. Ranges are disjoint: if one has some of the values that the
// key can have, no other one has all of them.
func (s *set) isInRange(key bits) Answer {
	for _, r := range s.candidates(key) {
		has := r.has(key)
		if has != No {
			return answerOf(r.element, has)
		}
	}
	return No
}

// find returns the elements that may have a key, nil if that is not known.
func (s *set) find(key bits) (found []*nfnetlink.Element) {
	if !s.canFind(key) {
		return nil
	}
	for _, r := range s.candidates(key) {
		if r.has(key) != No {
			found = append(found, r.element)
		}
	}
	for _, e := range s.fields {
		if key.withinFields(s.Fields, e) != No {
			found = append(found, e)
		}
	}
	if s.catchAll != nil && s.states(key) != Yes {
		found = append(found, s.catchAll)
	}
	return found
}

// answerOf returns whether an element with the key lets the packet meet the rule: one with a condition may
// refuse it.
func answerOf(e *nfnetlink.Element, has Answer) Answer {
	if e.Conditional {
		return min(has, Perhaps)
	}
	return has
}

func (r keyRange) has(key bits) Answer {
	if bytes.Equal(r.first, r.last) {
		return key.equals(r.first)
	}
	return key.within(r.first, r.last)
}

// candidates returns the ranges that can have the key: those from its lowest value to its highest one.
func (s *set) candidates(key bits) []keyRange {
	lowest, highest := key.value, key.highest()
	first := sort.Search(len(s.ranges), func(i int) bool {
		return bytes.Compare(s.ranges[i].last, lowest) >= 0
	})
	end := sort.Search(len(s.ranges), func(i int) bool {
		return bytes.Compare(s.ranges[i].first, highest) > 0
	})
	return s.ranges[first:max(first, end)]
}

// withinFields compares each field of a concatenation, padded to 4 bytes.
func (b bits) withinFields(fields []int, e *nfnetlink.Element) Answer {
	a, at := Yes, 0
	for _, size := range fields {
		end := at + size
		if end > min(len(b.value), len(e.Key), len(e.KeyEnd)) {
			return Perhaps
		}
		field := bits{b.value[at:end], b.known[at:end]}
		a = min(a, field.within(e.Key[at:end], e.KeyEnd[at:end]))
		at += (size + 3) &^ 3
	}
	return a
}

func (m *machine) lookup(r *Rule, e nfnetlink.Lookup) {
	s := r.set(e.Set)
	key, from := m.register(e.Sreg, int(s.KeyLen))
	m.steps += len(s.fields)
	m.condition(s.has(key), e.Not, from)
}

// mapLookup loads the value that a map has for a key, or ends the rule with the verdict that it has.
func (m *machine) mapLookup(r *Rule, e nfnetlink.MapLookup) {
	s := r.set(e.Set)
	key, from := m.register(e.Sreg, int(s.KeyLen))
	found := s.find(key)
	m.steps += len(s.fields) + len(found)
	m.condition(s.has(key), false, from)
	isVerdict := e.Dreg == nfnetlink.VerdictRegister
	switch {
	case isVerdict && !s.canFind(key):
		m.mayDoAnything()
	case isVerdict:
		m.verdicts(found)
	default:
		m.loadCommon(e.Dreg, found)
	}
}

// loadCommon loads the value that all elements have. If they have several, or none, it is unknown.
func (m *machine) loadCommon(to nfnetlink.Register, elements []*nfnetlink.Element) {
	m.forget(to, unix.IFNAMSIZ)
	if len(elements) == 0 {
		return
	}
	value := elements[0].Data
	for _, e := range elements {
		if !bytes.Equal(e.Data, value) {
			return
		}
	}
	m.load(to, knownBits(value), 0)
}

// verdicts ends the rule with the verdict of one of the elements. Unless all of them end it, it may continue
// with the next expression.
func (m *machine) verdicts(elements []*nfnetlink.Element) {
	seen := map[nfnetlink.Verdict]bool{}
	allEnd := true
	for _, e := range elements {
		if e.Verdict == nil { // it was not decoded
			m.mayDoAnything()
			allEnd = false
			continue
		}
		if seen[*e.Verdict] {
			continue
		}
		seen[*e.Verdict] = true
		ends := m.verdict(*e.Verdict)
		allEnd = allEnd && ends
	}
	m.ended = allEnd
}
