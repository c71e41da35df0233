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

// deletion is a program that deletes the stale conntrack entries of a node.
type deletion struct {
	name    string
	request scene.Request
	// masqueraded reports whether the change masquerades a prefix; otherwise it exempts one.
	masqueraded bool
}

// deletions returns the contenders.
func deletions(changed netip.Prefix) []deletion {
	env := []string{"PREFIX=" + changed.String()}
	return []deletion{
		{"change=exempt/program=ip-masq", scene.Request{Plugin: "delete-stale", Env: env}, false},
		{"change=exempt/program=netlink", scene.Request{Plugin: "delete-netlink", Env: env}, false},
		{"change=exempt/program=conntrack", scene.Request{Plugin: "conntrack", Args: []string{"-D", "--orig-dst", changed.Addr().String()}}, false},
		{"change=masqueraded/program=ip-masq", scene.Request{Plugin: "delete-stale", Env: env}, true},
	}
}

// resetNode is a node with conntrack entries, of which a change of one prefix makes some stale.
type resetNode struct {
	*scene.Node
	prefixes       []netip.Prefix // the first is changed
	entries, stale int
}

// fill replaces all entries but the stale ones, which are missing.
func (r *resetNode) fill(entries, stale int) error {
	r.entries, r.stale = entries, stale
	return errors.Join(r.Node.Node.FlushConntrack(), r.Track(scene.Elsewhere(), entries-stale, true))
}

// prepare adds the stale entries and sets the policy after the change.
func (r *resetNode) prepare(d deletion) error {
	prefixes := r.prefixes
	if d.masqueraded {
		prefixes = prefixes[1:]
	}
	keys := map[string]any{"podCIDRs": []string{"10.244.0.0/16"}, "staleConnections": "reset"}
	return errors.Join(r.State(scene.Policy{Prefixes: prefixes, Keys: keys}), r.Track(r.prefixes[0].Addr(), r.stale, !d.masqueraded))
}

// contender returns the processor time of a deletion, which must delete the stale entries and no
// others.
func (r *resetNode) contender(d deletion) measure.Contender {
	return measure.Contender{Name: d.name, Run: func(int) ([]measure.Value, error) {
		if err := r.prepare(d); err != nil {
			return nil, err
		}
		took, err := r.Run(d.request)
		if err != nil {
			return nil, err
		}
		left, err := r.Tracked()
		if err == nil && left != r.entries-r.stale {
			err = fmt.Errorf("%d conntrack entries are left, want %d", left, r.entries-r.stale)
		}
		return []measure.Value{processor(took.CPU)}, err
	}}
}

// reset measures the deletion of stale conntrack entries: one in a hundred. Each contender walks the
// whole hash table of the kernel, whose size does not depend on the number of entries.
func (b *bench) reset() (err error) {
	n, err := scene.NewNode(scene.Backends()[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	r := &resetNode{Node: n, prefixes: scene.Prefixes(usual)}
	all := deletions(r.prefixes[0])
	var contenders []measure.Contender
	for _, d := range all {
		contenders = append(contenders, r.contender(d))
	}
	for _, count := range b.sizes(1000, 100_000, 250_000) {
		if err := r.fill(count, count/100); err != nil {
			return err
		}
		benchmark := fmt.Sprintf("Reset/entries=%d", count)
		limit := measure.Limit{Rounds: b.limit(12, 0).Rounds, Least: b.limit(6, 0).Least, Time: 8 * time.Second, Cold: count > 1000}
		if _, err := b.compare(benchmark, limit, contenders...); err != nil {
			return err
		}
		for _, d := range all {
			if err := r.prepare(d); err != nil {
				return err
			}
			if err := b.peak(benchmark+"/"+d.name, n, d.request); err != nil {
				return err
			}
		}
	}
	return nil
}

// peak writes the peak memory of a program.
func (b *bench) peak(benchmark string, n *scene.Node, r scene.Request) error {
	peak, err := n.Peak(r)
	if err != nil {
		return err
	}
	return measure.WriteLine(&b.results, benchmark, measure.Value{Cost: float64(peak), Unit: "peak-bytes"})
}
