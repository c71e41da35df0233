// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"net/netip"
	"strings"
	"testing"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

func interval(keyLen uint32) Set {
	keyType := map[uint32]uint32{4: TypeIPv4, 16: TypeIPv6}[keyLen]
	return Set{Name: "s", Flags: unix.NFT_SET_INTERVAL, KeyType: keyType, KeyLen: keyLen}
}

func newElement(key []byte, end bool) element {
	var e element
	if end {
		e.end = unix.NFT_SET_ELEM_INTERVAL_END
	}
	e.size = uint8(copy(e.key[:], key))
	return e
}

// elementsOf writes elements "10.0.0.0" and, where a range ends, "]10.1.0.0".
func elementsOf(keys ...string) []element {
	elems := make([]element, 0, len(keys))
	for _, k := range keys {
		k, end := strings.CutPrefix(k, "]")
		elems = append(elems, newElement(netip.MustParseAddr(k).AsSlice(), end))
	}
	return elems
}

func TestRanges(t *testing.T) {
	for _, tt := range []struct {
		name  string
		set   Set
		elems []element
		want  []netipx.IPRange
	}{
		{"none", interval(4), nil, []netipx.IPRange{}},
		{"ascending", interval(4), elementsOf("10.0.0.0", "]11.0.0.0", "192.168.0.0", "]192.169.0.0"),
			[]netipx.IPRange{span("10.0.0.0", "10.255.255.255"), span("192.168.0.0", "192.168.255.255")}},
		{"descending, touching", interval(4), elementsOf("]12.0.0.0", "11.0.0.0", "]11.0.0.0", "10.0.0.0"),
			[]netipx.IPRange{span("10.0.0.0", "10.255.255.255"), span("11.0.0.0", "11.255.255.255")}},
		{"nft's end at zero", interval(4), elementsOf("]0.0.0.0", "10.0.0.0", "]10.0.0.1"), []netipx.IPRange{span("10.0.0.0", "10.0.0.0")}},
		{"open end", interval(4), elementsOf("]11.0.0.0", "240.0.0.0", "10.0.0.0"),
			[]netipx.IPRange{span("10.0.0.0", "10.255.255.255"), span("240.0.0.0", "255.255.255.255")}},
		{"everything", interval(16), elementsOf("::"), []netipx.IPRange{span("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")}},
		{"mapped", interval(16), elementsOf("::ffff:10.0.0.0", "]::ffff:10.0.0.2"), []netipx.IPRange{span("::ffff:10.0.0.0", "::ffff:10.0.0.1")}},
		{"no end between", interval(4), elementsOf("10.0.0.0", "10.0.0.8", "]10.0.0.9"),
			[]netipx.IPRange{span("10.0.0.0", "10.0.0.7"), span("10.0.0.8", "10.0.0.8")}},
		{"the same twice", interval(4), elementsOf("0.0.0.0", "0.0.0.0", "]10.0.0.1", "]10.0.0.1"), []netipx.IPRange{span("0.0.0.0", "10.0.0.0")}},
		{"no intervals", Set{KeyType: TypeIPv4, KeyLen: 4}, elementsOf("10.0.0.9", "10.0.0.7"), []netipx.IPRange{span("10.0.0.7", "10.0.0.7"), span("10.0.0.9", "10.0.0.9")}},
	} {
		got, err := tt.set.ranges(tt.elems)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		assert.Equal(t, tt.name, got, tt.want)
	}
}

func TestRangesRefuses(t *testing.T) {
	special := newElement([]byte{10, 0, 0, 0}, false)
	special.special = true
	for name, tt := range map[string]struct {
		set   Set
		elems []element
	}{
		"map":         {Set{KeyType: TypeIPv4, KeyLen: 4, Flags: unix.NFT_SET_MAP}, nil},
		"ports":       {Set{KeyType: 13, KeyLen: 2}, nil},
		"mark":        {Set{KeyType: 19, KeyLen: 4}, nil},
		"four fields": {Set{KeyType: 7<<18 | 7<<12 | 7<<6 | 7, KeyLen: 16}, nil},
		"catch-all":   {interval(4), []element{{special: true}}},
		"expression":  {interval(4), []element{special}},
		"short key":   {interval(16), []element{newElement([]byte{10, 0, 0, 0}, false)}},
		"no key":      {interval(4), []element{{}}},
	} {
		if got, err := tt.set.ranges(tt.elems); err == nil {
			t.Errorf("%s: got %v, want an error", name, got)
		}
	}
}

