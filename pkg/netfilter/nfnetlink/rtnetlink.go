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

// NewRouteConn returns a Conn to the routing tables, addresses and interfaces (rtnetlink), which needs no
// privilege. Local, Output, Addresses and Link work on it alone, and the other requests on other Conns alone.
func NewRouteConn() *Conn { return &Conn{routes: true} }

// Local returns the destinations of a family's routes of type local in all tables, without those to every
// address. There are none if the kernel does not have the family.
func (c *Conn) Local(f Family) (local []netip.Prefix, err error) {
	all := unix.RtMsg{Family: uint8(f), Type: unix.RTN_LOCAL}
	list := route(unix.RTM_GETROUTE, "list local addresses", unix.NLM_F_DUMP, all)
	list.handle = handleRoute(c, func(route unix.RtMsg, t *attrTable) {
		dst, ok := netip.AddrFromSlice(t.get(unix.RTA_DST))
		if !ok || route.Type != unix.RTN_LOCAL || route.Dst_len == 0 {
			return
		}
		bits := int(route.Dst_len)
		if bits > dst.BitLen() {
			t.bad = true
		}
		local = append(local, netip.PrefixFrom(dst, bits))
	})
	err = c.queryAll(context.Background(), list)
	return local, ignore(err, unix.EAFNOSUPPORT, unix.EOPNOTSUPP)
}

// Output returns the index of the interface to dst, 0 if there is no route, for packets from src that come in
// through an interface; if that is 0, for the node's own.
func (c *Conn) Output(dst, src netip.Addr, in uint32) (out uint32, err error) {
	header := unix.RtMsg{Family: uint8(FamilyOf(dst)), Dst_len: uint8(dst.BitLen())}
	if in != 0 {
		header.Src_len = uint8(src.BitLen())
	}
	find := route(unix.RTM_GETROUTE, fmt.Sprintf("find route to %s", dst), 0, header)
	find.encode = func(w *attrWriter) {
		w.bytes(unix.RTA_DST, dst.AsSlice())
		if in != 0 {
			w.bytes(unix.RTA_SRC, src.AsSlice())
			w.bytes(unix.RTA_IIF, binary.NativeEndian.AppendUint32(nil, in))
		}
	}
	find.handle = handleRoute(c, func(route unix.RtMsg, t *attrTable) {
		oif := t.get(unix.RTA_OIF)
		if len(oif) == 4 && route.Type == unix.RTN_UNICAST {
			out = binary.NativeEndian.Uint32(oif)
		}
	})
	_, err = c.query(context.Background(), find)
	_, isRefused := errors.AsType[*Error](err)
	if isRefused { // there is no route
		return 0, nil
	}
	return out, err
}

// route returns a request to rtnetlink, whose messages begin with a header.
func route[H any](get uint16, verb string, flags uint16, header H) request {
	encoded, _ := binary.Append(nil, binary.NativeEndian, header) // a struct of numbers
	return request{op: operation{verb: verb}, typ: get, flags: flags, header: encoded}
}

