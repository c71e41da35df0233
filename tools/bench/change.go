// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// operation is a contender with an untimed first step.
type operation struct {
	name   string
	before func(round int) error
	timed  func() (time.Duration, error)
}

func (c operation) contender() measure.Contender {
	return measure.Contender{Name: c.name, Run: func(round int) (float64, error) {
		if err := c.before(round); err != nil {
			return 0, err
		}
		took, err := c.timed()
		return milliseconds(took), err
	}}
}

func contenders(all []operation) []measure.Contender {
	var made []measure.Contender
	for _, c := range all {
		made = append(made, c.contender())
	}
	return made
}

// addTimed times an ADD of ip-masq.
func addTimed(n *scene.Node) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		took, err := n.Add("ip-masq", n.NextPod())
		return took.Wall, err
	}
}

// feedTimed times a program that reads a script.
func feedTimed(n *scene.Node, script func() string, program string, args ...string) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		text := script()
		start := time.Now()
		err := n.Feed(text, program, args...)
		return time.Since(start), err
	}
}

// change measures writing rules.
func (b *bench) change() (err error) {
	prefixes := scene.Prefixes(10_000)
	var nodes []*scene.Node
	defer func() {
		for _, n := range nodes {
			err = errors.Join(err, n.Close())
		}
	}()
	for _, f := range append(scene.Backends(), scene.Backends()...) { // the last three are for the agents and the tools
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
		if len(nodes) <= len(scene.Backends()) {
			err = n.Enforce(scene.Policy{Prefixes: prefixes})
		}
		if err != nil {
			return err
		}
	}
	section := b.report.section("Rule changes")
	section.say("The policy has %s prefixes. `iptables-restore` writes the rules that the agents write every minute. `nft -f` "+
		"writes the table of ip-masq.\n\n"+
		"ADD is a whole plugin process. It parses the plugin entry, reads the rules twice to verify the difference, "+
		"writes the document, writes the rules and reads them again. Therefore a change of one prefix costs almost as "+
		"much as a change of all prefixes. The test writes the document to memory; a disk adds the time of its sync.\n\n"+
		"*In process* is one transaction of a reconciler with an open socket. It reads the rules and writes the "+
		"difference. [Repair of changed rules](#repair-of-changed-rules) has the time from the kernel's event to the "+
		"reconciler's last commit.",
		chart.Thousands(len(prefixes)))
	policies := []scene.Policy{{Prefixes: prefixes}, {Prefixes: prefixes[:len(prefixes)-1]}}
	if err := b.onePrefix(section, nodes, policies); err != nil {
		return err
	}
	if err := b.rebuild(section, nodes, policies); err != nil {
		return err
	}
	return b.firstPod(section, nodes)
}

// onePrefix alternately removes a prefix from the list and adds it again.
func (b *bench) onePrefix(section *section, nodes []*scene.Node, policies []scene.Policy) (err error) {
	all := []operation{{empty, func(int) error { return nodes[0].State(policies[0]) }, func() (time.Duration, error) {
		took, err := nodes[0].Add("plugin-empty", nodes[0].NextPod())
		return took.Wall, err
	}}}
	for _, n := range nodes[:3] {
		all = append(all, operation{ipMasqName(n.Backend), func(round int) error { return n.State(policies[(round+2)%2]) }, addTimed(n)})
	}
	for _, n := range nodes[4:] {
		var round int
		all = append(all, operation{"the agents' restore, " + n.Backend.Name, func(r int) error { round = r; return nil },
			feedTimed(n, func() string { return scene.AgentScript(policies[(round+2)%2].Prefixes) }, "iptables-restore", "--noflush")})
	}
	rebuilder, err := nodes[3].Rebuilder(policies[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rebuilder.Close()) }()
	if _, err := rebuilder.Apply(); err != nil {
		return err
	}
	all = append(all, operation{"in process, nftables", func(round int) error { return rebuilder.SetPolicy(policies[(round+3)%2]) }, rebuilder.Apply})
	f, err := measure.Interleave(b.limit(14, 15*time.Second), contenders(all)...)
	if err != nil {
		return err
	}
	section.say("One prefix added or removed:")
	section.table(compared(f, all, "ms", empty, "× the empty plugin"))
	return nil
}

func compared(f measure.Figures, all []operation, unit, base, ratio string) [][]string {
	rows := [][]string{{"case", unit, ratio}}
	for _, c := range all {
		rows = append(rows, []string{c.name, f.Of(c.name).String(), f.Ratio(c.name, base).String()})
	}
	return rows
}

