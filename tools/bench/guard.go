// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// traffic is packets through a node.
type traffic struct {
	node        *scene.Node
	name        string
	to          netip.Addr
	connections bool // each packet opens one
	// without and with are the times with the table ip-masq-guard dormant and awake, by round.
	without, with measure.Series
}

// contender returns the difference that the table makes. Each round measures without, with, with,
// without or the reverse, some 10 ms each.
func (t *traffic) contender() measure.Contender {
	const each, fewest, most = 10_000.0, 100, 4000 // µs; packets
	packets := fewest
	return measure.Contender{Name: fmt.Sprint(t.name, t.connections), Run: func(round int) (float64, error) {
		sum := map[bool]float64{}
		first := round%2 == 0
		for _, awake := range []bool{first, !first, !first, first} {
			if err := t.node.SetGuard(awake); err != nil {
				return 0, err
			}
			took, err := t.node.Send(t.to, packets, t.connections)
			if err != nil {
				return 0, err
			}
			sum[awake] += took / 2
		}
		if round < 0 {
			packets = min(max(int(each/sum[false]), fewest), most)
		} else {
			t.without, t.with = append(t.without, sum[false]), append(t.with, sum[true])
		}
		return sum[true] - sum[false], nil
	}}
}

// guard measures what guard and enforceExempt cost.
func (b *bench) guard() error {
	const mostExtra = 0.4 // µs
	head := func(what string) [][]string {
		return [][]string{{"processor time, µs a " + what, "without the table", "with it", "difference"}}
	}
	packets, connections := head("packet"), head("connection")
	for _, f := range scene.Backends()[:2] {
		for _, count := range b.sizes(usual, 10_000) {
			all, figures, err := b.guarded(f, count)
			if err != nil {
				return err
			}
			for _, t := range all {
				extra := measure.EstimateOf(figures.Of(t.contender().Name))
				row := []string{t.name, t.without.String(), t.with.String(), extra.String()}
				if t.connections {
					connections = append(connections, row)
					continue
				}
				packets = append(packets, row)
				if t.to == scene.Elsewhere() {
					b.report.judge(budget{fmt.Sprintf("guard, per packet, %s prefixes, %s", chart.Thousands(count), f.Name), fmt.Sprintf("≤ %.1f µs of processor time", mostExtra),
						extra.String() + " µs", atMost(extra, mostExtra), "for every packet of a pod, the kernel evaluates the sets of the guard, and then the chain that follows these sets."})
				}
			}
		}
	}
	s := b.report.section("Guard and enforceExempt")
	s.say("The nodes have `guard: drop` or `enforceExempt`. A pod sends UDP datagrams through the node to the outside " +
		"host, which drops them. The processor time is that of the sending thread. In this thread the kernel also " +
		"forwards the packet and evaluates the rules.\n\n" +
		"*Without the table* is the same node in the same round with a dormant table `ip-masq-guard`. The difference " +
		"is the median of the differences within a round, with its 95 %% confidence interval. Packets of one " +
		"established connection:")
	s.table(packets)
	s.say("The first packet of a connection includes connection tracking and NAT. This test has no iptables-nft with " +
		"10,000 prefixes, because the chain takes a hundred times as long as the guard.")
	s.table(connections)
	return nil
}

// guarded measures traffic on a node with each of the keys.
func (b *bench) guarded(f scene.Backend, count int) (all []*traffic, figures measure.Figures, err error) {
	prefixes := scene.Prefixes(count)
	destinations := []struct {
		name string
		to   netip.Addr
	}{{"masqueraded", scene.Elsewhere()}, {"exempt", prefixes[0].Addr()}}
	keys := []struct {
		key   string
		value any
		chain string // that must exist
	}{{"guard", "drop", "guard"}, {"enforceExempt", true, "enforce"}}
	var contenders []measure.Contender
	var nodes []*scene.Node
	defer func() {
		for _, n := range nodes {
			err = errors.Join(err, n.Close())
		}
	}()
	for i, k := range keys {
		n, err := scene.NewNode(f)
		if err != nil {
			return nil, figures, err
		}
		nodes = append(nodes, n)
		if err := n.Enforce(scene.Policy{Prefixes: prefixes, Keys: map[string]any{k.key: k.value}}); err != nil {
			return nil, figures, err
		}
		if err := n.Feed("", "nft", "list", "chain", "ip", "ip-masq-guard", k.chain); err != nil {
			return nil, figures, err
		}
		for _, d := range destinations {
			for _, connections := range []bool{false, true} {
				if connections && count > usual && f.Kind == "iptables" || !connections && i > 0 {
					continue // enforceExempt is a NAT rule, which packets of established connections do not evaluate
				}
				t := &traffic{node: n, name: fmt.Sprintf("`%s`, %s, %s prefixes, %s destination", k.key, f.Name, chart.Thousands(count), d.name), to: d.to, connections: connections}
				all = append(all, t)
				contenders = append(contenders, t.contender())
			}
		}
	}
	figures, err = measure.Interleave(b.limit(25, 8*time.Second), contenders...)
	return all, figures, err
}
