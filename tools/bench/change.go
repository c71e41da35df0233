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
