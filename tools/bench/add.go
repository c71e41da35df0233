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
	rules   = ", 5,000 rules"
	changed = ", after a commit of others"
	floor   = "the legacy table, not looked at"
	usual   = 64 // prefixes
)

// ours is the name of ip-masq in a form.
func ours(f scene.Form) string { return "ip-masq, " + f.Name }

// stage are nodes of every form, with and without rules of others.
type stage struct {
	bare, full []*scene.Node // by form
}

func newStage() (s *stage, err error) {
	s = &stage{}
	for _, f := range scene.Forms() {
		for _, where := range []*[]*scene.Node{&s.bare, &s.full} {
			n, err := scene.NewNode(f)
			if err != nil {
				return nil, errors.Join(err, s.close())
			}
			*where = append(*where, n)
		}
		if err := s.full[len(s.full)-1].AddKubeProxy(); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	return s, nil
}

func (s *stage) all() []*scene.Node { return append(append([]*scene.Node{}, s.bare...), s.full...) }

// enforce puts a policy in force on all nodes.
func (s *stage) enforce(p scene.Policy) error {
	for _, n := range s.all() {
		if err := n.Enforce(p); err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) close() error {
	var errs []error
	for _, n := range s.all() {
		errs = append(errs, n.Close())
	}
	return errors.Join(errs...)
}

// verifier is a plugin on a node.
type verifier struct {
	name, plugin string
	node         *scene.Node
	disturbed    bool // by a commit of others before it runs
}

// disturb has others commit, if they are to.
func (v verifier) disturb() error {
	if !v.disturbed {
		return nil
	}
	return v.node.Commit()
}

// verifiers are all that verify, in every form, and the empty plugin first.
func (s *stage) verifiers() []verifier {
	all := []verifier{{name: empty, plugin: "plugin-empty", node: s.bare[0]}}
	for _, n := range s.bare[:2] {
		all = append(all, verifier{ours(n.Form) + changed, "ip-masq", n, true})
	}
	for suffix, nodes := range map[string][]*scene.Node{"": s.bare, rules: s.full} {
		for _, n := range nodes {
			all = append(all, verifier{ours(n.Form) + suffix, "ip-masq", n, false})
		}
		for _, n := range nodes[1:] {
			all = append(all,
				verifier{"`iptables -S`, " + n.Form.Variant + suffix, "plugin-iptables-s", n, false},
				verifier{"go-iptables, " + n.Form.Variant + suffix, "plugin-go-iptables", n, false})
		}
		all = append(all, verifier{floor + suffix, "plugin-legacy-table", nodes[len(nodes)-1], false})
	}
	return all
}

// alone has the verifier run once a round. The processor time of each round goes
// to cpu.
func (v verifier) alone(cpu map[string]measure.Series) measure.Contender {
	return measure.Contender{Name: v.name, Run: func(round int) (float64, error) {
		if err := v.disturb(); err != nil {
			return 0, err
		}
		took, err := v.node.Add(v.plugin, v.node.NextPod())
		if round >= 0 {
			cpu[v.name] = append(cpu[v.name], milliseconds(took.CPU))
		}
		return milliseconds(took.Wall), err
	}}
}

// setting is a policy under which ADDs are measured.
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

// add measures ADD when all is right already.
func (b *bench) add() (err error) {
	s, err := newStage()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	names := []string{empty}
	for _, suffix := range []string{"", rules} {
		for _, f := range scene.Forms() {
			names = append(names, ours(f)+suffix)
		}
		if suffix == "" {
			for _, f := range scene.Forms()[:2] {
				names = append(names, ours(f)+changed)
			}
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
		cpu := map[string]measure.Series{}
		var contenders []measure.Contender
		for _, v := range s.verifiers() {
			contenders = append(contenders, v.alone(cpu))
		}
		most := 10 * time.Second
		if at.prefixes == usual && !at.policy.IPv6 {
			most = 40 * time.Second // the budgets are about these
		}
		f, err := measure.Interleave(b.limit(200, most), contenders...)
		if err != nil {
			return err
		}
		tables.add(at.name, f, cpu)
		for _, name := range names {
			if !at.policy.IPv6 {
				if lines[name] == nil {
					lines[name] = &chart.Line{Name: name}
				}
				lines[name].Points = append(lines[name].Points, chart.Point{Count: at.prefixes, Figure: f.Of(name)})
			}
		}
		if at.prefixes == usual && !at.policy.IPv6 {
			b.judgeAdd(f)
		}
	}
	return b.reportAdd(tables, lines)
}

// addTables are the tables of ADDs, a column for each setting.
type addTables struct {
	heads  [3]string
	names  []string
	tables [3][][]string
}

func (t *addTables) add(setting string, f measure.Figures, cpu map[string]measure.Series) {
	for i := range t.tables {
		if t.tables[i] == nil {
			t.tables[i] = [][]string{{t.heads[i]}}
			for _, name := range t.names {
				t.tables[i] = append(t.tables[i], []string{name})
			}
		}
		t.tables[i][0] = append(t.tables[i][0], setting)
		for j, name := range t.names {
			cell := [3]string{f.Ratio(name, empty).String(), measure.Paired(cpu[name], cpu[empty]).String(), f.Of(name).String()}[i]
			t.tables[i][j+1] = append(t.tables[i][j+1], cell)
		}
	}
}

// judgeAdd holds the figures of 64 prefixes against the budgets.
func (b *bench) judgeAdd(f measure.Figures) {
	reason := "the empty plugin does nothing but start, parse and print. What ip-masq does more is for the larger part the kernel's: page faults of a larger process, " +
		"and the system calls to note the attachment, to read the documents, and to ask whether anybody changed a rule."
	budgets := []float64{1.3, 1.5, 2.5}
	for i, form := range scene.Forms() {
		r := f.Ratio(ours(form), empty)
		b.report.judge(budget{"ADD, all right already, 64 prefixes, " + form.Name, fmt.Sprintf("≤ %.1f × an empty plugin", budgets[i]),
			r.String() + " ×", atMost(r, budgets[i]), reason})
	}
	for _, form := range scene.Forms()[:2] {
		r := f.Ratio(ours(form)+rules, ours(form))
		b.report.judge(budget{"the same beside 5,000 rules of others, " + form.Name, "unchanged (within a tenth)",
			r.String() + " × without them", atMost(r, 1.1),
			"nothing of theirs is read; what is left is noise between two nodes."})
	}
}

func (b *bench) reportAdd(tables addTables, lines map[string]*chart.Line) error {
	s := b.report.section("ADD when all is right already")
	s.say("What each pod's start waits for. From before the plugin's start to after its end, with the same entry and the same result of the plugin before. " +
		"The *empty plugin* parses both, passes the result on and verifies nothing. *`iptables -S`* and *go-iptables* do the same and list the chain, " +
		"the one by a program, the other by `Exists` and `List` of github.com/coreos/go-iptables. Prefixes are of lengths from 8 to 32; " +
		"*5,000 rules* are rules as kube-proxy writes them, in the same table nat.")
	s.say("An ADD of ip-masq that finds all right says so in a seal beside the document, and the next one looks at the rules only if documents, entry or program are "+
		"others, or if anybody committed to nf_tables since, which the kernel counts. *%s* is an ADD that looks, for that reason. "+
		"In iptables-legacy, of which nothing is counted, each one looks; *%s* is a plugin that has the kernel hand out the table, as it must, and does no more: the least "+
		"that can cost.", strings.TrimPrefix(changed, ", "), floor)
	s.table(tables.tables[0])
	s.say("Processor time, of the plugin and of what it runs: what is left of the above where others do not keep the processors busy.")
	s.table(tables.tables[1])
	s.say("As times:")
	s.table(tables.tables[2])
	var drawn []chart.Line
	var rows []chart.Row
	for _, name := range tables.names {
		if l := lines[name]; l != nil && !hasRules(name) {
			drawn = append(drawn, *l)
		}
	}
	svg, err := chart.Lines("ADD when all is right already", "prefixes", "ms", drawn)
	if err := b.report.plot(s, "add.svg", "time of an ADD over the number of prefixes, by plugin", svg, err); err != nil {
		return err
	}
	for _, name := range tables.names[1:] {
		budgets := map[string]float64{ours(scene.Forms()[0]): 1.3, ours(scene.Forms()[1]): 1.5, ours(scene.Forms()[2]): 2.5}
		rows = append(rows, chart.Row{Name: name, Ratio: ratioAt(lines, name, usual), Budget: budgets[name]})
	}
	svg, err = chart.Ratios("ADD with 64 prefixes, as a multiple of an empty plugin", "× the empty plugin", rows)
	return b.report.plot(s, "add-64.svg", "ADD with 64 prefixes as a multiple of an empty plugin, with and without rules of others", svg, err)
}

func hasRules(name string) bool { return strings.HasSuffix(name, rules) }

// ratioAt compares a line with the empty plugin's at a count.
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
