// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

func dial(t testing.TB) *nfnetlink.Conn {
	t.Helper()
	c := &nfnetlink.Conn{}
	t.Cleanup(func() {
		assert.NoError(t, c.Close())
	})
	return c
}

func addConnections(t testing.TB, n int, port uint16) {
	t.Helper()
	assert.NoError(t, fixtures.AddConnections(n, func(i int) fixtures.Connection {
		src := netip.AddrPortFrom(netip.MustParseAddr("10.88.0.2"), port+uint16(i))
		dst := netip.MustParseAddrPort("192.0.2.1:53")
		return fixtures.Connection{Protocol: unix.IPPROTO_UDP, Src: src, Dst: dst, ReplySrc: dst, ReplyDst: src}
	}))
}

// TestDeletedByID: an entry that replaces the listed one, and has its tuple, is not deleted.
func TestDeletedByID(t *testing.T) {
	namespace(t)
	list, remove := dial(t), dial(t)
	addConnections(t, 1, 1000)
	n := 0
	err := list.Connections(t.Context(), nfnetlink.ConnectionFilter{}, func(e *nfnetlink.Connection) error {
		if n++; n > 1 {
			return nil
		}
		deleted, err := remove.DeleteConnection(e.Original, e.ID)
		addConnections(t, 100, 2000) // so that the memory of the old one is in use
		addConnections(t, 1, 1000)
		again, errAgain := remove.DeleteConnection(e.Original, e.ID)
		if !deleted || again {
			t.Errorf("deleted %t, again %t", deleted, again)
		}
		return errors.Join(err, errAgain)
	})
	if err != nil || n == 0 {
		t.Errorf("%d entries, %v", n, err)
	}
	n = 0
	if err := list.Connections(t.Context(), nfnetlink.ConnectionFilter{}, func(*nfnetlink.Connection) error { n++; return nil }); n != 101 || err != nil {
		t.Errorf("%d entries left, of 101, %v", n, err)
	}
}

// TestConnectionsByStatus: the kernel selects the entries. Older kernels do so only by family.
func TestConnectionsByStatus(t *testing.T) {
	namespace(t)
	c := dial(t)
	addConnections(t, 3, 1000)
	assert.NoError(t, fixtures.AddConnections(1, func(int) fixtures.Connection {
		src, dst := netip.MustParseAddrPort("[fd88::2]:1"), netip.MustParseAddrPort("[2001:db8::1]:53")
		return fixtures.Connection{Protocol: unix.IPPROTO_TCP, Src: src, Dst: dst, ReplySrc: dst, ReplyDst: netip.MustParseAddrPort("[2001:db8::9]:2")}
	}))
	for filter, want := range map[nfnetlink.ConnectionFilter]int{
		{}:                          4,
		{Family: nfnetlink.IPv4}:    3,
		{Family: nfnetlink.IPv6}:    1,
		{Mask: nfnetlink.SourceNAT}: 3,
		{Status: nfnetlink.SourceNAT, Mask: nfnetlink.SourceNAT}:                            1,
		{Family: nfnetlink.IPv6, Mask: nfnetlink.SourceNAT}:                                 0,
		{Mask: nfnetlink.DestinationNAT, Family: nfnetlink.IPv6}:                            1,
		{Status: nfnetlink.SourceNAT, Mask: nfnetlink.SourceNAT | nfnetlink.DestinationNAT}: 1,
	} {
		if sandbox.KernelBefore(5, 14) {
			want = map[nfnetlink.Family]int{0: 4, nfnetlink.IPv4: 3, nfnetlink.IPv6: 1}[filter.Family]
		}
		n := 0
		if err := c.Connections(t.Context(), filter, func(e *nfnetlink.Connection) error {
			n++
			if e.Original.Src.Is6() && e.Reply.Dst != netip.MustParseAddr("2001:db8::9") || e.Reply.Flow().Src != e.Original.Flow().Dst || e.Zone != 0 {
				t.Errorf("%+v", e)
			}
			return nil
		}); err != nil || n != want {
			t.Errorf("%+v: %d entries, %v, want %d", filter, n, err, want)
		}
	}
}

// TestStatsCount: a second flow finds no port that is free.
func TestStatsCount(t *testing.T) {
	w := topology.New(t, topology.Options{})
	pod := w.AddPod(t, "pod", netip.MustParseAddr("10.88.0.2"))
	nft := w.Node.Command(t.Context(), "nft", "add table ip t; add chain ip t post { type nat hook postrouting priority 100; }; "+
		"add rule ip t post meta l4proto udp masquerade to :2000")
	assert.Output(t, nft)
	to := netip.MustParseAddrPort("20.0.0.1:7")
	assert.Must(pod.SendUDP(to))(t)
	if _, err := pod.SendUDP(to, topology.Within(50_000_000)); err == nil {
		t.Error("the second flow passed")
	}
	err := w.Node.Do(func() error {
		s, err := ReadStats(t.Context())
		if s.Drop == 0 && s.InsertFailed == 0 || s.Entries == 0 {
			t.Errorf("%+v", s)
		}
		return err
	})
	assert.NoError(t, err)
}

// TestSourcesOfIPv6AreListedOnce: the kernel does not filter the sources of IPv6, so each of them would list the whole
// family.
func TestSourcesOfIPv6AreListedOnce(t *testing.T) {
	addresses := func(texts ...string) (list []netip.Addr) {
		for _, text := range texts {
			list = append(list, netip.MustParseAddr(text))
		}
		return list
	}
	got := filtersOf(addresses("10.0.0.1", "fd00::1", "10.0.0.2", "fd00::2"))
	assert.Equal(t, "filters", got, []nfnetlink.ConnectionFilter{
		{Family: nfnetlink.IPv4, Src: netip.MustParseAddr("10.0.0.1")},
		{Family: nfnetlink.IPv6},
		{Family: nfnetlink.IPv4, Src: netip.MustParseAddr("10.0.0.2")},
	})
}
