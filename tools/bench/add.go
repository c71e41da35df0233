// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

const (
	ipMasq      = "ip-masq"
	empty       = "plugin-empty"
	usual       = 64 // prefixes
	afterCommit = "-after-commit"
)

// withNodes runs a function with a node of each backend, and with further ones that have third-party rules.
func withNodes(run func(bare, full []*scene.Node) error) (err error) {
	var all []*scene.Node
	defer func() {
		for _, n := range all {
			err = errors.Join(err, n.Close())
		}
	}()
	backends := scene.Backends()
	for i := range 2 * len(backends) {
		n, err := scene.NewNode(backends[i%len(backends)])
		if err != nil {
			return err
		}
		all = append(all, n)
		if i >= len(backends) {
			if err := n.AddKubeProxy(); err != nil {
				return err
			}
		}
	}
	return run(all[:len(backends)], all[len(backends):])
}

// verifier is a plugin on a node.
type verifier struct {
	name, program string
	node          *scene.Node
	disturbed     bool // another program commits before each run
}

// disturb commits a third-party rule if the verifier is disturbed.
func (v verifier) disturb() error {
	if !v.disturbed {
		return nil
	}
	return v.node.Commit()
}

// verifiers returns the empty plugin and ip-masq with each backend, on nodes with this number of third-party
// rules. The empty plugin runs twice, as a measure of noise.
func verifiers(rules int, nodes []*scene.Node) (all []verifier) {
	add := func(name, program string, n *scene.Node, disturbed bool) {
		all = append(all, verifier{fmt.Sprintf("rules=%d/plugin=%s", rules, name), program, n, disturbed})
	}
	add("empty", empty, nodes[0], false)
	add("empty-again", empty, nodes[0], false)
	for _, n := range nodes {
		add(ipMasqOn(n.Backend), ipMasq, n, false)
		if n.Backend.Variant != "legacy" {
			add(ipMasqOn(n.Backend)+afterCommit, ipMasq, n, true)
		}
	}
	return all
}

// ipMasqOn returns the name of ip-masq with a backend.
func ipMasqOn(f scene.Backend) string { return "ip-masq-" + f.Name }

// alone runs the verifier once a round.
func (v verifier) alone() measure.Contender {
	return measure.Contender{Name: v.name, Run: func(int) ([]measure.Value, error) {
		if err := v.disturb(); err != nil {
			return nil, err
		}
		took, err := v.node.Add(v.program, v.node.NextPod())
		return []measure.Value{wall(took.Wall), processor(took.CPU)}, err
	}}
}

// concurrent runs 20 ADDs of the verifier at once in a round. The cost is the time until the last has ended.
func (v verifier) concurrent() measure.Contender {
	return measure.Contender{Name: v.name, Run: func(int) ([]measure.Value, error) {
		if err := v.disturb(); err != nil {
			return nil, err
		}
		var requests []scene.Request
		for range 20 {
			requests = append(requests, scene.Request{Plugin: v.program, Container: v.node.NextPod()})
		}
		took, err := v.node.RunAtOnce(requests)
		return []measure.Value{wall(took)}, err
	}}
}

// enforce applies a policy on all nodes.
func enforce(p scene.Policy, nodes ...*scene.Node) error {
	for _, n := range nodes {
		if err := n.Enforce(p); err != nil {
			return err
		}
	}
	return nil
}

// add measures ADD with rules in sync.
func (b *bench) add(bare, full []*scene.Node) error {
	for _, count := range b.sizes(usual, 10_000) {
		if err := enforce(scene.Policy{Prefixes: scene.Prefixes(count)}, append(bare[:len(bare):len(bare)], full...)...); err != nil {
			return err
		}
		var contenders []measure.Contender
		for _, v := range append(verifiers(0, bare), verifiers(scene.KubeProxyRules, full)...) {
			contenders = append(contenders, v.alone())
		}
		if err := b.compare(fmt.Sprintf("ADD/prefixes=%d", count), b.limit(200, 40*time.Second), contenders...); err != nil {
			return err
		}
	}
	return nil
}

// burst measures concurrent ADDs. On iptables-legacy, the least that a plugin can do to verify rules is to read
// the table.
func (b *bench) burst(_, full []*scene.Node) error {
	if err := enforce(scene.Policy{Prefixes: scene.Prefixes(usual)}, full...); err != nil {
		return err
	}
	table := verifier{fmt.Sprintf("rules=%d/plugin=legacy-table", scene.KubeProxyRules), "plugin-legacy-table", full[len(full)-1], false}
	var contenders []measure.Contender
	for _, v := range append(verifiers(scene.KubeProxyRules, full), table) {
		contenders = append(contenders, v.concurrent())
	}
	return b.compare(fmt.Sprintf("ConcurrentADDs/prefixes=%d", usual), b.limit(60, 45*time.Second), contenders...)
}

// prepared returns a contender with an untimed first step.
func prepared(name string, prepare, timed func() error) measure.Contender {
	return measure.Contender{Name: name, Run: func(int) ([]measure.Value, error) {
		if err := prepare(); err != nil {
			return nil, err
		}
		start := time.Now()
		err := timed()
		return []measure.Value{wall(time.Since(start))}, err
	}}
}

// adds returns an ADD of a plugin.
func adds(n *scene.Node, plugin string) func() error {
	return func() error {
		_, err := n.Add(plugin, n.NextPod())
		return err
	}
}

// rebuild measures restoring rules that were deleted. iptables-restore writes the rules that the agents write
// every minute.
func (b *bench) rebuild(bare, _ []*scene.Node) error {
	p := scene.Policy{Prefixes: scene.Prefixes(10_000)}
	wipe := func(n *scene.Node) func() error {
		return func() error { return errors.Join(n.State(p), n.Wipe()) }
	}
	agents := bare[1]
	return b.compare(fmt.Sprintf("Rebuild/prefixes=%d", len(p.Prefixes)), b.limit(12, 20*time.Second),
		prepared("writer=agents-"+agents.Backend.Name, wipe(agents), func() error {
			return agents.Feed(scene.AgentScript(p.Prefixes), "iptables-restore", "--noflush")
		}),
		prepared("writer="+ipMasqOn(bare[0].Backend), wipe(bare[0]), adds(bare[0], ipMasq)))
}

// firstPod measures the first ADD on a node without state and rules.
func (b *bench) firstPod(bare, _ []*scene.Node) error {
	for _, count := range b.sizes(usual, 10_000) {
		p := scene.Policy{Prefixes: scene.Prefixes(count)}
		all := []measure.Contender{prepared("plugin=empty", func() error { return bare[0].State(p) }, adds(bare[0], empty))}
		for _, n := range bare {
			all = append(all, prepared("plugin="+ipMasqOn(n.Backend), func() error { return errors.Join(n.State(p), n.Forget()) }, adds(n, ipMasq)))
		}
		if err := b.compare(fmt.Sprintf("FirstADD/prefixes=%d", count), b.limit(20, 10*time.Second), all...); err != nil {
			return err
		}
	}
	return nil
}
