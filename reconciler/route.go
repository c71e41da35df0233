// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// isLocal reports whether an address is one of the node's own, as its routing tables
// define it: what `ip route get` shows as local.
func isLocal(a netip.Addr) (bool, error) {
	kind, err := routeType(a.Unmap().WithZone(""))
	// No route, one that refuses, or no such family.
	none := []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL, unix.EOPNOTSUPP, unix.EAFNOSUPPORT}
	if err != nil && !slices.ContainsFunc(none, func(n error) bool { return errors.Is(err, n) }) {
		return false, fmt.Errorf("find the route to %s: %w", a, err)
	}
	return err == nil && kind == unix.RTN_LOCAL, nil
}

// routeType asks the kernel for the type of the route to an address (RTM_GETROUTE).
func routeType(a netip.Addr) (kind uint8, err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	const typeAt = unix.SizeofNlMsghdr + 7 // struct rtmsg: rtm_type
	family, order := byte(unix.AF_INET), binary.NativeEndian
	if a.Is6() {
		family = unix.AF_INET6
	}
	size := uint32(unix.SizeofNlMsghdr + unix.SizeofRtMsg + unix.SizeofRtAttr + a.BitLen()/8)
	b := order.AppendUint32(nil, size)
	b = order.AppendUint16(b, unix.RTM_GETROUTE)
	b = order.AppendUint16(b, unix.NLM_F_REQUEST)
	b = append(b, make([]byte, 8)...) // sequence and port
	b = append(b, family, byte(a.BitLen()), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	b = order.AppendUint16(b, uint16(unix.SizeofRtAttr+a.BitLen()/8))
	b = order.AppendUint16(b, unix.RTA_DST)
	b = append(b, a.AsSlice()...)
	if err := unix.Sendto(fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, err
	}
	in := make([]byte, 8<<10)
	n, _, err := unix.Recvfrom(fd, in, 0)
	switch {
	case err != nil:
		return 0, err
	case n < unix.SizeofNlMsghdr+unix.SizeofRtMsg:
	case order.Uint16(in[4:]) == unix.RTM_NEWROUTE:
		return in[typeAt], nil
	case order.Uint16(in[4:]) == unix.NLMSG_ERROR:
		return 0, unix.Errno(-int32(order.Uint32(in[unix.SizeofNlMsghdr:])))
	}
	return 0, errors.New("the kernel's answer is malformed")
}
