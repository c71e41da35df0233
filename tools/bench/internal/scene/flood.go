// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"encoding/binary"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/aclements/go-moremath/stats"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
)

// Flood opens new UDP connections from the pod, one after another, by the first packet of each, and
// returns the time of one. The node forwards the packets to the outside host, which
// drops them, so the time is that of routing, connection tracking, NAT rules and sending. Every
// flow has its own destination port, and the node's connection tracking is flushed before.
func (n *Node) Flood(to netip.Addr, flows int) (each time.Duration) {
	took, _ := n.flood(to, flows, true)
	return took / time.Duration(flows)
}

// Send sends packets as Flood does, of new connections or of one, and returns the processor time of one: that of
// the sending thread, in which the kernel also forwards the packet; the median of parts.
func (n *Node) Send(to netip.Addr, packets int, connections bool) time.Duration {
	_, cpu := n.flood(to, packets, connections)
	return time.Duration(stats.Sample{Xs: cpu}.Quantile(0.5))
}

// firstPort is the destination port of the first connection.
const firstPort = 1024

// flood sends packets, again if one is lost.
func (n *Node) flood(to netip.Addr, packets int, connections bool) (took time.Duration, cpu []float64) {
	const tries = 5
	port := func(int) uint16 { return firstPort }
	if connections {
		port = func(i int) uint16 { return uint16(firstPort + i) }
	}
	var missing int64
	for range tries {
		assert.NoError(n, n.Node.FlushConntrack())
		if took, cpu, missing = n.send(to, packets, port); missing == 0 {
			return took, cpu
		}
	}
	n.Fatalf("send to %s from a pod: packets were lost in each of %d attempts, %d of %d in the last", to, tries, missing, packets)
	return 0, nil
}

// send sends packets to a port each, and returns the time until the last has arrived, the sender's
// processor time of a packet in parts of the packets, and the number of packets that are missing.
func (n *Node) send(to netip.Addr, packets int, port func(i int) uint16) (took time.Duration, cpu []float64, missing int64) {
	const parts = 10
	before := n.arrived()
	var start time.Time
	assert.NoError(n, n.pod.Do(func() error {
		fd := assert.Must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0))(n)
		defer func() { _ = unix.Close(fd) }() // no data is pending
		assert.NoError(n, unix.Bind(fd, &unix.SockaddrInet4{Addr: PodAddress().As4()}))
		address := unix.SockaddrInet4{Addr: to.As4()}
		start = time.Now()
		for part := range parts {
			before := threadTime()
			for i := part * packets / parts; i < (part+1)*packets/parts; i++ {
				address.Port = int(port(i))
				if err := unix.Sendto(fd, []byte("bench"), 0, &address); err != nil {
					return err
				}
			}
			cpu = append(cpu, float64(threadTime()-before)/float64(packets/parts))
		}
		return nil
	}))
	// The kernel usually forwards during the send.
	for {
		missing = int64(packets) - (n.arrived() - before)
		took = time.Since(start)
		if missing <= 0 {
			return took, cpu, 0
		}
		if took > time.Second+time.Duration(packets)*time.Millisecond {
			return took, cpu, missing
		}
	}
}

// arrived returns the number of packets that the outside host has received.
func (n *Node) arrived() int64 {
	return int64(assert.Must(n.Outside.Netlink.LinkByName("eth0"))(n).Attrs().Statistics.RxPackets)
}

// threadTime returns the processor time of the thread.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // fails only for unknown clocks
	return time.Duration(t.Nano())
}

// SetGuard makes the table ip-masq-guard dormant, so that the kernel does not evaluate its chains, or
// wakes it.
func (n *Node) SetGuard(awake bool) {
	flags := "flags dormant;"
	if awake {
		flags = ""
	}
	n.Feed("add table ip ip-masq-guard { "+flags+" }", "nft", "-f", "-")
}

// Track adds conntrack entries of UDP connections from pods, masqueraded or not, to an address and the
// ones after it.
func (n *Node) Track(to netip.Addr, count int, masqueraded bool) {
	const ports, pods = 1 << 15, 1 << 12 // connections of a destination; sources
	assert.NoError(n, n.Node.Do(func() error {
		return fixtures.AddConnections(count, func(i int) fixtures.Connection {
			port := uint16(firstPort + i%ports)
			server := netip.AddrPortFrom(fromUint32(toUint32(to)+uint32(i/ports)), 53)
			pod := netip.AddrPortFrom(fromUint32(toUint32(PodAddress())+uint32(i%pods)), port)
			source := pod
			if masqueraded {
				source = netip.AddrPortFrom(n.Node.Addrs[0], port)
			}
			return fixtures.Connection{Protocol: unix.IPPROTO_UDP, Src: pod, Dst: server, ReplySrc: server, ReplyDst: source}
		})
	}))
}

// Tracked returns the number of conntrack entries of the node.
func (n *Node) Tracked() (count int) {
	assert.NoError(n, n.Node.Do(func() (err error) {
		text := assert.Must(os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count"))(n)
		count, err = strconv.Atoi(strings.TrimSpace(string(text)))
		return err
	}))
	return count
}

func toUint32(a netip.Addr) uint32 { return binary.BigEndian.Uint32(a.AsSlice()) }
