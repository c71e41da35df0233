// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// guarded is a node with rules of the usual size and a reconciler.
type guarded struct {
	*scene.Node
	reconciler *scene.Reconciler
}

func newGuarded(f scene.Form, args ...string) (g guarded, err error) {
	if g.Node, err = scene.NewNode(f); err != nil {
		return g, err
	}
	if err = g.Enforce(scene.Policy{Prefixes: scene.Prefixes(usual)}); err == nil {
		g.reconciler, err = g.StartReconciler(args...)
	}
	return g, err
}

func (g guarded) close() error {
	var err error
	if g.reconciler != nil {
		err = g.reconciler.Stop()
	}
	if g.Node != nil {
		err = errors.Join(err, g.Close())
	}
	return err
}

// repair measures how long rules are wrong that somebody spoiled.
func (b *bench) repair() (err error) {
	const most = 50.0 // ms
	s := b.report.section("Repair of drift")
	s.say("From the kernel's word that somebody spoiled our rules (the jump deleted, the chain flushed, the whole table deleted, in turn) to its word of the last "+
		"commit that repaired them, with %d prefixes; CHECK then finds the rules right. The agents look every 60 s.", usual)
	rows := [][]string{{"form", "median, ms", "95 of 100, ms", "worst, ms", "the agents' minute is so many times the median"}}
	for _, f := range scene.Forms()[:2] {
		g, err := newGuarded(f, "--resync-interval", "10m")
		if err != nil {
			return errors.Join(err, g.close())
		}
		took, err := b.repairs(g)
		if err = errors.Join(err, g.close()); err != nil {
			return err
		}
		rows = append(rows, []string{f.Name, took.String(), measure.Short(took.Quantile(0.95)), measure.Short(took.Quantile(1)),
			chart.Thousands(int(60_000 / took.Median()))})
		b.report.judge(budget{"drift to repair, " + f.Name, "≤ 50 ms",
			fmt.Sprintf("median %s, worst %s ms of %d", measure.Short(took.Median()), measure.Short(took.Quantile(1)), len(took)), plainly(took.Quantile(1) <= most),
			"whoever deletes a table keeps others from committing until the kernel has freed it, 8 to 16 ms later; the rest is what else ran on the machine."})
	}
	s.table(rows)
	s.say("iptables-legacy tells nobody of changes; there the interval rules, 60 s unless told otherwise.")
	return nil
}

// repairs are fewer than make somebody a rival.
func (b *bench) repairs(g guarded) (took measure.Series, err error) {
	ear, err := g.Listen()
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, ear.Close()) }()
	for i := range 8 * scene.Damages {
		one, err := g.Repair(ear, i)
		if err != nil {
			return nil, err
		}
		took = append(took, milliseconds(one))
	}
	return took, nil
}

// spent is the difference of two readings of a reconciler and its node.
type spent struct {
	cpu             time.Duration
	memory          int64
	written, logged int64
	commits         uint32
}

// watch reads before and after something happens.
func (g guarded) watch(happens func() error) (s spent, err error) {
	before, err := g.reconciler.Usage()
	if err != nil {
		return s, err
	}
	first, err := g.Generation()
	if err != nil {
		return s, err
	}
	if err := happens(); err != nil {
		return s, err
	}
	after, err := g.reconciler.Usage()
	if err != nil {
		return s, err
	}
	end, err := g.Generation()
	return spent{after.CPU - before.CPU, after.Memory, after.Written - before.Written, after.Logged - before.Logged, end - first}, err
}

// idle measures an hour in which nothing happens, at a second for a minute.
func (b *bench) idle() error {
	const mostMemory = 20 << 20
	passes := 60
	if b.quick {
		passes = 10
	}
	results := make([]spent, len(scene.Forms()))
	errs := make([]error, len(results))
	var all sync.WaitGroup
	for i, f := range scene.Forms() {
		all.Go(func() {
			g, err := newGuarded(f, "--resync-interval", "1s")
			if err == nil {
				time.Sleep(time.Second) // for what its start asked for
				results[i], err = g.watch(func() error { time.Sleep(time.Duration(passes) * time.Second); return nil })
			}
			errs[i] = errors.Join(err, g.close())
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	s := b.report.section("The reconciler, idle")
	s.say("%d passes, at one a second in place of one a minute, so that this is what %d idle minutes cost; %d prefixes.", passes, passes, usual)
	rows := [][]string{{"form", "commits", "bytes written", "bytes logged", "RSS, MiB", "processor time, ms", "share of one processor in reality"}}
	for i, f := range scene.Forms() {
		r := results[i]
		rows = append(rows, []string{f.Name, fmt.Sprint(r.commits), fmt.Sprint(r.written), fmt.Sprint(r.logged),
			measure.Short(float64(r.memory) / (1 << 20)), measure.Short(milliseconds(r.cpu)),
			fmt.Sprintf("%.6f %%", 100*r.cpu.Seconds()/float64(passes*60))})
		b.report.judge(budget{"reconciler idle, " + f.Name, "no write, no log line, < 20 MiB RSS",
			fmt.Sprintf("%d commits, %d bytes written, %d logged, %s MiB", r.commits, r.written, r.logged, measure.Short(float64(r.memory)/(1<<20))),
			plainly(r.commits == 0 && r.written == 0 && r.logged == 0 && r.memory < mostMemory),
			"the figures above say which part."})
	}
	s.table(rows)
	return nil
}

// crowd measures what commits of others cost: the reconciler, which hears of each,
// and them.
func (b *bench) crowd() error {
	const each = 500 // commits a round
	limit := measure.Limit{Rounds: 20, Least: 20}
	if b.quick {
		limit = measure.Limit{Rounds: 4, Least: 4}
	}
	s := b.report.section("The reconciler, while others commit")
	s.say("%s commits of others, which have nothing to do with our rules, as fast as one process can make them.", chart.Thousands(each*limit.Rounds))
	rows := [][]string{{"form", "a commit with a reconciler × without one", "processor time of the reconciler, µs a commit", "RSS after, MiB", "bytes logged"}}
	for _, f := range scene.Forms()[:2] {
		r, ratio, err := b.crowded(f, each, limit)
		if err != nil {
			return err
		}
		rows = append(rows, []string{f.Name, ratio.String(), measure.Short(float64(r.cpu.Microseconds()) / float64(each*(limit.Rounds+1))),
			measure.Short(float64(r.memory) / (1 << 20)), fmt.Sprint(r.logged)})
	}
	s.table(rows)
	return nil
}

func (b *bench) crowded(f scene.Form, each int, limit measure.Limit) (r spent, ratio measure.Estimate, err error) {
	g, err := newGuarded(f, "--resync-interval", "10m")
	defer func() { err = errors.Join(err, g.close()) }()
	if err != nil {
		return r, ratio, err
	}
	alone, err := scene.NewNode(f)
	if err != nil {
		return r, ratio, err
	}
	defer func() { err = errors.Join(err, alone.Close()) }()
	if err := alone.Enforce(scene.Policy{Prefixes: scene.Prefixes(usual)}); err != nil {
		return r, ratio, err
	}
	crowd := func(name string, n *scene.Node) measure.Contender {
		return measure.Contender{Name: name, Run: func(int) (float64, error) {
			took, err := n.Crowd(each)
			return milliseconds(took), err
		}}
	}
	r, err = g.watch(func() error {
		figures, err := measure.Interleave(limit, crowd("with", g.Node), crowd("without", alone))
		ratio = figures.Ratio("with", "without")
		return err
	})
	return r, ratio, err
}
