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

// atOnce is the number of concurrent ADDs.
const atOnce = 20

// concurrent runs the verifier this number of times concurrently in a round.
func (v verifier) concurrent(pods int) measure.Contender {
	return measure.Contender{Name: v.name, Run: func(int) (float64, error) {
		if err := v.disturb(); err != nil {
			return 0, err
		}
		var requests []scene.Request
		for range pods {
			requests = append(requests, scene.Request{Plugin: v.plugin, Container: v.node.NextPod()})
		}
		took, err := v.node.RunAtOnce(requests)
		return milliseconds(took), err
	}}
}

// burst measures concurrent ADDs: every verifier with the usual number of prefixes, and ip-masq
// with other numbers.
func (b *bench) burst() (err error) {
	s, err := newStage()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	section := b.report.section(fmt.Sprintf("%d concurrent ADDs", atOnce))
	section.say("A node has concurrent ADDs when it starts, and when it receives the pods of a drained node. All ADDs start "+
		"together. The time ends with the last ADD. In the rows *%s*, another program commits right before, so the "+
		"first ADDs read the rules. With %d prefixes:", strings.TrimPrefix(afterCommit, ", "), usual)
	columns := [][]string{{"× the empty plugin"}}
	for _, at := range b.settings() {
		if err := s.enforce(at.policy); err != nil {
			return err
		}
		if at.prefixes == usual && !at.policy.IPv6 {
			if err := b.burstOfAll(s, section); err != nil {
				return err
			}
			if err := b.burstWithBudget(s, section); err != nil {
				return err
			}
			continue
		}
		if columns, err = b.burstOfIPMasq(s, at, columns); err != nil {
			return err
		}
	}
	section.say("With other numbers of prefixes:")
	section.table(columns)
	return nil
}

// burstOfAll runs all verifiers concurrently and compares them with the budgets.
func (b *bench) burstOfAll(s *stage, section *section) error {
	var contenders []measure.Contender
	var names []string
	for _, v := range s.verifiers() {
		contenders = append(contenders, v.concurrent(atOnce))
		names = append(names, v.name)
	}
	f, err := measure.Interleave(b.limit(30, 35*time.Second), contenders...)
	if err != nil {
		return err
	}
	legacy := scene.Backends()[2]
	b.judgeBurst(f, legacy, ipMasqName(legacy)+rules, "")
	b.report.summarize(legacy, concurrentFull, f.Extra(ipMasqName(legacy)+rules, empty))
	table := [][]string{{"plugin", "× the empty plugin", "ms, all ADDs"}}
	var rows []chart.Row
	for _, name := range names {
		table = append(table, []string{name, f.Ratio(name, empty).String(), f.Of(name).String()})
		if name == empty {
			continue
		}
		row := chart.Row{Name: name, Ratio: f.Ratio(name, empty)}
		if strings.HasPrefix(name, "ip-masq") && hasRules(name) {
			row.Budget = 1.3
		}
		rows = append(rows, row)
	}
	section.table(table)
	svg, err := chart.Ratios(fmt.Sprintf("%d concurrent ADDs, as a multiple of an empty plugin", atOnce), "× the empty plugin", rows)
	return b.report.plot(section, "burst.svg", "twenty concurrent ADDs as a multiple of an empty plugin", svg, err)
}

// burstWithBudget measures the verifiers with a budget again, because the comparison of all has too
// few rounds.
func (b *bench) burstWithBudget(s *stage, section *section) error {
	var contenders []measure.Contender
	var names []string
	for _, v := range s.verifiers() {
		base := v.name == empty || v.name == again
		if base || v.plugin == "ip-masq" && hasRules(v.name) && v.node.Backend.Variant != "legacy" {
			contenders = append(contenders, v.concurrent(atOnce))
			names = append(names, v.name)
		}
	}
	f, err := measure.Interleave(b.limit(120, 40*time.Second), contenders...)
	if err != nil {
		return err
	}
	for _, backend := range scene.Backends()[:2] {
		b.judgeBurst(f, backend, ipMasqName(backend)+rules, "")
		b.judgeBurst(f, backend, ipMasqName(backend)+afterCommit+rules, afterCommit)
		b.report.summarize(backend, concurrentFull, f.Extra(ipMasqName(backend)+rules, empty))
	}
	table := [][]string{{"plugin", "× the empty plugin", "ms, all ADDs"}}
	for _, name := range names {
		table = append(table, []string{name, f.Ratio(name, empty).String(), f.Of(name).String()})
	}
	section.say("The plugins with a budget are compared separately in more rounds (%d):", len(f.Of(empty)))
	section.table(table)
	return nil
}

func (b *bench) judgeBurst(f measure.Figures, backend scene.Backend, name, when string) {
	const most = 1.3
	r := f.Ratio(name, empty)
	reason := "twenty processes share the processors, so the ratio is that of their processor time. The section about a " +
		"single ADD has its parts."
	if backend.Variant == "legacy" {
		reason = fmt.Sprintf("the kernel returns the whole table of iptables-legacy, with the 5,000 third-party rules, to one process "+
			"at a time. These tables have no ruleset generation. Reading the table takes %s × the time of the empty plugin "+
			"(*%s*), and ip-masq takes %s × that.",
			f.Ratio(tableOnly+rules, empty), tableOnly, f.Ratio(name, tableOnly+rules))
	}
	b.report.judge(budget{fmt.Sprintf("%d concurrent ADDs with 5,000 third-party rules%s, %s", atOnce, when, backend.Name), fmt.Sprintf("≤ %.1f × an empty plugin", most),
		r.String() + " ×", atMost(r, most), reason})
}

// burstOfIPMasq adds a column for ip-masq.
func (b *bench) burstOfIPMasq(s *stage, at setting, table [][]string) ([][]string, error) {
	var contenders []measure.Contender
	var names []string
	for _, v := range s.verifiers() {
		if v.name == empty || v.plugin == "ip-masq" {
			contenders = append(contenders, v.concurrent(atOnce))
			names = append(names, v.name)
		}
	}
	f, err := measure.Interleave(measure.Limit{Rounds: 12, Least: 3, Time: 10 * time.Second}, contenders...)
	if err != nil {
		return nil, err
	}
	if len(table) == 1 {
		for _, name := range names {
			table = append(table, []string{name})
		}
	}
	table[0] = append(table[0], at.name)
	for i, name := range names {
		table[i+1] = append(table[i+1], f.Ratio(name, empty).String())
	}
	return table, nil
}
