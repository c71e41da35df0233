// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// Routes returns a Conn to the routing tables, addresses and interfaces (rtnetlink) instead. It needs no privilege.
func Routes() *Conn { return &Conn{routes: true} }

// Local returns the destinations of a family's routes of type local in all tables, without those to every
// address. There are none if the kernel does not have the family.
func (c *Conn) Local(f Family) (local []netip.Prefix, err error) {
	all := unix.RtMsg{Family: uint8(f), Type: unix.RTN_LOCAL}
	err = c.queryAll(context.Background(), route(c, unix.RTM_GETROUTE, "list local addresses", unix.NLM_F_DUMP, all, nil, func(route unix.RtMsg, t *attrTable) {
		if dst, ok := netip.AddrFromSlice(t.get(unix.RTA_DST)); ok && route.Type == unix.RTN_LOCAL && route.Dst_len > 0 {
			local, t.bad = append(local, netip.PrefixFrom(dst, int(route.Dst_len))), t.bad || int(route.Dst_len) > dst.BitLen()
		}
	}))
	return local, ignore(err, unix.EAFNOSUPPORT, unix.EOPNOTSUPP)
}

// Output returns the index of the interface to dst, 0 if there is no route, for packets from src that come in
// through an interface; if that is 0, for the node's own.
func (c *Conn) Output(dst, src netip.Addr, in uint32) (out uint32, err error) {
	get := unix.RtMsg{Family: uint8(FamilyOf(dst)), Dst_len: uint8(dst.BitLen())}
	if in != 0 {
		get.Src_len = uint8(src.BitLen())
	}
	_, err = c.query(context.Background(), route(c, unix.RTM_GETROUTE, fmt.Sprintf("find route to %s", dst), 0, get, func(w *attrWriter) {
		w.bytes(unix.RTA_DST, dst.AsSlice())
		if in != 0 {
			w.bytes(unix.RTA_SRC, src.AsSlice())
			w.bytes(unix.RTA_IIF, binary.NativeEndian.AppendUint32(nil, in))
		}
	}, func(route unix.RtMsg, t *attrTable) {
		if oif := t.get(unix.RTA_OIF); len(oif) == 4 && route.Type == unix.RTN_UNICAST {
			out = binary.NativeEndian.Uint32(oif)
		}
	}))
	if errno := unix.Errno(0); errors.As(err, &errno) { // a refusal is no route
		err = nil
	}
	return out, err
}

// route returns a request to rtnetlink, whose messages begin with a header.
func route[H any](c *Conn, get uint16, verb string, flags uint16, header H, encode func(*attrWriter), handle func(H, *attrTable)) request {
	encoded, err := binary.Append(nil, binary.NativeEndian, header)
	return request{op: operation{verb: verb}, typ: get, flags: flags, header: encoded, encode: encode, handle: func(answer, attrs []byte) error {
		if err != nil {
			return err
		}
		if _, err := binary.Decode(answer, binary.NativeEndian, &header); err != nil {
			return err
		}
		return c.attrs.decode(attrs, func(t *attrTable) { handle(header, t) })
	}}
}

// Address is an address of an interface, as rtnetlink(7) describes it.
type Address struct {
	Address netip.Addr
	Link    uint32 // the index of the interface
	Flags   uint32 // IFA_F_*
}

// Link is an interface.
type Link struct {
	Index uint32
	Name  string
	Flags uint32 // IFF_*
	Kind  string // dummy, bridge, veth, …; "" of most hardware
}

