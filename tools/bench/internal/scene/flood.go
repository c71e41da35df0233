// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
)

// Protocol is the protocol of new connections.
type Protocol string

// The protocols of new connections: the first packet is a datagram or a SYN.
const (
	UDP Protocol = "udp"
	TCP Protocol = "tcp"
)

// Flood opens new connections from the pod, one after another, by the first packet of each, and
// returns the time of one. The node forwards the packets to the outside host, which
// drops them, so the time is that of routing, connection tracking, NAT rules and sending. Every
// flow has its own destination port, and the node's connection tracking is flushed before. A flood
// that loses a packet is repeated.
func (n *Node) Flood(to netip.Addr, protocol Protocol, flows int) (each time.Duration, err error) {
	const tries = 5
	var last int64
	for range tries {
		if err := n.Node.FlushConntrack(); err != nil {
			return 0, err
		}
		took, _, missing, err := n.flood(to, protocol, flows, func(i int) uint16 { return uint16(firstPort + i) })
		if err != nil {
			return 0, fmt.Errorf("flood %s from a pod: %w", protocol, err)
		}
		if missing == 0 {
			return took / time.Duration(flows), nil
		}
		last = missing
	}
	return 0, fmt.Errorf("flood %s to %s: packets were lost in each of %d floods, %d of %d in the last", protocol, to, tries, last, flows)
}

// firstPort is the destination port of the first connection.
const firstPort = 1024

// flood sends packets to a port each, and returns the time until the last has arrived, the sender's
// processor time of a packet in parts of the flood, and the number of packets that are missing.
func (n *Node) flood(to netip.Addr, protocol Protocol, packets int, port func(i int) uint16) (took time.Duration, cpu measure.Series, missing int64, err error) {
	const parts = 10
	if err := n.dropIncoming(); err != nil {
		return 0, nil, 0, err
	}
	before, err := n.arrived()
	if err != nil {
		return 0, nil, 0, err
	}
	var start time.Time
	err = n.pod.Do(func() error {
		s, err := newSender(protocol, to)
		if err != nil {
			return err
		}
		defer s.close()
		start = time.Now()
		for part := range parts {
			before := threadTime()
			for i := part * packets / parts; i < (part+1)*packets/parts; i++ {
				if err := s.send(port(i)); err != nil {
					return err
				}
			}
			cpu = append(cpu, float64(threadTime()-before)/float64(packets/parts))
		}
		return nil
	})
	if err != nil {
		return 0, nil, 0, err
	}
	// The kernel usually forwards during the send.
	for {
		now, err := n.arrived()
		took = time.Since(start)
		if err != nil {
			return 0, nil, 0, err
		}
		if now-before >= int64(packets) {
			return took, cpu, 0, nil
		}
		if took > time.Second+time.Duration(packets)*time.Millisecond {
			return took, cpu, int64(packets) - (now - before), nil
		}
	}
}

// arrived returns the number of packets that the outside host has received.
func (n *Node) arrived() (int64, error) {
	link, err := n.Outside.Netlink.LinkByName("eth0")
	if err != nil {
		return 0, err
	}
	return int64(link.Attrs().Statistics.RxPackets), nil
}

// dropIncoming makes the outside host drop incoming packets, once.
func (n *Node) dropIncoming() error {
	if n.dropsIncoming {
		return nil
	}
	n.dropsIncoming = true
	return n.Outside.Do(dropAll)
}

// sender sends first packets of connections.
type sender struct {
	fd     int
	to     unix.SockaddrInet4
	packet []byte
	tcp    bool
}

func newSender(protocol Protocol, to netip.Addr) (*sender, error) {
	s := &sender{to: unix.SockaddrInet4{Addr: to.As4()}, tcp: protocol == TCP}
	kind, number := unix.SOCK_DGRAM, unix.IPPROTO_UDP
	if s.tcp {
		kind, number = unix.SOCK_RAW, unix.IPPROTO_TCP
		s.packet = syn()
	} else {
		s.packet = []byte("bench")
	}
	var err error
	if s.fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, number); err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	if err := unix.Bind(s.fd, &unix.SockaddrInet4{Addr: PodAddress().As4()}); err != nil {
		return nil, errors.Join(fmt.Errorf("bind socket: %w", err), unix.Close(s.fd))
	}
	return s, nil
}

func (s *sender) send(port uint16) error {
	if s.tcp {
		setPort(s.packet, PodAddress(), netip.AddrFrom4(s.to.Addr), port)
	} else {
		s.to.Port = int(port)
	}
	return unix.Sendto(s.fd, s.packet, 0, &s.to)
}

func (s *sender) close() { _ = unix.Close(s.fd) } // no data is pending

// syn returns the TCP header of a SYN (RFC 9293).
func syn() []byte {
	const sourcePort = 40000
	h := make([]byte, 20)
	binary.BigEndian.PutUint16(h, sourcePort)
	binary.BigEndian.PutUint32(h[4:], 1) // sequence number
	h[12], h[13] = 5<<4, 0x02            // five words, SYN
	binary.BigEndian.PutUint16(h[14:], 0xffff)
	return h
}

// setPort sets the destination port of a TCP header and its checksum. Connection tracking marks a
// packet with a wrong checksum as invalid.
func setPort(h []byte, from, to netip.Addr, port uint16) {
	binary.BigEndian.PutUint16(h[2:], port)
	h[16], h[17] = 0, 0
	pseudo := append(from.AsSlice(), to.AsSlice()...)
	pseudo = append(pseudo, 0, unix.IPPROTO_TCP, 0, byte(len(h)))
	sum := uint32(0)
	for _, b := range [][]byte{pseudo, h} {
		for i := 0; i < len(b); i += 2 {
			sum += uint32(binary.BigEndian.Uint16(b[i:]))
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(h[16:], ^uint16(sum))
}
