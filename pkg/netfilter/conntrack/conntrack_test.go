// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var chains = struct{ v4, v6 policy.ChainFamily }{
	policy.ChainFamily{Chain: policy.DefaultChain, Family: policy.IPv4},
	policy.ChainFamily{Chain: policy.DefaultChain, Family: policy.IPv6},
}

// TestReset: 192.0.2.0/24 and 2001:db8:2::/48 were exempt and are masqueraded now; 10.0.0.0/8 and fd00::/8
// stay exempt. An entry is named by its source, of which each has one: in 10.88.1.0/24 and fd88::1:0/112
// those that are stale.
func TestReset(t *testing.T) {
	namespace(t, "203.0.113.1/32", "10.88.1.250/32", "2001:db8::1/128")
	const tcp, udp, sctp, dccp, icmp, icmp6 = unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_UDPLITE, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6
	for i, protocol := range []uint8{tcp, udp, sctp, dccp, icmp} {
		stale, kept := fmt.Sprint("10.88.1.", i), fmt.Sprint("10.88.2.", i)
		add(t, entry(protocol, 1000, stale, "192.0.2.1", "192.0.2.1", stale),
			entry(protocol, 1001, kept, "192.0.2.1", "192.0.2.1", "203.0.113.1"))
	}
	for i, protocol := range []uint8{tcp, udp, icmp6} {
		stale, kept := fmt.Sprint("fd88::1:", i), fmt.Sprint("fd88::2:", i)
		add(t, entry(protocol, 1000, stale, "2001:db8:2::1", "2001:db8:2::1", stale),
			entry(protocol, 1001, kept, "2001:db8:2::1", "2001:db8:2::1", "2001:db8::1"))
	}
	moved := entry(tcp, 1000, "10.88.1.101", "192.0.2.1", "192.0.2.1", "10.88.1.101") // its port is another
	moved.ReplyDst = netip.AddrPortFrom(moved.Src.Addr(), 2000)
	zoned := entry(tcp, 1000, "10.88.2.200", "192.0.2.1", "192.0.2.1", "10.88.2.200")
	zoned.Zone = 7
	add(t, moved, zoned,
		entry(udp, 1000, "10.88.1.100", "10.96.0.1", "192.0.2.1", "10.88.1.100"), // a Service
		entry(udp, 1000, "10.88.2.100", "10.96.0.1", "10.88.0.7", "10.88.2.100"),
		entry(udp, 1000, "10.88.2.101", "10.96.0.1", "192.0.2.1", "203.0.113.1"),
		entry(udp, 1000, "10.88.2.102", "10.9.0.1", "10.9.0.1", "10.88.2.102"),
		entry(udp, 1000, "10.88.2.103", "203.0.113.1", "203.0.113.1", "10.88.2.103"), // a LOCAL endpoint
		entry(udp, 1000, "10.88.1.250", "192.0.2.1", "192.0.2.1", "10.88.1.250"),     // a LOCAL source
		entry(udp, 1000, "198.51.100.1", "192.0.2.1", "192.0.2.1", "198.51.100.1"),   // no pod
	)
	all := sources(t)
	now, before := merged(nil, "10.0.0.0/8", "fd00::/8"), merged(nil, "10.0.0.0/8", "fd00::/8", "192.0.2.0/24", "2001:db8:2::/48")
	if deleted, err := Reset(t.Context(), policy.NewConnectionJudge(now, [][]policy.Policy{now}, false)); err != nil || len(deleted) != 0 {
		t.Errorf("nothing changed, and %v deleted, %v", deleted, err)
	}
	deleted, err := Reset(t.Context(), policy.NewConnectionJudge(now, [][]policy.Policy{before}, false))
	if err != nil || !maps.Equal(deleted, map[policy.ChainFamily]uint64{chains.v4: 7, chains.v6: 3}) {
		t.Errorf("deleted %v, %v", deleted, err)
	}
	want := slices.DeleteFunc(all, func(src string) bool {
		return strings.HasPrefix(src, "10.88.1.") && src != "10.88.1.250" || strings.HasPrefix(src, "fd88::1:")
	})
	if left := sources(t); !slices.Equal(left, want) {
		t.Errorf("left %v, want %v", left, want)
	}
}

