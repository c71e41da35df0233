// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// masqueradedDestinations has an address of each family that no policy exempts. addrPorts returns
// consecutive addresses from there on.
var masqueradedDestinations = []netip.Addr{netip.MustParseAddr("1.2.3.0"), netip.MustParseAddr("2001:db8:5::")}

func addrPorts(first netip.Addr, count int) []netip.AddrPort {
	var all []netip.AddrPort
	for a := first; len(all) < count; a = a.Next() {
		all = append(all, netip.AddrPortFrom(a, topology.EchoPort))
	}
	return all
}

// TestKeyRandomFully compares the source ports of many flows that leave the pod from one port.
func TestKeyRandomFully(t *testing.T) {
	const count, port = 64, 30000
	onEveryBackend(t, func(t *testing.T, n *node) {
		for i, c := range []struct {
			name   string
			value  any
			random bool
		}{{"not set", nil, true}, {"true", true, true}, {"false", false, false}} {
			t.Run(c.name, func(t *testing.T) {
				n.conflist(t, "podnet", object{"randomFully": c.value, "enableIPv6": true})
				p := n.pod(t, "podnet")
				// A random port of an earlier flow is in use and would have to be changed.
				must(t, n.Node.FlushConntrack())
				for _, first := range masqueradedDestinations {
					seen := assert.Must(p.SweepUDP(addrPorts(first, count), topology.FromPort(uint16(port+i))))(t)
					same := 0
					for to, source := range seen {
						assert.Equal(t, fmt.Sprintf("to %s: came from", to), source.Addr(), n.NodeAddr(n.Outside, to.Addr()))
						if source.Port() == uint16(port+i) {
							same++
						}
					}
					// By chance two of 64 flows keep their port once in some ten million runs.
					if c.random && same > 1 || !c.random && same != count {
						t.Errorf("to %s and following: %d of %d flows kept their port, randomFully %v", first, same, count, c.random)
					}
				}
				flag := map[bool]string{true: "fully-random", false: "random-fully"}[n.backend.variant == ""]
				if has := strings.Contains(n.rules(t), flag); has != c.random {
					t.Errorf("rules have %q: %v, want %v\n%s", flag, has, c.random, n.rules(t))
				}
			})
		}
	})
}

// portRange is a range of toPorts.
type portRange struct{ first, last int }

func (r portRange) size() int { return r.last - r.first + 1 }

func (r portRange) String() string { return fmt.Sprintf("%d-%d", r.first, r.last) }

// TestKeyToPorts counts in which ranges the ports of many flows fall. The pod sends all flows from
// one port outside the ranges, or from one in the smallest range. Each range must get the share
// that corresponds to its size.
func TestKeyToPorts(t *testing.T) {
	const count = 600
	cases := []struct {
		name   string
		ranges []portRange
		keys   object
	}{
		{"one", []portRange{{40000, 40999}}, object{}},
		{"one port", []portRange{{40000, 40000}}, object{}},
		{"two", []portRange{{1024, 29999}, {32768, 65535}}, object{}},
		{"three unequal", []portRange{{50000, 50999}, {20000, 25999}, {40000, 42999}}, object{}},
		{"three without randomFully", []portRange{{50000, 50999}, {20000, 25999}, {40000, 42999}}, object{"randomFully": false}},
		{"two for a prefix inside an exempt one", []portRange{{50000, 50999}, {20000, 25999}}, object{
			"nonMasqueradeCIDRs": []string{"1.0.0.0/8", "2001:db8::/32"}, "masqueradeCIDRs": []string{"1.2.0.0/16", "2001:db8:5::/48"},
		}},
	}
	onEveryBackend(t, func(t *testing.T, n *node) {
		for i, c := range cases {
			t.Run(c.name, func(t *testing.T) {
				var texts []string
				for _, r := range c.ranges {
					texts = append(texts, r.String())
				}
				keys := object{"toPorts": strings.Join(texts, ","), "enableIPv6": true}
				for key, value := range c.keys {
					keys[key] = value
				}
				n.conflist(t, "podnet", keys)
				p := n.pod(t, "podnet")
				for _, first := range masqueradedDestinations {
					for _, port := range []int{30000 + i, c.ranges[0].first} {
						// A port that a flow to the destination has is not assigned again.
						must(t, n.Node.FlushConntrack())
						seen := assert.Must(p.SweepUDP(addrPorts(first, count), topology.FromPort(uint16(port))))(t)
						wantUniformPorts(t, c.ranges, seen)
					}
					n.wantPortsTCP(t, p, c.ranges, first)
				}
				n.wantEveryProtocol(t)
				n.wantPortsSCTP(t, p, c.ranges)
				n.wantPingMasqueraded(t, p)
			})
		}
	})
}

// wantUniformPorts fails if a range's share of the ports differs from its size by more than five
// standard deviations, which happens once in a million ranges.
func wantUniformPorts(t *testing.T, ranges []portRange, seen map[netip.AddrPort]netip.AddrPort) {
	t.Helper()
	total, hits := 0, make([]int, len(ranges))
	for _, r := range ranges {
		total += r.size()
	}
	for to, source := range seen {
		i := rangeOf(ranges, source.Port())
		if i < 0 {
			t.Fatalf("to %s: came from %s, which is outside %v", to, source, ranges)
		}
		hits[i]++
	}
	for i, r := range ranges {
		share := float64(r.size()) / float64(total)
		want := share * float64(len(seen))
		if bound := 5 * math.Sqrt(want*(1-share)); math.Abs(float64(hits[i])-want) > bound {
			t.Errorf("%d of %d flows have ports of %s, want %.0f ± %.0f", hits[i], len(seen), r, want, bound)
		}
	}
}

func rangeOf(ranges []portRange, port uint16) int {
	for i, r := range ranges {
		if r.first <= int(port) && int(port) <= r.last {
			return i
		}
	}
	return -1
}

func (n *node) wantPortsTCP(t *testing.T, p *pod, ranges []portRange, first netip.Addr) {
	t.Helper()
	for _, to := range addrPorts(first, 20) {
		seen := assert.Must(p.SendTCP(to))(t)
		if seen.Source.Addr() != n.NodeAddr(n.Outside, to.Addr()) || rangeOf(ranges, seen.Source.Port()) < 0 {
			t.Errorf("tcp to %s: came from %s, want the node's address and a port of %v", to, seen.Source, ranges)
		}
	}
}

// wantEveryProtocol checks that the rules match each protocol that has ports.
func (n *node) wantEveryProtocol(t *testing.T) {
	t.Helper()
	rules := n.rules(t)
	for _, protocol := range []string{"tcp", "udp", "sctp"} {
		if !strings.Contains(rules, "-p "+protocol) && !strings.Contains(rules, "l4proto "+protocol) {
			t.Errorf("no rule matches %s:\n%s", protocol, rules)
		}
	}
}

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
		request := assert.Must((&icmp.Message{Type: kind, Body: echo}).Marshal(nil))(t)
		seen, _ := n.sendRaw(t, p, network, to, request, echo.Data)
		assert.Equal(t, fmt.Sprintf("icmp to %s: came from", to), seen, n.NodeAddr(n.Outside, to))
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
