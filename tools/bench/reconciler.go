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

// reconciledNode is a node with rules and a reconciler.
type reconciledNode struct {
	*scene.Node
	reconciler *scene.Reconciler
}

// newReconciledNode makes a node with n prefixes and a reconciler. It writes the agent file first, if
// there is one.
func newReconciledNode(f scene.Backend, prefixes int, agents string, args ...string) (g reconciledNode, err error) {
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

func (g reconciledNode) close() error {
	var err error
	if g.reconciler != nil {
		err = g.reconciler.Stop()
	}
	if g.Node != nil {
		err = errors.Join(err, g.Close())
	}
	return err
}

// usage is the difference of two readings of a reconciler and its node.
type usage struct {
	cpu          time.Duration
	memory, peak int64 // bytes
	logged       int64 // bytes
	files        int   // files changed
	commits      uint32
}

// usageDuring reads the usage before and after a function.
func (g reconciledNode) usageDuring(run func() error) (s usage, err error) {
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
	if err := run(); err != nil {
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
	return usage{after.CPU - before.CPU, after.Memory, after.Peak, after.Logged - before.Logged, stamps.Changed(now), end - first}, err
}

// mebibytes formats a size.
func mebibytes(bytes int64) string { return measure.Short(float64(bytes) / (1 << 20)) }

// idle measures a node without changes.
func (b *bench) idle() error {
	const mostMemory = 20 << 20
	syncs := 60
	if b.quick {
		syncs = 10
	}
	results := make([]usage, len(scene.Backends()))
	errs := make([]error, len(results))
	var all sync.WaitGroup
	for i, f := range scene.Backends() {
		all.Go(func() {
			g, err := newReconciledNode(f, usual, agentFile(0), "--resync-interval", "1s")
			if err == nil {
				time.Sleep(time.Second) // for the commits of its start
				results[i], err = g.usageDuring(func() error { time.Sleep(time.Duration(syncs) * time.Second); return nil })
			}
			errs[i] = errors.Join(err, g.close())
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	s := b.report.section("The reconciler, idle")
	s.say("The reconciler does %d syncs, one per second instead of one per minute. This is the cost of %d idle minutes. "+
		"The plugin entry has %d prefixes, and the agent file has %d.\n\n"+
		"- *Files changed* is the number of files and directories with a different inode, size, mtime or ctime. It "+
		"counts the state, the agent files and the conflists, and includes created and deleted files.\n"+
		"- *Peak* is the maximum resident memory since the start (VmHWM).", syncs, syncs, usual, agentPrefixes)
	rows := [][]string{{"backend", "commits", "files changed", "bytes logged", "RSS, MiB", "peak, MiB", "processor time, ms", "share of one processor at one sync per minute"}}
	for i, f := range scene.Backends() {
		r := results[i]
		rows = append(rows, []string{f.Name, fmt.Sprint(r.commits), fmt.Sprint(r.files), fmt.Sprint(r.logged), mebibytes(r.memory), mebibytes(r.peak),
			measure.Short(milliseconds(r.cpu)), fmt.Sprintf("%.6f %%", 100*r.cpu.Seconds()/float64(syncs*60))})
		b.report.judge(budget{"reconciler idle, " + f.Name, "no write, no log line, < 20 MiB peak RSS",
			fmt.Sprintf("%d commits, %d files changed, %d bytes logged, %s MiB peak RSS", r.commits, r.files, r.logged, mebibytes(r.peak)),
			plainly(r.commits == 0 && r.files == 0 && r.logged == 0 && r.peak < mostMemory),
			"column \"measured\" has the figure above its limit."})
	}
	s.table(rows)
	return nil
}
