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
	empty       = "an empty plugin"
	again       = "an empty plugin, again"
	rules       = ", 5,000 rules"
	afterCommit = ", after another program's commit"
	tableOnly   = "the legacy table, read only"
	usual       = 64 // prefixes
)

// ipMasqName returns the name of ip-masq with a backend.
func ipMasqName(f scene.Backend) string { return "ip-masq, " + f.Name }

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
		for _, f := range scene.Backends() {
			names = append(names, ipMasqName(f)+suffix)
		}
		for _, f := range scene.Backends()[:2] {
			names = append(names, ipMasqName(f)+afterCommit+suffix)
		}
		for _, variant := range []string{"nft", "legacy"} {
			names = append(names, "`iptables -S`, "+variant+suffix, "go-iptables, "+variant+suffix)
		}
		names = append(names, tableOnly+suffix)
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
			most = 40 * time.Second // the budgets use these figures
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
	judge := func(backend scene.Backend, name, work string, most float64) {
		r := f.Ratio(name, empty)
		b.report.judge(budget{"ADD, " + work + ", 64 prefixes, " + backend.Name, fmt.Sprintf("≤ %.1f × an empty plugin", most),
			r.String() + " ×", atMost(r, most), explainAdd(costs[name], costs[empty])})
	}
	for i, backend := range scene.Backends() {
		judge(backend, ipMasqName(backend), "rules in sync", budgets[i])
		b.report.summarize(backend, nothingChanged, f.Extra(ipMasqName(backend), empty))
		b.report.summarize(backend, nothingChangedFull, f.Extra(ipMasqName(backend)+rules, empty))
		if backend.Variant == "legacy" {
			continue
		}
		judge(backend, ipMasqName(backend)+afterCommit, strings.TrimPrefix(afterCommit, ", "), budgets[i])
		b.report.summarize(backend, afterCommitShort, f.Extra(ipMasqName(backend)+afterCommit, empty))
		b.report.summarize(backend, afterCommitFull, f.Extra(ipMasqName(backend)+afterCommit+rules, empty))
		r := f.Ratio(ipMasqName(backend)+afterCommit+rules, ipMasqName(backend)+afterCommit)
		b.report.judge(budget{"ADD after another program's commit, with 5,000 third-party rules, " + backend.Name, "≤ 1.1 × without these rules",
			r.String() + " ×", atMost(r, 1.1),
			"in table nat ip-masq reads its chain and POSTROUTING, and no third-party chain; the remaining difference is the kernel's look-up of the two chains, and noise between two nodes."})
	}
}

// explainAdd returns the parts of an ADD's time beyond an empty plugin's.
func explainAdd(ipMasq, empty *cost) string {
	more := func(of func(*cost) measure.Series) float64 { return of(ipMasq).Median() - of(empty).Median() }
	cpu := more(func(c *cost) measure.Series { return c.cpu })
	return fmt.Sprintf("ADD takes %s ms of processor time more than the empty plugin, which only starts, parses and prints. The "+
		"kernel takes %.0f %% of that difference. It serves %.0f more page faults (%.0f instead of %.0f), because the "+
		"program is larger, and because it reads and decodes rules. It also serves the system calls that record the "+
		"attachment, read the documents and request the rules.",
		measure.Short(cpu), 100*more(func(c *cost) measure.Series { return c.kernel })/cpu, more(func(c *cost) measure.Series { return c.faults }),
		ipMasq.faults.Median(), empty.faults.Median())
}

func (b *bench) reportAdd(tables addTables, lines map[string]*chart.Line) error {
	s := b.report.section("ADD with rules in sync")
	s.say("The start of each pod waits for ADD. The time of an ADD is from before the start of the plugin to after its " +
		"end. All plugins get the same plugin entry and the same prevResult.\n\n" +
		"The contenders:\n\n" +
		"- *empty plugin*: parses the entry and the result, prints the result, and verifies nothing.\n" +
		"- *`iptables -S`*: does the same, and lists the chain with the program `iptables`.\n" +
		"- *go-iptables*: does the same as *empty plugin*, and calls `Exists` and `List` of github.com/coreos/go-iptables.\n\n" +
		"The prefixes have lengths from 8 to 32. *5,000 rules* are third-party rules in the same table nat. They have " +
		"the form of kube-proxy's rules.")
	s.say("An ADD of ip-masq that finds the rules in sync writes a verification cache. The next ADD reads the rules only "+
		"if the documents, the plugin entry, the program or the ruleset generation of nf_tables changed.\n\n"+
		"- *%s*: the ADD reads the rules, because the generation changed.\n"+
		"- *iptables-legacy*: each ADD reads the rules, because iptables-legacy has no generation.\n"+
		"- *%s*: a plugin that requests the table from the kernel and ignores it. This is the minimum cost of reading "+
		"iptables-legacy.", strings.TrimPrefix(afterCommit, ", "), tableOnly)
	s.say("*%s* is the same plugin a second time. The deviation of its ratio from 1 is noise.\n\n"+
		"The process of the other program's commit ends before ADD begins, as `iptables-restore` and `nft` do. If a "+
		"process keeps its socket open after a commit, the kernel cleans up when the next process closes a socket. "+
		"This takes 8 to 16 ms in that process.", again)
	s.table(tables.tables[0])
	s.folded("Processor time of the plugin and of the programs that it runs", tables.tables[1])
	s.folded("Times", tables.tables[2])
	var drawn []chart.Line
	var rows []chart.Row
	for _, name := range tables.names {
		if l := lines[name]; l != nil && !hasRules(name) && name != again {
			drawn = append(drawn, *l)
		}
	}
	svg, err := chart.Lines("ADD with rules in sync", "prefixes", "ms", drawn)
	if err := b.report.plot(s, "add.svg", "time of an ADD by number of prefixes and plugin", svg, err); err != nil {
		return err
	}
	for _, name := range tables.names[1:] {
		budgets := map[string]float64{ipMasqName(scene.Backends()[0]): 1.3, ipMasqName(scene.Backends()[1]): 1.5, ipMasqName(scene.Backends()[2]): 2.5}
		budget := budgets[strings.TrimSuffix(name, afterCommit)]
		rows = append(rows, chart.Row{Name: name, Ratio: ratioAt(lines, name, usual), Budget: budget})
	}
	svg, err = chart.Ratios("ADD with 64 prefixes, as a multiple of an empty plugin", "× the empty plugin", rows)
	return b.report.plot(s, "add-64.svg", "ADD with 64 prefixes as a multiple of an empty plugin, with and without third-party rules", svg, err)
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
