// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// Listeners for the commits of other programs.
const (
	noListener     = "no listener"
	idleListener   = "a listener that ignores the events"
	withReconciler = "a reconciler"
)

// thirdPartyCommits measures the cost of other programs' commits for the reconciler, which receives
// each event, and for those programs.
func (b *bench) thirdPartyCommits() error {
	const each = 500 // commits a round
	limit := measure.Limit{Rounds: 20, Least: 20}
	if b.quick {
		limit = measure.Limit{Rounds: 4, Least: 4}
	}
	s := b.report.section("The reconciler during commits of other programs")
	s.say("Other programs make %s commits that do not concern the rules of ip-masq. They do this as fast as one process "+
		"can, on three nodes in turn:\n\n"+
		"- a node without a listener to nf_tables events;\n"+
		"- a node with a listener that reads the events and ignores them;\n"+
		"- a node with a reconciler.\n\n"+
		"The kernel sends events only if a process listens. The committing process needs time to send the events and "+
		"to wake the listener. This time does not depend on the work of the listener.", chart.Thousands(each*limit.Rounds))
	commits := [][]string{{"backend, listener", "µs per commit", "× " + noListener}}
	usages := [][]string{{"backend", "processor time of the reconciler, µs per commit", "files changed", "bytes logged", "RSS after, MiB", "peak, MiB"}}
	for _, f := range scene.Backends()[:2] {
		r, figures, err := commitsWithListeners(f, each, limit)
		if err != nil {
			return err
		}
		for _, listener := range []string{noListener, idleListener, withReconciler} {
			commits = append(commits, []string{f.Name + ", " + listener, figures.Of(listener).String(), figures.Ratio(listener, noListener).String()})
		}
		usages = append(usages, []string{f.Name, measure.Short(float64(r.cpu.Microseconds()) / float64(each*(limit.Rounds+1))),
			fmt.Sprint(r.files), fmt.Sprint(r.logged), mebibytes(r.memory), mebibytes(r.peak)})
	}
	s.table(commits)
	s.say("The reconciler during these commits:")
	s.table(usages)
	return nil
}

// commitsWithListeners commits without a listener, with a listener, and with a reconciler.
func commitsWithListeners(f scene.Backend, each int, limit measure.Limit) (r usage, figures measure.Figures, err error) {
	g, err := newReconciledNode(f, usual, "", "--resync-interval", "10m")
	defer func() { err = errors.Join(err, g.close()) }()
	if err != nil {
		return r, figures, err
	}
	contender := func(name string, n *scene.Node) measure.Contender {
		return measure.Contender{Name: name, Run: func(int) (float64, error) {
			took, err := n.CommitMany(each)
			return 1000 * milliseconds(took), err
		}}
	}
	var plain []*scene.Node
	defer func() {
		for _, n := range plain {
			err = errors.Join(err, n.Close())
		}
	}()
	for range 2 {
		n, err := scene.NewNode(f)
		if err != nil {
			return r, figures, err
		}
		plain = append(plain, n)
		if err := n.Enforce(scene.Policy{Prefixes: scene.Prefixes(usual)}); err != nil {
			return r, figures, err
		}
	}
	watcher, err := plain[1].Listen()
	if err != nil {
		return r, figures, err
	}
	defer func() { err = errors.Join(err, watcher.Close()) }()
	r, err = g.usageDuring(func() (err error) {
		figures, err = measure.Interleave(limit, contender(noListener, plain[0]), contender(idleListener, plain[1]), contender(withReconciler, g.Node))
		return err
	})
	if made := each * (limit.Rounds + 1); err == nil && watcher.Count() < made/2 {
		err = fmt.Errorf("the listener received %d of %d commits", watcher.Count(), made)
	}
	return r, figures, err
}
