// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func dial(t testing.TB) *nfnetlink.Conn {
	t.Helper()
	c, err := nfnetlink.Dial()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func addConnections(t testing.TB, n int, port uint16) {
	t.Helper()
	err := fixtures.AddConnections(n, func(i int) fixtures.Connection {
		src := netip.AddrPortFrom(netip.MustParseAddr("10.88.0.2"), port+uint16(i))
		dst := netip.MustParseAddrPort("192.0.2.1:53")
		return fixtures.Connection{Protocol: unix.IPPROTO_UDP, Src: src, Dst: dst, ReplySrc: dst, ReplyDst: src}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestDeletedByID: an entry that replaces the listed one, and has its tuple, is not deleted.
func TestDeletedByID(t *testing.T) {
	namespace(t)
	list, remove := dial(t), dial(t)
	deleteAll := func() (missing int, err error) {
		var d nfnetlink.Deletions
		if err := list.Connections(t.Context(), nfnetlink.ConnectionFilter{}, func(e *nfnetlink.Connection) error {
			d.Add(e)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return missing, remove.DeleteConnections(&d, func(int) { missing++ })
	}
	count := func() (n int) {
		if err := list.Connections(t.Context(), nfnetlink.ConnectionFilter{}, func(*nfnetlink.Connection) error { n++; return nil }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	addConnections(t, 3, 1000)
	var old nfnetlink.Deletions
	if err := list.Connections(t.Context(), nfnetlink.ConnectionFilter{}, func(e *nfnetlink.Connection) error {
		old.Add(e)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if missing, err := deleteAll(); missing != 0 || err != nil || count() != 0 {
		t.Fatalf("%d missing of three, %v; %d left", missing, err, count())
	}
	addConnections(t, 100, 2000) // so that the memory of the old ones is in use
	addConnections(t, 3, 1000)
	missing := 0
	if err := remove.DeleteConnections(&old, func(int) { missing++ }); missing != 3 || err != nil {
		t.Errorf("%d missing, %v", missing, err)
	}
	if n := count(); n != 103 {
		t.Errorf("%d entries left, of 103", n)
	}
	if err := remove.DeleteConnections(&old, func(int) { missing++ }); missing != 3 || err != nil {
		t.Errorf("the batch is not empty after it was sent: %d missing, %v", missing, err)
	}
}

// TestConnectionsByStatus: the kernel selects the entries. Older kernels do so only by family.
func TestConnectionsByStatus(t *testing.T) {
	namespace(t)
	c := dial(t)
	addConnections(t, 3, 1000)
	err := fixtures.AddConnections(1, func(int) fixtures.Connection {
		src, dst := netip.MustParseAddrPort("[fd88::2]:1"), netip.MustParseAddrPort("[2001:db8::1]:53")
		return fixtures.Connection{Protocol: unix.IPPROTO_TCP, Src: src, Dst: dst, ReplySrc: dst, ReplyDst: netip.MustParseAddrPort("[2001:db8::9]:2")}
	})
	if err != nil {
		t.Fatal(err)
	}
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
			if e.Src.Is6() && e.ReplyDst != netip.MustParseAddr("2001:db8::9") || e.ReplySrc != e.Dst || e.Zone != 0 {
				t.Errorf("%+v", e)
			}
			return nil
		}); err != nil || n != want {
			t.Errorf("%+v: %d entries, %v, want %d", filter, n, err, want)
		}
	}
}

// TestGoneEntriesAreNotCounted: connections end between the listing and the deletion.
func TestGoneEntriesAreNotCounted(t *testing.T) {
	namespace(t)
	addConnections(t, 3, 1000)
	w := walk{
		judge: policy.NewConnectionJudge(merged(nil), nil, true), list: dial(t), remove: dial(t),
		deleted: map[policy.ChainFamily]uint64{},
	}
	defer w.routes.Close()
	if err := w.list.Connections(t.Context(), nfnetlink.ConnectionFilter{}, w.visit); err != nil {
		t.Fatal(err)
	}
	if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		t.Fatal(err)
	}
	addConnections(t, 1, 5000)
	if err := w.list.Connections(t.Context(), nfnetlink.ConnectionFilter{}, w.visit); err != nil {
		t.Fatal(err)
	}
	if err := w.flush(); err != nil || w.deleted[chains.v4] != 1 {
		t.Errorf("counted %v, %v", w.deleted, err)
	}
}

// TestStatsCount: a second flow finds no port that is free.
func TestStatsCount(t *testing.T) {
	w := topology.New(t, topology.Options{})
	pod := topology.Must(w.AddPod("pod", netip.MustParseAddr("10.88.0.2")))(t)
	nft := w.Node.Command(t.Context(), "nft", "add table ip t; add chain ip t post { type nat hook postrouting priority 100; }; "+
		"add rule ip t post meta l4proto udp masquerade to :2000")
	if output, err := nft.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, output)
	}
	to := netip.MustParseAddrPort("20.0.0.1:7")
	topology.Must(pod.SendUDP(to))(t)
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
	if err != nil {
		t.Error(err)
	}
}
