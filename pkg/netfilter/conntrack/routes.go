// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// routes answers questions about the node's routing tables. The zero value is ready for use. Its error is
// the first failure, after which its answers mean nothing.
type routes struct {
	fd         int // of the socket, once there is a buffer
	sequence   uint32
	buffer     []byte
	local      [unix.AF_INET6 + 1]*netipx.IPSet // by address family, AF_INET or AF_INET6
	interfaces map[[2]netip.Addr]string
	err        error
}

// errInterrupted is about a dump that may lack routes.
var errInterrupted = errors.New("the routes changed meanwhile")

// maxRoutes is the number of routes that are cached.
const maxRoutes = 10_000

// Close closes the socket.
func (r *routes) Close() error {
	if r.buffer == nil {
		return nil
	}
	return unix.Close(r.fd)
}

func addressFamily(a netip.Addr) uint8 {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// IsLocal implements policy.NodeRoutes.
func (r *routes) IsLocal(a netip.Addr) bool {
	family := addressFamily(a)
	set := r.local[family]
	if set == nil && r.err == nil {
		if set, r.err = r.readLocal(family); r.err != nil {
			r.err = fmt.Errorf("list local addresses: %w", r.err)
		}
		r.local[family] = set
	}
	return set != nil && set.Contains(a)
}

// readLocal returns the destinations of the routes of type local in all tables. One to every address is
// that of a transparent proxy, for packets that bear its mark.
func (r *routes) readLocal(family uint8) (*netipx.IPSet, error) {
	var local netipx.IPSetBuilder
	all := unix.RtMsg{Family: family, Type: unix.RTN_LOCAL}
	add := func(route unix.RtMsg, attrs []syscall.NetlinkRouteAttr) {
		dst, ok := netip.AddrFromSlice(attribute(attrs, unix.RTA_DST))
		if ok && route.Type == unix.RTN_LOCAL && route.Dst_len > 0 {
			local.AddPrefix(netip.PrefixFrom(dst, int(route.Dst_len)))
		}
	}
	err := r.request(unix.NLM_F_DUMP, all, nil, add)
	for n := 0; errors.Is(err, errInterrupted) && n < 3; n++ {
		err = r.request(unix.NLM_F_DUMP, all, nil, add)
	}
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) { // no IPv6
		err = nil
	}
	if err != nil {
		return nil, err
	}
	return local.IPSet()
}

// OutputInterface implements policy.NodeRoutes. The source's own route is where its packets come in.
func (r *routes) OutputInterface(src, dst netip.Addr) string {
	key := [2]netip.Addr{src, dst}
	name, known := r.interfaces[key]
	if known || r.err != nil {
		return name
	}
	if in := r.lookup(src, netip.Addr{}, 0); in != 0 {
		name = r.interfaceName(r.lookup(dst, src, in))
	}
	if r.interfaces == nil || len(r.interfaces) == maxRoutes {
		r.interfaces = map[[2]netip.Addr]string{}
	}
	r.interfaces[key] = name
	return name
}

// lookup returns the index of the interface to dst, 0 if there is none, of packets from src that come in
// through an interface, or of the node's own.
func (r *routes) lookup(dst, src netip.Addr, in uint32) (out uint32) {
	get := unix.RtMsg{Family: addressFamily(dst), Dst_len: uint8(dst.BitLen())}
	attrs := appendAttribute(nil, unix.RTA_DST, dst.AsSlice())
	if in != 0 {
		get.Src_len = uint8(src.BitLen())
		attrs = appendAttribute(attrs, unix.RTA_SRC, src.AsSlice())
		attrs = appendAttribute(attrs, unix.RTA_IIF, binary.NativeEndian.AppendUint32(nil, in))
	}
	err := r.request(0, get, attrs, func(route unix.RtMsg, attrs []syscall.NetlinkRouteAttr) {
		if oif := attribute(attrs, unix.RTA_OIF); len(oif) == 4 && route.Type == unix.RTN_UNICAST {
			out = binary.NativeEndian.Uint32(oif)
		}
	})
	if errno := unix.Errno(0); err != nil && !errors.As(err, &errno) {
		r.err = fmt.Errorf("find route to %s: %w", dst, err)
	}
	return out // a refusal is no route
}

