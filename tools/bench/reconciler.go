// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// guarded is a node with rules and a reconciler.
type guarded struct {
	*scene.Node
	reconciler *scene.Reconciler
}

// newGuarded makes a node with n prefixes and a reconciler. The agent file, if any, is written
// first.
func newGuarded(f scene.Form, prefixes int, agents string, args ...string) (g guarded, err error) {
	if g.Node, err = scene.NewNode(f); err != nil {
		return g, err
	}
	if agents != "" {
		err = g.AgentFile(agents)
	}
	if err = errors.Join(err, g.Enforce(scene.Policy{Prefixes: scene.Prefixes(prefixes)})); err == nil {
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

// spent is the difference of two readings of a reconciler and its node.
type spent struct {
	cpu          time.Duration
	memory, peak int64 // bytes
	logged       int64 // bytes
	files        int   // that were changed
	commits      uint32
}

// watch reads the usage before and after a function.
func (g guarded) watch(happens func() error) (s spent, err error) {
	before, err := g.reconciler.Usage()
	if err != nil {
		return s, err
	}
	stamps, err := g.Stamps()
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
	now, err := g.Stamps()
	if err != nil {
		return s, err
	}
	end, err := g.Generation()
	return spent{after.CPU - before.CPU, after.Memory, after.Peak, after.Logged - before.Logged, stamps.Changed(now), end - first}, err
}

// mebibytes formats a size.
func mebibytes(bytes int64) string { return measure.Short(float64(bytes) / (1 << 20)) }

// idle measures a node without changes.
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
			g, err := newGuarded(f, usual, agentFile(0), "--resync-interval", "1s")
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
	s.say("%d passes, at one a second in place of one a minute, so that this is what %d idle minutes cost; %d prefixes in the entry and %d in the agents' file. "+
		"*Files changed* are files and directories of the state, of the agents and of the conflists that have another inode, size, mtime or ctime after it, to the nanosecond, "+
		"or are new or gone. *Peak* is the most memory since its start (VmHWM).", passes, passes, usual, agentPrefixes)
	rows := [][]string{{"form", "commits", "files changed", "bytes logged", "RSS, MiB", "peak, MiB", "processor time, ms", "share of one processor in reality"}}
	for i, f := range scene.Forms() {
		r := results[i]
		rows = append(rows, []string{f.Name, fmt.Sprint(r.commits), fmt.Sprint(r.files), fmt.Sprint(r.logged), mebibytes(r.memory), mebibytes(r.peak),
			measure.Short(milliseconds(r.cpu)), fmt.Sprintf("%.6f %%", 100*r.cpu.Seconds()/float64(passes*60))})
		b.report.judge(budget{"reconciler idle, " + f.Name, "no write, no log line, < 20 MiB RSS at the peak",
			fmt.Sprintf("%d commits, %d files changed, %d bytes logged, %s MiB at the peak", r.commits, r.files, r.logged, mebibytes(r.peak)),
			plainly(r.commits == 0 && r.files == 0 && r.logged == 0 && r.peak < mostMemory),
			"the figures above say which part."})
	}
	s.table(rows)
	return nil
}
