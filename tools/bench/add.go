// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

const (
	ipMasq      = "ip-masq"
	empty       = "plugin-empty"
	usual       = 64 // prefixes
	afterCommit = "-after-commit"
)

// nodes returns a node of each backend without third-party rules, and one with them.
func nodes(t topology.T) (bare, full []*scene.Node) {
	for _, f := range scene.Backends() {
		bare, full = append(bare, scene.NewNode(t, f)), append(full, scene.NewNode(t, f))
		full[len(full)-1].AddKubeProxy()
	}
	return bare, full
}

// verifier is a plugin on a node.
type verifier struct {
	name, program string
	node          *scene.Node
	disturbed     bool // another program commits before each run
}

// disturb commits a third-party rule if the verifier is disturbed.
func (v verifier) disturb() {
	if v.disturbed {
		v.node.Commit()
	}
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
	return measure.Contender{Name: v.name, Run: func(int) []measure.Value {
		v.disturb()
		took := v.node.Add(v.program)
		return []measure.Value{wall(took.Wall), processor(took.CPU)}
	}}
}

// concurrent runs 20 ADDs of the verifier at once in a round. The cost is the time until the last has ended.
func (v verifier) concurrent() measure.Contender {
	return measure.Contender{Name: v.name, Run: func(int) []measure.Value {
		v.disturb()
		return []measure.Value{wall(v.node.AddAtOnce(v.program, 20))}
	}}
}

// enforce applies a policy on all nodes.
func enforce(p scene.Policy, nodes ...*scene.Node) {
	for _, n := range nodes {
		n.Enforce(p)
	}
}

// add measures ADD with rules in sync.
func (b *bench) add(t topology.T) {
	bare, full := nodes(t)
	for _, count := range b.sizes(usual, 10_000) {
		enforce(scene.Policy{Prefixes: scene.Prefixes(count)}, slices.Concat(bare, full)...)
		var contenders []measure.Contender
		for _, v := range append(verifiers(0, bare), verifiers(scene.KubeProxyRules, full)...) {
			contenders = append(contenders, v.alone())
		}
		b.compare(fmt.Sprintf("ADD/prefixes=%d", count), b.limit(200, 40*time.Second), contenders...)
	}
}

// burst measures concurrent ADDs. On iptables-legacy, the least that a plugin can do to verify rules is to read
// the table.
func (b *bench) burst(t topology.T) {
	_, full := nodes(t)
	enforce(scene.Policy{Prefixes: scene.Prefixes(usual)}, full...)
	table := verifier{fmt.Sprintf("rules=%d/plugin=legacy-table", scene.KubeProxyRules), "plugin-legacy-table", full[len(full)-1], false}
	var contenders []measure.Contender
	for _, v := range append(verifiers(scene.KubeProxyRules, full), table) {
		contenders = append(contenders, v.concurrent())
	}
	b.compare(fmt.Sprintf("ConcurrentADDs/prefixes=%d", usual), b.limit(60, 45*time.Second), contenders...)
}

// prepared returns a contender with an untimed first step.
func prepared(name string, prepare, timed func()) measure.Contender {
	return measure.Contender{Name: name, Run: func(int) []measure.Value {
		prepare()
		start := time.Now()
		timed()
		return []measure.Value{wall(time.Since(start))}
	}}
}

// rebuild measures restoring rules that were deleted. iptables-restore writes the rules that the agents write
// every minute.
func (b *bench) rebuild(t topology.T) {
	bare, _ := nodes(t)
	p := scene.Policy{Prefixes: scene.Prefixes(10_000)}
	wipe := func(n *scene.Node) func() {
		return func() {
			n.State(p)
			n.Wipe()
		}
	}
	agents := bare[1]
	b.compare(fmt.Sprintf("Rebuild/prefixes=%d", len(p.Prefixes)), b.limit(12, 20*time.Second),
		prepared("writer=agents-"+agents.Backend.Name, wipe(agents), func() {
			agents.Feed(scene.AgentScript(p.Prefixes), "iptables-restore", "--noflush")
		}),
		prepared("writer="+ipMasqOn(bare[0].Backend), wipe(bare[0]), func() { bare[0].Add(ipMasq) }))
}

// firstPod measures the first ADD on a node without state and rules.
func (b *bench) firstPod(t topology.T) {
	bare, _ := nodes(t)
	for _, count := range b.sizes(usual, 10_000) {
		p := scene.Policy{Prefixes: scene.Prefixes(count)}
		all := []measure.Contender{prepared("plugin=empty", func() { bare[0].State(p) }, func() { bare[0].Add(empty) })}
		for _, n := range bare {
			all = append(all, prepared("plugin="+ipMasqOn(n.Backend), func() {
				n.State(p)
				n.Forget()
			}, func() { n.Add(ipMasq) }))
		}
		b.compare(fmt.Sprintf("FirstADD/prefixes=%d", count), b.limit(20, 10*time.Second), all...)
	}
}
