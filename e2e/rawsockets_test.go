// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// wantPingMasqueraded sends ICMP echo requests, which have no ports, and fails unless they arrive
// from the node's address.
func (n *node) wantPingMasqueraded(t *testing.T, p *pod) {
	t.Helper()
	for _, to := range masqueradedDestinations {
		network, kind := "ip4:icmp", icmp.Type(ipv4.ICMPTypeEcho)
		if to.Is6() {
			network, kind = "ip6:ipv6-icmp", ipv6.ICMPTypeEchoRequest
		}
		echo := &icmp.Echo{ID: int(n.nextPort()), Seq: 1, Data: []byte("from " + p.Path)}
		// The kernel computes the ICMPv6 checksum (RFC 3542, section 3.1).
		request, err := (&icmp.Message{Type: kind, Body: echo}).Marshal(nil)
		must(t, err)
		seen, _ := n.sendRaw(t, p, network, to, request, echo.Data)
		if want := n.NodeAddr(n.Outside, to); seen != want {
			t.Errorf("icmp to %s: came from %s, want the node's %s", to, seen, want)
		}
	}
}

// wantPortsSCTP sends INIT packets of SCTP associations.
func (n *node) wantPortsSCTP(t *testing.T, p *pod, ranges []portRange) {
	t.Helper()
	for _, first := range masqueradedDestinations {
		network := "ip4:132"
		if first.Is6() {
			network = "ip6:132"
		}
		for _, destination := range addrPorts(first, 5) {
			to := destination.Addr()
			packet, chunk := sctpInit(n.nextPort())
			seen, received := n.sendRaw(t, p, network, to, packet, chunk)
			port := binary.BigEndian.Uint16(received)
			if want := n.NodeAddr(n.Outside, to); seen != want || rangeOf(ranges, port) < 0 {
				t.Errorf("sctp to %s: came from %s, port %d, want the node's %s and a port of %v", to, seen, port, want, ranges)
			}
		}
	}
}

// sctpInit returns an SCTP packet (RFC 9260, section 3) with an INIT chunk. NAT does not change
// the chunk; its initiate tag is the port.
func sctpInit(port uint16) (packet, chunk []byte) {
	const headerLength, typeInit, chunkLength = 12, 1, 20
	packet = make([]byte, headerLength+chunkLength)
	binary.BigEndian.PutUint16(packet, port)
	binary.BigEndian.PutUint16(packet[2:], topology.EchoPort)
	chunk = packet[headerLength:]
	chunk[0], chunk[3] = typeInit, chunkLength
	binary.BigEndian.PutUint32(chunk[4:], uint32(port))
	binary.BigEndian.PutUint32(chunk[8:], 1<<16) // receiver window
	chunk[13], chunk[15] = 1, 1                  // streams
	binary.BigEndian.PutUint32(chunk[16:], 1)    // sequence number
	binary.LittleEndian.PutUint32(packet[8:], crc32.Checksum(packet, crc32.MakeTable(crc32.Castagnoli)))
	return packet, chunk
}

// sendRaw sends a transport layer packet from the pod. It returns the source address and the
// packet that the outside host received, which it recognizes by a part of the packet.
func (n *node) sendRaw(t *testing.T, p *pod, network string, to netip.Addr, packet, known []byte) (from netip.Addr, received []byte) {
	t.Helper()
	watch, socket := listenIP(t, n.Outside, network), listenIP(t, p.Host, network)
	defer watch.Close()
	defer socket.Close()
	if _, err := socket.WriteTo(packet, &net.IPAddr{IP: to.AsSlice()}); err != nil {
		t.Fatal(err)
	}
	must(t, watch.SetReadDeadline(time.Now().Add(timelimit.Wait)))
	buffer := make([]byte, 1500)
	for {
		size, source, err := watch.ReadFrom(buffer)
		if err != nil {
			t.Fatalf("the packet to %s did not arrive: %v", to, err)
		}
		if bytes.Contains(buffer[:size], known) {
			return netip.MustParseAddr(source.String()), buffer[:size]
		}
	}
}

func listenIP(t *testing.T, h *topology.Host, network string) net.PacketConn {
	t.Helper()
	var conn net.PacketConn
	err := h.Do(func() (err error) {
		var config net.ListenConfig
		conn, err = config.ListenPacket(t.Context(), network, "")
		return err
	})
	must(t, err)
	return conn
}
