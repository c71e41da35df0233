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

// The simulated node and its cluster.
const (
	fullNode  = 250  // pods
	nodes     = 5000 // of that size
	perSecond = 10   // pods that are replaced
)

// agentPrefixes is the number of prefixes in the agent file.
const agentPrefixes = 20

// half has the results of one half of a simulation.
type half struct {
	add, del   measure.Series // ms
	cpu, floor measure.Series // ms of a DEL and an ADD, of ip-masq and of the empty plugin
	reconciler usage
	took       time.Duration
	changes    int // of the agent file
	thirdParty int // commits of other programs
}

// The halves of a simulation.
const (
	undisturbed = "undisturbed"
	disturbed   = "disturbed"
)

// churn simulates a full node whose pods are replaced, first alone and then while other programs
// commit and the ConfigMap changes.
func (b *bench) churn() error {
	s := b.report.section(fmt.Sprintf("A node of %d pods, %d of them replaced every second", fullNode, perSecond))
	s.say("A new pod replaces an old pod every tenth of a second while a reconciler runs. The plugin entry has %d "+
		"prefixes, and the agent file has %d. The test has two halves:\n\n"+
		"- *%s*: no other program commits. Each ADD and DEL can use the verification cache of an earlier ADD.\n"+
		"- *%s*: another program commits a rule to nf_tables before each ADD and each DEL, as kube-proxy does when "+
		"pods start and stop. Each ADD and DEL reads the rules. The agent file changes every second.\n\n"+
		"The empty plugin runs right after ip-masq, for the same pod.", usual, agentPrefixes, undisturbed, disturbed)
	plugin := [][]string{{"backend, half", "ADD, ms", "ADD, 99th percentile, ms", "DEL, ms", "processor time of an ADD and a DEL, ms", "× an empty plugin's", "share of one processor"}}
	background := [][]string{{"backend, half", "commits of other programs", "changes of the agent file", "commits of ip-masq", "reconciler, processor ms per second", "reconciler, RSS MiB", "peak, MiB"}}
	scale := [][]string{{"measured on one node"}}
	var columns []half
	for _, f := range scene.Backends()[:2] {
		quiet, busy, err := b.churnOf(f)
		if err != nil {
			return err
		}
		for i, h := range []half{quiet, busy} {
			name := f.Name + ", " + []string{undisturbed, disturbed}[i]
			scale[0] = append(scale[0], name)
			columns = append(columns, h)
			plugin = append(plugin, []string{name, h.add.String(), measure.Short(h.add.Quantile(0.99)), h.del.String(), h.cpu.String(),
				measure.Paired(h.cpu, h.floor).String(), h.share()})
			background = append(background, []string{name, fmt.Sprint(h.thirdParty), fmt.Sprint(h.changes), fmt.Sprint(h.commits()), h.reconciling(),
				mebibytes(h.reconciler.memory), mebibytes(h.reconciler.peak)})
		}
	}
	s.table(plugin)
	s.say("The next table has the commits and the reconciler at the same time. The reconciler receives the events of all " +
		"commits and reads the rules after them.")
	s.table(background)
	b.report.scale.WriteString(table(append(scale, scaleRows(columns)...)))
	return nil
}

// scaleRows returns the rows of docs/scale.md, with a column for each half.
func scaleRows(columns []half) (rows [][]string) {
	// Some rows apply only to the half with changes.
	changed := func(of func(half) string) func(half) string {
		return func(h half) string {
			if h.changes == 0 {
				return "–"
			}
			return of(h)
		}
	}
	for _, line := range []struct {
		name string
		of   func(half) string
	}{
		{"ADD, ms", func(h half) string { return h.add.String() }},
		{"DEL, ms", func(h half) string { return h.del.String() }},
		{"processor time of an ADD and a DEL, ms", func(h half) string { return h.cpu.String() }},
		{"processor time of an ADD and a DEL of the empty plugin, ms", func(h half) string { return h.floor.String() }},
		{"× the empty plugin", func(h half) string { return measure.Paired(h.cpu, h.floor).String() }},
		{fmt.Sprintf("%d pods per second: share of one processor", perSecond), half.share},
		{"number of ADDs, and of DELs", func(h half) string { return fmt.Sprint(len(h.add)) }},
		{"commits of other programs", func(h half) string { return fmt.Sprint(h.thirdParty) }},
		{"changes of the agent file", func(h half) string { return fmt.Sprint(h.changes) }},
		{"commits of ip-masq", func(h half) string { return fmt.Sprint(h.commits()) }},
		{"commits of ip-masq per change of the agent file", changed(func(h half) string { return measure.Short(float64(h.commits()) / float64(h.changes)) })},
		{"processor time of the reconciler per second, ms", half.reconciling},
		{"memory of the reconciler, MiB", func(h half) string { return mebibytes(h.reconciler.memory) }},
		{fmt.Sprintf("%s nodes, one change per minute: commits per second in the whole cluster", chart.Thousands(nodes)), changed(func(h half) string {
			return measure.Short(float64(h.commits()) / float64(h.changes) * nodes / 60)
		})},
	} {
		row := []string{line.name}
		for _, h := range columns {
			row = append(row, line.of(h))
		}
		rows = append(rows, row)
	}
	return rows
}