func (r *routes) interfaceName(index uint32) string {
	ifr, err := unix.NewIfreq("")
	if index == 0 || err != nil {
		return ""
	}
	ifr.SetUint32(index)
	if unix.IoctlIfreq(r.fd, unix.SIOCGIFNAME, ifr) != nil {
		return ""
	}
	return ifr.Name()
}

// request sends a request RTM_GETROUTE and calls handle with each route of the answer.
func (r *routes) request(
	flags uint16, get unix.RtMsg, attrs []byte, handle func(unix.RtMsg, []syscall.NetlinkRouteAttr),
) error {
	if err := r.open(); err != nil {
		return err
	}
	r.sequence++
	header := unix.NlMsghdr{
		Len: uint32(unix.SizeofNlMsghdr + unix.SizeofRtMsg + len(attrs)), Type: unix.RTM_GETROUTE,
		Flags: unix.NLM_F_REQUEST | flags, Seq: r.sequence,
	}
	var b bytes.Buffer
	for _, part := range []any{header, get, attrs} {
		if err := binary.Write(&b, binary.NativeEndian, part); err != nil {
			return fmt.Errorf("encode request: %w", err)
		}
	}
	if _, err := unix.Write(r.fd, b.Bytes()); err != nil {
		return fmt.Errorf("send request: %w", err)
	}
	interrupted := false
	for {
		n, err := unix.Read(r.fd, r.buffer)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("receive answer: %w", err)
		}
		messages, err := syscall.ParseNetlinkMessage(r.buffer[:n])
		if err != nil {
			return fmt.Errorf("receive answer: %w", err)
		}
		for i := range messages {
			m := &messages[i]
			interrupted = interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
			switch {
			case m.Header.Seq != r.sequence:
			case m.Header.Type == unix.NLMSG_ERROR, m.Header.Type == unix.NLMSG_DONE:
				if len(m.Data) >= 4 {
					if number := int32(binary.NativeEndian.Uint32(m.Data)); number < 0 {
						return unix.Errno(-number)
					}
				}
				if interrupted {
					return errInterrupted
				}
				return nil
			case m.Header.Type == unix.RTM_NEWROUTE:
				var route unix.RtMsg
				if _, err := binary.Decode(m.Data, binary.NativeEndian, &route); err != nil {
					return fmt.Errorf("receive answer: %w", err)
				}
				attrs, err := syscall.ParseNetlinkRouteAttr(m)
				if err != nil {
					return fmt.Errorf("receive answer: %w", err)
				}
				if handle(route, attrs); flags&unix.NLM_F_DUMP == 0 {
					return nil
				}
			}
		}
	}
}

// open opens the socket once.
func (r *routes) open() (err error) {
	if r.buffer != nil {
		return nil
	}
	if r.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	r.buffer = make([]byte, 32<<10)
	// The kernel lists only the routes of the type asked for. Before Linux 4.20 it lists all.
	err = unix.SetsockoptInt(r.fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	if errors.Is(err, unix.ENOPROTOOPT) {
		err = nil
	}
	if err == nil {
		err = unix.Connect(r.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	return err
}

func attribute(attrs []syscall.NetlinkRouteAttr, typ uint16) []byte {
	for _, a := range attrs {
		if a.Attr.Type == typ {
			return a.Value
		}
	}
	return nil
}

// appendAttribute appends an attribute whose length is a multiple of four.
func appendAttribute(b []byte, typ uint16, value []byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(unix.SizeofRtAttr+len(value)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	return append(b, value...)
}
