// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ruleset returns a table of each family: what pods send is masqueraded, unless it goes to the prefixes; two
// Services at 10.96.0.0/16; and all that pod 10.88.0.9 sends is in a zone of its own.
func ruleset(exempt []string) string {
	var v4, v6 []string
	for _, prefix := range exempt {
		if strings.Contains(prefix, ":") {
			v6 = append(v6, prefix)
		} else {
			v4 = append(v4, prefix)
		}
	}
	table := func(family, pods string, exempt []string) string {
		return fmt.Sprintf(`
add table %[1]s t; delete table %[1]s t
table %[1]s t {
	chain post {
		type nat hook postrouting priority 101
		%[1]s saddr %[2]s %[1]s daddr != { %[3]s } masquerade fully-random
	}`, family, pods, strings.Join(exempt, ", "))
	}
	return table("ip6", "fd88::/64", v6) + "\n}" + table("ip", "10.88.0.0/16", v4) + `
	chain pre {
		type nat hook prerouting priority -100
		ip daddr 10.96.0.1 dnat to 20.0.0.9
		ip daddr 10.96.0.2 dnat to 30.0.0.9
	}
	chain raw {
		type filter hook prerouting priority -300
		ip saddr 10.88.0.9 ct zone set 7
	}
}
`
}

// TestTraffic: 20.0.0.0/24 and 2001:db8:20::/48 were exempt and are masqueraded now, 30.0.0.0/24 and
// 2001:db8:30::/48 the reverse. Each flow goes on after the entries were reset.
func TestTraffic(t *testing.T) {
	w := topology.New(t, topology.Options{})
	pod := topology.Must(w.AddPod("pod", netip.MustParseAddr("10.88.0.2"), netip.MustParseAddr("fd88::2")))(t)
	zoned := topology.Must(w.AddPod("zoned", netip.MustParseAddr("10.88.0.9")))(t)
	before := []string{"10.0.0.0/8", "20.0.0.0/24", "fd00::/8", "2001:db8:20::/48"}
	now := []string{"10.0.0.0/8", "30.0.0.0/24", "fd00::/8", "2001:db8:30::/48"}
	load := func(exempt []string) {
		nft := w.Node.Command(t.Context(), "nft", "-f", "-")
		nft.Stdin = strings.NewReader(ruleset(exempt))
		if output, err := nft.CombinedOutput(); err != nil {
			t.Fatalf("nft: %v\n%s", err, output)
		}
	}
	load(before)

	const podAddress, podAddress6, zonedAddress = "10.88.0.2", "fd88::2", "10.88.0.9"
	node4 := w.NodeAddr(w.Outside, netip.MustParseAddr("20.0.0.1")).String()
	node6 := w.NodeAddr(w.Outside, netip.MustParseAddr("2001:db8:20::1")).String()
	// A flow whose source is the same address before and after must also keep its port: it was not reset.
	flows := []struct {
		from              *topology.Host
		to, before, after string
	}{
		{pod, "20.0.0.1", podAddress, node4},
		{pod, "30.0.0.1", node4, podAddress},
		{pod, "40.0.0.1", node4, node4},
		{pod, "10.9.0.1", podAddress, podAddress},
		{pod, "10.96.0.1", podAddress, node4},
		{pod, "10.96.0.2", node4, node4},
		{zoned, "20.0.0.2", zonedAddress, zonedAddress},
		{pod, "2001:db8:20::1", podAddress6, node6},
		{pod, "2001:db8:30::1", node6, podAddress6},
		{pod, "2001:db8:40::1", node6, node6},
	}
	send := func(i int) topology.Seen {
		to := netip.AddrPortFrom(netip.MustParseAddr(flows[i].to), topology.EchoPort)
		return topology.Must(flows[i].from.SendUDP(to, topology.FromPort(uint16(5000+i))))(t)
	}
	first := make([]topology.Seen, len(flows))
	for i, flow := range flows {
		if first[i] = send(i); first[i].Source.Addr().String() != flow.before {
			t.Fatalf("to %s: seen %s before, want %s", flow.to, first[i].Source, flow.before)
		}
	}
	open := func(to string) *topology.Conn {
		return topology.Must(pod.OpenTCP(netip.AddrPortFrom(netip.MustParseAddr(to), topology.EchoPort)))(t)
	}
	stale, kept := open("20.0.0.3"), open("40.0.0.3")
	defer stale.Close()
	defer kept.Close()

	load(now)
	for i, flow := range flows {
		if seen := send(i); seen.Source != first[i].Source {
			t.Errorf("to %s: seen %s after the rules changed: the entry is not the old one", flow.to, seen.Source)
		}
	}
	var deleted map[policy.ChainFamily]uint64
	err := w.Node.Do(func() (err error) {
		judge := policy.NewConnectionJudge(merged(nil, now...), [][]policy.Policy{merged(nil, before...)}, false)
		deleted, err = Reset(t.Context(), judge)
		return err
	})
	if want := (map[policy.ChainFamily]uint64{chains.v4: 4, chains.v6: 2}); err != nil || !maps.Equal(deleted, want) {
		t.Errorf("deleted %v, want %v: %v", deleted, want, err)
	}
	for i, flow := range flows {
		seen := send(i).Source
		if seen.Addr().String() != flow.after || flow.before == flow.after && seen != first[i].Source {
			t.Errorf("to %s: seen %s, then %s, want %s", flow.to, first[i].Source, seen, flow.after)
		}
	}
	if seen, err := kept.Ask(); err != nil || seen.Source != kept.Seen.Source {
		t.Errorf("the TCP connection that the change is not about: %v, %v", seen, err)
	}
	if seen, err := stale.Ask(); err == nil {
		t.Errorf("the stale TCP connection lives, seen as %s", seen.Source)
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