// Addresses returns the addresses of a family of global scope, without those of one interface. A
// listing that changes interrupt is repeated, until two are equal, or ten times: the kernel lists
// each interface by itself.
func (c *Conn) Addresses(f Family, except uint32) (list []Address, err error) {
	const flagsAt, scopeAt, indexAt = 2, 3, 4 // in struct ifaddrmsg
	const attempts = 10
	all := request{op: operation{verb: "list addresses"}, typ: unix.RTM_GETADDR, flags: unix.NLM_F_DUMP,
		header: append([]byte{uint8(f)}, make([]byte, unix.SizeofIfAddrmsg-1)...)}
	all.handle = func(header, attrs []byte) error {
		link := binary.NativeEndian.Uint32(header[indexAt:])
		// Each veth of a pod has a link-local address.
		if header[scopeAt] != unix.RT_SCOPE_UNIVERSE || link == except || header[0] != uint8(f) {
			return nil
		}
		return c.attrs.decode(attrs, func(t *attrTable) {
			local := t.get(unix.IFA_LOCAL) // IFA_ADDRESS of a point-to-point interface is the peer's
			if local == nil {
				local = t.get(unix.IFA_ADDRESS)
			}
			flags := uint32(header[flagsAt])
			if all := t.get(unix.IFA_FLAGS); len(all) == 4 {
				flags = binary.NativeEndian.Uint32(all)
			}
			if a, ok := netip.AddrFromSlice(local); ok {
				list = append(list, Address{a, link, flags})
			}
		})
	}
	for n := 1; ; n++ {
		last := list
		list = nil
		interrupted, err := c.query(context.Background(), all)
		if err != nil || !interrupted || n > 1 && slices.Equal(list, last) || n == attempts {
			return list, ignore(err, unix.EAFNOSUPPORT, unix.EOPNOTSUPP)
		}
	}
}

// Link returns the interface with the index or, if that is 0, with the name: the zero Link if there is none.
func (c *Conn) Link(index uint32, name string) (l Link, err error) {
	const withoutStatistics = 8 // RTEXT_FILTER_SKIP_STATS
	verb, get := "read interface "+cmp.Or(name, fmt.Sprint(index)), unix.IfInfomsg{Index: int32(index)}
	_, err = c.query(context.Background(), route(c, unix.RTM_GETLINK, verb, 0, get, func(w *attrWriter) {
		w.bytes(unix.IFLA_EXT_MASK, binary.NativeEndian.AppendUint32(nil, withoutStatistics))
		if name != "" {
			w.str(unix.IFLA_IFNAME, name)
		}
	}, func(m unix.IfInfomsg, t *attrTable) {
		driver := untilNUL(nested(t.get(unix.IFLA_LINKINFO), unix.IFLA_INFO_KIND))
		l = Link{uint32(m.Index), t.str(unix.IFLA_IFNAME), m.Flags, string(driver)}
	}))
	return l, ignore(err, unix.ENODEV)
}

// ListenAddresses calls a function when interfaces, or addresses of others than one, may have
// changed in the calling thread's namespace, and once at first, until ctx ends.
func ListenAddresses(ctx context.Context, except string, changed func()) error {
	file, err := openEvents("listen to addresses", unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	defer context.AfterFunc(ctx, func() { _ = file.Close() })()
	c := Routes()
	defer func() { _ = c.Close() }()
	ignored, _ := c.Link(0, except) // without its index nothing is ignored
	changed()
	in := make([]byte, datagramSize)
	for {
		n, err := file.Read(in)
		if err != nil && !errors.Is(err, unix.ENOBUFS) { // more changes than the socket holds
			return fmt.Errorf("receive change events of addresses: %w", err)
		}
		links, relevant := err != nil, err != nil
		m, rest, ok := cutMessage(in[:n])
		for ; ok; m, rest, ok = cutMessage(rest) {
			const indexAt = 4 // in struct ifaddrmsg
			links = links || m.typ != unix.RTM_NEWADDR && m.typ != unix.RTM_DELADDR
			relevant = relevant || links || len(m.payload) < unix.SizeofIfAddrmsg ||
				binary.NativeEndian.Uint32(m.payload[indexAt:]) != ignored.Index
		}
		if links {
			ignored, _ = c.Link(0, except)
		}
		if relevant || len(rest) > 0 {
			changed()
		}
	}
}
