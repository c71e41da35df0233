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

// Address is an address of an interface, as rtnetlink(7) describes it.
type Address struct {
	Address netip.Addr
	Link    uint32 // the index of the interface
	Flags   uint32 // IFA_F_*
}

// Link is an interface.
type Link struct {
	Name  string
	Flags uint32 // IFF_*
	Kind  string // dummy, bridge, veth, …; "" of most hardware
}

// Addresses returns the addresses of a family that have global scope. There are none if the kernel does not have
// the family.
func (c *Conn) Addresses(f Family) (list []Address, err error) {
	const scopeAt = 3 // in struct ifaddrmsg
	all := route(c, unix.RTM_GETADDR, "list addresses", unix.NLM_F_DUMP, unix.IfAddrmsg{Family: uint8(f)}, nil,
		func(m unix.IfAddrmsg, t *attrTable) {
			local := t.get(unix.IFA_LOCAL) // IFA_ADDRESS of a point-to-point interface is the peer's
			if local == nil {
				local = t.get(unix.IFA_ADDRESS)
			}
			flags := uint32(m.Flags)
			if all := t.get(unix.IFA_FLAGS); len(all) == 4 {
				flags = binary.NativeEndian.Uint32(all)
			}
			if a, ok := netip.AddrFromSlice(local); ok && m.Family == uint8(f) {
				list = append(list, Address{a, m.Index, flags})
			}
		})
	decode := all.handle
	all.handle = func(header, attrs []byte) error {
		if header[scopeAt] != unix.RT_SCOPE_UNIVERSE { // each veth of a pod has a link-local address
			return nil
		}
		return decode(header, attrs)
	}
	err = c.queryAll(context.Background(), all)
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		err = nil
	}
	return list, err
}

// Link returns the interface with the index. It is the zero Link if there is none.
func (c *Conn) Link(index uint32) (l Link, err error) {
	const withoutStatistics = 8 // RTEXT_FILTER_SKIP_STATS
	get := unix.IfInfomsg{Index: int32(index)}
	_, err = c.query(context.Background(), route(c, unix.RTM_GETLINK, fmt.Sprintf("read interface %d", index), 0, get,
		func(w *attrWriter) {
			w.bytes(unix.IFLA_EXT_MASK, binary.NativeEndian.AppendUint32(nil, withoutStatistics))
		}, func(m unix.IfInfomsg, t *attrTable) {
			l = Link{t.str(unix.IFLA_IFNAME), m.Flags, string(untilNUL(nested(t.get(unix.IFLA_LINKINFO), unix.IFLA_INFO_KIND)))}
		}))
	if errors.Is(err, unix.ENODEV) {
		err = nil
	}
	return l, err
}

// ListenAddresses calls a function when interfaces or addresses of the calling thread's network namespace may have
// changed, and once when it begins. It returns when ctx ends, or with an error. It needs no privilege.
func ListenAddresses(ctx context.Context, changed func()) error {
	file, err := openEvents("listen to addresses", unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	defer context.AfterFunc(ctx, func() { _ = file.Close() })()
	in := make([]byte, datagramSize)
	for err == nil || errors.Is(err, unix.ENOBUFS) { // more changes than the socket holds
		changed()
		_, err = file.Read(in)
	}
	return fmt.Errorf("receive change events of addresses: %w", err)
}
