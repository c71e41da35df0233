// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// TestFind: an entry is named by its source, of which each has one. Those of the pods 10.88.1.0/24 and
// fd88::1:0/112 leave with 203.0.113.1 or 2001:db8::1 and port 1000.
func TestFind(t *testing.T) {
	namespace(t, "203.0.113.1/32", "2001:db8::1/128")
	const tcp, udp, sctp, icmp, icmp6 = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6
	for i, protocol := range []uint8{tcp, udp, sctp, icmp} {
		otherPort := entry(protocol, 1000, fmt.Sprint("10.88.2.", i), "192.0.2.1", "192.0.2.1", "203.0.113.1")
		otherPort.ReplyDst = netip.AddrPortFrom(otherPort.ReplyDst.Addr(), 1001)
		moved := entry(protocol, 1002, fmt.Sprint("10.88.1.", i), "192.0.2.1", "192.0.2.1", "203.0.113.1") // to another port
		moved.ReplyDst = netip.AddrPortFrom(moved.ReplyDst.Addr(), 1000)
		add(t, otherPort, moved, entry(protocol, 1000, fmt.Sprint("10.88.3.", i), "192.0.2.9", "192.0.2.9", "203.0.113.2"))
	}
	for i, protocol := range []uint8{tcp, udp, icmp6} {
		add(t, entry(protocol, 1000, fmt.Sprint("fd88::1:", i), "2001:db8:2::1", "2001:db8:2::1", "2001:db8::1"),
			entry(protocol, 1000, fmt.Sprint("fd88::2:", i), "2001:db8:2::1", "2001:db8:2::1", fmt.Sprint("fd88::2:", i)))
	}
	zoned := entry(tcp, 1000, "10.88.1.7", "192.0.2.7", "192.0.2.7", "203.0.113.1")
	zoned.Zone = 7
	add(t, zoned, entry(udp, 1000, "10.88.1.9", "10.96.0.1", "192.0.2.9", "203.0.113.1"), // a Service
		entry(udp, 1000, "203.0.113.1", "192.0.2.3", "192.0.2.3", "203.0.113.1"))
	for query, want := range map[string]string{
		"203.0.113.1:1000 0":                   "10.88.1.0:1002>192.0.2.1:53 10.88.1.7:1000>192.0.2.7:53(7) 10.88.1.1:1002>192.0.2.1:53 10.88.1.9:1000>10.96.0.1:53 203.0.113.1:1000>192.0.2.3:53 10.88.1.2:1002>192.0.2.1:53",
		"203.0.113.1:1000 17":                  "10.88.1.1:1002>192.0.2.1:53 10.88.1.9:1000>10.96.0.1:53 203.0.113.1:1000>192.0.2.3:53",
		"203.0.113.1:1000 132":                 "10.88.1.2:1002>192.0.2.1:53",
		"203.0.113.1:1000 0 192.0.2.7":         "10.88.1.7:1000>192.0.2.7:53(7)",
		"203.0.113.1:1000 0 192.0.2.9":         "10.88.1.9:1000>10.96.0.1:53",
		"203.0.113.1:1000 0 10.96.0.1":         "10.88.1.9:1000>10.96.0.1:53",
		"203.0.113.1:1000 6 10.96.0.1":         "",
		"203.0.113.1:1001 6":                   "10.88.2.0:1000>192.0.2.1:53",
		"203.0.113.1:999 0":                    "",
		"[2001:db8::1]:1000 0":                 "[fd88::1:0]:1000>[2001:db8:2::1]:53 [fd88::1:1]:1000>[2001:db8:2::1]:53",
		"[fd88::2:0]:1000 0":                   "[fd88::2:0]:1000>[2001:db8:2::1]:53",
		"[2001:db8::1]:1000 6 2001:db8:2::1":   "[fd88::1:0]:1000>[2001:db8:2::1]:53",
		"[2001:db8::1]:1000 6 2001:db8:2::2":   "",
		"[2001:db8::1]:1000 132 2001:db8:2::1": "",
	} {
		var q Query
		words := append(strings.Fields(query), "")
		q.Source = netip.MustParseAddrPort(words[0])
		_, err := fmt.Sscan(words[1], &q.Protocol)
		if words[2] != "" {
			q.To = netip.MustParseAddr(words[2])
		}
		var found []Found
		if err == nil {
			found, err = Find(t.Context(), q)
		}
		var have []string
		for _, f := range found {
			text := fmt.Sprint(f.Original.Src, ">", f.Original.Dst)
			if f.Zone != 0 {
				text += fmt.Sprintf("(%d)", f.Zone)
			}
			have = append(have, text)
			if f.Reply.Dst != q.Source || f.Original.Protocol != f.Reply.Protocol || f.SourceLocal != strings.HasPrefix(text, "203.") || f.EndpointLocal {
				t.Errorf("%s: %+v", query, f)
			}
		}
		if diff := cmp.Diff(want, strings.Join(have, " ")); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +found):\n%s", query, err, diff)
		}
	}
}
