// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Contents is a set or map of any type, with all of its elements.
type Contents struct {
	Set
	// Fields are the lengths in bytes of the fields of a concatenation with intervals. Each is padded to 4
	// bytes in a key.
	Fields   []int
	Elements []Element
}

// Element is an element of a set or map.
type Element struct {
	Key    []byte
	KeyEnd []byte // of a concatenation with intervals: the last values, field by field
	// End tells that the element ends a range: Key is the first value behind it.
	End      bool
	CatchAll bool     // it stands for all keys that no other element has
	Data     []byte   // of a map
	Verdict  *Verdict // of a verdict map
	// Conditional tells that an expression of the element, such as a limit, can refuse a packet.
	Conditional bool
}

// Contents returns a set or map, or an error that is os.ErrNotExist. Elements that do not decode are an
// error. Attributes of an element that are not known are ignored: package thirdparty, the only caller, judges what
// rules may do.
func (c *Conn) Contents(family Family, table, name string) (Contents, error) {
	op := operation{"read set", family, table, name}
	found, err := read(c, op, unix.NFT_MSG_GETSET, unix.NFTA_SET_NAME, decodeContents)
	if err != nil {
		return found, err
	}
	op.verb = "list elements of"
	const get, nameAttr = unix.NFT_MSG_GETSETELEM, unix.NFTA_SET_ELEM_LIST_SET
	found.Elements, err = list(c, op, get, nameAttr, decodeContentElements)
	return found, err
}

// decodeContents decodes a set without its elements.
func decodeContents(t *attrTable) Contents {
	const descConcat, fieldLen = 2, 1 // NFTA_SET_DESC_CONCAT, NFTA_SET_FIELD_LEN
	found := Contents{Set: decodeSet(t)}
	concatenation := nested(t.at[unix.NFTA_SET_DESC], descConcat)
	for _, field, rest, ok := cutAttr(concatenation); ok; _, field, rest, ok = cutAttr(rest) {
		length := nested(field, fieldLen)
		if len(length) != 4 {
			t.bad = true
			break
		}
		found.Fields = append(found.Fields, int(binary.BigEndian.Uint32(length)))
	}
	return found
}

func decodeContentElements(elements []Element, t *attrTable) []Element {
	_, data, rest, ok := cutAttr(t.at[unix.NFTA_SET_ELEM_LIST_ELEMENTS])
	for ; ok; _, data, rest, ok = cutAttr(rest) {
		e, decoded := decodeContentElement(data)
		t.bad = t.bad || !decoded
		elements = append(elements, e)
	}
	t.bad = t.bad || len(rest) > 0
	return elements
}

// decodeContentElement decodes an element. One with a flag or an attribute that is not known, and not zero, is not
// ok: it may stand for other keys than Key.
func decodeContentElement(b []byte) (e Element, ok bool) {
	typ, data, rest, more := cutAttr(b)
	for ; more; typ, data, rest, more = cutAttr(rest) {
		switch typ {
		case unix.NFTA_SET_ELEM_KEY:
			e.Key = bytes.Clone(nested(data, unix.NFTA_DATA_VALUE))
		case attrElemKeyEnd:
			e.KeyEnd = bytes.Clone(nested(data, unix.NFTA_DATA_VALUE))
		case unix.NFTA_SET_ELEM_FLAGS:
			if len(data) != 4 {
				return e, false
			}
			flags := binary.BigEndian.Uint32(data)
			e.End = flags&unix.NFT_SET_ELEM_INTERVAL_END != 0
			e.CatchAll = flags&elemCatchAll != 0
			if flags&^(unix.NFT_SET_ELEM_INTERVAL_END|elemCatchAll) != 0 {
				return e, false
			}
		case unix.NFTA_SET_ELEM_DATA:
			e.Data = bytes.Clone(nested(data, unix.NFTA_DATA_VALUE))
			e.Verdict = decodeVerdict(nested(data, unix.NFTA_DATA_VERDICT))
		case unix.NFTA_SET_ELEM_EXPR:
			e.Conditional = e.Conditional || !counts(data)
		case attrElemExpressions:
			for _, one, others, some := cutAttr(data); some; _, one, others, some = cutAttr(others) {
				e.Conditional = e.Conditional || !counts(one)
			}
		case unix.NFTA_SET_ELEM_TIMEOUT, unix.NFTA_SET_ELEM_EXPIRATION, unix.NFTA_SET_ELEM_OBJREF:
		case unix.NFTA_SET_ELEM_USERDATA, unix.NFTA_SET_ELEM_PAD:
		default:
			if !zero(data) {
				return e, false
			}
		}
	}
	return e, len(rest) == 0 && (len(e.Key) > 0 || e.CatchAll)
}

// Numbers of elements that golang.org/x/sys/unix does not have.
const (
	attrElemKeyEnd = 10 // NFTA_SET_ELEM_KEY_END
	elemCatchAll   = 2  // NFT_SET_ELEM_CATCHALL
)

// counts reports whether an expression of an element only counts packets.
func counts(expr []byte) bool {
	_, is := decodeExpr(expr).(Counter)
	return is
}
