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
	ranges   []keyRange
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
		case e.KeyEnd == nil:
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

// find returns the elements that may have a key, and whether one of them has it.
func (s *set) find(key bits) (found []*nfnetlink.Element, has Answer) {
	isDynamic := s.Flags&unix.NFT_SET_EVAL != 0 // packets add elements
	isOfKeys := uint32(len(key.value)) == s.KeyLen
	if s.unreadable || isDynamic || !isOfKeys {
		return nil, Perhaps
	}
	var l lookup
	for _, r := range s.candidates(key) {
		l.note(r.element, r.has(key))
	}
	for i := range s.Elements {
		e := &s.Elements[i]
		if e.KeyEnd != nil {
			l.note(e, key.withinFields(s.Fields, e))
		}
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

// note adds an element unless it does not have the key. One with a condition may refuse the packet.
func (l *lookup) note(e *nfnetlink.Element, has Answer) {
	if has == No {
		return
	}
	if e.Conditional {
		has = Perhaps
	}
	l.found = append(l.found, e)
	l.has = max(l.has, has)
}

func (r keyRange) has(key bits) Answer {
	if bytes.Equal(r.first, r.last) {
		return key.equals(r.first)
	}
	return key.within(r.first, r.last)
}

// candidates returns the ranges that can have the key: those from its lowest value to its highest one.
func (s *set) candidates(key bits) []keyRange {
	lastOf := func(r keyRange, value []byte) int { return bytes.Compare(r.last, value) }
	first, _ := slices.BinarySearchFunc(s.ranges, key.value, lastOf)
	highest, end := key.highest(), first
	for end < len(s.ranges) && bytes.Compare(s.ranges[end].first, highest) <= 0 {
		end++
	}
	return s.ranges[first:end]
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
	_, has := s.find(key)
	m.condition(has, e.Not, from)
}

// translate loads the value that a map has for a key: unknown, where several elements with other values may
// have it.
func (m *machine) translate(r *Rule, e nfnetlink.MapLookup) {
	s := r.set(e.Set)
	key, from := m.register(e.Sreg, int(s.KeyLen))
	found, has := s.find(key)
	m.condition(has, false, from)
	value := commonData(found)
	if value == nil {
		m.forget(e.Dreg, unix.IFNAMSIZ)
		return
	}
	m.load(e.Dreg, bits{value, allKnown(len(value))}, 0)
}

// commonData returns the value that all elements have, nil if they have several or there are none.
func commonData(elements []*nfnetlink.Element) []byte {
	if len(elements) == 0 {
		return nil
	}
	value := elements[0].Data
	for _, e := range elements {
		if !bytes.Equal(e.Data, value) {
			return nil
		}
	}
	return value
}

// verdicts returns the verdicts that a verdict map may have for a key, each once.
func (m *machine) verdicts(r *Rule, e nfnetlink.MapLookup) (effects []effect) {
	s := r.set(e.Set)
	key, from := m.register(e.Sreg, int(s.KeyLen))
	found, has := s.find(key)
	m.condition(has, false, from)
	if has == Perhaps && len(found) == 0 { // it cannot be read
		m.forgetMark()
		return []effect{{code: nfnetlink.DoAccept}, {code: nfnetlink.DoReturn}, {code: nfnetlink.DoSNAT}}
	}
	for _, element := range found {
		if element.Verdict == nil {
			continue
		}
		end := m.verdict(*element.Verdict)
		if end == (effect{}) {
			m.and(Perhaps)
		} else if !slices.Contains(effects, end) {
			effects = append(effects, end)
		}
	}
	return effects
}
