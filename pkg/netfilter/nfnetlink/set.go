// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// The key types of sets of addresses, as nft numbers types. The kernel uses only the length.
const (
	TypeIPv4 uint32 = 7
	TypeIPv6 uint32 = 8
)

// Numbers that golang.org/x/sys/unix does not have.
const (
	attrSetExpr         = 17 // NFTA_SET_EXPR
	attrSetExpressions  = 18 // NFTA_SET_EXPRESSIONS
	attrElemExpressions = 11 // NFTA_SET_ELEM_EXPRESSIONS
)

// ErrNotAddresses is wrapped by errors about a set that has more than addresses.
var ErrNotAddresses = errors.New("not a set of addresses")

// Set is a set or map of nf_tables.
type Set struct {
	Name    string
	Flags   uint32 // NFT_SET_*
	KeyType uint32 // TypeIPv4, TypeIPv6 or another of nft's numbers
	KeyLen  uint32 // in bytes
	Size    uint32 // maximum number of elements; 0 is any
	Timeout time.Duration
	Other   bool // it has further attributes that bear on the elements
}

// AddressRanges is the set `type ipv4_addr; flags interval` without limits of size and time.
func AddressRanges(f Family, name string) Set {
	if f == IPv6 {
		return Set{Name: name, Flags: unix.NFT_SET_INTERVAL, KeyType: TypeIPv6, KeyLen: net6}
	}
	return Set{Name: name, Flags: unix.NFT_SET_INTERVAL, KeyType: TypeIPv4, KeyLen: net4}
}

// AddressPairs is a set that rules fill: `type ipv4_addr . ipv4_addr; flags dynamic,timeout`.
func AddressPairs(f Family, name string, size uint32, timeout time.Duration) Set {
	const bitsPerType = 6 // of a concatenation
	s := AddressRanges(f, name)
	s.KeyType, s.KeyLen = s.KeyType<<bitsPerType|s.KeyType, 2*s.KeyLen
	s.Flags, s.Size, s.Timeout = unix.NFT_SET_EVAL|unix.NFT_SET_TIMEOUT, size, timeout
	return s
}

// Set returns a set, or an error that is os.ErrNotExist if the set or the table does not exist.
func (c *Conn) Set(family Family, table, name string) (Set, error) {
	op := operation{"read set", family, table, name}
	return read(c, op, unix.NFT_MSG_GETSET, unix.NFTA_SET_NAME, decodeSet)
}

// Sets returns the sets and maps of a table, also anonymous ones, or an error os.ErrNotExist.
func (c *Conn) Sets(family Family, table string) ([]Set, error) {
	return list(c, operation{"list sets of", family, table, ""}, unix.NFT_MSG_GETSET, 0, each(decodeSet))
}

func decodeSet(t *attrTable) Set {
	s := Set{
		Name:    t.str(unix.NFTA_SET_NAME),
		Flags:   t.optU32(unix.NFTA_SET_FLAGS),
		KeyType: t.optU32(unix.NFTA_SET_KEY_TYPE),
		KeyLen:  t.u32(unix.NFTA_SET_KEY_LEN),
	}
	var desc attrTable
	desc.parse(t.at[unix.NFTA_SET_DESC])
	s.Size = desc.optU32(unix.NFTA_SET_DESC_SIZE)
	if t.has(unix.NFTA_SET_TIMEOUT) {
		s.Timeout = time.Duration(t.u64(unix.NFTA_SET_TIMEOUT)) * time.Millisecond
	}
	// Other attributes, those of newer kernels too, describe the state of the set only, such as its length.
	s.Other = slices.ContainsFunc([]uint16{
		unix.NFTA_SET_DATA_TYPE, unix.NFTA_SET_POLICY, unix.NFTA_SET_GC_INTERVAL, unix.NFTA_SET_OBJ_TYPE,
		attrSetExpr, attrSetExpressions,
	}, t.has)
	t.bad = t.bad || desc.bad
	return s
}

// element is an element of a set. In an interval set it begins a range of keys, or ends the one before:
// then its key is the first one behind the range. It holds no pointer, as there can be 100,000 of them.
type element struct {
	key     [16]byte
	size    uint8 // of the key, in bytes
	end     uint8 // NFT_SET_ELEM_INTERVAL_END, or 0
	special bool  // more than a key of at most 16 bytes: the catch-all, or with an expression or a second key
}

// Ranges returns a set and its elements as ranges in ascending order. If the set was read and is not one of
// addresses, it is returned with an error that wraps ErrNotAddresses.
func (c *Conn) Ranges(family Family, table, name string) (Set, []netipx.IPRange, error) {
	s, err := c.Set(family, table, name)
	if err != nil {
		return Set{}, nil, err
	}
	elements, err := c.elements(family, table, name)
	if err != nil {
		return Set{}, nil, err
	}
	ranges, err := s.ranges(elements)
	return s, ranges, err
}

