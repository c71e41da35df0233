// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"bytes"
	"slices"

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

// newSet sorts the elements of a set. The kernel reads elements that do not pair up likewise: a range lasts
// up to the next key, whether that ends it or begins another.
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
	slices.SortFunc(keys, func(a, b *nfnetlink.Element) int {
		if order := bytes.Compare(a.Key, b.Key); order != 0 {
			return order
		}
		return ranked(a) - ranked(b)
	})
	hasIntervals := s.Flags&unix.NFT_SET_INTERVAL != 0 && s.Fields == nil
	for i, e := range keys {
		switch {
		case e.End:
		case !hasIntervals:
			s.ranges = append(s.ranges, keyRange{e.Key, e.Key, e})
		case i+1 < len(keys):
			s.ranges = append(s.ranges, keyRange{e.Key, before(keys[i+1].Key), e})
		default:
			s.ranges = append(s.ranges, keyRange{e.Key, bytes.Repeat([]byte{0xff}, len(e.Key)), e})
		}
	}
	return s
}

// ranked orders elements of one key: an end before a beginning.
func ranked(e *nfnetlink.Element) int {
	if e.End {
		return 0
	}
	return 1
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
	has := No
	for _, r := range s.candidates(key) {
		has = answerOf(r.element, r.has(key))
		if has != No { // ranges are disjoint, so no other one is for all values that the key can have
			break
		}
	}
	for _, e := range s.fields {
		has = max(has, answerOf(e, key.withinFields(s.Fields, e)))
	}
	if s.catchAll != nil {
		has = max(has, answerOf(s.catchAll, Yes))
	}
	return has
}

// find returns the elements that may have a key, and whether one of them has it.
func (s *set) find(key bits) (found []*nfnetlink.Element, has Answer) {
	if !s.canFind(key) {
		return nil, Perhaps
	}
	var l lookup
	for _, r := range s.candidates(key) {
		l.note(r.element, r.has(key))
	}
	for _, e := range s.fields {
		l.note(e, key.withinFields(s.Fields, e))
	}
	if l.has != Yes && s.catchAll != nil {
		l.note(s.catchAll, Yes)
	}
	return l.found, l.has
}

// lookup is what was found for a key.
type lookup struct {
	found []*nfnetlink.Element
	has   Answer
}

// note adds an element unless it does not have the key.
func (l *lookup) note(e *nfnetlink.Element, has Answer) {
	if has != No {
		l.found = append(l.found, e)
		l.has = max(l.has, answerOf(e, has))
	}
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
	endsBefore := func(r keyRange, value []byte) int { return bytes.Compare(r.last, value) }
	first, _ := slices.BinarySearchFunc(s.ranges, key.value, endsBefore)
	highest := key.highest()
	beginsBehind := func(r keyRange, value []byte) int {
		if bytes.Compare(r.first, value) > 0 {
			return 1
		}
		return -1
	}
	end, _ := slices.BinarySearchFunc(s.ranges, highest, beginsBehind)
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
	found, has := s.find(key)
	m.steps += len(s.fields) + len(found)
	m.condition(has, false, from)
	isVerdict := e.Dreg == nfnetlink.VerdictRegister
	switch {
	case isVerdict && len(found) == 0 && has == Perhaps: // it cannot be read
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
	m.load(to, bits{value, allKnown(len(value))}, 0)
}

// verdicts ends the rule with the verdict of one of the elements, each verdict once. Unless all of them end
// it, it may continue with the next expression.
func (m *machine) verdicts(elements []*nfnetlink.Element) {
	seen := map[effect]bool{}
	allEnd := true
	for _, element := range elements {
		v := element.Verdict
		if v != nil && v.Code == nfnetlink.Continue {
			allEnd = false
			continue
		}
		var e effect
		isKnown := false
		if v != nil {
			e, isKnown = effectOf(*v)
		}
		switch {
		case !isKnown:
			m.mayDoAnything()
			allEnd = false
		case !seen[e]:
			seen[e] = true
			m.mayEnd(e)
		}
	}
	m.ended = allEnd
}