// TestResetFamilies: a judge of IPv4 alone leaves IPv6 alone, and one without pod ranges does nothing.
func TestResetFamilies(t *testing.T) {
	namespace(t)
	add(t, entry(unix.IPPROTO_UDP, 1, "10.88.0.1", "192.0.2.1", "192.0.2.1", "10.88.0.1"),
		entry(unix.IPPROTO_UDP, 1, "fd88::1", "2001:db8:2::1", "2001:db8:2::1", "fd88::1"))
	for _, tt := range []struct {
		pods string
		left int
	}{{"", 2}, {"10.88.0.0/16", 1}, {"fd88::/64", 0}} {
		now := merged(func(s *policy.SourcePolicy) {
			s.PodCIDRs = nil
			if tt.pods != "" {
				s.PodCIDRs = prefixes(tt.pods)
			}
		})
		if _, err := Reset(t.Context(), policy.NewConnectionJudge(now, nil, true)); err != nil {
			t.Error(err)
		}
		if left := sources(t); len(left) != tt.left {
			t.Errorf("pods %q: left %v", tt.pods, left)
		}
	}
}

func TestResetEndsAtTheDeadline(t *testing.T) {
	namespace(t)
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	_, err := Reset(ctx, policy.NewConnectionJudge(merged(nil), nil, true))
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

// TestResetInLargeTable: the kernel lists few of many entries, and all stale ones: also one of a Service
// that was given another port.
func TestResetInLargeTable(t *testing.T) {
	namespace(t)
	fill(t, maxListed, 1, false)
	moved := entry(unix.IPPROTO_TCP, 1000, "10.88.1.1", "10.96.0.1", "192.0.2.1", "10.88.1.1")
	moved.ReplyDst = netip.AddrPortFrom(moved.Src.Addr(), 2000)
	add(t, moved)
	exempt, none := merged(nil, "192.0.2.0/24"), merged(nil)
	deleted, err := Reset(t.Context(), policy.NewConnectionJudge(none, [][]policy.Policy{exempt}, false))
	if err != nil || deleted[chains.v4] != maxListed/100+1 {
		t.Errorf("deleted %v, %v", deleted, err)
	}
	fill(t, maxListed, 100, true)
	add(t, moved)
	deleted, err = Reset(t.Context(), policy.NewConnectionJudge(exempt, [][]policy.Policy{none}, false))
	if err != nil || deleted[chains.v4] != maxListed/100 {
		t.Errorf("deleted %v, %v", deleted, err)
	}
	assert.Equal(t, "left", len(sources(t)), maxListed-maxListed/100+1)
}

// TestResetByOutputInterface: pods are on pods0, and only what leaves by eth0 is masqueraded.
func TestResetByOutputInterface(t *testing.T) {
	namespace(t)
	addVeth(t, "pods0", "10.88.255.254/16", "fd88::ff/64")
	addVeth(t, "eth0", "192.0.2.254/24", "2001:db8:2::ff/64")
	wg := addVeth(t, "wg0", "198.51.100.254/24", "2001:db8:5::ff/64")
	for _, sysctl := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		assert.NoError(t, os.WriteFile("/proc/sys/net/"+sysctl, []byte("1"), 0))
	}
	// A policy route: what 10.88.0.3 sends goes to wg0.
	rule := netlink.NewRule()
	rule.Src, rule.Table, rule.Family = &net.IPNet{IP: net.IPv4(10, 88, 0, 3), Mask: net.CIDRMask(32, 32)}, 100, unix.AF_INET
	byWG := &netlink.Route{LinkIndex: wg.Index, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Table: 100}
	assert.NoError(t, errors.Join(netlink.RuleAdd(rule), netlink.RouteAdd(byWG)))
	add(t, entry(unix.IPPROTO_UDP, 1, "10.88.0.1", "192.0.2.1", "192.0.2.1", "10.88.0.1"),
		entry(unix.IPPROTO_UDP, 1, "10.88.0.2", "198.51.100.1", "198.51.100.1", "10.88.0.2"),
		entry(unix.IPPROTO_UDP, 1, "10.88.0.3", "192.0.2.1", "192.0.2.1", "10.88.0.3"),
		entry(unix.IPPROTO_UDP, 1, "10.88.0.4", "240.0.0.1", "240.0.0.1", "10.88.0.4"), // no route
		entry(unix.IPPROTO_UDP, 1, "fd88::1", "2001:db8:2::1", "2001:db8:2::1", "fd88::1"),
		entry(unix.IPPROTO_UDP, 1, "fd88::2", "2001:db8:5::1", "2001:db8:5::1", "fd88::2"))
	now := merged(func(s *policy.SourcePolicy) { s.OutputInterfaces = []string{"eth+"} })
	deleted, err := Reset(t.Context(), policy.NewConnectionJudge(now, nil, true))
	if left := sources(t); err != nil || !slices.Equal(left, []string{"10.88.0.2", "10.88.0.3", "10.88.0.4", "fd88::2"}) {
		t.Errorf("left %v, deleted %v, %v", left, deleted, err)
	}
}

