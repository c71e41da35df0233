// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Additional addresses of the node: VIPs, as load balancers and keepalived add them.
var (
	vip4 = netip.MustParseAddr("192.0.2.77")
	vip6 = netip.MustParseAddr("2001:db8:77::77")
)

// Addresses of a host whose traffic passes the node and that is not a pod.
var (
	transit4 = netip.MustParseAddr("172.20.0.5")
	transit6 = netip.MustParseAddr("fd00:77::5")
)

// senders are the hosts that send in a test: the pod, the node from its VIP, and a host in transit.
type senders map[string]sender

type sender struct {
	host  *topology.Host
	addrs []netip.Addr
}

func newSenders(t *testing.T, n *node, p *pod) senders {
	t.Helper()
	addAddress(t, n.Node, "lo", vip4)
	addAddress(t, n.Node, "lo", vip6)
	transit := n.AddPod(t, "transit", transit4, transit6)
	return senders{
		"pod":     {p.Host, p.addrs},
		"vip":     {n.Node, []netip.Addr{vip4, vip6}},
		"transit": {transit, transit.Addrs},
	}
}

func addAddress(t *testing.T, h *topology.Host, device string, a netip.Addr) {
	t.Helper()
	link := assert.Must(h.Netlink.LinkByName(device))(t)
	address := assert.Must(netlink.ParseAddr(netip.PrefixFrom(a, a.BitLen()).String()))(t)
	if a.Is6() {
		address.Flags = unix.IFA_F_NODAD
	}
	must(t, h.Netlink.AddrAdd(link, address))
}

// nextPort returns a new port, so that each probe is a new connection.
func (n *node) nextPort() uint16 {
	const first = 20000
	n.ports++
	return first + n.ports
}

// transports returns the functions that send a probe.
func transports() map[string]func(*topology.Host, netip.AddrPort, ...topology.Option) (topology.Seen, error) {
	return map[string]func(*topology.Host, netip.AddrPort, ...topology.Option) (topology.Seen, error){
		"udp": (*topology.Host).SendUDP, "tcp": (*topology.Host).SendTCP,
	}
}

// verdicts sends from each sender to each destination (separated by spaces) and compares the source
// seen by the receiver: the sender's address and port if exempt, the node's address on the
// interface to the receiver if masqueraded.
func (s senders) verdicts(t *testing.T, n *node, masqueraded bool, flows map[string]string) {
	t.Helper()
	for who, destinations := range flows {
		from, known := s[who]
		if !known {
			t.Fatalf("no sender %s", who)
		}
		for _, text := range strings.Fields(destinations) {
			to := netip.AddrPortFrom(netip.MustParseAddr(text), topology.EchoPort)
			own := from.addr(to.Addr())
			for transport, send := range transports() {
				sent := netip.AddrPortFrom(own, n.nextPort())
				seen, err := send(from.host, to, topology.FromAddr(sent.Addr()), topology.FromPort(sent.Port()))
				if err != nil {
					t.Errorf("%s %s to %s: %v", transport, who, text, err)
					continue
				}
				node := n.NodeAddr(n.remoteHost(seen.By), to.Addr())
				switch {
				case !masqueraded && seen.Source != sent:
					t.Errorf("%s %s to %s: came from %s, want %s", transport, who, text, seen.Source, sent)
				case masqueraded && seen.Source.Addr() != node:
					t.Errorf("%s %s to %s: came from %s, want the node's %s", transport, who, text, seen.Source, node)
				}
			}
		}
	}
}

func (s sender) addr(like netip.Addr) netip.Addr {
	for _, a := range s.addrs {
		if a.Is4() == like.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// remoteHost returns the remote host with the name.
func (n *node) remoteHost(name string) *topology.Host {
	if name == n.LAN.Name {
		return n.LAN
	}
	return n.Outside
}

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
		packets := assert.Must(strconv.Atoi(m[3]))(t)
		counts[[2]netip.Addr{netip.MustParseAddr(m[1]), netip.MustParseAddr(m[2])}] = packets
	}
	return counts
}
