// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// paced returns a contender that sends packets for some time a round, and returns the cost of one.
func paced(name string, each time.Duration, unit func(time.Duration) measure.Value, send func(packets int) (time.Duration, error)) measure.Contender {
	const fewest, most = 100, 4000
	packets := fewest
	return measure.Contender{Name: name, Run: func(round int) ([]measure.Value, error) {
		took, err := send(packets)
		if round < 0 && err == nil {
			packets = min(max(int(each/took), fewest), most)
		}
		return []measure.Value{unit(took)}, err
	}}
}

// guard measures what the guard costs, for packets of one established connection and for the first packets of
// connections, with masqueraded and exempt destinations.
func (b *bench) guard() error {
	for _, f := range scene.Backends()[:2] {
		for _, count := range b.sizes(usual, 10_000) {
			if err := b.guarded(f, count); err != nil {
				return err
			}
		}
	}
	return nil
}

// guarded measures packets through a node whose table ip-masq-guard is dormant, or awake. The cost is the
// processor time of a packet.
func (b *bench) guarded(f scene.Backend, count int) (err error) {
	n, err := scene.NewNode(f)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	prefixes := scene.Prefixes(count)
	if err := n.Enforce(scene.Policy{Prefixes: prefixes, Keys: map[string]any{"guard": "drop"}}); err != nil {
		return err
	}
	if err := n.Feed("", "nft", "list", "chain", "ip", "ip-masq-guard", "guard"); err != nil {
		return err
	}
	destinations := map[string]netip.Addr{"masqueraded": scene.Elsewhere(), "exempt": prefixes[0].Addr()}
	var contenders []measure.Contender
	for _, packets := range []string{"established", "first"} {
		if packets == "first" && count > usual && f.Kind == "iptables" {
			continue // the chain takes a hundred times as long as the guard
		}
		for _, destination := range []string{"masqueraded", "exempt"} {
			for _, table := range []string{"dormant", "awake"} {
				name := fmt.Sprintf("packets=%s/destination=%s/table=%s", packets, destination, table)
				contenders = append(contenders, paced(name, 10*time.Millisecond, processor, func(count int) (time.Duration, error) {
					if err := n.SetGuard(table == "awake"); err != nil {
						return 0, err
					}
					return n.Send(destinations[destination], count, packets == "first")
				}))
			}
		}
	}
	return b.compare(fmt.Sprintf("Guard/backend=%s/prefixes=%d", f.Name, count), b.limit(50, 8*time.Second), contenders...)
}

// connections measures the cost of a new connection to an address that no prefix exempts: without a list, and
// with each backend.
func (b *bench) connections() (err error) {
	backends := scene.Backends()
	names := []string{"no-list"}
	for _, f := range backends {
		names = append(names, ipMasqOn(f))
	}
	var routers []*scene.Node
	defer func() {
		for _, n := range routers {
			err = errors.Join(err, n.Close())
		}
	}()
	for _, f := range append(backends[:1:1], backends...) {
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		routers = append(routers, n)
	}
	if err := enforce(scene.Policy{}, routers[0]); err != nil {
		return err
	}
	for _, count := range b.sizes(usual, 10_000) {
		if err := enforce(scene.Policy{Prefixes: scene.Prefixes(count)}, routers[1:]...); err != nil {
			return err
		}
		var contenders []measure.Contender
		for i, n := range routers {
			contenders = append(contenders, paced("router="+names[i], 30*time.Millisecond, wall, func(flows int) (time.Duration, error) {
				return n.Flood(scene.Elsewhere(), flows)
			}))
		}
		if err := b.compare(fmt.Sprintf("Connection/prefixes=%d", count), b.limit(20, 20*time.Second), contenders...); err != nil {
			return err
		}
	}
	return nil
}

// reset measures the deletion of stale conntrack entries: one in a hundred, after a change that exempts a prefix,
// and after one that masquerades it. The cost is the processor time of the program and its peak memory. It walks
// the whole hash table of the kernel, whose size does not depend on the number of entries.
func (b *bench) reset() (err error) {
	n, err := scene.NewNode(scene.Backends()[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	for _, entries := range b.sizes(1000, 250_000) {
		stale := entries / 100
		if err := errors.Join(n.Node.FlushConntrack(), n.Track(scene.Elsewhere(), entries-stale, true)); err != nil {
			return err
		}
		var contenders []measure.Contender
		for _, change := range []string{"exempt", "masqueraded"} {
			contenders = append(contenders, deletion(n, change, entries-stale, stale))
		}
		limit := measure.Limit{Rounds: b.limit(12, 0).Rounds, Least: b.limit(6, 0).Least, Time: 8 * time.Second, Cold: entries > 1000}
		if err := b.compare(fmt.Sprintf("Reset/entries=%d", entries), limit, contenders...); err != nil {
			return err
		}
	}
	return nil
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
	return measure.Contender{Name: "change=" + change, Run: func(int) ([]measure.Value, error) {
		err := errors.Join(n.State(scene.Policy{Prefixes: prefixes, Keys: keys}), n.Track(changed.Addr(), stale, change == "exempt"))
		if err != nil {
			return nil, err
		}
		took, peak, err := n.Peak(request)
		if err != nil {
			return nil, err
		}
		left, err := n.Tracked()
		if err == nil && left != entries {
			err = fmt.Errorf("%d conntrack entries are left, want %d", left, entries)
		}
		return []measure.Value{processor(took.CPU), {Cost: float64(peak), Unit: "peak-bytes"}}, err
	}}
}
