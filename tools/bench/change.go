// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// operation is a contender with an untimed first step.
type operation struct {
	name   string
	before func(round int) error
	timed  func() (time.Duration, error)
}

func (c operation) contender() measure.Contender {
	return measure.Contender{Name: c.name, Run: func(round int) ([]measure.Value, error) {
		if err := c.before(round); err != nil {
			return nil, err
		}
		took, err := c.timed()
		return []measure.Value{wall(took)}, err
	}}
}

func contenders(all []operation) []measure.Contender {
	var made []measure.Contender
	for _, c := range all {
		made = append(made, c.contender())
	}
	return made
}

// addTimed times an ADD of a plugin.
func addTimed(n *scene.Node, plugin string) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		took, err := n.Add(plugin, n.NextPod())
		return took.Wall, err
	}
}

// feedTimed times a program that reads a script.
func feedTimed(n *scene.Node, script func() string, program string, args ...string) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		text := script()
		start := time.Now()
		err := n.Feed(text, program, args...)
		return time.Since(start), err
	}
}

// change measures writing rules. iptables-restore writes the rules that the agents write every minute,
// and nft the table of ip-masq. "In process" is one transaction of a reconciler with an open socket.
func (b *bench) change() (err error) {
	prefixes := scene.Prefixes(10_000)
	var nodes []*scene.Node
	defer func() {
		for _, n := range nodes {
			err = errors.Join(err, n.Close())
		}
	}()
	for _, f := range append(scene.Backends(), scene.Backends()...) { // the last three are for the agents and the tools
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
		if len(nodes) <= len(scene.Backends()) {
			err = n.Enforce(scene.Policy{Prefixes: prefixes})
		}
		if err != nil {
			return err
		}
	}
	policies := []scene.Policy{{Prefixes: prefixes}, {Prefixes: prefixes[:len(prefixes)-1]}}
	rebuilder, err := nodes[3].Rebuilder(policies[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rebuilder.Close()) }()
	if err := b.onePrefix(nodes, rebuilder, policies); err != nil {
		return err
	}
	if err := b.rebuild(nodes, rebuilder, policies[0]); err != nil {
		return err
	}
	return b.firstPod(nodes)
}

// onePrefix alternately removes a prefix from the list and adds it again.
func (b *bench) onePrefix(nodes []*scene.Node, rebuilder *scene.Rebuilder, policies []scene.Policy) error {
	all := []operation{{"writer=empty", func(int) error { return nodes[0].State(policies[0]) }, addTimed(nodes[0], empty)}}
	for _, n := range nodes[:3] {
		all = append(all, operation{"writer=" + ipMasqOn(n.Backend), func(round int) error { return n.State(policies[(round+2)%2]) }, addTimed(n, ipMasq)})
	}
	for _, n := range nodes[4:] {
		var round int
		all = append(all, operation{"writer=agents-" + n.Backend.Name, func(r int) error { round = r; return nil },
			feedTimed(n, func() string { return scene.AgentScript(policies[(round+2)%2].Prefixes) }, "iptables-restore", "--noflush")})
	}
	if _, err := rebuilder.Apply(); err != nil {
		return err
	}
	all = append(all, operation{"writer=in-process-nftables", func(round int) error { return rebuilder.SetPolicy(policies[(round+3)%2]) }, rebuilder.Apply})
	_, err := b.compare(fmt.Sprintf("OnePrefix/prefixes=%d", len(policies[0].Prefixes)), b.limit(14, 15*time.Second), contenders(all)...)
	return err
}

// rebuild restores rules that were deleted.
func (b *bench) rebuild(nodes []*scene.Node, rebuilder *scene.Rebuilder, p scene.Policy) error {
	if err := rebuilder.SetPolicy(p); err != nil {
		return err
	}
	wipe := func(n *scene.Node) func(int) error {
		return func(int) error { return errors.Join(n.State(p), n.Wipe()) }
	}
	var all []operation
	for _, n := range nodes[4:] {
		all = append(all, operation{"writer=agents-" + n.Backend.Name, wipe(n),
			feedTimed(n, func() string { return scene.AgentScript(p.Prefixes) }, "iptables-restore", "--noflush")})
	}
	all = append(all, operation{"writer=in-process-nftables", wipe(nodes[3]), rebuilder.Apply},
		operation{"writer=nft-f", wipe(nodes[3]), feedTimed(nodes[3], rebuilder.Script, "nft", "-f", "-")})
	for _, n := range nodes[:3] {
		all = append(all, operation{"writer=" + ipMasqOn(n.Backend), wipe(n), addTimed(n, ipMasq)})
	}
	_, err := b.compare(fmt.Sprintf("Rebuild/prefixes=%d", len(p.Prefixes)), b.limit(12, 20*time.Second), contenders(all)...)
	return err
}

// firstPod measures the first ADD on a node without state and rules.
func (b *bench) firstPod(nodes []*scene.Node) error {
	for _, count := range b.sizes(usual, 10_000) {
		p := scene.Policy{Prefixes: scene.Prefixes(count)}
		all := []operation{{"plugin=empty", func(int) error { return nodes[0].State(p) }, addTimed(nodes[0], empty)}}
		for _, n := range nodes[:3] {
			all = append(all, operation{"plugin=" + ipMasqOn(n.Backend), func(int) error { return errors.Join(n.State(p), n.Forget()) }, addTimed(n, ipMasq)})
		}
		if _, err := b.compare(fmt.Sprintf("FirstADD/prefixes=%d", count), b.limit(20, 10*time.Second), contenders(all)...); err != nil {
			return err
		}
	}
	return nil
}
