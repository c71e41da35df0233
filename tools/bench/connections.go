// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

const noList = "no list, nftables"

// road is a node through which connections are opened, with a list that somebody
// wrote.
type road struct {
	name  string
	node  *scene.Node
	write func(prefixes []netip.Prefix) error
	most  int // prefixes beyond which it is not measured
}

// roads are our forms and the agents' chain in both variants of iptables; and the
// masquerading of everything, which no list slows down.
func (b *bench) roads() (all []road, err error) {
	forms := scene.Forms()
	for i, f := range append(append([]scene.Form{}, forms...), forms[1:]...) {
		n, err := scene.NewNode(f)
		if err != nil {
			return all, err
		}
		r := road{ours(f), n, func(prefixes []netip.Prefix) error { return n.Enforce(scene.Policy{Prefixes: prefixes}) }, 10_000}
		if i == 0 {
			r.most = 100_000
		}
		if i >= len(forms) {
			r.name, r.write = "the agents' chain, "+f.Name, n.AgentCycle
			if err := errors.Join(n.AgentCycle(nil), n.AgentJump()); err != nil {
				return all, err
			}
		}
		all = append(all, r)
	}
	n, err := scene.NewNode(forms[0])
	if err != nil {
		return all, err
	}
	return append(all, road{noList, n, func([]netip.Prefix) error { return n.Enforce(scene.Policy{}) }, 100_000}), nil
}

// flood is a series of new connections over a road.
type flood struct {
	road
	protocol scene.Protocol
	position string
	to       netip.Addr
}

func (f flood) name() string { return fmt.Sprintf("%s, %s, %s", f.road.name, f.protocol, f.position) }

// contender opens as many connections a round as take about 30 ms.
func (f flood) contender() measure.Contender {
	const each, fewest, most = 30_000.0, 100, 3000 // µs; flows
	flows := fewest
	return measure.Contender{Name: f.name(), Run: func(round int) (float64, error) {
		took, err := f.node.Flood(f.to, f.protocol, flows)
		if round < 0 && err == nil {
			flows = min(max(int(each/took), fewest), most)
		}
		return took, err
	}}
}

const (
	none  = "no match"
	first = "match first"
	last  = "match last"
)

// floods are what is measured with a list: UDP wherever the match is, TCP where
// there is none.
func floods(roads []road, prefixes []netip.Prefix) []flood {
	var all []flood
	for _, r := range roads {
		if len(prefixes) > r.most {
			continue
		}
		all = append(all, flood{r, scene.UDP, none, scene.Elsewhere()}, flood{r, scene.TCP, none, scene.Elsewhere()})
		if len(prefixes) > 0 && strings.HasPrefix(r.name, "ip-masq") {
			all = append(all,
				flood{r, scene.UDP, first, prefixes[0].Addr()},
				flood{r, scene.UDP, last, prefixes[len(prefixes)-1].Addr()})
		}
	}
	return all
}

// connections measures what a new connection costs.
func (b *bench) connections() (err error) {
	roads, err := b.roads()
	defer func() {
		for _, r := range roads {
			err = errors.Join(err, r.node.Close())
		}
	}()
	if err != nil {
		return err
	}
	counts := b.sizes(0, 4, usual, 1000, 10_000, 100_000)
	figures := map[int]measure.Figures{}
	for _, count := range counts {
		if figures[count], err = b.flood(roads, scene.Prefixes(count), b.limit(25, 14*time.Second)); err != nil {
			return err
		}
	}
	section := b.report.section("New connections")
	section.say("What the NAT rules of the node cost the first packet of a connection; later packets do not meet them. A pod opens connections one after the other through " +
		"the node, by UDP datagrams or TCP SYNs, each to a port of its own; they end at the door of the host outside. The time is that of all the way: sending, routing, " +
		"connection tracking, NAT. *No list* is our chain without a prefix. The agents' chain is written as they write it, a rule for each prefix.")
	if err := b.reportConnections(section, roads, counts, figures); err != nil {
		return err
	}
	return b.lengths(section, roads)
}

// flood writes a list on all roads and opens connections on each in turn.
func (b *bench) flood(roads []road, prefixes []netip.Prefix, limit measure.Limit) (measure.Figures, error) {
	for _, r := range roads {
		if len(prefixes) <= r.most {
			if err := r.write(prefixes); err != nil {
				return measure.Figures{}, err
			}
		}
	}
	var contenders []measure.Contender
	for _, f := range floods(roads, prefixes) {
		contenders = append(contenders, f.contender())
	}
	return measure.Interleave(limit, contenders...)
}

