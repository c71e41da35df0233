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

// changing is a contender with an untimed first step.
type changing struct {
	name   string
	before func(round int) error
	timed  func() (time.Duration, error)
}

func (c changing) contender() measure.Contender {
	return measure.Contender{Name: c.name, Run: func(round int) (float64, error) {
		if err := c.before(round); err != nil {
			return 0, err
		}
		took, err := c.timed()
		return milliseconds(took), err
	}}
}

func contenders(all []changing) []measure.Contender {
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

// fed times a program that reads a script.
func fed(n *scene.Node, script func() string, program string, args ...string) func() (time.Duration, error) {
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
	for _, f := range append(scene.Forms(), scene.Forms()...) { // the second three are the agents' and the tools'
		n, err := scene.NewNode(f)
		if err != nil {
			return err
		}
		nodes = append(nodes, n)
		if len(nodes) <= len(scene.Forms()) {
			err = n.Enforce(scene.Policy{Prefixes: prefixes})
		}
		if err != nil {
			return err
		}
	}
	section := b.report.section("Changes")
	section.say("%s prefixes. The tools write what the agents write every minute, and `nft -f` what our tables are. ADD is a whole plugin process: "+
		"it parses the entry, reads the rules twice to be sure of the difference, writes the document (to memory here: a disk adds its sync), writes the rules and reads them again; "+
		"so one prefix is hardly cheaper than all of them. *In process* is one transaction as a reconciler makes it, whose socket is open: it reads what stands there and writes "+
		"the difference. What a reconciler takes from the kernel's word to the last commit is below, under repair.",
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
	all := []changing{{empty, func(int) error { return nodes[0].State(policies[0]) }, func() (time.Duration, error) {
		took, err := nodes[0].Add("plugin-empty", nodes[0].NextPod())
		return took.Wall, err
	}}}
	for _, n := range nodes[:3] {
		all = append(all, changing{ours(n.Form), func(round int) error { return n.State(policies[(round+2)%2]) }, addTimed(n)})
	}
	for _, n := range nodes[4:] {
		var round int
		all = append(all, changing{"the agents' restore, " + n.Form.Name, func(r int) error { round = r; return nil },
			fed(n, func() string { return scene.AgentScript(policies[(round+2)%2].Prefixes) }, "iptables-restore", "--noflush")})
	}
	rebuilder, err := nodes[3].Rebuilder(policies[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rebuilder.Close()) }()
	if _, err := rebuilder.Apply(); err != nil {
		return err
	}
	all = append(all, changing{"in process, nftables", func(round int) error { return rebuilder.Turn(policies[(round+3)%2]) }, rebuilder.Apply})
	f, err := measure.Interleave(b.limit(14, 15*time.Second), contenders(all)...)
	if err != nil {
		return err
	}
	section.say("One prefix added or taken out:")
	section.table(compared(f, all, "ms", empty, "× the empty plugin"))
	return nil
}

func compared(f measure.Figures, all []changing, unit, base, ratio string) [][]string {
	rows := [][]string{{"", unit, ratio}}
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
	all := []changing{{inProcess, wipe(nodes[3]), rebuilder.Apply},
		{"nft -f, nftables", wipe(nodes[3]), fed(nodes[3], rebuilder.Script, "nft", "-f", "-")}}
	for _, n := range nodes[4:] {
		all = append(all, changing{"iptables-restore, " + n.Form.Name, wipe(n),
			fed(n, func() string { return scene.AgentScript(policies[0].Prefixes) }, "iptables-restore", "--noflush")})
	}
	for _, n := range nodes[:3] {
		all = append(all, changing{"ADD, " + n.Form.Name, wipe(n), addTimed(n)})
	}
	f, err := measure.Interleave(b.limit(12, 20*time.Second), contenders(all)...)
	if err != nil {
		return err
	}
	section.say("All rules made again, after somebody took them away:")
	section.table(compared(f, all, "ms", base, "× "+base))
	var rows []chart.Row
	const most = 60.0 / 169 // of the budget and of its yardstick
	for _, c := range all {
		row := chart.Row{Name: c.name, Ratio: f.Ratio(c.name, base)}
		if c.name == inProcess {
			row.Budget = most
			b.report.judge(budget{"full rebuild, " + chart.Thousands(len(policies[0].Prefixes)) + " prefixes, " + c.name,
				fmt.Sprintf("60 ms where iptables-restore (nft) takes 169: ≤ %.2f × of it", most),
				fmt.Sprintf("%s ×; %s ms", row.Ratio, f.Of(c.name)), atMost(row.Ratio, most),
				"most of it is the kernel's commit."})
		}
		rows = append(rows, row)
	}
	svg, err := chart.Ratios("A full rebuild, as a multiple of iptables-restore", "× iptables-restore of iptables-nft", rows)
	return b.report.plot(section, "rebuild.svg", "a full rebuild as a multiple of iptables-restore", svg, err)
}

// firstPod measures the first ADD on a new node.
func (b *bench) firstPod(section *section, nodes []*scene.Node) error {
	few := scene.Policy{Prefixes: scene.Prefixes(usual)}
	all := []changing{{empty, func(int) error { return nodes[0].State(few) }, func() (time.Duration, error) {
		took, err := nodes[0].Add("plugin-empty", nodes[0].NextPod())
		return took.Wall, err
	}}}
	for _, n := range nodes[:3] {
		all = append(all, changing{ours(n.Form), func(int) error { return errors.Join(n.State(few), n.Forget()) }, addTimed(n)})
	}
	f, err := measure.Interleave(b.limit(20, 10*time.Second), contenders(all)...)
	if err != nil {
		return err
	}
	section.say("The first ADD on an empty node, with %d prefixes: no state, no rules.", usual)
	section.table(compared(f, all, "ms", empty, "× the empty plugin"))
	return nil
}

// large measures a very long list on nftables.
func (b *bench) large() (err error) {
	prefixes := scene.Prefixes(100_000)
	if b.quick {
		prefixes = scene.Prefixes(20_000)
	}
	n, err := scene.NewNode(scene.Forms()[0])
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
	const settled = "ADD, all right already"
	twice := func(int) error { return errors.Join(n.Enforce(policies[0]), n.Enforce(policies[0])) }
	disturbed := func(int) error { return errors.Join(n.Enforce(policies[0]), n.Commit()) }
	wiped := func(int) error { return errors.Join(n.Enforce(policies[0]), n.Wipe()) }
	all := []changing{
		{empty, func(int) error { return n.State(policies[0]) }, func() (time.Duration, error) {
			took, err := n.Add("plugin-empty", n.NextPod())
			return took.Wall, err
		}},
		{settled, twice, addTimed(n)},
		{settled + changed, disturbed, addTimed(n)},
		{"ADD, one prefix taken out", func(int) error { return errors.Join(n.Enforce(policies[0]), n.State(policies[1])) }, addTimed(n)},
		{"ADD, all rules made again", wiped, addTimed(n)},
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
		peak, err := n.Peak()
		if err != nil {
			return err
		}
		peaks = append(peaks, fmt.Sprintf("%.0f", float64(peak)/(1<<20)))
	}
	s := b.report.section(chart.Thousands(len(prefixes)) + " prefixes on nftables")
	s.say("`cidrLimit` has to be raised for it, and every pod's ADD is handed the entry of %.1f MB, which even the empty plugin has to parse. The set has %s elements. "+
		"The most memory that ADD has is %s MiB if all is right already, %s MiB after a commit of others, and %s MiB if it makes all rules again. "+
		"What a new connection costs then is above.", float64(len(entry))/1e6, chart.Thousands(elements), peaks[0], peaks[1], peaks[2])
	s.table(compared(f, all, "ms", empty, "× the empty plugin"))
	b.report.judge(budget{chart.Thousands(len(prefixes)) + " prefixes on nftables", "work", fmt.Sprintf("%s elements in the set; ADD when all is right %s × an empty plugin with the same entry",
		chart.Thousands(elements), f.Ratio(settled, empty)), plainly(elements == len(prefixes)), "elements are missing from the set."})
	return nil
}