// Keys returns the keys, of at most 16 bytes, of the elements of a set or map, in no defined order. It leaves out
// elements that have more than such a key.
func (c *Conn) Keys(family Family, table, set string) ([][]byte, error) {
	elements, err := c.elements(family, table, set)
	var keys [][]byte
	for i := range elements {
		if e := &elements[i]; !e.special {
			keys = append(keys, e.key[:e.size])
		}
	}
	return keys, err
}

// elements returns the elements of a set in no defined order, or an error that is os.ErrNotExist.
func (c *Conn) elements(family Family, table, set string) ([]element, error) {
	op := operation{"list elements of", family, table, set}
	return list(c, op, unix.NFT_MSG_GETSETELEM, unix.NFTA_SET_ELEM_LIST_SET, decodeElements)
}

func decodeElements(elems []element, t *attrTable) []element {
	_, data, rest, ok := cutAttr(t.at[unix.NFTA_SET_ELEM_LIST_ELEMENTS])
	for ; ok; _, data, rest, ok = cutAttr(rest) {
		e, decoded := decodeElement(data)
		t.bad = t.bad || !decoded
		if len(elems) == cap(elems) { // append would grow a long list by a quarter
			elems = slices.Grow(elems, len(elems)+1)
		}
		elems = append(elems, e)
	}
	t.bad = t.bad || len(rest) > 0
	return elems
}

func decodeElement(b []byte) (e element, ok bool) {
	typ, data, rest, more := cutAttr(b)
	for ; more; typ, data, rest, more = cutAttr(rest) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			key := nested(data, unix.NFTA_DATA_VALUE)
			e.size = uint8(copy(e.key[:], key))
			e.special = e.special || len(key) == 0 || len(key) > len(e.key)
		case unix.NFTA_SET_ELEM_FLAGS:
			if len(data) != 4 {
				return e, false
			}
			flags := binary.BigEndian.Uint32(data)
			e.end = uint8(flags & unix.NFT_SET_ELEM_INTERVAL_END)
			e.special = e.special || flags&^unix.NFT_SET_ELEM_INTERVAL_END != 0
		case unix.NFTA_SET_ELEM_DATA, unix.NFTA_SET_ELEM_OBJREF: // of a map
		case unix.NFTA_SET_ELEM_TIMEOUT, unix.NFTA_SET_ELEM_EXPIRATION:
		case unix.NFTA_SET_ELEM_USERDATA, unix.NFTA_SET_ELEM_PAD:
		case unix.NFTA_SET_ELEM_EXPR, attrElemExpressions:
			e.special = true
		default:
			e.special = e.special || !zero(data)
		}
	}
	return e, len(rest) == 0 && (e.size > 0 || e.special)
}

// ranges returns the ranges of the elements in ascending order, and sorts the elements.
//
// Elements that do not pair up are read as the kernel reads them: a range lasts up to the next key,
// whether that ends it or begins another, and a last range without an end includes the highest address.
func (s Set) ranges(elems []element) ([]netipx.IPRange, error) {
	isOfIPv4 := s.KeyType == TypeIPv4 && s.KeyLen == net4
	isOfIPv6 := s.KeyType == TypeIPv6 && s.KeyLen == net6
	isMap := s.Flags&(unix.NFT_SET_MAP|unix.NFT_SET_OBJECT) != 0
	if isMap || !isOfIPv4 && !isOfIPv6 {
		return nil, fmt.Errorf("read ranges of set %s: %w", s.Name, ErrNotAddresses)
	}
	// The kernel lists elements in ascending or descending order, depending on its version, which SortFunc
	// notices.
	slices.SortFunc(elems, func(a, b element) int { // an end before a beginning
		return cmp.Or(bytes.Compare(a.key[:], b.key[:]), cmp.Compare(b.end, a.end))
	})
	ranges := make([]netipx.IPRange, 0, len(elems)/2+1)
	var first netip.Addr // of the range that has no end yet
	for i := range elems {
		e := &elems[i]
		if e.special || uint32(e.size) != s.KeyLen {
			return nil, fmt.Errorf("read ranges of set %s: %w: an element is more than a key",
				s.Name, ErrNotAddresses)
		}
		key, _ := netip.AddrFromSlice(e.key[:e.size])
		if first == key {
			continue // the same element twice, as in a read during a rebuild
		}
		if first.IsValid() {
			ranges = append(ranges, netipx.IPRangeFrom(first, key.Prev()))
		}
		first = netip.Addr{}
		if e.end != 0 {
			continue
		}
		isInterval := s.Flags&unix.NFT_SET_INTERVAL != 0
		if isInterval {
			first = key
		} else {
			ranges = append(ranges, netipx.IPRangeFrom(key, key))
		}
	}
	if first.IsValid() {
		ranges = append(ranges, netipx.IPRangeFrom(first, netipx.PrefixLastIP(netip.PrefixFrom(first, 0))))
	}
	return ranges, nil
}
