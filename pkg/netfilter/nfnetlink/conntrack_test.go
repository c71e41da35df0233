// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestConnectionsAnswers: the kernel has no ctnetlink, interrupts a dump, or sends what is not an entry.
func TestConnectionsAnswers(t *testing.T) {
	answer := func(typ, flags uint16, sequence uint32, payload []byte) []byte {
		var w attrWriter
		w.endMessage(w.beginMessage(typ, flags, payload))
		binary.NativeEndian.PutUint32(w.b[sequenceAt:], sequence)
		return w.b
	}
	done := native(t, int32(0))
	entry := append(make([]byte, nfgenHeader), encodeConnection(t, "10.88.0.2", "192.0.2.1", false)...)
	for name, tt := range map[string]struct {
		answers [][]byte
		entries int
		err     string
	}{
		"no ctnetlink": {[][]byte{answer(unix.NLMSG_ERROR, 0, 1, native(t, -int32(unix.EINVAL)))}, 0,
			"list conntrack entries: invalid argument; the kernel has no ctnetlink (module nf_conntrack_netlink)"},
		"interrupted once": {[][]byte{
			answer(ctnetlinkType(ctNew), 0, 1, entry), answer(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, 1, done),
			answer(ctnetlinkType(ctNew), 0, 2, entry), answer(unix.NLMSG_DONE, 0, 2, done),
		}, 2, ""},
		"interrupted each time": {[][]byte{
			answer(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, 1, done), answer(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, 2, done),
			answer(unix.NLMSG_DONE, unix.NLM_F_DUMP_INTR, 3, done),
		}, 0, "list conntrack entries: interrupted 3 times"},
		"two families": {[][]byte{answer(ctnetlinkType(ctNew), 0, 1, append(make([]byte, nfgenHeader), encodeConnection(t, "10.88.0.2", "fd88::2", false)...)),
			answer(unix.NLMSG_DONE, 0, 1, done)}, 0,
			"list conntrack entries: the kernel's answer has an unknown form"},
		"too short": {[][]byte{answer(ctnetlinkType(ctNew), 0, 1, nil), answer(unix.NLMSG_DONE, 0, 1, done)}, 0, "list conntrack entries: the kernel's answer has an unknown form"},
	} {
		ends, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		assert.NoError(t, err)
		for _, a := range tt.answers {
			assert.Must(unix.Write(ends[1], a))(t)
		}
		c, entries := &Conn{fd: ends[0], in: make([]byte, datagramSize)}, 0
		err = c.Connections(t.Context(), ConnectionFilter{}, func(*Connection) error { entries++; return nil })
		if text := fmt.Sprint(err); entries != tt.entries || text != tt.err && (err != nil || tt.err != "") {
			t.Errorf("%s: %d entries, %v", name, entries, err)
		}
		assert.NoError(t, errors.Join(c.Close(), unix.Close(ends[1])))
	}
}

// encodeConnection returns the attributes of an entry, with a zone if it is not 0.
func encodeConnection(f testing.TB, src, dst string, zone bool) []byte {
	f.Helper()
	var w attrWriter
	for i, tuple := range [][2]string{{src, dst}, {dst, src}} {
		whole := w.begin(uint16(ctaTupleOrig + i))
		ip := w.begin(ctaTupleIP)
		for i, a := range tuple {
			address := netip.MustParseAddr(a)
			typ := uint16(ctaV4Src + i)
			if address.Is6() {
				typ = uint16(ctaV6Src + i)
			}
			w.bytes(typ, address.AsSlice())
		}
		w.end(ip)
		w.end(whole)
	}
	w.u32(ctaID, 7)
	if zone {
		w.bytes(ctaZone, []byte{0, 7})
	}
	return w.b
}

// FuzzDecodeConnection feeds the decoder of conntrack entries. What it accepts has four addresses of one
// family.
func FuzzDecodeConnection(f *testing.F) {
	f.Add(encodeConnection(f, "10.88.0.2", "192.0.2.1", false))
	f.Add(encodeConnection(f, "fd88::2", "2001:db8::1", true))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var e Connection
		if !e.decode(b) {
			return
		}
		for _, a := range []netip.Addr{e.Original.Src, e.Original.Dst, e.Reply.Src, e.Reply.Dst} {
			if !a.IsValid() || a.BitLen() != e.Original.Src.BitLen() {
				t.Fatalf("%+v", e)
			}
		}
		for _, tuple := range []Tuple{e.Original, e.Reply} {
			if f := tuple.Flow(); f.Src.Addr() != tuple.Src || f.Dst.Addr() != tuple.Dst {
				t.Fatalf("%+v: %+v", tuple, f)
			}
		}
	})
}

// The addresses of a tuple are those of its attribute, also where a message has that twice.
func TestTupleTwice(t *testing.T) {
	var second attrWriter
	second.bytes(ctaTupleOrig, nil)
	var e Connection
	if e.decode(append(encodeConnection(t, "10.88.0.2", "192.0.2.1", false), second.b...)) {
		t.Errorf("%+v", e)
	}
}