func (b *bench) reportConnections(section *section, roads []road, counts []int, figures map[int]measure.Figures) error {
	head := []string{"µs a connection"}
	for _, count := range counts {
		head = append(head, chart.Thousands(count))
	}
	rows := [][]string{head}
	var lines []chart.Line
	for _, protocol := range []scene.Protocol{scene.UDP, scene.TCP} {
		for _, position := range []string{none, first, last} {
			for _, r := range roads {
				name := flood{r, protocol, position, netip.Addr{}}.name()
				row, line := []string{name}, chart.Line{Name: r.name}
				for _, count := range counts {
					s := figures[count].Of(name)
					row = append(row, s.String())
					line.Points = append(line.Points, chart.Point{Count: count, Figure: s})
				}
				if strings.Trim(strings.Join(row[1:], ""), "–") == "" {
					continue
				}
				rows = append(rows, row)
				if protocol == scene.UDP && position == none {
					lines = append(lines, line)
				}
			}
		}
	}
	section.table(rows)
	b.judgeConnections(section, roads, counts, figures)
	svg, err := chart.Lines("A new connection that no prefix exempts (UDP)", "prefixes", "µs", lines)
	return b.report.plot(section, "connections.svg", "time of a new connection over the number of prefixes, by form", svg, err)
}

func (b *bench) judgeConnections(section *section, roads []road, counts []int, figures map[int]measure.Figures) {
	rows := [][]string{{"× no list, no match", "UDP", "TCP"}}
	for _, count := range counts[1:] {
		f := figures[count]
		for _, r := range roads[:len(roads)-1] {
			if count < 1000 && r.name != roads[0].name || count > r.most {
				continue
			}
			row := []string{fmt.Sprintf("%s, %s prefixes", r.name, chart.Thousands(count))}
			for _, protocol := range []scene.Protocol{scene.UDP, scene.TCP} {
				at := func(r road) string { return flood{r, protocol, none, netip.Addr{}}.name() }
				ratio := f.Ratio(at(r), at(roads[len(roads)-1]))
				row = append(row, ratio.String())
				if r.name == roads[0].name && count >= 1000 && (count == 10_000 || b.quick) {
					b.report.judge(budget{fmt.Sprintf("new connection, %s prefixes, nftables, %s", chart.Thousands(count), protocol), "≤ 1.15 × no list",
						ratio.String() + " ×", atMost(ratio, 1.15),
						"the look-up in the set is a walk down a tree as deep as the logarithm of the number of prefixes."})
				}
			}
			rows = append(rows, row)
		}
	}
	section.table(rows)
	if f, there := figures[10_000]; there {
		for i, variant := range []string{"iptables-nft", "iptables-legacy"} {
			at := func(r road) string { return flood{r, scene.UDP, none, netip.Addr{}}.name() }
			ratio := f.Ratio(at(roads[1+i]), at(roads[3+i]))
			v := atMost(ratio, 1.1)
			says := "ADD warns of it"
			if !roads[1+i].node.Warned {
				v, says = plainly(false), "ADD does not warn of it"
			}
			b.report.judge(budget{"new connection, 10,000 prefixes, " + variant, "linear, no worse than the agents' chain (within a tenth), and ADD says so",
				ratio.String() + " × the agents' chain; " + says, v, "the rules are the agents', and so is their order of cost."})
		}
	}
}

// lengths measures what the lengths of prefixes do.
func (b *bench) lengths(section *section, roads []road) error {
	count := 10_000
	if b.quick {
		count = 1000
	}
	section.say("The same with prefixes of one length, for the kernel compares an address of whole bytes in another way than its first bits:")
	rows := [][]string{{fmt.Sprintf("µs, %s prefixes, no match", chart.Thousands(count)), "/24", "/32"}}
	var columns []measure.Figures
	for _, bits := range []int{24, 32} {
		f, err := b.flood(roads, scene.PrefixesOf(count, bits), b.limit(8, 6*time.Second))
		if err != nil {
			return err
		}
		columns = append(columns, f)
	}
	for _, r := range roads {
		name := flood{r, scene.UDP, none, netip.Addr{}}.name()
		rows = append(rows, []string{r.name, columns[0].Of(name).String(), columns[1].Of(name).String()})
	}
	section.table(rows)
	return nil
}
