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