// rebuild restores rules that were deleted.
func (b *bench) rebuild(section *section, nodes []*scene.Node, policies []scene.Policy) (err error) {
	rebuilder, err := nodes[3].Rebuilder(policies[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rebuilder.Close()) }()
	const inProcess, base = "in process, nftables", "iptables-restore, iptables-nft"
	wipe := func(n *scene.Node) func(int) error {
		return func(int) error { return errors.Join(n.State(policies[0]), n.Wipe()) }
	}
	all := []operation{{inProcess, wipe(nodes[3]), rebuilder.Apply},
		{"nft -f, nftables", wipe(nodes[3]), feedTimed(nodes[3], rebuilder.Script, "nft", "-f", "-")}}
	for _, n := range nodes[4:] {
		all = append(all, operation{"iptables-restore, " + n.Backend.Name, wipe(n),
			feedTimed(n, func() string { return scene.AgentScript(policies[0].Prefixes) }, "iptables-restore", "--noflush")})
	}
	for _, n := range nodes[:3] {
		all = append(all, operation{"ADD, " + n.Backend.Name, wipe(n), addTimed(n)})
	}
	f, err := measure.Interleave(b.limit(12, 20*time.Second), contenders(all)...)
	if err != nil {
		return err
	}
	section.say("All rules recreated after their deletion:")
	section.table(compared(f, all, "ms", base, "× "+base))
	var rows []chart.Row
	const most = 60.0 / 169 // the budget and its base, in ms
	for _, c := range all {
		row := chart.Row{Name: c.name, Ratio: f.Ratio(c.name, base)}
		if c.name == inProcess {
			row.Budget = most
			b.report.judge(budget{"full rebuild, " + chart.Thousands(len(policies[0].Prefixes)) + " prefixes, " + c.name,
				fmt.Sprintf("60 ms if iptables-restore (nft) takes 169 ms: ≤ %.2f ×", most),
				fmt.Sprintf("%s ×; %s ms", row.Ratio, f.Of(c.name)), atMost(row.Ratio, most),
				"most of the time is the kernel's commit."})
		}
		rows = append(rows, row)
	}
	svg, err := chart.Ratios("A full rebuild, as a multiple of iptables-restore", "× iptables-restore of iptables-nft", rows)
	return b.report.plot(section, "rebuild.svg", "a full rebuild as a multiple of iptables-restore", svg, err)
}

// firstPod measures the first ADD on a new node.
func (b *bench) firstPod(section *section, nodes []*scene.Node) error {
	few := scene.Policy{Prefixes: scene.Prefixes(usual)}
	all := []operation{{empty, func(int) error { return nodes[0].State(few) }, func() (time.Duration, error) {
		took, err := nodes[0].Add("plugin-empty", nodes[0].NextPod())
		return took.Wall, err
	}}}
	for _, n := range nodes[:3] {
		all = append(all, operation{ipMasqName(n.Backend), func(int) error { return errors.Join(n.State(few), n.Forget()) }, addTimed(n)})
	}
	f, err := measure.Interleave(b.limit(20, 10*time.Second), contenders(all)...)
	if err != nil {
		return err
	}
	section.say("The first ADD on a node without state and rules, with %d prefixes:", usual)
	section.table(compared(f, all, "ms", empty, "× the empty plugin"))
	return nil
}

// large measures a very long list on nftables.
func (b *bench) large() (err error) {
	prefixes := scene.Prefixes(100_000)
	if b.quick {
		prefixes = scene.Prefixes(20_000)
	}
	n, err := scene.NewNode(scene.Backends()[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	policies := []scene.Policy{{Prefixes: prefixes}, {Prefixes: prefixes[:len(prefixes)-1]}}
	if err := n.Enforce(policies[0]); err != nil {
		return err
	}
	elements, err := n.Elements()
	if err != nil {
		return err
	}
	entry, err := n.Entry(policies[0])
	if err != nil {
		return err
	}
	const settled = "ADD, rules in sync"
	twice := func(int) error { return errors.Join(n.Enforce(policies[0]), n.Enforce(policies[0])) }
	disturbed := func(int) error { return errors.Join(n.Enforce(policies[0]), n.Commit()) }
	wiped := func(int) error { return errors.Join(n.Enforce(policies[0]), n.Wipe()) }
	all := []operation{
		{empty, func(int) error { return n.State(policies[0]) }, func() (time.Duration, error) {
			took, err := n.Add("plugin-empty", n.NextPod())
			return took.Wall, err
		}},
		{settled, twice, addTimed(n)},
		{settled + afterCommit, disturbed, addTimed(n)},
		{"ADD, one prefix removed", func(int) error { return errors.Join(n.Enforce(policies[0]), n.State(policies[1])) }, addTimed(n)},
		{"ADD, all rules recreated", wiped, addTimed(n)},
	}
	f, err := measure.Interleave(measure.Limit{Rounds: 5, Least: 2, Time: 30 * time.Second, Cold: true}, contenders(all)...)
	if err != nil {
		return err
	}
	var peaks []string
	for _, before := range []func(int) error{twice, disturbed, wiped} {
		if err := before(0); err != nil {
			return err
		}
		peak, err := n.Peak(scene.Request{Plugin: "ip-masq", Container: n.NextPod()})
		if err != nil {
			return err
		}
		peaks = append(peaks, fmt.Sprintf("%.0f", float64(peak)/(1<<20)))
	}
	s := b.report.section(chart.Thousands(len(prefixes)) + " prefixes on nftables")
	s.say("This list needs a higher `cidrLimit`. The plugin entry has %.1f MB. Each ADD parses it, also the ADD of the "+
		"empty plugin. The set has %s elements.\n\n"+
		"The peak memory of ADD is %s MiB with rules in sync, %s MiB after another program's commit, and %s MiB if ADD "+
		"creates all rules again. [New connections](#new-connections) has the cost of a new connection.", float64(len(entry))/1e6, chart.Thousands(elements), peaks[0], peaks[1], peaks[2])
	s.table(compared(f, all, "ms", empty, "× the empty plugin"))
	b.report.judge(budget{chart.Thousands(len(prefixes)) + " prefixes on nftables", "all prefixes are in the set", fmt.Sprintf("%s elements in the set; ADD with rules in sync %s × an empty plugin with the same entry",
		chart.Thousands(elements), f.Ratio(settled, empty)), plainly(elements == len(prefixes)), "the set lacks elements."})
	return nil
}
