// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Numbers in linux/netfilter/nfnetlink_conntrack.h, which golang.org/x/sys/unix does not have.
const (
	ctNew, ctGet, ctDelete, ctGetStatsCPU, ctGetStats = 0, 1, 2, 4, 5

	ctaTupleOrig, ctaTupleReply, ctaStatus, ctaID, ctaZone, ctaFilter, ctaStatusMask = 1, 2, 3, 12, 18, 25, 26

	ctaTupleIP, ctaTupleProto, ctaTupleZone       = 1, 2, 3
	ctaV4Src, ctaV4Dst, ctaV6Src, ctaV6Dst        = 1, 2, 3, 4
	ctaProtoNum, ctaProtoSrcPort, ctaProtoDstPort = 1, 2, 3
	ctaFilterOrigFlags, ctaFilterIPSrc            = 1, 1 << 0
	ctaInsertFailed, ctaDrop, ctaEarlyDrop        = 9, 10, 11
	ctaGlobalEntries, ctaGlobalMaximum            = 1, 2
)

// Connection is a conntrack entry.
type Connection struct {
	Original Tuple // of the first packet, as it was sent
	Reply    Tuple // of the replies, as they arrive: its destination is what the packets leave with
	// Zone is the zone that the entry, or one direction of it, is in.
	Zone uint16
	ID   []byte // the attribute, for DeleteConnection
}

// Tuple is one direction of a conntrack entry.
type Tuple struct {
	Src, Dst netip.Addr
	attrs    []byte
}

// Clone returns a copy that is valid after the call that got the entry.
func (t Tuple) Clone() Tuple {
	t.attrs = bytes.Clone(t.attrs)
	return t
}

// Flow is a tuple with its ports. Those of a protocol without ports are 0.
type Flow struct {
	Protocol uint8 // IPPROTO_*
	Src, Dst netip.AddrPort
}

// ConnectionFilter selects conntrack entries. The zero value selects all.
type ConnectionFilter struct {
	Family Family // 0 is any
	// Status are the bits that the entry has, of those in Mask. Older kernels (5.10) ignore both.
	Status, Mask uint32
	// Src is, if it is valid, the source of the connection. Kernels before 5.8 ignore it. One of IPv6 is not sent:
	// the kernel's filter of IPv6 addresses (up to 6.18 at least) selects the entries that differ. So the
	// function that gets the entries compares the source, too.
	Src netip.Addr
}

func (f *ConnectionFilter) encode(w *attrWriter) {
	if f.Mask != 0 {
		w.u32(ctaStatus, f.Status)
		w.u32(ctaStatusMask, f.Mask)
	}
	if f.Src.Is4() {
		tuple := w.begin(ctaTupleOrig)
		ip := w.begin(ctaTupleIP)
		w.bytes(ctaV4Src, f.Src.AsSlice())
		w.end(ip)
		w.end(tuple)
		filter := w.begin(ctaFilter)
		w.bytes(ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, ctaFilterIPSrc))
		w.end(filter)
	}
}

// Bits of an entry's status (IPS_*). A source NAT that changes nothing sets no bit, one that changes
// only the port does.
const (
	SourceNAT      = 1 << 4
	DestinationNAT = 1 << 5
)

// Connections calls handle with each conntrack entry that the filter selects. The entry is valid during
// the call only. One that exists all the time is handled at least once.
func (c *Conn) Connections(
	ctx context.Context, filter ConnectionFilter, handle func(*Connection) error,
) error {
	list := ctnetlink("list conntrack entries", ctGet, unix.NLM_F_DUMP, filter.Family)
	list.encode = filter.encode
	var entry Connection
	list.handle = func(_, attrs []byte) error {
		if !entry.decode(attrs) {
			return errMalformed
		}
		return handle(&entry)
	}
	return c.queryAll(ctx, list)
}

// decode decodes the attributes of an entry. It allocates nothing and uses no attrTable, as there can be a
// million entries: a library that returns a slice of them takes 2.3 times the processor time.
func (e *Connection) decode(attrs []byte) bool {
	*e = Connection{}
	typ, data, rest, ok := cutAttr(attrs)
	for ; ok; typ, data, rest, ok = cutAttr(rest) {
		switch typ {
		case ctaTupleOrig:
			e.tuple(&e.Original, data)
		case ctaTupleReply:
			e.tuple(&e.Reply, data)
		case ctaZone:
			e.zone(data)
		case ctaID:
			e.ID = data
		}
	}
	bits := e.Original.Src.BitLen()
	sameFamily := bits == e.Original.Dst.BitLen()
	sameFamily = sameFamily && bits == e.Reply.Src.BitLen() && bits == e.Reply.Dst.BitLen()
	return len(rest) == 0 && len(e.ID) == 4 && bits > 0 && sameFamily
}

