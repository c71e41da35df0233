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

const (
	empty   = "an empty plugin"
	again   = "an empty plugin, again"
	rules   = ", 5,000 rules"
	changed = ", after a commit of others"
	floor   = "the legacy table, not looked at"
	usual   = 64 // prefixes
)

// ours returns the name of ip-masq with a backend.
func ours(f scene.Form) string { return "ip-masq, " + f.Name }

// setting is a policy for measuring ADDs.
type setting struct {
	name     string
	prefixes int
	policy   scene.Policy
}

func (b *bench) settings() []setting {
	var all []setting
	for _, n := range b.sizes(4, usual, 1000, 10_000) {
		all = append(all, setting{chart.Thousands(n), n, scene.Policy{Prefixes: scene.Prefixes(n)}})
	}
	for _, n := range b.sizes(usual, 1000) {
		all = append(all, setting{chart.Thousands(n) + ", dual stack", n, scene.Policy{Prefixes: scene.DualStack(n), IPv6: true}})
	}
	return all
}

// add measures ADD with rules in sync.
func (b *bench) add() (err error) {
	s, err := newStage()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	names := []string{empty, again}
	for _, suffix := range []string{"", rules} {
		for _, f := range scene.Forms() {
			names = append(names, ours(f)+suffix)
		}
		for _, f := range scene.Forms()[:2] {
			names = append(names, ours(f)+changed+suffix)
		}
		for _, variant := range []string{"nft", "legacy"} {
			names = append(names, "`iptables -S`, "+variant+suffix, "go-iptables, "+variant+suffix)
		}
		names = append(names, floor+suffix)
	}
	tables := addTables{heads: [3]string{"× the empty plugin", "processor time, × the empty plugin's", "ms"}, names: names}
	lines := map[string]*chart.Line{}
	for _, at := range b.settings() {
		if err := s.enforce(at.policy); err != nil {
			return err
		}
		costs := map[string]*cost{}
		var contenders []measure.Contender
		for _, v := range s.verifiers() {
			contenders = append(contenders, v.alone(costs))
		}
		most := 10 * time.Second
		if at.prefixes == usual && !at.policy.IPv6 {
			most = 40 * time.Second // the budgets are about these
		}
		f, err := measure.Interleave(b.limit(200, most), contenders...)
		if err != nil {
			return err
		}
		tables.add(at.name, f, costs)
		for _, name := range names {
			if !at.policy.IPv6 {
				if lines[name] == nil {
					lines[name] = &chart.Line{Name: name}
				}
				lines[name].Points = append(lines[name].Points, chart.Point{Count: at.prefixes, Figure: f.Of(name)})
			}
		}
		if at.prefixes == usual && !at.policy.IPv6 {
			b.judgeAdd(f, costs)
		}
	}
	return b.reportAdd(tables, lines)
}

// addTables has the tables of ADDs, with a column for each setting.
type addTables struct {
	heads  [3]string
	names  []string
	tables [3][][]string
}

func (t *addTables) add(setting string, f measure.Figures, costs map[string]*cost) {
	for i := range t.tables {
		if t.tables[i] == nil {
			t.tables[i] = [][]string{{t.heads[i]}}
			for _, name := range t.names {
				t.tables[i] = append(t.tables[i], []string{name})
			}
		}
		t.tables[i][0] = append(t.tables[i][0], setting)
		for j, name := range t.names {
			cell := [3]string{f.Ratio(name, empty).String(), measure.Paired(costs[name].cpu, costs[empty].cpu).String(), f.Of(name).String()}[i]
			t.tables[i][j+1] = append(t.tables[i][j+1], cell)
		}
	}
}

// judgeAdd compares the figures of 64 prefixes with the budgets.
func (b *bench) judgeAdd(f measure.Figures, costs map[string]*cost) {
	budgets := []float64{1.3, 1.5, 2.5}
	judge := func(form scene.Form, name, work string, most float64) {
		r := f.Ratio(name, empty)
		b.report.judge(budget{"ADD, " + work + ", 64 prefixes, " + form.Name, fmt.Sprintf("≤ %.1f × an empty plugin", most),
			r.String() + " ×", atMost(r, most), whyMore(costs[name], costs[empty])})
	}
	for i, form := range scene.Forms() {
		judge(form, ours(form), "all right already", budgets[i])
		b.report.shortly(form, nothingChanged, f.Extra(ours(form), empty))
		b.report.shortly(form, nothingChangedFull, f.Extra(ours(form)+rules, empty))
		if form.Variant == "legacy" {
			continue
		}
		judge(form, ours(form)+changed, strings.TrimPrefix(changed, ", "), budgets[i])
		b.report.shortly(form, otherChanged, f.Extra(ours(form)+changed, empty))
		b.report.shortly(form, otherChangedFull, f.Extra(ours(form)+changed+rules, empty))
		r := f.Ratio(ours(form)+changed+rules, ours(form)+changed)
		b.report.judge(budget{"the same beside 5,000 rules of others, " + form.Name, "unchanged (within a tenth)",
			r.String() + " × without them", atMost(r, 1.1),
			"of table nat ip-masq reads the chain and POSTROUTING, and not the rules of others; what is left is what the kernel takes to find them, and noise between two nodes."})
	}
}