// TestDeleteReversed: after a connection of a pod is deleted, a packet to the pod creates an entry in the
// other direction, which goes too. Another connection to a pod stays.
func TestDeleteReversed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		namespace(t)
		stale := entry(unix.IPPROTO_TCP, 1000, "10.88.0.2", "192.0.2.1", "192.0.2.1", "10.88.0.2")
		reversed := fixtures.Connection{Protocol: stale.Protocol, Src: stale.Dst, Dst: stale.Src, ReplySrc: stale.Src, ReplyDst: stale.Dst}
		inbound := reversed
		inbound.Src = netip.MustParseAddrPort("192.0.2.2:53")
		inbound.ReplyDst = inbound.Src
		add(t, stale)
		w := walk{deleted: map[policy.ChainFamily]uint64{}, routes: newRoutes()}
		defer func() { _ = errors.Join(w.list.Close(), w.remove.Close(), w.routes.socket.Close()) }()
		w.judge = policy.NewConnectionJudge(merged(nil), [][]policy.Policy{merged(nil, "192.0.2.0/24")}, false)
		assert.NoError(t, w.all(t.Context(), []policy.Family{policy.IPv4}))
		if left := sources(t); len(left) > 0 {
			t.Fatalf("left %v", left)
		}
		ended := make(chan error, 1)
		go func() { ended <- w.deleteReversed(t.Context()) }()
		time.Sleep(220 * time.Millisecond) // the packet is a retransmission: the pod's last ACK was lost
		add(t, reversed, inbound)
		assert.NoError(t, <-ended)
		if left := sources(t); !slices.Equal(left, []string{"192.0.2.2"}) || w.deleted[chains.v4] != 1 {
			t.Errorf("left %v, deleted %v", left, w.deleted)
		}
	})
}

// TestLocalAddresses: prefixes of type local count, in other tables too; the default route of a transparent
// proxy does not.
func TestLocalAddresses(t *testing.T) {
	namespace(t, "203.0.113.1/32", "2001:db8::1/128")
	lo := assert.Must(netlink.LinkByName("lo"))(t)
	for dst, table := range map[string]int{"198.51.100.0/24": 100, "0.0.0.0/0": 200, "::/0": 200, "2001:db8:5::/48": 255} {
		to := assert.Must(netlink.ParseIPNet(dst))(t)
		route := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: to, Table: table, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST}
		if err := netlink.RouteAdd(route); err != nil {
			t.Fatalf("%s: %v", dst, err)
		}
	}
	r := newRoutes()
	defer r.socket.Close()
	for a, want := range map[string]bool{
		"127.0.0.5": true, "203.0.113.1": true, "203.0.113.2": false, "198.51.100.7": true, "192.0.2.1": false,
		"::1": true, "2001:db8::1": true, "2001:db8::2": false, "2001:db8:5::9": true,
	} {
		if got := r.IsLocal(netip.MustParseAddr(a)); got != want || r.err != nil {
			t.Errorf("%s: %v, %v", a, got, r.err)
		}
	}
}
