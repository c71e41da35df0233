// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Routes returns a Conn to the routing tables, addresses and interfaces (rtnetlink) instead. It needs no privilege.
func Routes() *Conn { return &Conn{routes: true} }

func setUpRoutes(fd int) error {
	// The kernel lists only the routes of the type asked for. Before Linux 4.20 it lists all.
	err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	if errors.Is(err, unix.ENOPROTOOPT) {
		return nil
	}
	return err
}

// Local returns the destinations of a family's routes of type local in all tables, without those to every
// address. There are none if the kernel does not have the family.
func (c *Conn) Local(f Family) (local []netip.Prefix, err error) {
	all := unix.RtMsg{Family: uint8(f), Type: unix.RTN_LOCAL}
	err = c.queryAll(context.Background(), route(c, unix.RTM_GETROUTE, "list local addresses", unix.NLM_F_DUMP, all, nil, func(route unix.RtMsg, t *attrTable) {
		if dst, ok := netip.AddrFromSlice(t.get(unix.RTA_DST)); ok && route.Type == unix.RTN_LOCAL && route.Dst_len > 0 {
			local = append(local, netip.PrefixFrom(dst, int(route.Dst_len)))
		}
	}))
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	return local, err
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