// share returns the processor share of the ADDs and DELs.
func (h half) share() string { return measure.Short(h.cpu.Median()*perSecond/10) + " %" }

// reconciling returns the reconciler's processor time per second, in ms.
func (h half) reconciling() string {
	return measure.Short(milliseconds(h.reconciler.cpu) / h.took.Seconds())
}

// commits returns the number of commits without those of other programs.
func (h half) commits() int { return int(h.reconciler.commits) - h.thirdParty }

func (b *bench) churnOf(f scene.Backend) (quiet, busy half, err error) {
	long := 15 * time.Second
	if b.quick {
		long = 4 * time.Second
	}
	n, err := scene.NewNode(f)
	if err != nil {
		return quiet, busy, err
	}
	g := reconciledNode{Node: n}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := errors.Join(n.AgentFile(agentFile(0)), n.Enforce(scene.Policy{Prefixes: scene.Prefixes(usual)})); err != nil {
		return quiet, busy, err
	}
	for range fullNode {
		if _, err := n.Add("ip-masq", n.NextPod()); err != nil {
			return quiet, busy, err
		}
	}
	if g.reconciler, err = n.StartReconciler("--resync-interval", "60s"); err != nil {
		return quiet, busy, err
	}
	nothing := func() error { return nil }
	if quiet.reconciler, err = g.usageDuring(func() error { return quiet.replace(n, long, nothing, nothing) }); err != nil {
		return quiet, busy, err
	}
	busy.reconciler, err = g.usageDuring(func() error {
		defer time.Sleep(time.Second / 2) // for the commits of the last change
		next := time.Now()
		commit := func() error { busy.thirdParty++; return n.Commit() }
		return busy.replace(n, long, commit, func() error {
			if time.Now().Before(next) {
				return nil
			}
			next = next.Add(time.Second)
			busy.changes++
			return n.AgentFile(agentFile(busy.changes))
		})
	})
	return quiet, busy, err
}

// agentFile returns the agent file after this number of changes.
func agentFile(changes int) string {
	var b strings.Builder
	b.WriteString("nonMasqueradeCIDRs:\n")
	for i := range agentPrefixes {
		fmt.Fprintf(&b, "- 100.%d.%d.0/24\n", 64+i, changes%250)
	}
	return b.String()
}

// replace replaces a pod every tenth of a second, and calls before and after around DEL and ADD.
func (h *half) replace(n *scene.Node, d time.Duration, before, after func() error) error {
	tick := time.NewTicker(time.Second / perSecond)
	defer tick.Stop()
	start := time.Now()
	defer func() { h.took = time.Since(start) }()
	for ; time.Since(start) < d; <-tick.C {
		pod := n.NextPod()
		var pair, floor time.Duration
		for _, verb := range []string{"DEL", "ADD"} {
			if err := before(); err != nil {
				return err
			}
			took, err := n.Run(scene.Request{Plugin: "ip-masq", Verb: verb, Container: pod})
			if err != nil {
				return err
			}
			of := &h.add
			if verb == "DEL" {
				of = &h.del
			}
			*of = append(*of, milliseconds(took.Wall))
			pair += took.CPU
		}
		for _, verb := range []string{"DEL", "ADD"} {
			took, err := n.Run(scene.Request{Plugin: "plugin-empty", Verb: verb, Container: pod})
			if err != nil {
				return err
			}
			floor += took.CPU
		}
		h.cpu, h.floor = append(h.cpu, milliseconds(pair)), append(h.floor, milliseconds(floor))
		if err := after(); err != nil {
			return err
		}
	}
	return nil
}