// zone sets the zone. An attribute of another form is a zone, too.
func (e *Connection) zone(data []byte) {
	if len(data) != 2 {
		e.Zone = math.MaxUint16
		return
	}
	e.Zone = binary.BigEndian.Uint16(data)
}

// tuple decodes a tuple. Its addresses are the zero Addr if they are missing.
func (e *Connection) tuple(t *Tuple, attrs []byte) {
	*t = Tuple{attrs: attrs} // also where a message has it twice
	for typ, part, rest, ok := cutAttr(attrs); ok; typ, part, rest, ok = cutAttr(rest) {
		switch typ {
		case ctaTupleZone:
			e.zone(part)
		case ctaTupleIP:
			t.addresses(part)
		}
	}
}

// addresses decodes the addresses of a tuple.
func (t *Tuple) addresses(attrs []byte) {
	for typ, a, rest, ok := cutAttr(attrs); ok; typ, a, rest, ok = cutAttr(rest) {
		switch typ {
		case ctaV4Src, ctaV6Src:
			t.Src, _ = netip.AddrFromSlice(a)
		case ctaV4Dst, ctaV6Dst:
			t.Dst, _ = netip.AddrFromSlice(a)
		}
	}
}

// Flow decodes the rest of the tuple, which a walk of the whole table has no use for.
func (t Tuple) Flow() (f Flow) {
	var ports [2]uint16
	typ, data, rest, ok := cutAttr(nested(t.attrs, ctaTupleProto))
	for ; ok; typ, data, rest, ok = cutAttr(rest) {
		switch {
		case typ == ctaProtoNum && len(data) == 1:
			f.Protocol = data[0]
		case (typ == ctaProtoSrcPort || typ == ctaProtoDstPort) && len(data) == 2:
			ports[typ-ctaProtoSrcPort] = binary.BigEndian.Uint16(data)
		}
	}
	f.Src, f.Dst = netip.AddrPortFrom(t.Src, ports[0]), netip.AddrPortFrom(t.Dst, ports[1])
	return f
}

// DeleteConnection deletes the entry that has the tuple in one of its directions. With an ID it
// does not delete one that has replaced it. It reports whether there was one: the kernel does not
// delete an entry that a flowtable has.
func (c *Conn) DeleteConnection(t Tuple, id []byte) (deleted bool, err error) {
	request := ctnetlink("delete conntrack entry", ctDelete, unix.NLM_F_ACK, FamilyOf(t.Src))
	request.encode = func(w *attrWriter) {
		w.bytes(ctaTupleOrig|unix.NLA_F_NESTED, t.attrs)
		if id != nil {
			w.bytes(ctaID, id)
		}
	}
	_, err = c.query(context.Background(), request)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EBUSY) {
		return false, nil
	}
	return err == nil, err
}

// ConntrackStats are the numbers of a network namespace's conntrack.
type ConntrackStats struct {
	Entries, Limit uint64
	// InsertFailed, Drop and EarlyDrop are the counters that conntrack -S shows, over all CPUs.
	InsertFailed, Drop, EarlyDrop uint64
}

// ConntrackStats returns the numbers of the namespace.
func (c *Conn) ConntrackStats(ctx context.Context) (s ConntrackStats, err error) {
	const verb = "read conntrack statistics"
	ofNamespace := ctnetlink(verb, ctGetStats, 0, 0)
	ofNamespace.handle = func(_, attrs []byte) error {
		return c.attrs.decode(attrs, func(t *attrTable) {
			s.Entries, s.Limit = uint64(t.u32(ctaGlobalEntries)), uint64(t.optU32(ctaGlobalMaximum))
		})
	}
	if _, err := c.query(ctx, ofNamespace); err != nil {
		return s, err
	}
	ofEachCPU := ctnetlink(verb, ctGetStatsCPU, unix.NLM_F_DUMP, 0)
	ofEachCPU.handle = func(_, attrs []byte) error {
		return c.attrs.decode(attrs, func(t *attrTable) {
			s.InsertFailed += uint64(t.u32(ctaInsertFailed))
			s.Drop += uint64(t.u32(ctaDrop))
			s.EarlyDrop += uint64(t.u32(ctaEarlyDrop))
		})
	}
	_, err = c.query(ctx, ofEachCPU)
	return s, err
}

func ctnetlink(verb string, get, flags uint16, family Family) request {
	return request{op: operation{verb: verb}, typ: ctnetlinkType(get), flags: flags, header: nfgenmsg(family)}
}

func ctnetlinkType(number uint16) uint16 { return unix.NFNL_SUBSYS_CTNETLINK<<8 | number }
