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
	nobody        = "nobody"
	listenerAlone = "a listener that does nothing"
	reconciling   = "a reconciler"
)

// crowd measures the cost of other programs' commits for the reconciler, which receives each event,
// and for those programs.
func (b *bench) crowd() error {
	const each = 500 // commits a round
	limit := measure.Limit{Rounds: 20, Least: 20}
	if b.quick {
		limit = measure.Limit{Rounds: 4, Least: 4}
	}
	s := b.report.section("The reconciler, while others commit")
	s.say("%s commits of other programs, which have nothing to do with our rules, as fast as one process can make them, on each of three nodes in turn: where nobody listens to "+
		"nf_tables, where somebody does who reads what the kernel tells and does nothing, and where a reconciler runs. The kernel tells of a commit only if somebody listens, and "+
		"the committing process pays for that and for waking the listener, whatever the listener then does.", chart.Thousands(each*limit.Rounds))
	them := [][]string{{"form, and who hears of it", "µs a commit", "× " + nobody}}
	us := [][]string{{"form", "processor time of the reconciler, µs a commit", "files changed", "bytes logged", "RSS after, MiB", "peak, MiB"}}
	for _, f := range scene.Forms()[:2] {
		r, figures, err := crowded(f, each, limit)
		if err != nil {
			return err
		}
		for _, who := range []string{nobody, listenerAlone, reconciling} {
			them = append(them, []string{f.Name + ", " + who, figures.Of(who).String(), figures.Ratio(who, nobody).String()})
		}
		us = append(us, []string{f.Name, measure.Short(float64(r.cpu.Microseconds()) / float64(each*(limit.Rounds+1))),
			fmt.Sprint(r.files), fmt.Sprint(r.logged), mebibytes(r.memory), mebibytes(r.peak)})
	}
	s.table(them)
	s.say("What the reconciler does meanwhile:")
	s.table(us)
	return nil
}

// crowded commits without a listener, with a listener, and with a reconciler.
func crowded(f scene.Form, each int, limit measure.Limit) (r spent, figures measure.Figures, err error) {
	g, err := newGuarded(f, usual, "", "--resync-interval", "10m")
	defer func() { err = errors.Join(err, g.close()) }()
	if err != nil {
		return r, figures, err
	}
	contender := func(name string, n *scene.Node) measure.Contender {
		return measure.Contender{Name: name, Run: func(int) (float64, error) {
			took, err := n.Crowd(each)
			return 1000 * milliseconds(took), err
		}}
	}
	var others []*scene.Node
	defer func() {
		for _, n := range others {
			err = errors.Join(err, n.Close())
		}
	}()
	for range 2 {
		n, err := scene.NewNode(f)
		if err != nil {
			return r, figures, err
		}
		others = append(others, n)
		if err := n.Enforce(scene.Policy{Prefixes: scene.Prefixes(usual)}); err != nil {
			return r, figures, err
		}
	}
	ear, err := others[1].Listen()
	if err != nil {
		return r, figures, err
	}
	defer func() { err = errors.Join(err, ear.Close()) }()
	r, err = g.watch(func() (err error) {
		figures, err = measure.Interleave(limit, contender(nobody, others[0]), contender(listenerAlone, others[1]), contender(reconciling, g.Node))
		return err
	})
	if made := each * (limit.Rounds + 1); err == nil && ear.Count() < made/2 {
		err = fmt.Errorf("the listener received %d of %d commits", ear.Count(), made)
	}
	return r, figures, err
}
