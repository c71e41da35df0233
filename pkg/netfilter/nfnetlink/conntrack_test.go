// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"net/netip"
	"testing"
)

// encodeConnection returns the attributes of an entry, with a zone if it is not 0.
func encodeConnection(f testing.TB, src, dst string, zone bool) []byte {
	f.Helper()
	var w attrWriter
	for _, tuple := range [][2]string{{src, dst}, {dst, src}} {
		outer := w.open(ctaTupleOrig)
		if tuple[0] == dst {
			w.b[outer+2] = ctaTupleReply
		}
		ip := w.open(ctaTupleIP)
		for i, a := range tuple {
			address := netip.MustParseAddr(a)
			typ := uint16(ctaV4Src + i)
			if address.Is6() {
				typ = uint16(ctaV6Src + i)
			}
			w.bytes(typ, address.AsSlice())
		}
		w.close(ip)
		w.close(outer)
	}
	w.u32(ctaID, 7)
	if zone {
		w.bytes(ctaZone, []byte{0, 7})
	}
	return w.b
}

// FuzzDecodeConnection feeds the decoder of conntrack entries. What it accepts has four addresses of one
// family, and the request to delete it has the same original tuple and id.
func FuzzDecodeConnection(f *testing.F) {
	f.Add(encodeConnection(f, "10.88.0.2", "192.0.2.1", false))
	f.Add(encodeConnection(f, "fd88::2", "2001:db8::1", true))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var e Connection
		if !e.decode(b) {
			return
		}
		for _, a := range []netip.Addr{e.Src, e.Dst, e.ReplySrc, e.ReplyDst} {
			if !a.IsValid() || a.BitLen() != e.Src.BitLen() {
				t.Fatalf("%+v", e)
			}
		}
		var d Deletions
		d.Add(&e)
		it := messageIter{rest: d.w.b}
		if !it.next() || it.typ != ctnetlinkType(ctDelete) {
			t.Fatalf("message %v", it.message)
		}
		var again Connection
		attrs := append(it.payload[nfgenHeader:], b...) // the reply is not in the request
		if d.w.err == nil && (!again.decode(attrs) || again.Src != e.Src || again.Dst != e.Dst) {
			t.Errorf("deletes %+v instead of %+v", again, e)
		}
	})
}
