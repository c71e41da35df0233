// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// besideReconciler measures on nodes of each backend with notifications, and with a large list, that have a
// reconciler. The kernel sends no notifications for iptables-legacy.
func (b *bench) besideReconciler(measure func(n *scene.Node, prefixes int, r *scene.Reconciler) error) error {
	for _, f := range scene.Backends()[:2] {
		for _, prefixes := range b.sizes(usual, 10_000) {
			if err := withReconciler(f, prefixes, measure); err != nil {
				return err
			}
		}
	}
	return nil
}

func withReconciler(f scene.Backend, prefixes int, measure func(n *scene.Node, prefixes int, r *scene.Reconciler) error) (err error) {
	n, err := scene.NewNode(f)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	if err := n.Enforce(scene.Policy{Prefixes: scene.Prefixes(prefixes)}); err != nil {
		return err
	}
	r, err := n.StartReconciler("--resync-interval", "10m")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Stop()) }()
	time.Sleep(time.Second) // for the syncs of its start
	return measure(n, prefixes, r)
}

// published measures ADD with rules in sync beside a reconciler, which publishes what it verified, alone and after
// another program's commit.
func (b *bench) published(n *scene.Node, prefixes int, _ *scene.Reconciler) error {
	var contenders []measure.Contender
	for _, v := range []verifier{
		{"plugin=empty", empty, n, false},
		{"plugin=empty" + afterCommit, empty, n, true},
		{"plugin=" + ipMasqOn(n.Backend), ipMasq, n, false},
		{"plugin=" + ipMasqOn(n.Backend) + afterCommit, ipMasq, n, true},
	} {
		contenders = append(contenders, v.alone())
	}
	return b.compare(fmt.Sprintf("PublishedADD/prefixes=%d/backend=%s", prefixes, n.Backend.Name), b.limit(200, 10*time.Second), contenders...)
}

// commits measures the processor time of the reconciler for a commit of another program that does not concern
// the rules of ip-masq: for many at once, and for paced ones, each of which wakes the reconciler up.
func (b *bench) commits(n *scene.Node, prefixes int, r *scene.Reconciler) error {
	for _, c := range []struct {
		name   string
		count  int
		paused time.Duration
	}{{"small", 10_000, 0}, {"paced", 500, 10 * time.Millisecond}} {
		if b.quick {
			c.count /= 10
		}
		before, err := r.CPUTime()
		if err != nil {
			return err
		}
		if err := n.CommitMany(c.count, c.paused); err != nil {
			return err
		}
		after, err := r.CPUTime()
		if err != nil {
			return err
		}
		name := fmt.Sprintf("ThirdPartyCommitReconciler/prefixes=%d/backend=%s/commit=%s", prefixes, n.Backend.Name, c.name)
		if err := measure.WriteLine(&b.results, name, processor((after-before)/time.Duration(c.count))); err != nil {
			return err
		}
	}
	return nil
}

// repairs measures how long changed rules stay unrepaired: from right before the commit that changes them to the
// kernel's event of the last commit that repairs them. The rules are changed rarely enough that the reconciler
// does not detect flapping and back off.
func (b *bench) repairs(n *scene.Node, prefixes int, _ *scene.Reconciler) (err error) {
	times, quiet := 8, 80*time.Millisecond // without a commit, after which a repair is over
	if prefixes > usual {
		times, quiet = 3, 300*time.Millisecond
	}
	if b.quick {
		times = 1
	}
	watcher, err := n.Listen()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, watcher.Close()) }()
	for i := range times * scene.Damages {
		took, err := n.Repair(watcher, i, quiet)
		if err != nil {
			return err
		}
		benchmark := fmt.Sprintf("Repair/prefixes=%d/backend=%s/damage=%s", prefixes, n.Backend.Name, scene.DamageName(i))
		if err := measure.WriteLine(&b.results, benchmark, wall(took)); err != nil {
			return err
		}
	}
	return nil
}
