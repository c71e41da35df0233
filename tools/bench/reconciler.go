// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// besideReconciler measures on nodes of each backend with notifications, and with a large list, that have a
// reconciler. The kernel sends no notifications for iptables-legacy.
func (b *bench) besideReconciler(measure func(n *scene.Node, prefixes int, r *topology.Cmd)) func(topology.T) {
	return func(t topology.T) {
		for _, f := range scene.Backends()[:2] {
			for _, prefixes := range b.sizes(usual, 10_000) {
				separately(t, func(t topology.T) {
					n := scene.NewNode(t, f)
					n.Enforce(scene.Policy{Prefixes: scene.Prefixes(prefixes)})
					r := n.StartReconciler("--resync-interval", "10m")
					time.Sleep(time.Second) // for the syncs of its start
					measure(n, prefixes, r)
				})
			}
		}
	}
}

// published measures ADD with rules in sync beside a reconciler, which publishes what it verified, alone and after
// another program's commit.
func (b *bench) published(n *scene.Node, prefixes int, _ *topology.Cmd) {
	var contenders []measure.Contender
	for _, v := range []verifier{
		{"plugin=empty", empty, n, false},
		{"plugin=empty" + afterCommit, empty, n, true},
		{"plugin=" + ipMasqOn(n.Backend), ipMasq, n, false},
		{"plugin=" + ipMasqOn(n.Backend) + afterCommit, ipMasq, n, true},
	} {
		contenders = append(contenders, v.alone())
	}
	b.compare(fmt.Sprintf("PublishedADD/prefixes=%d/backend=%s", prefixes, n.Backend.Name), b.limit(200, 10*time.Second), contenders...)
}

// commits measures the processor time of the reconciler for a commit of another program that does not concern
// the rules of ip-masq: for many at once, and for paced ones, each of which wakes the reconciler up.
func (b *bench) commits(n *scene.Node, prefixes int, r *topology.Cmd) {
	for _, c := range []struct {
		name   string
		count  int
		paused time.Duration
	}{{"small", 10_000, 0}, {"paced", 500, 10 * time.Millisecond}} {
		if b.quick {
			c.count /= 10
		}
		before := assert.Must(r.CPUTime())(n)
		n.CommitMany(c.count, c.paused)
		after := assert.Must(r.CPUTime())(n)
		name := fmt.Sprintf("ThirdPartyCommitReconciler/prefixes=%d/backend=%s/commit=%s", prefixes, n.Backend.Name, c.name)
		measure.WriteLine(&b.results, name, processor((after-before)/time.Duration(c.count)))
	}
}

// repairs measures how long changed rules stay unrepaired: from right before the commit that changes them to the
// kernel's event of the last commit that repairs them. The rules are changed rarely enough that the reconciler
// does not detect flapping and back off.
func (b *bench) repairs(n *scene.Node, prefixes int, _ *topology.Cmd) {
	times, quiet := 8, 80*time.Millisecond // without a commit, after which a repair is over
	if prefixes > usual {
		times, quiet = 3, 300*time.Millisecond
	}
	if b.quick {
		times = 1
	}
	watcher := n.Listen()
	for i := range times * scene.Damages {
		took := n.Repair(watcher, i, quiet)
		benchmark := fmt.Sprintf("Repair/prefixes=%d/backend=%s/damage=%s", prefixes, n.Backend.Name, scene.DamageName(i))
		measure.WriteLine(&b.results, benchmark, wall(took))
	}
}
