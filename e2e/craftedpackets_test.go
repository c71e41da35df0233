// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Flags of TCP segments (RFC 9293, section 3.1).
const (
	fin = 1 << iota
	syn
	rst
	_
	ack
)

// tcpSegment returns an IP packet with a TCP segment that has 10 bytes of data.
func tcpSegment(from, to netip.AddrPort, flags byte, sequence, acknowledged uint32) []byte {
	const headerLength, window = 20, 64240
	b := make([]byte, headerLength, headerLength+10)
	binary.BigEndian.PutUint16(b, from.Port())
	binary.BigEndian.PutUint16(b[2:], to.Port())
	binary.BigEndian.PutUint32(b[4:], sequence)
	binary.BigEndian.PutUint32(b[8:], acknowledged)
	b[12], b[13] = headerLength/4<<4, flags
	binary.BigEndian.PutUint16(b[14:], window)
	if flags == ack {
		b = append(b, "0123456789"...)
	}
	binary.BigEndian.PutUint16(b[16:], checksum(from.Addr(), to.Addr(), unix.IPPROTO_TCP, b))
	return ipPacket(from.Addr(), to.Addr(), unix.IPPROTO_TCP, b)
}

// udpDatagram returns an IP packet with a UDP datagram.
func udpDatagram(from, to netip.AddrPort) []byte {
	b := make([]byte, 8, 20)
	binary.BigEndian.PutUint16(b, from.Port())
	binary.BigEndian.PutUint16(b[2:], to.Port())
	b = append(b, "0123456789"...)
	binary.BigEndian.PutUint16(b[4:], uint16(len(b)))
	binary.BigEndian.PutUint16(b[6:], checksum(from.Addr(), to.Addr(), unix.IPPROTO_UDP, b))
	return ipPacket(from.Addr(), to.Addr(), unix.IPPROTO_UDP, b)
}

// echoReply returns an IP packet with an ICMP echo reply.
func echoReply(from, to netip.AddrPort) []byte {
	if from.Addr().Is4() {
		return icmpPacket(from.Addr(), to.Addr(), 0, 0, nil, from.Port())
	}
	return icmpPacket(from.Addr(), to.Addr(), 129, 0, nil, from.Port())
}

// portUnreachable returns an IP packet with an ICMP error for a UDP datagram that came from the
// destination.
func portUnreachable(from, to netip.AddrPort) []byte {
	quoted := udpDatagram(to, from)
	if from.Addr().Is4() {
		return icmpPacket(from.Addr(), to.Addr(), 3, 3, quoted, 0)
	}
	return icmpPacket(from.Addr(), to.Addr(), 1, 4, quoted, 0)
}

func icmpPacket(from, to netip.Addr, kind, code byte, body []byte, id uint16) []byte {
	b := append([]byte{kind, code, 0, 0, byte(id >> 8), byte(id), 0, 0}, body...)
	if from.Is4() {
		binary.BigEndian.PutUint16(b[2:], fold(sum(b)))
		return ipPacket(from, to, unix.IPPROTO_ICMP, b)
	}
	binary.BigEndian.PutUint16(b[2:], checksum(from, to, unix.IPPROTO_ICMPV6, b))
	return ipPacket(from, to, unix.IPPROTO_ICMPV6, b)
}

// badChecksum returns the packet with a wrong checksum of its TCP segment.
func badChecksum(packet []byte) []byte {
	packet[ipHeaderLength(packet)+16] ^= 0xff
	return packet
}

func ipHeaderLength(packet []byte) int {
	if packet[0]>>4 == 4 {
		return 20
	}
	return 40
}

// ipPacket returns a packet with an IPv4 (RFC 791) or IPv6 header (RFC 8200).
func ipPacket(from, to netip.Addr, protocol byte, payload []byte) []byte {
	const hops = 64
	if from.Is4() {
		b := make([]byte, 20)
		b[0], b[8], b[9] = 4<<4|20/4, hops, protocol
		binary.BigEndian.PutUint16(b[2:], uint16(len(b)+len(payload)))
		copy(b[12:], from.AsSlice())
		copy(b[16:], to.AsSlice())
		binary.BigEndian.PutUint16(b[10:], fold(sum(b)))
		return append(b, payload...)
	}
	b := make([]byte, 40)
	b[0], b[6], b[7] = 6<<4, protocol, hops
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)))
	copy(b[8:], from.AsSlice())
	copy(b[24:], to.AsSlice())
	return append(b, payload...)
}

