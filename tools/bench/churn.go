// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// The node that is simulated, and its cluster.
const (
	fullNode  = 250  // pods
	nodes     = 5000 // of that size
	perSecond = 10   // pods that go, and as many that come
)

// churned is what became of a node's minutes.
type churned struct {
	add, del   measure.Series // ms
	cpu, floor measure.Series // ms of an ADD and a DEL, of ours and of the empty plugin's
	changes    int
	reconciler spent
	quiet      spent // without changes of the ConfigMap
}

// churn simulates a full node whose pods come and go while its ConfigMap changes.
func (b *bench) churn() error {
	s := b.report.section(fmt.Sprintf("A node of %d pods, %d of them replaced every second", fullNode, perSecond))
	s.say("Every tenth of a second a pod goes and another comes, with a reconciler beside, %d prefixes in the entry; first with nothing else, then with a change of the "+
		"agents' file every second.", usual)
	rows := [][]string{{"form", "ADD, ms", "ADD, 99 of 100, ms", "DEL, ms", "processor time of a pair, ms", "× an empty plugin's", "of one processor", "commits without a change", "commits a change", "reconciler, ms a change", "reconciler, RSS MiB"}}
	scale := [][]string{{"measured on one node", "nftables", "iptables-nft"}}
	var columns []churned
	for _, f := range scene.Forms()[:2] {
		c, err := b.churnOf(f)
		if err != nil {
			return err
		}
		columns = append(columns, c)
		rows = append(rows, []string{f.Name, c.add.String(), measure.Short(c.add.Quantile(0.99)), c.del.String(), c.cpu.String(),
			measure.Paired(c.cpu, c.floor).String(), fmt.Sprintf("%s %%", measure.Short(c.cpu.Median()*perSecond/10)), fmt.Sprint(c.quiet.commits), c.perChange(float64(c.reconciler.commits)),
			c.perChange(milliseconds(c.reconciler.cpu)), measure.Short(float64(c.reconciler.memory) / (1 << 20))})
	}
	s.table(rows)
	for _, line := range []struct {
		name string
		of   func(churned) string
	}{
		{"ADD, ms", func(c churned) string { return c.add.String() }},
		{"processor time of an ADD and a DEL, ms", func(c churned) string { return c.cpu.String() }},
		{"the same of an empty plugin, ms", func(c churned) string { return c.floor.String() }},
		{fmt.Sprintf("%d pods a second: share of one processor", perSecond), func(c churned) string { return measure.Short(c.cpu.Median()*perSecond/10) + " %" }},
		{fmt.Sprintf("commits by %d ADDs and as many DELs", len(columns[0].add)/2), func(c churned) string { return fmt.Sprint(c.quiet.commits) }},
		{"commits by a change of the ConfigMap", func(c churned) string { return c.perChange(float64(c.reconciler.commits)) }},
		{"processor time of the reconciler by a change, ms", func(c churned) string { return c.perChange(milliseconds(c.reconciler.cpu)) }},
		{"memory of the reconciler, MiB", func(c churned) string { return measure.Short(float64(c.reconciler.memory) / (1 << 20)) }},
		{fmt.Sprintf("%s nodes, a change a minute: commits a second in the whole cluster", chart.Thousands(nodes)), func(c churned) string {
			return measure.Short(float64(c.reconciler.commits) / float64(c.changes) * nodes / 60)
		}},
	} {
		row := []string{line.name}
		for _, c := range columns {
			row = append(row, line.of(c))
		}
		scale = append(scale, row)
	}
	b.report.scale.WriteString(table(scale))
	return nil
}

func (c churned) perChange(v float64) string { return measure.Short(v / float64(c.changes)) }

func (b *bench) churnOf(f scene.Form) (c churned, err error) {
	half := 15 * time.Second
	if b.quick {
		half = 4 * time.Second
	}
	n, err := scene.NewNode(f)
	if err != nil {
		return c, err
	}
	g := guarded{Node: n}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := errors.Join(n.AgentFile(agentFile(0)), n.Enforce(scene.Policy{Prefixes: scene.Prefixes(usual)})); err != nil {
		return c, err
	}
	for range fullNode {
		if _, err := n.Add("ip-masq", n.NextPod()); err != nil {
			return c, err
		}
	}
	if g.reconciler, err = n.StartReconciler("--resync-interval", "60s"); err != nil {
		return c, err
	}
	if c.quiet, err = g.watch(func() error { return c.replace(n, half, func() error { return nil }) }); err != nil {
		return c, err
	}
	c.reconciler, err = g.watch(func() error {
		next := time.Now()
		return c.replace(n, half, func() error {
			if time.Now().Before(next) {
				return nil
			}
			next = next.Add(time.Second)
			c.changes++
			return n.AgentFile(agentFile(c.changes))
		})
	})
	return c, err
}

// agentFile is the agents' file after so many changes.
func agentFile(changes int) string {
	var b strings.Builder
	b.WriteString("nonMasqueradeCIDRs:\n")
	for i := range 20 {
		fmt.Fprintf(&b, "- 100.%d.%d.0/24\n", 64+i, changes%250)
	}
	return b.String()
}

// replace has a pod go and another come every tenth of a second.
func (c *churned) replace(n *scene.Node, d time.Duration, also func() error) error {
	tick := time.NewTicker(time.Second / perSecond)
	defer tick.Stop()
	for start := time.Now(); time.Since(start) < d; <-tick.C {
		pod := n.NextPod()
		gone, err := n.Run(scene.Request{Plugin: "ip-masq", Verb: "DEL", Container: pod})
		if err != nil {
			return err
		}
		come, err := n.Add("ip-masq", pod)
		if err != nil {
			return err
		}
		c.add, c.del = append(c.add, milliseconds(come.Wall)), append(c.del, milliseconds(gone.Wall))
		c.cpu = append(c.cpu, milliseconds(come.CPU+gone.CPU))
		var floor time.Duration
		for _, verb := range []string{"DEL", "ADD"} {
			took, err := n.Run(scene.Request{Plugin: "plugin-empty", Verb: verb, Container: pod})
			if err != nil {
				return err
			}
			floor += took.CPU
		}
		c.floor = append(c.floor, milliseconds(floor))
		if err := also(); err != nil {
			return err
		}
	}
	return nil
}
