// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"strings"

	"golang.org/x/sys/unix"
)

// attrHeader is the size of a netlink attribute's header: length and type.
const attrHeader = unix.SizeofNlAttr

// typeMask leaves out the two flag bits NLA_F_NESTED and NLA_F_NET_BYTEORDER.
const typeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)

func align4(n int) int { return (n + 3) &^ 3 }

// cutAttr returns the first attribute of b and those after it, or !ok and all of b if that is empty or
// malformed.
func cutAttr(b []byte) (typ uint16, data, rest []byte, ok bool) {
	if len(b) < attrHeader {
		return 0, nil, b, false
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < attrHeader || n > len(b) {
		return 0, nil, b, false
	}
	return binary.NativeEndian.Uint16(b[2:]) & typeMask, b[attrHeader:n:n], b[min(align4(n), len(b)):], true
}

// maxAttr is above every attribute number that is looked up in an attrTable.
const maxAttr = 20

// attrTable holds attributes by number. The getters set bad for one that is missing or misshapen.
type attrTable struct {
	at  [maxAttr][]byte
	bad bool
	// unread is a bitmap of nonzero attributes that no getter has returned. Bit maxAttr is any attribute >=
	// maxAttr.
	unread uint32
}

func (t *attrTable) parse(b []byte) {
	*t = attrTable{}
	typ, data, rest, ok := cutAttr(b)
	for ; ok; typ, data, rest, ok = cutAttr(rest) {
		if typ < maxAttr {
			t.at[typ] = data
		}
		if !zero(data) {
			t.unread |= 1 << min(typ, maxAttr)
		}
	}
	t.bad = len(rest) > 0
}

// zero reports whether all bytes are 0, as in the attributes that newer kernels report for features which a
// rule or an element does not use. Only such unknown attributes are tolerated, except in a set itself, whose
// other attributes describe its state.
func zero(data []byte) bool {
	for _, b := range data {
		if b != 0 {
			return false
		}
	}
	return true
}

// get returns the data of an attribute, nil if it is not there.
func (t *attrTable) get(typ uint16) []byte {
	t.unread &^= 1 << typ
	return t.at[typ]
}

// has reports whether the attribute is present, even if empty.
func (t *attrTable) has(typ uint16) bool { return t.at[typ] != nil }

// number returns a required number. The integers of nf_tables are in network order.
func (t *attrTable) number(typ uint16, size int) (n uint64) {
	v := t.get(typ)
	t.bad = t.bad || len(v) != size
	for _, b := range v[:min(len(v), size)] {
		n = n<<8 | uint64(b)
	}
	return n
}

// decode lets a function read attributes. It fails if they do not have the form that the function expects.
func (t *attrTable) decode(attrs []byte, read func(*attrTable)) error {
	t.parse(attrs)
	read(t)
	if t.bad {
		return errMalformed
	}
	return nil
}

func (t *attrTable) u32(typ uint16) uint32 { return uint32(t.number(typ, 4)) }

func (t *attrTable) u64(typ uint16) uint64 { return t.number(typ, 8) }

// optU32 returns a number that is 0 if the attribute is missing.
func (t *attrTable) optU32(typ uint16) uint32 {
	if !t.has(typ) {
		return 0
	}
	return t.u32(typ)
}

func (t *attrTable) str(typ uint16) string {
	t.bad = t.bad || !t.has(typ)
	return string(untilNUL(t.get(typ)))
}

// nested returns the data of an attribute among those in b, nil if it is not there.
func nested(b []byte, typ uint16) []byte {
	for number, data, rest, ok := cutAttr(b); ok; number, data, rest, ok = cutAttr(rest) {
		if number == typ {
			return data
		}
	}
	return nil
}

func untilNUL(b []byte) []byte {
	text, _, _ := bytes.Cut(b, []byte{0})
	return text
}

// attrWriter appends attributes to b. It keeps its first error: the length of an attribute has 16
// bits, and an overflow would silently truncate what the kernel reads.
type attrWriter struct {
	b   []byte
	op  operation // that is being encoded
	err error
}

func (w *attrWriter) fail(format string, args ...any) {
	if w.err == nil {
		w.err = w.op.wrap(fmt.Errorf(format, args...))
	}
}

// begin begins an attribute, in which those are nested that are written until end is called with the result.
func (w *attrWriter) begin(typ uint16) (at int) {
	at = len(w.b)
	w.header(0, typ|unix.NLA_F_NESTED)
	return at
}

func (w *attrWriter) end(at int) {
	n := len(w.b) - at
	if n > math.MaxUint16 {
		w.fail("nested attribute of %d bytes is longer than netlink can express", n)
	}
	binary.NativeEndian.PutUint16(w.b[at:], uint16(n))
}

func (w *attrWriter) header(n int, typ uint16) {
	w.b = binary.NativeEndian.AppendUint16(w.b, uint16(n))
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
}

func (w *attrWriter) bytes(typ uint16, v []byte) {
	n := attrHeader + len(v)
	if n > math.MaxUint16 {
		w.fail("attribute of %d bytes is longer than netlink can express", n)
		return
	}
	w.header(n, typ)
	w.b = append(append(w.b, v...), make([]byte, align4(n)-n)...)
}

func (w *attrWriter) str(typ uint16, s string) {
	if strings.IndexByte(s, 0) >= 0 {
		w.fail("name %q holds a NUL byte", s)
		return
	}
	w.bytes(typ, append([]byte(s), 0))
}

func (w *attrWriter) u32(typ uint16, v uint32) {
	w.header(attrHeader+4, typ)
	w.b = binary.BigEndian.AppendUint32(w.b, v)
}

func (w *attrWriter) u64(typ uint16, v uint64) {
	w.header(attrHeader+8, typ)
	w.b = binary.BigEndian.AppendUint64(w.b, v)
}