// checksum returns the checksum with the pseudo header of the family.
func checksum(from, to netip.Addr, protocol byte, payload []byte) uint16 {
	return fold(sum(from.AsSlice()) + sum(to.AsSlice()) + uint32(protocol) + uint32(len(payload)) + sum(payload))
}

func sum(b []byte) (s uint32) {
	for i, octet := range b {
		s += uint32(octet) << (8 * (1 - i%2))
	}
	return s
}

func fold(s uint32) uint16 {
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return ^uint16(s)
}

// inject sends IP packets with these headers from a host. The source can be any address.
func inject(t *testing.T, h *topology.Host, packets ...[]byte) {
	t.Helper()
	must(t, sendPackets(h, packets))
}

func sendPackets(h *topology.Host, packets [][]byte) error {
	return h.Do(func() error {
		for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
			socket, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
			if err != nil {
				return err
			}
			defer func() { _ = unix.Close(socket) }()
			for _, p := range packets {
				var to unix.Sockaddr
				switch {
				case p[0]>>4 == 4 && family == unix.AF_INET:
					to = &unix.SockaddrInet4{Addr: [4]byte(p[16:20])}
				case p[0]>>4 == 6 && family == unix.AF_INET6:
					to = &unix.SockaddrInet6{Addr: [16]byte(p[24:40])}
				default:
					continue
				}
				if err := unix.Sendto(socket, p, 0, to); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// Destinations at which hosts with packetCounters do not react to packets. No policy exempts the first
// two; the last two are in exempt prefixes and behind the LAN.
var (
	silentDestinations       = []netip.Addr{netip.MustParseAddr("198.51.100.0"), netip.MustParseAddr("2001:db8:51::")}
	silentExemptDestinations = []netip.Addr{netip.MustParseAddr("10.51.100.0"), netip.MustParseAddr("fd00:51::")}
)

// packetCounters counts the packets that a host receives by source and destination address.
type packetCounters struct {
	n    *node
	host *topology.Host
}

// countPackets starts to count. The host does not react to packets from or to the silent
// destinations.
func (n *node) countPackets(t *testing.T, h *topology.Host) packetCounters {
	t.Helper()
	c := packetCounters{n, h}
	c.nft(t, `table inet received {
	set ipv4 { type ipv4_addr . ipv4_addr; flags dynamic; size 65535; counter; }
	set ipv6 { type ipv6_addr . ipv6_addr; flags dynamic; size 65535; counter; }
	chain received {
		type filter hook prerouting priority -400
		iifname "eth0" meta nfproto ipv4 update @ipv4 { ip saddr . ip daddr counter }
		iifname "eth0" meta nfproto ipv6 update @ipv6 { ip6 saddr . ip6 daddr counter }
	}
	chain silent {
		type filter hook input priority 0
		ip saddr { 198.51.100.0/24, 10.51.100.0/24 } drop
		ip daddr { 198.51.100.0/24, 10.51.100.0/24 } drop
		ip6 saddr { 2001:db8:51::/64, fd00:51::/64 } drop
		ip6 daddr { 2001:db8:51::/64, fd00:51::/64 } drop
	}
}
`)
	return c
}

// nft loads a script in the host's network namespace and returns the output.
func (c packetCounters) nft(t *testing.T, script string) string {
	t.Helper()
	command := c.host.Command(c.n.timeout(t), "nft", "-f", "-")
	command.Stdin = strings.NewReader(script)
	stdout, stderr, code := run(t, command)
	if code != 0 {
		t.Fatalf("nft on %s: exit code %d\n%s\n%s", c.host.Name, code, stderr, script)
	}
	return stdout
}

// reset sets all counters to 0.
func (c packetCounters) reset(t *testing.T) {
	t.Helper()
	c.nft(t, "flush set inet received ipv4\nflush set inet received ipv6\n")
}

// received returns the number of packets by source and destination.
func (c packetCounters) received(t *testing.T) map[[2]netip.Addr]int {
	t.Helper()
	counts := map[[2]netip.Addr]int{}
	element := regexp.MustCompile(`(\S+) \. (\S+) counter packets (\d+)`)
	for _, m := range element.FindAllStringSubmatch(c.nft(t, "list table inet received"), -1) {
		packets := topology.Must(strconv.Atoi(m[3]))(t)
		counts[[2]netip.Addr{netip.MustParseAddr(m[1]), netip.MustParseAddr(m[2])}] = packets
	}
	return counts
}
