// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"encoding/binary"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
)

// Track adds conntrack entries of UDP connections from pods, masqueraded or not, to an address and the
// ones after it.
func (n *Node) Track(to netip.Addr, count int, masqueraded bool) error {
	const ports, pods = 1 << 15, 1 << 12 // connections of a destination; sources
	return n.Node.Do(func() error {
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
	})
}

// Tracked returns the number of conntrack entries of the node.
func (n *Node) Tracked() (count int, err error) {
	err = n.Node.Do(func() error {
		text, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
		if err == nil {
			count, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err
	})
	return count, err
}

func toUint32(a netip.Addr) uint32 { return binary.BigEndian.Uint32(a.AsSlice()) }
