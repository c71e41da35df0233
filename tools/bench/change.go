// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// prepared returns a contender with an untimed first step.
func prepared(name string, prepare func() error, timed func() (time.Duration, error)) measure.Contender {
	return measure.Contender{Name: name, Run: func(int) ([]measure.Value, error) {
		if err := prepare(); err != nil {
			return nil, err
		}
		took, err := timed()
		return []measure.Value{wall(took)}, err
	}}
}

// addTimed times an ADD of a plugin.
func addTimed(n *scene.Node, plugin string) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		took, err := n.Add(plugin, n.NextPod())
		return took.Wall, err
	}
}

// feedTimed times a program that reads a script.
func feedTimed(n *scene.Node, script, program string, args ...string) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		start := time.Now()
		err := n.Feed(script, program, args...)
		return time.Since(start), err
	}
}

// change measures writing rules, on a node of each backend for ip-masq, and one for the agents and the tools.
func (b *bench) change() (err error) {
	var nodes []*scene.Node
	defer func() {
		for _, n := range nodes {
			err = errors.Join(err, n.Close())
		}
	}()
	for _, f := range append(scene.Backends(), scene.Backends()...) {
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
	}
	return errors.Join(b.rebuild(nodes[:3], nodes[3:]), b.firstPod(nodes[:3]))
}

// rebuild measures restoring rules that were deleted. iptables-restore writes the rules that the agents write
// every minute, and nft the table of ip-masq. "In process" is one transaction of a reconciler with an open
// socket.
func (b *bench) rebuild(nodes, others []*scene.Node) (err error) {
	p := scene.Policy{Prefixes: scene.Prefixes(10_000)}
	rebuilder, err := others[0].Rebuilder(p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rebuilder.Close()) }()
	wipe := func(n *scene.Node) func() error {
		return func() error { return errors.Join(n.State(p), n.Wipe()) }
	}
	var all []measure.Contender
	for _, n := range others[1:] {
		all = append(all, prepared("writer=agents-"+n.Backend.Name, wipe(n), feedTimed(n, scene.AgentScript(p.Prefixes), "iptables-restore", "--noflush")))
	}
	all = append(all, prepared("writer=in-process-nftables", wipe(others[0]), rebuilder.Apply),
		prepared("writer=nft-f", wipe(others[0]), feedTimed(others[0], rebuilder.Script(), "nft", "-f", "-")))
	for _, n := range nodes {
		all = append(all, prepared("writer="+ipMasqOn(n.Backend), wipe(n), addTimed(n, ipMasq)))
	}
	_, err = b.compare(fmt.Sprintf("Rebuild/prefixes=%d", len(p.Prefixes)), b.limit(12, 20*time.Second), all...)
	return err
}

// firstPod measures the first ADD on a node without state and rules.
func (b *bench) firstPod(nodes []*scene.Node) error {
	for _, count := range b.sizes(usual, 10_000) {
		p := scene.Policy{Prefixes: scene.Prefixes(count)}
		all := []measure.Contender{prepared("plugin=empty", func() error { return nodes[0].State(p) }, addTimed(nodes[0], empty))}
		for _, n := range nodes {
			all = append(all, prepared("plugin="+ipMasqOn(n.Backend), func() error { return errors.Join(n.State(p), n.Forget()) }, addTimed(n, ipMasq)))
		}
		if _, err := b.compare(fmt.Sprintf("FirstADD/prefixes=%d", count), b.limit(20, 10*time.Second), all...); err != nil {
			return err
		}
	}
	return nil
}
