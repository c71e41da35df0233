// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

// reportMix describes the composition of the lists.
func reportMix(section *section, counts []int) {
	section.say("The list has the same number of prefixes of each length from /8 to /32, except for the " +
		"widest lengths. It has fewer of these, because the address space has no room for more. The order of the list is random. *first* and *last* " +
		"are the first and the last prefix of the list. The lengths are:")
	head := []string{"% of prefixes"}
	var rows [][]string
	for _, count := range counts {
		head = append(head, chart.Thousands(count))
		for i, share := range scene.Mix(scene.Prefixes(count)) {
			if i == len(rows) {
				rows = append(rows, []string{share.Lengths})
			}
			rows[i] = append(rows[i], measure.Short(100*float64(share.Count)/float64(count)))
		}
	}
	section.table(append([][]string{head}, rows...))
}

func (b *bench) reportConnections(section *section, routers []router, counts []int, figures map[int]measure.Figures) error {
	var lines []chart.Line
	for _, protocol := range protocols() {
		head := []string{"µs per connection, " + strings.ToUpper(string(protocol))}
		for _, count := range counts {
			head = append(head, chart.Thousands(count))
		}
		rows := [][]string{head}
		for _, position := range []string{none, first, last} {
			for _, r := range routers {
				if r.name == noList && position != none {
					continue // it has no match, so it is measured once
				}
				row, line := []string{r.name + ", " + position}, chart.Line{Name: r.name}
				for _, count := range counts {
					s := figures[count].Of(flood{r, protocol, position, netip.Addr{}}.name())
					row = append(row, s.String())
					line.Points = append(line.Points, chart.Point{Count: count, Figure: s})
				}
				rows = append(rows, row)
				if protocol == scene.UDP && position == none {
					lines = append(lines, line)
				}
			}
		}
		section.table(rows)
	}
	b.judgeConnections(section, routers, counts, figures)
	svg, err := chart.Lines("A new connection that no prefix exempts (UDP)", "prefixes", "µs", lines)
	return b.report.plot(section, "connections.svg", "time of a new connection by number of prefixes and backend", svg, err)
}

func (b *bench) judgeConnections(section *section, routers []router, counts []int, figures map[int]measure.Figures) {
	rows := [][]string{{"× no list, no match", "UDP", "TCP"}}
	for _, count := range counts[1:] {
		f := figures[count]
		for _, r := range routers[:len(routers)-1] {
			if count < 1000 && r.name != routers[0].name || count > r.most {
				continue
			}
			row := []string{fmt.Sprintf("%s, %s prefixes", r.name, chart.Thousands(count))}
			for _, protocol := range protocols() {
				at := func(r router) string { return flood{r, protocol, none, netip.Addr{}}.name() }
				ratio := f.Ratio(at(r), at(routers[len(routers)-1]))
				row = append(row, ratio.String())
				if r.name == routers[0].name && count >= 1000 && (count == 10_000 || b.quick) {
					b.report.judge(budget{fmt.Sprintf("new connection, %s prefixes, nftables, %s", chart.Thousands(count), protocol), "≤ 1.15 × no list",
						ratio.String() + " ×", atMost(ratio, 1.15),
						"the look-up in the set walks a tree. The depth of the tree is the logarithm of the number of prefixes."})
				}
			}
			rows = append(rows, row)
		}
	}
	section.table(rows)
	if f, there := figures[10_000]; there {
		b.judgeLinear(section, routers, f)
	}
}

// judgeLinear compares ip-masq's iptables chain of 10,000 prefixes with the agents'.
func (b *bench) judgeLinear(section *section, routers []router, f measure.Figures) {
	rows := [][]string{{"× the agents' chain, 10,000 prefixes", "UDP", "TCP"}}
	for i, variant := range []string{"iptables-nft", "iptables-legacy"} {
		chain, agents := routers[1+i], routers[3+i]
		ratio := func(protocol scene.Protocol, position string) measure.Estimate {
			return f.Ratio(flood{chain, protocol, position, netip.Addr{}}.name(), flood{agents, protocol, position, netip.Addr{}}.name())
		}
		for _, position := range []string{none, first, last} {
			rows = append(rows, []string{variant + ", " + position, ratio(scene.UDP, position).String(), ratio(scene.TCP, position).String()})
		}
		r := ratio(scene.UDP, none)
		v, warning := atMost(r, 1.1), "ADD logs a warning"
		if !chain.node.Warned {
			v, warning = plainly(false), "ADD logs no warning"
		}
		b.report.judge(budget{"new connection, 10,000 prefixes, " + variant, "linear, ≤ 1.1 × the agents' chain, and ADD logs a warning",
			r.String() + " × the agents' chain; " + warning, v, "the rules are those of the agents; iptables evaluates them one by one."})
	}
	section.table(rows)
}
