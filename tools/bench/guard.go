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

// traffic returns contenders that send packets through a node whose table ip-masq-guard is dormant, or
// awake. The cost is the processor time of a packet.
func traffic(n *scene.Node, name string, to netip.Addr, connections bool) (all []measure.Contender) {
	for _, state := range []string{"dormant", "awake"} {
		all = append(all, paced(name+"/table="+state, 10*time.Millisecond, processor, func(packets int) (time.Duration, error) {
			if err := n.SetGuard(state == "awake"); err != nil {
				return 0, err
			}
			return n.Send(to, packets, connections)
		}))
	}
	return all
}

// guard measures what guard and enforceExempt cost, for packets of one established connection and for
// the first packets of connections, with masqueraded and exempt destinations.
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

// guarded measures traffic on a node with each of the keys.
func (b *bench) guarded(f scene.Backend, count int) (err error) {
	prefixes := scene.Prefixes(count)
	destinations := map[string]netip.Addr{"masqueraded": scene.Elsewhere(), "exempt": prefixes[0].Addr()}
	var contenders []measure.Contender
	for _, k := range []struct {
		key   string
		value any
		chain string // that must exist
		// packets says what kinds of packets to measure: enforceExempt is a NAT rule, which packets of
		// established connections do not evaluate.
		packets []string
	}{{"guard", "drop", "guard", []string{"established", "first"}}, {"enforceExempt", true, "enforce", []string{"first"}}} {
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, n.Close()) }()
		if err := n.Enforce(scene.Policy{Prefixes: prefixes, Keys: map[string]any{k.key: k.value}}); err != nil {
			return err
		}
		if err := n.Feed("", "nft", "list", "chain", "ip", "ip-masq-guard", k.chain); err != nil {
			return err
		}
		for _, packets := range k.packets {
			if packets == "first" && count > usual && f.Kind == "iptables" {
				continue // the chain takes a hundred times as long as the guard
			}
			for _, destination := range []string{"masqueraded", "exempt"} {
				name := fmt.Sprintf("key=%s/packets=%s/destination=%s", k.key, packets, destination)
				contenders = append(contenders, traffic(n, name, destinations[destination], packets == "first")...)
			}
		}
	}
	_, err = b.compare(fmt.Sprintf("Guard/backend=%s/prefixes=%d", f.Name, count), b.limit(50, 8*time.Second), contenders...)
	return err
}
