// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// paced returns a contender that sends packets for some time a round, and returns the cost of one.
func paced(name string, each time.Duration, unit func(time.Duration) measure.Value, send func(packets int) time.Duration) measure.Contender {
	const fewest, most = 100, 4000
	packets := fewest
	return measure.Contender{Name: name, Run: func(round int) []measure.Value {
		took := send(packets)
		if round < 0 {
			packets = min(max(int(each/took), fewest), most)
		}
		return []measure.Value{unit(took)}
	}}
}

// guard measures what the guard costs, for packets of one established connection and for the first packets of
// connections, with masqueraded and exempt destinations.
func (b *bench) guard(t topology.T) {
	for _, f := range scene.Backends()[:2] {
		for _, count := range b.sizes(usual, 10_000) {
			separately(t, func(t topology.T) { b.guarded(scene.NewNode(t, f), count) })
		}
	}
}

// guarded measures packets through a node whose table ip-masq-guard is dormant, or awake. The cost is the
// processor time of a packet.
func (b *bench) guarded(n *scene.Node, count int) {
	prefixes := scene.Prefixes(count)
	n.Enforce(scene.Policy{Prefixes: prefixes, Keys: map[string]any{"guard": "drop"}})
	n.Feed("", "nft", "list", "chain", "ip", "ip-masq-guard", "guard")
	destinations := map[string]netip.Addr{"masqueraded": scene.Elsewhere(), "exempt": prefixes[0].Addr()}
	var contenders []measure.Contender
	for _, packets := range []string{"established", "first"} {
		if packets == "first" && count > usual && n.Backend.Kind == "iptables" {
			continue // the chain takes a hundred times as long as the guard
		}
		for _, destination := range []string{"masqueraded", "exempt"} {
			for _, table := range []string{"dormant", "awake"} {
				name := fmt.Sprintf("packets=%s/destination=%s/table=%s", packets, destination, table)
				contenders = append(contenders, paced(name, 10*time.Millisecond, processor, func(count int) time.Duration {
					n.SetGuard(table == "awake")
					return n.Send(destinations[destination], count, packets == "first")
				}))
			}
		}
	}
	b.compare(fmt.Sprintf("Guard/backend=%s/prefixes=%d", n.Backend.Name, count), b.limit(50, 8*time.Second), contenders...)
}

// connections measures the cost of a new connection to an address that no prefix exempts: without a list, and
// with each backend.
func (b *bench) connections(t topology.T) {
	backends := scene.Backends()
	names := []string{"no-list"}
	routers := []*scene.Node{scene.NewNode(t, backends[0])}
	for _, f := range backends {
		names, routers = append(names, ipMasqOn(f)), append(routers, scene.NewNode(t, f))
	}
	enforce(scene.Policy{}, routers[0])
	for _, count := range b.sizes(usual, 10_000) {
		enforce(scene.Policy{Prefixes: scene.Prefixes(count)}, routers[1:]...)
		var contenders []measure.Contender
		for i, n := range routers {
			contenders = append(contenders, paced("router="+names[i], 30*time.Millisecond, wall, func(flows int) time.Duration {
				return n.Flood(scene.Elsewhere(), flows)
			}))
		}
		b.compare(fmt.Sprintf("Connection/prefixes=%d", count), b.limit(20, 20*time.Second), contenders...)
	}
}

// reset measures the deletion of stale conntrack entries: one in a hundred, after a change that exempts a prefix,
// and after one that masquerades it. The cost is the processor time of the program and its peak memory. It walks
// the whole hash table of the kernel, whose size does not depend on the number of entries.
func (b *bench) reset(t topology.T) {
	n := scene.NewNode(t, scene.Backends()[0])
	for _, entries := range b.sizes(1000, 250_000) {
		stale := entries / 100
		assert.NoError(t, n.Node.FlushConntrack())
		n.Track(scene.Elsewhere(), entries-stale, true)
		var contenders []measure.Contender
		for _, change := range []string{"exempt", "masqueraded"} {
			contenders = append(contenders, deletion(n, change, entries-stale, stale))
		}
		limit := measure.Limit{Rounds: b.limit(12, 0).Rounds, Least: b.limit(6, 0).Least, Time: 8 * time.Second, Cold: entries > 1000}
		b.compare(fmt.Sprintf("Reset/entries=%d", entries), limit, contenders...)
	}
}

// deletion returns a contender that must delete the stale entries of a change, and no others.
func deletion(n *scene.Node, change string, entries, stale int) measure.Contender {
	all := scene.Prefixes(usual)
	changed, prefixes := all[0], all
	if change == "masqueraded" {
		prefixes = all[1:]
	}
	request := scene.Request{Plugin: "delete-stale", Env: []string{"PREFIX=" + changed.String()}}
	keys := map[string]any{"podCIDRs": []string{"10.244.0.0/16"}, "staleConnections": "reset"}
	return measure.Contender{Name: "change=" + change, Run: func(int) []measure.Value {
		n.State(scene.Policy{Prefixes: prefixes, Keys: keys})
		n.Track(changed.Addr(), stale, change == "exempt")
		took, peak := n.Peak(request)
		if left := n.Tracked(); left != entries {
			n.Fatalf("%d conntrack entries are left, want %d", left, entries)
		}
		return []measure.Value{processor(took.CPU), {Cost: float64(peak), Unit: "peak-bytes"}}
	}}
}
