// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// The key types of sets of addresses. Type is what nft shows a key as; to the
// kernel only the length means something.
const (
	TypeIPv4 uint32 = 7
	TypeIPv6 uint32 = 8
)

// Numbers that golang.org/x/sys/unix does not have.
const (
	attrSetExpr         = 17 // NFTA_SET_EXPR
	attrSetExpressions  = 18 // NFTA_SET_EXPRESSIONS
	attrElemKeyEnd      = 10 // NFTA_SET_ELEM_KEY_END
	attrElemExpressions = 11 // NFTA_SET_ELEM_EXPRESSIONS
)

// Set is a set, or map, of nf_tables.
type Set struct {
	Name    string
	Handle  uint64
	Flags   uint32 // NFT_SET_*
	KeyType uint32 // TypeIPv4, TypeIPv6 or another of nft's numbers
	KeyLen  uint32 // bytes
	Size    uint32 // the most elements that it takes; 0 is any number
	// Other names what else bears on what it holds or may hold, each after a comma.
	Other string
}

// Interval reports whether elements are ends of ranges rather than single keys.
func (s Set) Interval() bool { return s.Flags&unix.NFT_SET_INTERVAL != 0 }

// Plain reports whether it is a set of ranges as AddSet makes it: without a limit,
// and with elements that stay until somebody deletes them.
func (s Set) Plain() bool {
	return s.Flags == unix.NFT_SET_INTERVAL && s.Size == 0 && s.Other == ""
}

// Traits writes what Plain goes by, as nft names it.
func (s Set) Traits() string {
	var flags []string
	for i, name := range []string{"anonymous", "constant", "interval", "map", "timeout", "dynamic", "object", "concat", "expression"} {
		if s.Flags&(1<<i) != 0 {
			flags = append(flags, name)
		}
	}
	text := "flags " + cmp.Or(strings.Join(flags, ","), "0")
	if s.Size != 0 {
		text += fmt.Sprintf(", size %d", s.Size)
	}
	return text + s.Other
}

// Set returns a set, or an error that is os.ErrNotExist if the set or the table
// does not exist.
func (c *Conn) Set(family Family, table, name string) (Set, error) {
	op := operation{"read set", family, table, name}
	c.request(unix.NFT_MSG_GETSET, 0, family)
	c.out.str(unix.NFTA_SET_TABLE, table)
	c.out.str(unix.NFTA_SET_NAME, name)
	attrs, err := c.get(op, unix.NFT_MSG_NEWSET)
	if err != nil {
		return Set{}, err
	}
	s, err := decodeSet(attrs)
	if err != nil {
		return Set{}, fmt.Errorf("%s: %w", op, err)
	}
	return s, nil
}

// Sets returns the sets and maps of a table, anonymous ones too, or an error
// that is os.ErrNotExist if the table does not exist.
func (c *Conn) Sets(family Family, table string) ([]Set, error) {
	op := operation{"list sets of", family, table, ""}
	c.request(unix.NFT_MSG_GETSET, unix.NLM_F_DUMP, family)
	c.out.str(unix.NFTA_SET_TABLE, table)
	return dump(c, op, unix.NFT_MSG_NEWSET, func(sets []Set, attrs []byte) ([]Set, error) {
		s, err := decodeSet(attrs)
		if err != nil {
			return sets, err
		}
		return append(sets, s), nil
	})
}

func decodeSet(attrs []byte) (Set, error) {
	var t attrTable
	t.parse(attrs)
	s := Set{
		Name:    t.str(unix.NFTA_SET_NAME),
		Handle:  t.optU64(attrSetHandle),
		Flags:   t.optU32(unix.NFTA_SET_FLAGS),
		KeyType: t.optU32(unix.NFTA_SET_KEY_TYPE),
		KeyLen:  t.u32(unix.NFTA_SET_KEY_LEN),
	}
	// What has a higher number describes the set as it is: its type, its length.
	var desc attrTable
	desc.parse(t.at[unix.NFTA_SET_DESC])
	s.Size = desc.optU32(unix.NFTA_SET_DESC_SIZE)
	for _, a := range []struct {
		attr uint16
		name string
	}{
		{unix.NFTA_SET_DATA_TYPE, "data"}, {unix.NFTA_SET_POLICY, "policy"}, {unix.NFTA_SET_TIMEOUT, "timeout"},
		{unix.NFTA_SET_GC_INTERVAL, "gc-interval"}, {unix.NFTA_SET_OBJ_TYPE, "objects"}, {attrSetExpr, "expressions"}, {attrSetExpressions, "expressions"},
	} {
		if t.has(a.attr) {
			s.Other += ", " + a.name
		}
	}
	if t.bad || desc.bad {
		return Set{}, errMalformed
	}
	return s, nil
}

// Element is an element of a set. In an interval set it begins a range of keys,
// or ends the one before: then its key is the first that is in it no more.
//
// It holds no pointer: there can be a hundred thousand of them.
type Element struct {
	key     [16]byte
	size    uint8 // of the key, in bytes
	end     bool
	special bool
}

// Key returns the key, and whether it ends a range.
func (e *Element) Key() (key []byte, end bool) { return e.key[:e.size], e.end }

// Special reports whether the element is more than a key of at most 16 bytes:
// the catch-all, which has none, or one with an expression, or with what is not
// known here, that may keep it from matching.
func (e *Element) Special() bool { return e.special }