// handleRoute returns a handler of answers that begin with a header.
func handleRoute[H any](c *Conn, handle func(H, *attrTable)) func(answer, attrs []byte) error {
	return func(answer, attrs []byte) error {
		var header H
		if _, err := binary.Decode(answer, binary.NativeEndian, &header); err != nil {
			return err
		}
		return c.attrs.decode(attrs, func(t *attrTable) { handle(header, t) })
	}
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
// listing that a change interrupts can lack addresses. It is repeated until one is not interrupted,
// or two are equal, or ten times.
func (c *Conn) Addresses(f Family, except uint32) (list []Address, err error) {
	const attempts = 10
	all := request{
		op: operation{verb: "list addresses"}, typ: unix.RTM_GETADDR, flags: unix.NLM_F_DUMP,
		header: append([]byte{uint8(f)}, make([]byte, unix.SizeofIfAddrmsg-1)...),
	}
	all.handle = func(header, attrs []byte) error {
		of := addressHeader(header)
		isWanted := of.scope() == unix.RT_SCOPE_UNIVERSE && of.link() != except && of.family() == f
		if !isWanted { // each veth of a pod has a link-local address
			return nil
		}
		return c.attrs.decode(attrs, func(t *attrTable) {
			a := decodeAddress(of, t)
			if a.Address.IsValid() {
				list = append(list, a)
			}
		})
	}
	for n := 1; ; n++ {
		last := list
		list = nil
		interrupted, err := c.query(context.Background(), all)
		isSettled := !interrupted || n > 1 && slices.Equal(list, last)
		if err != nil || isSettled || n == attempts {
			return list, ignore(err, unix.EAFNOSUPPORT, unix.EOPNOTSUPP)
		}
	}
}

// addressHeader is a struct ifaddrmsg.
type addressHeader []byte

func (h addressHeader) family() Family { return Family(h[0]) }
func (h addressHeader) flags() uint32  { return uint32(h[2]) }
func (h addressHeader) scope() uint8   { return h[3] }
func (h addressHeader) link() uint32   { return binary.NativeEndian.Uint32(h[4:]) }

// decodeAddress decodes an address. Address is the zero Addr if it is missing.
func decodeAddress(header addressHeader, t *attrTable) Address {
	local := t.get(unix.IFA_LOCAL) // IFA_ADDRESS of a point-to-point interface is the peer's
	if local == nil {
		local = t.get(unix.IFA_ADDRESS)
	}
	flags := header.flags()
	all := t.get(unix.IFA_FLAGS)
	if len(all) == 4 {
		flags = binary.NativeEndian.Uint32(all)
	}
	a, _ := netip.AddrFromSlice(local)
	return Address{Address: a, Link: header.link(), Flags: flags}
}

// Link returns the interface with the index or, if that is 0, with the name: the zero Link if there is none.
func (c *Conn) Link(index uint32, name string) (l Link, err error) {
	const withoutStatistics = 8 // RTEXT_FILTER_SKIP_STATS
	verb := "read interface " + cmp.Or(name, fmt.Sprint(index))
	get := route(unix.RTM_GETLINK, verb, 0, unix.IfInfomsg{Index: int32(index)})
	get.encode = func(w *attrWriter) {
		w.bytes(unix.IFLA_EXT_MASK, binary.NativeEndian.AppendUint32(nil, withoutStatistics))
		if name != "" {
			w.str(unix.IFLA_IFNAME, name)
		}
	}
	get.handle = handleRoute(c, func(m unix.IfInfomsg, t *attrTable) {
		driver := untilNUL(nested(t.get(unix.IFLA_LINKINFO), unix.IFLA_INFO_KIND))
		l = Link{Index: uint32(m.Index), Name: t.str(unix.IFLA_IFNAME), Flags: m.Flags, Kind: string(driver)}
	})
	_, err = c.query(context.Background(), get)
	return l, ignore(err, unix.ENODEV)
}

// ListenAddresses calls a function when interfaces, or addresses of others than one, may have
// changed in the calling thread's namespace, and once at first. It returns with an error, also when
// ctx ends.
func ListenAddresses(ctx context.Context, except string, changed func()) error {
	file, err := openEvents("listen to addresses", unix.NETLINK_ROUTE,
		unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return err
	}
	closeFile := func() { _ = file.Close() }
	defer closeFile()
	stop := context.AfterFunc(ctx, closeFile)
	defer stop()
	c := NewRouteConn()
	defer func() { _ = c.Close() }()
	ignored, _ := c.Link(0, except) // without its index nothing is ignored
	changed()
	in := make([]byte, datagramSize)
	for {
		n, err := file.Read(in)
		isLost := errors.Is(err, unix.ENOBUFS) // more changes than the socket holds
		if err != nil && !isLost {
			return fmt.Errorf("receive change events of addresses: %w", err)
		}
		links, addresses := isLost, isLost
		if !isLost {
			links, addresses = decodeChanges(in[:n], ignored.Index)
		}
		if links {
			ignored, _ = c.Link(0, except)
		}
		if links || addresses {
			changed()
		}
	}
}

// decodeChanges reports whether events are about links, or about addresses of others than one. Malformed ones
// may be.
func decodeChanges(events []byte, except uint32) (links, addresses bool) {
	m, rest, ok := cutMessage(events)
	for ; ok; m, rest, ok = cutMessage(rest) {
		isAddress := m.typ == unix.RTM_NEWADDR || m.typ == unix.RTM_DELADDR
		switch {
		case !isAddress:
			links = true
		case len(m.payload) < unix.SizeofIfAddrmsg || addressHeader(m.payload).link() != except:
			addresses = true
		}
	}
	return links, addresses || len(rest) > 0
}
