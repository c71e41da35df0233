// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/chart"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

const noList = "no list, nftables"

// road is a node through which connections are opened, with a list of prefixes.
type road struct {
	name  string
	node  *scene.Node
	write func(prefixes []netip.Prefix) error
	most  int // prefixes beyond which it is not measured
	tally *tally
}

// tally counts the floods of a road, including those with a lost packet.
type tally struct{ floods, lost int }

// roads returns the backends of ip-masq, the agents' chain with both variants of iptables, and
// unconditional masquerading.
func (b *bench) roads() (all []road, err error) {
	forms := scene.Forms()
	for i, f := range append(append([]scene.Form{}, forms...), forms[1:]...) {
		n, err := scene.NewNode(f)
		if err != nil {
			return all, err
		}
		r := road{ours(f), n, func(prefixes []netip.Prefix) error { return n.Enforce(scene.Policy{Prefixes: prefixes}) }, 10_000, &tally{}}
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
	return append(all, road{noList, n, func([]netip.Prefix) error { return n.Enforce(scene.Policy{}) }, 100_000, &tally{}}), nil
}

// flood is a series of new connections over a road.
type flood struct {
	road
	protocol scene.Protocol
	position string
	to       netip.Addr
}

func (f flood) name() string { return fmt.Sprintf("%s, %s, %s", f.road.name, f.protocol, f.position) }

// contender opens about 30 ms of connections a round.
func (f flood) contender() measure.Contender {
	const each, fewest, most = 30_000.0, 100, 3000 // µs; flows
	flows := fewest
	return measure.Contender{Name: f.name(), Run: func(round int) (float64, error) {
		took, lost, err := f.node.Flood(f.to, f.protocol, flows)
		f.tally.floods += 1 + lost
		f.tally.lost += lost
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

// floods returns the measurements for a list: each position of the match, with UDP and TCP.
func floods(roads []road, prefixes []netip.Prefix) []flood {
	var all []flood
	for _, r := range roads {
		if len(prefixes) > r.most {
			continue
		}
		for _, protocol := range protocols() {
			all = append(all, flood{r, protocol, none, scene.Elsewhere()})
			if len(prefixes) > 0 && r.name != noList {
				all = append(all,
					flood{r, protocol, first, prefixes[0].Addr()},
					flood{r, protocol, last, prefixes[len(prefixes)-1].Addr()})
			}
		}
	}
	return all
}

func protocols() []scene.Protocol { return []scene.Protocol{scene.UDP, scene.TCP} }

// connections measures the cost of a new connection.
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
		prefixes := scene.Prefixes(count)
		if figures[count], err = race(roads, prefixes, b.limit(20, 20*time.Second), floods(roads, prefixes)); err != nil {
			return err
		}
	}
	section := b.report.section("New connections")
	section.say("What the NAT rules of the node cost the first packet of a connection; later packets do not meet them. A pod opens connections one after the other through " +
		"the node, by UDP datagrams or TCP SYNs, each to a port of its own; they end at the door of the host outside. The time is that of all the way: sending, routing, " +
		"connection tracking, NAT. *No list* is our chain without a prefix. The agents' chain is written as they write it, a rule for each prefix.")
	reportMix(section, counts[1:])
	if err := b.reportConnections(section, roads, counts, figures); err != nil {
		return err
	}
	if err := b.lengths(section, roads); err != nil {
		return err
	}
	var sum tally
	for _, r := range roads {
		sum.floods += r.tally.floods
		sum.lost += r.tally.lost
	}
	section.say("Of %s floods %s lost a packet and were repeated.", chart.Thousands(sum.floods), chart.Thousands(sum.lost))
	return nil
}

// race writes a list on all roads and opens connections on each in turn.
func race(roads []road, prefixes []netip.Prefix, limit measure.Limit, floods []flood) (measure.Figures, error) {
	for _, r := range roads {
		if len(prefixes) <= r.most {
			if err := r.write(prefixes); err != nil {
				return measure.Figures{}, err
			}
		}
	}
	var contenders []measure.Contender
	for _, f := range floods {
		contenders = append(contenders, f.contender())
	}
	return measure.Interleave(limit, contenders...)
}

// lengths measures the effect of prefix lengths.
func (b *bench) lengths(section *section, roads []road) error {
	count := 10_000
	if b.quick {
		count = 1000
	}
	section.say("The same with prefixes of one length. Where a prefix is of whole bytes, iptables-nft has the kernel load no more of the address than these, " +
		"and three bytes are loaded in a slower way than four:")
	rows := [][]string{{fmt.Sprintf("µs, %s prefixes, no match", chart.Thousands(count)), "/24", "/32"}}
	var missing []flood
	for _, r := range roads {
		missing = append(missing, flood{r, scene.UDP, none, scene.Elsewhere()})
	}
	var columns []measure.Figures
	for _, bits := range []int{24, 32} {
		f, err := race(roads, scene.PrefixesOf(count, bits), b.limit(15, 6*time.Second), missing)
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