// whyMore returns the parts of an ADD's time beyond an empty plugin's.
func whyMore(ours, empty *cost) string {
	more := func(of func(*cost) measure.Series) float64 { return of(ours).Median() - of(empty).Median() }
	cpu := more(func(c *cost) measure.Series { return c.cpu })
	return fmt.Sprintf("it takes %s ms of processor time more than the empty plugin, which does nothing but start, parse and print. %.0f %% of that is the kernel's, which "+
		"serves %.0f page faults more (%.0f in place of %.0f: a larger program, and what it reads and decodes) and the system calls by which the attachment is noted, the "+
		"documents are read and the rules are asked for.",
		measure.Short(cpu), 100*more(func(c *cost) measure.Series { return c.kernel })/cpu, more(func(c *cost) measure.Series { return c.faults }),
		ours.faults.Median(), empty.faults.Median())
}

func (b *bench) reportAdd(tables addTables, lines map[string]*chart.Line) error {
	s := b.report.section("ADD when all is right already")
	s.say("What each pod's start waits for. From before the plugin's start to after its end, with the same entry and the same result of the plugin before. " +
		"The *empty plugin* parses both, passes the result on and verifies nothing. *`iptables -S`* and *go-iptables* do the same and list the chain, " +
		"the one by a program, the other by `Exists` and `List` of github.com/coreos/go-iptables. Prefixes are of lengths from 8 to 32; " +
		"*5,000 rules* are rules as kube-proxy writes them, in the same table nat.")
	s.say("An ADD of ip-masq that finds all right says so in a verification cache beside the document, and the next one looks at the rules only if documents, entry or program are "+
		"others, or if anybody committed to nf_tables since, which the kernel counts. *%s* is an ADD that looks, for that reason. "+
		"In iptables-legacy, of which nothing is counted, each one looks; *%s* is a plugin that has the kernel hand out the table, as it must, and does no more: the least "+
		"that can cost.", strings.TrimPrefix(changed, ", "), floor)
	s.say("*%s* is the same plugin once more: what its ratio is off 1 is noise. A commit of another program is by a process that has ended when ADD begins, as those of "+
		"`iptables-restore` and `nft` are. Where it goes on and keeps its socket, the kernel cleans up behind its commit when the next socket is closed, in whatever process: 8 to 16 ms "+
		"for the first to come.", again)
	s.table(tables.tables[0])
	s.folded("Processor time, of the plugin and of what it runs", tables.tables[1])
	s.folded("As times", tables.tables[2])
	var drawn []chart.Line
	var rows []chart.Row
	for _, name := range tables.names {
		if l := lines[name]; l != nil && !hasRules(name) && name != again {
			drawn = append(drawn, *l)
		}
	}
	svg, err := chart.Lines("ADD when all is right already", "prefixes", "ms", drawn)
	if err := b.report.plot(s, "add.svg", "time of an ADD over the number of prefixes, by plugin", svg, err); err != nil {
		return err
	}
	for _, name := range tables.names[1:] {
		budgets := map[string]float64{ours(scene.Forms()[0]): 1.3, ours(scene.Forms()[1]): 1.5, ours(scene.Forms()[2]): 2.5}
		budget := budgets[strings.TrimSuffix(name, changed)]
		rows = append(rows, chart.Row{Name: name, Ratio: ratioAt(lines, name, usual), Budget: budget})
	}
	svg, err = chart.Ratios("ADD with 64 prefixes, as a multiple of an empty plugin", "× the empty plugin", rows)
	return b.report.plot(s, "add-64.svg", "ADD with 64 prefixes as a multiple of an empty plugin, with and without rules of others", svg, err)
}

func hasRules(name string) bool { return strings.HasSuffix(name, rules) }

// ratioAt returns a line's ratio to the empty plugin at a count.
func ratioAt(lines map[string]*chart.Line, name string, count int) measure.Estimate {
	find := func(name string) measure.Series {
		for _, p := range lines[name].Points {
			if p.Count == count {
				return p.Figure
			}
		}
		return nil
	}
	return measure.Paired(find(name), find(empty))
}