// Elements returns the elements of a set in no certain order, or an error that
// is os.ErrNotExist if the set or the table does not exist.
//
// While another program rebuilds the set, some elements may be missing without
// any sign of it. Read again within Snapshot before acting on a difference.
func (c *Conn) Elements(family Family, table, set string) ([]Element, error) {
	op := operation{"list elements of", family, table, set}
	c.request(unix.NFT_MSG_GETSETELEM, unix.NLM_F_DUMP, family)
	c.out.str(unix.NFTA_SET_ELEM_LIST_TABLE, table)
	c.out.str(unix.NFTA_SET_ELEM_LIST_SET, set)
	return dump(c, op, unix.NFT_MSG_NEWSETELEM, decodeElements)
}

func decodeElements(elems []Element, attrs []byte) ([]Element, error) {
	msg := attrIter{rest: attrs}
	for msg.next() {
		if msg.typ != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			continue
		}
		it := attrIter{rest: msg.data}
		for it.next() {
			e, last, ok := decodeElement(it.data)
			if !ok {
				return elems, errMalformed
			}
			elems = append(elems, e)
			if last == nil {
				continue
			}
			// A range in one element, as sets of several fields have it.
			if end, ok := behind(last); ok {
				elems = append(elems, end)
			}
		}
		if it.malformed {
			return elems, errMalformed
		}
	}
	if msg.malformed {
		return elems, errMalformed
	}
	return elems, nil
}

// decodeElement also returns the last key of the range if it stands in the same
// element.
func decodeElement(b []byte) (e Element, last []byte, ok bool) {
	it := attrIter{rest: b}
	for it.next() {
		switch it.typ {
		case unix.NFTA_SET_ELEM_KEY:
			key := dataValue(it.data)
			e.size = uint8(copy(e.key[:], key))
			e.special = e.special || len(key) == 0 || len(key) > len(e.key)
		case attrElemKeyEnd:
			last = dataValue(it.data)
		case unix.NFTA_SET_ELEM_FLAGS:
			if len(it.data) != 4 {
				return e, nil, false
			}
			flags := binary.BigEndian.Uint32(it.data)
			e.end = flags&unix.NFT_SET_ELEM_INTERVAL_END != 0
			e.special = e.special || flags&^unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA, unix.NFTA_SET_ELEM_OBJREF: // of a map
		case unix.NFTA_SET_ELEM_TIMEOUT, unix.NFTA_SET_ELEM_EXPIRATION, unix.NFTA_SET_ELEM_USERDATA, unix.NFTA_SET_ELEM_PAD:
		case unix.NFTA_SET_ELEM_EXPR, attrElemExpressions:
			e.special = true
		default:
			e.special = e.special || !zero(it.data)
		}
	}
	return e, last, !it.malformed && (e.size > 0 || e.special)
}

// behind returns the end of a range whose last key is given, unless there is no
// key behind that.
func behind(last []byte) (Element, bool) {
	e := Element{end: true}
	e.size = uint8(copy(e.key[:], last))
	e.special = len(last) == 0 || len(last) > len(e.key)
	for i := int(e.size) - 1; i >= 0; i-- {
		if e.key[i]++; e.key[i] != 0 {
			return e, true
		}
	}
	return e, e.special
}

// Range is the addresses from First to Last, both included.
type Range struct{ First, Last netip.Addr }

// Ranges returns the ranges that the elements of the set stand for, in
// ascending order, and sorts the elements on the way. It is an error if the set
// is not one of addresses or an element is more than its keys.
//
// Elements that do not pair up are read as the kernel reads them: a range lasts
// up to the next key, whether that ends it or begins another, and the last one
// without an end lasts up to the highest address.
func (s Set) Ranges(elems []Element) ([]Range, error) {
	v4, v6 := s.KeyType == TypeIPv4 && s.KeyLen == 4, s.KeyType == TypeIPv6 && s.KeyLen == 16
	if !v4 && !v6 || s.Flags&(unix.NFT_SET_MAP|unix.NFT_SET_OBJECT) != 0 {
		return nil, fmt.Errorf("read ranges of set %s: not a set of addresses", s.Name)
	}
	sortElements(elems)
	ranges := make([]Range, 0, len(elems)/2+1)
	open := false // the last of ranges has no end yet
	for i := range elems {
		e := &elems[i]
		if e.special || uint32(e.size) != s.KeyLen {
			return nil, fmt.Errorf("read ranges of set %s: an element is not of addresses alone", s.Name)
		}
		first := e.addr()
		if open {
			last := &ranges[len(ranges)-1]
			if last.First == first {
				continue // the same twice, as a read during a rebuild may have it
			}
			last.Last = first.Prev()
		}
		open = false
		switch {
		case e.end:
		case s.Interval():
			ranges = append(ranges, Range{First: first})
			open = true
		default:
			ranges = append(ranges, Range{first, first})
		}
	}
	if open {
		highest := Element{size: uint8(s.KeyLen), key: [16]byte(bytes.Repeat([]byte{0xff}, 16))}
		ranges[len(ranges)-1].Last = highest.addr()
	}
	return ranges, nil
}

// sortElements sorts by key, an end before a beginning. The kernel has them in
// ascending or in descending order, depending on its version.
func sortElements(elems []Element) {
	descending := func(a, b Element) int { return compareElements(b, a) }
	switch {
	case slices.IsSortedFunc(elems, compareElements):
	case slices.IsSortedFunc(elems, descending):
		slices.Reverse(elems)
	default:
		slices.SortFunc(elems, compareElements)
	}
}

func compareElements(a, b Element) int {
	if d := bytes.Compare(a.key[:], b.key[:]); d != 0 || a.end == b.end {
		return d
	}
	if a.end {
		return -1
	}
	return 1
}

// addr returns the key as an address, of IPv4 unless it has 16 bytes.
func (e *Element) addr() netip.Addr {
	if e.size == 16 {
		return netip.AddrFrom16(e.key)
	}
	return netip.AddrFrom4([4]byte(e.key[:4]))
}