// TestElementForms has the elements that are not just a key and an end.
func TestElementForms(t *testing.T) {
	value := func(typ uint16, key ...byte) func(*attrWriter) { return func(w *attrWriter) { w.value(typ, key) } }
	flags := func(f uint32) func(*attrWriter) { return func(w *attrWriter) { w.u32(unix.NFTA_SET_ELEM_FLAGS, f) } }
	for name, tt := range map[string]struct {
		parts []func(*attrWriter)
		want  []string // as elementsOf has them, and "!" for a special one
	}{
		"a range in one": {[]func(*attrWriter){value(unix.NFTA_SET_ELEM_KEY, 10, 0, 0, 9), value(10, 10, 0, 0, 255)}, []string{"!"}},
		"catch-all":      {[]func(*attrWriter){flags(2)}, []string{"!"}},
		"unknown flag":   {[]func(*attrWriter){value(unix.NFTA_SET_ELEM_KEY, 10, 0, 0, 9), flags(1 << 24)}, []string{"!"}},
		"unknown attribute": {[]func(*attrWriter){value(unix.NFTA_SET_ELEM_KEY, 10, 0, 0, 9),
			func(w *attrWriter) { w.u32(12, 1) }}, []string{"!"}},
		"unknown attribute of 0": {[]func(*attrWriter){value(unix.NFTA_SET_ELEM_KEY, 10, 0, 0, 9),
			func(w *attrWriter) { w.u32(12, 0) }}, []string{"10.0.0.9"}},
		"expression": {[]func(*attrWriter){value(unix.NFTA_SET_ELEM_KEY, 10, 0, 0, 9),
			func(w *attrWriter) { w.bytes(unix.NFTA_SET_ELEM_EXPR, nil) }}, []string{"!"}},
		"expressions": {[]func(*attrWriter){value(unix.NFTA_SET_ELEM_KEY, 10, 0, 0, 9),
			func(w *attrWriter) { w.bytes(11, nil) }}, []string{"!"}},
		"long":            {[]func(*attrWriter){value(unix.NFTA_SET_ELEM_KEY, make([]byte, 20)...)}, []string{"!"}},
		"with a lifetime": {[]func(*attrWriter){value(unix.NFTA_SET_ELEM_KEY, 10, 0, 0, 9), flags(1), func(w *attrWriter) { w.u64(unix.NFTA_SET_ELEM_TIMEOUT, 1) }}, []string{"]10.0.0.9"}},
	} {
		var w attrWriter
		list := w.begin(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		element := w.begin(unix.NFTA_LIST_ELEM)
		for _, part := range tt.parts {
			part(&w)
		}
		w.end(element)
		w.end(list)
		elems, err := decodeElems(w.b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var got []string
		for _, e := range elems {
			switch key := addr(e.key[:e.size]).String(); {
			case e.special:
				got = append(got, "!")
			case e.end != 0:
				got = append(got, "]"+key)
			default:
				got = append(got, key)
			}
		}
		assert.Equal(t, name, got, tt.want)
	}
}

func addr(key []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(key)
	return a
}

func TestMalformedElements(t *testing.T) {
	var w attrWriter
	w.element(netip.MustParseAddr("10.0.0.0"), unix.NFT_SET_ELEM_INTERVAL_END)
	elem := w.b
	list := func(elem []byte) []byte {
		var w attrWriter
		w.bytes(unix.NFTA_SET_ELEM_LIST_ELEMENTS, elem)
		return w.b
	}
	if elems, err := decodeElems(list(elem)); err != nil || len(elems) != 1 || elems[0].end == 0 {
		t.Fatalf("well formed: %v, %v", elems, err)
	}
	for cut := 1; cut < len(elem); cut++ {
		if elems, err := decodeElems(list(elem[:cut])); err == nil {
			t.Errorf("%d of %d bytes: %v", cut, len(elem), elems)
		}
	}
}
