// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
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
		{"ip-masq, a prefix is exempt now", scene.Request{Plugin: "delete-stale", Env: env}, false},
		{"vishvananda/netlink, the same", scene.Request{Plugin: "delete-netlink", Env: env}, false},
		{"`conntrack -D`, the same", scene.Request{Plugin: "conntrack", Args: []string{"-D", "--orig-dst", changed.Addr().String()}}, false},
		{"ip-masq, a prefix is masqueraded now", scene.Request{Plugin: "delete-stale", Env: env}, true},
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
	return measure.Contender{Name: d.name, Run: func(int) (float64, error) {
		if err := r.prepare(d); err != nil {
			return 0, err
		}
		took, err := r.Run(d.request)
		if err != nil {
			return 0, err
		}
		left, err := r.Tracked()
		if err == nil && left != r.entries-r.stale {
			err = fmt.Errorf("%d conntrack entries are left, want %d", left, r.entries-r.stale)
		}
		return milliseconds(took.CPU), err
	}}
}

// reset measures the deletion of stale conntrack entries.
func (b *bench) reset() (err error) {
	const share, mostTime, mostMemory = 100, 500.0, 16 << 20 // one entry in so many is stale; ms; bytes
	n, err := scene.NewNode(scene.Backends()[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	r := &resetNode{Node: n, prefixes: scene.Prefixes(usual)}
	all := deletions(r.prefixes[0])
	times, peaks := [][]string{{"processor time, ms, by entries"}}, [][]string{{"peak memory, MiB, by entries"}}
	var contenders []measure.Contender
	for _, d := range all {
		times, peaks = append(times, []string{d.name}), append(peaks, []string{d.name})
		contenders = append(contenders, r.contender(d))
	}
	for _, count := range b.sizes(1000, 100_000, 250_000) {
		if err := r.fill(count, count/share); err != nil {
			return err
		}
		f, err := measure.Interleave(measure.Limit{Rounds: b.limit(12, 0).Rounds, Least: 3, Time: 8 * time.Second, Cold: count > 1000}, contenders...)
		if err != nil {
			return err
		}
		times[0], peaks[0] = append(times[0], chart.Thousands(count)), append(peaks[0], chart.Thousands(count))
		for i, d := range all {
			if err := r.prepare(d); err != nil {
				return err
			}
			peak, err := r.Peak(d.request)
			if err != nil {
				return err
			}
			times[1+i], peaks[1+i] = append(times[1+i], f.Of(d.name).String()), append(peaks[1+i], mebibytes(peak))
			if d.request.Plugin == "delete-stale" && (count == 250_000 || b.quick) {
				took := measure.EstimateOf(f.Of(d.name))
				held := atMost(took, mostTime)
				if peak > mostMemory {
					held = plainly(false)
				}
				b.report.judge(budget{fmt.Sprintf("reset of 1 %% of %s conntrack entries, %s", chart.Thousands(count), strings.TrimPrefix(d.name, "ip-masq, ")),
					fmt.Sprintf("≤ %.0f ms of processor time, ≤ %d MiB peak RSS", mostTime, mostMemory>>20), fmt.Sprintf("%s ms, %s MiB", took, mebibytes(peak)), held,
					"the kernel lists every entry with source NAT, at some 3 µs each."})
			}
		}
	}
	s := b.report.section("Reset of stale connections")
	s.say("A node has conntrack entries of masqueraded connections of pods. A change of one of %d prefixes makes 1 %% of "+
		"the entries stale:\n\n"+
		"- If the prefix becomes exempt, the stale entries are translated like all others.\n"+
		"- If the prefix becomes masqueraded, only the stale entries are not translated.\n\n"+
		"Each contender is a process that deletes the stale entries:\n\n"+
		"- *ip-masq* calls the functions of the plugin and of the reconciler.\n"+
		"- *vishvananda/netlink* calls `ConntrackDeleteFilters` of this library with one prefix.\n"+
		"- *conntrack -D* deletes the entries of one address.\n\n"+
		"Each contender walks the whole hash table of the kernel. Its size does not depend on the number of entries.", usual)
	s.table(times)
	s.table(peaks)
	return nil
}
