// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

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
