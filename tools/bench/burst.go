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

// together runs the verifier this number of times concurrently in a round.
func (v verifier) together(pods int) measure.Contender {
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
	section := b.report.section(fmt.Sprintf("%d ADDs at once", atOnce))
	section.say("A node that starts, or a drained one's pods that come: all begin together, and what is timed ends with the last one. "+
		"*%s*: others commit right before, and the first to come look at the rules. With %d prefixes:", strings.TrimPrefix(changed, ", "), usual)
	others := [][]string{{"× the empty plugin"}}
	for _, at := range b.settings() {
		if err := s.enforce(at.policy); err != nil {
			return err
		}
		if at.prefixes == usual && !at.policy.IPv6 {
			if err := b.burstOfAll(s, section); err != nil {
				return err
			}
			if err := b.burstJudged(s, section); err != nil {
				return err
			}
			continue
		}
		if others, err = b.burstOfOurs(s, at, others); err != nil {
			return err
		}
	}
	section.say("With other numbers of them:")
	section.table(others)
	return nil
}

// burstOfAll runs all verifiers concurrently and compares them with the budgets.
func (b *bench) burstOfAll(s *stage, section *section) error {
	var contenders []measure.Contender
	var names []string
	for _, v := range s.verifiers() {
		contenders = append(contenders, v.together(atOnce))
		names = append(names, v.name)
	}
	f, err := measure.Interleave(b.limit(30, 35*time.Second), contenders...)
	if err != nil {
		return err
	}
	legacy := scene.Forms()[2]
	b.judgeBurst(f, legacy, ours(legacy)+rules, "")
	b.report.shortly(legacy, together, f.Extra(ours(legacy)+rules, empty))
	table := [][]string{{"plugin", "× the empty plugin", "ms, all of them"}}
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
	svg, err := chart.Ratios(fmt.Sprintf("%d ADDs at once, as a multiple of an empty plugin", atOnce), "× the empty plugin", rows)
	return b.report.plot(section, "burst.svg", "twenty ADDs at once as a multiple of an empty plugin", svg, err)
}

// burstJudged measures the verifiers with a budget again, because the comparison of all has too few
// rounds.
func (b *bench) burstJudged(s *stage, section *section) error {
	var contenders []measure.Contender
	var names []string
	for _, v := range s.verifiers() {
		base := v.name == empty || v.name == again
		if base || v.plugin == "ip-masq" && hasRules(v.name) && v.node.Form.Variant != "legacy" {
			contenders = append(contenders, v.together(atOnce))
			names = append(names, v.name)
		}
	}
	f, err := measure.Interleave(b.limit(120, 40*time.Second), contenders...)
	if err != nil {
		return err
	}
	for _, form := range scene.Forms()[:2] {
		b.judgeBurst(f, form, ours(form)+rules, "")
		b.judgeBurst(f, form, ours(form)+changed+rules, changed)
		b.report.shortly(form, together, f.Extra(ours(form)+rules, empty))
	}
	table := [][]string{{"plugin", "× the empty plugin", "ms, all of them"}}
	for _, name := range names {
		table = append(table, []string{name, f.Ratio(name, empty).String(), f.Of(name).String()})
	}
	section.say("Those that are held against a budget, by themselves and in more rounds (%d):", len(f.Of(empty)))
	section.table(table)
	return nil
}

func (b *bench) judgeBurst(f measure.Figures, form scene.Form, name, when string) {
	const most = 1.3
	r := f.Ratio(name, empty)
	reason := "twenty processes share the processors, so the ratio is that of their processor time; for where that goes see the ADD alone."
	if form.Variant == "legacy" {
		reason = fmt.Sprintf("the kernel hands a table of iptables-legacy out whole, 5,000 rules of others included, to one process after the other, and there is no other "+
			"way to see ours nor to learn that nothing changed. Merely to be handed it is %s × the empty plugin (*%s*), and ip-masq %s × that.",
			f.Ratio(floor+rules, empty), floor, f.Ratio(name, floor+rules))
	}
	b.report.judge(budget{fmt.Sprintf("%d ADDs at once beside 5,000 rules of others%s, %s", atOnce, when, form.Name), fmt.Sprintf("≤ %.1f × an empty plugin", most),
		r.String() + " ×", atMost(r, most), reason})
}

// burstOfOurs adds a column for ip-masq.
func (b *bench) burstOfOurs(s *stage, at setting, table [][]string) ([][]string, error) {
	var contenders []measure.Contender
	var names []string
	for _, v := range s.verifiers() {
		if v.name == empty || v.plugin == "ip-masq" {
			contenders = append(contenders, v.together(atOnce))
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
