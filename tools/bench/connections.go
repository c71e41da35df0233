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

// router is a node that forwards the connections of a pod, with a list of prefixes.
type router struct {
	name  string
	node  *scene.Node
	write func(prefixes []netip.Prefix) error
	most  int // the maximum number of prefixes to measure
}

// routers returns a node with unconditional masquerading, nodes with the backends of ip-masq, and nodes
// with the agents' chain in both variants of iptables.
func (b *bench) routers() (all []router, err error) {
	add := func(name string, f scene.Backend, most int, write func(n *scene.Node, prefixes []netip.Prefix) error) error {
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		all = append(all, router{name, n, func(prefixes []netip.Prefix) error { return write(n, prefixes) }, most})
		return nil
	}
	enforce := func(n *scene.Node, prefixes []netip.Prefix) error { return n.Enforce(scene.Policy{Prefixes: prefixes}) }
	backends := scene.Backends()
	err = errors.Join(
		add("no-list", backends[0], 100_000, func(n *scene.Node, _ []netip.Prefix) error { return enforce(n, nil) }),
		add(ipMasqOn(backends[0]), backends[0], 100_000, enforce))
	for _, f := range backends[1:] {
		err = errors.Join(err, add(ipMasqOn(f), f, 10_000, enforce), add("agents-"+f.Name, f, 10_000, (*scene.Node).AgentCycle))
		if err != nil {
			return all, err
		}
		agents := all[len(all)-1].node
		if err := errors.Join(agents.AgentCycle(nil), agents.AgentJump()); err != nil {
			return all, err
		}
	}
	return all, err
}

// connections measures the cost of a new connection: to an address that no prefix exempts, and to those of
// the first and the last prefix.
func (b *bench) connections() (err error) {
	routers, err := b.routers()
	defer func() {
		for _, r := range routers {
			err = errors.Join(err, r.node.Close())
		}
	}()
	if err != nil {
		return err
	}
	lines := make([]chart.Line, len(routers))
	for _, count := range b.sizes(4, usual, 1000, 10_000, 100_000) {
		prefixes := scene.Prefixes(count)
		destinations := []struct {
			match string
			to    netip.Addr
		}{{"none", scene.Elsewhere()}, {"first", prefixes[0].Addr()}, {"last", prefixes[count-1].Addr()}}
		var contenders []measure.Contender
		name := func(r router, match string) string { return fmt.Sprintf("match=%s/router=%s", match, r.name) }
		for _, r := range routers {
			if count > r.most {
				continue
			}
			if err := r.write(prefixes); err != nil {
				return err
			}
			for _, d := range destinations {
				contenders = append(contenders, paced(name(r, d.match), 30*time.Millisecond, wall, func(flows int) (time.Duration, error) {
					return r.node.Flood(d.to, flows)
				}))
			}
		}
		f, err := b.compare(fmt.Sprintf("Connection/prefixes=%d", count), b.limit(20, 20*time.Second), contenders...)
		if err != nil {
			return err
		}
		for i, r := range routers {
			if lines[i].Name = r.name; count <= r.most {
				lines[i].Add(count, f.Of(name(r, "none")), 1e3)
			}
		}
	}
	b.pictures["connections.svg"], err = chart.Lines("A new connection that no prefix exempts (UDP)", "prefixes", "µs", lines)
	return err
}
