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

// router is a node that forwards the connections of a pod, with a list of prefixes.
type router struct {
	name  string
	node  *scene.Node
	write func(prefixes []netip.Prefix) error
	most  int // the maximum number of prefixes to measure
	tally *tally
}

// tally counts the floods of a router, including those with a lost packet.
type tally struct{ floods, lost int }

// routers returns nodes with the backends of ip-masq, the agents' chain with both variants of
// iptables, and unconditional masquerading.
func (b *bench) routers() (all []router, err error) {
	backends := scene.Backends()
	for i, f := range append(append([]scene.Backend{}, backends...), backends[1:]...) {
		n, err := scene.NewNode(f)
		if err != nil {
			return all, err
		}
		r := router{ipMasqName(f), n, func(prefixes []netip.Prefix) error { return n.Enforce(scene.Policy{Prefixes: prefixes}) }, 10_000, &tally{}}
		if i == 0 {
			r.most = 100_000
		}
		if i >= len(backends) {
			r.name, r.write = "the agents' chain, "+f.Name, n.AgentCycle
			if err := errors.Join(n.AgentCycle(nil), n.AgentJump()); err != nil {
				return all, err
			}
		}
		all = append(all, r)
	}
	n, err := scene.NewNode(backends[0])
	if err != nil {
		return all, err
	}
	return append(all, router{noList, n, func([]netip.Prefix) error { return n.Enforce(scene.Policy{}) }, 100_000, &tally{}}), nil
}

// flood is a series of new connections through a router.
type flood struct {
	router
	protocol scene.Protocol
	position string
	to       netip.Addr
}

func (f flood) name() string { return fmt.Sprintf("%s, %s, %s", f.router.name, f.protocol, f.position) }

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
func floods(routers []router, prefixes []netip.Prefix) []flood {
	var all []flood
	for _, r := range routers {
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
	routers, err := b.routers()
	defer func() {
		for _, r := range routers {
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
		if figures[count], err = compareFloods(routers, prefixes, b.limit(20, 20*time.Second), floods(routers, prefixes)); err != nil {
			return err
		}
	}
	section := b.report.section("New connections")
	section.say("The NAT rules of the node delay the first packet of a connection. The kernel does not evaluate them for later " +
		"packets.\n\n" +
		"A pod opens connections one after the other through the node, with UDP datagrams or TCP SYNs, each to a " +
		"different port. The outside host drops them. The time includes sending, routing, connection tracking and NAT. " +
		"*No list* is the chain of ip-masq without a prefix. The agents' chain has a rule for each prefix.")
	reportMix(section, counts[1:])
	if err := b.reportConnections(section, routers, counts, figures); err != nil {
		return err
	}
	if err := b.lengths(section, routers); err != nil {
		return err
	}
	var sum tally
	for _, r := range routers {
		sum.floods += r.tally.floods
		sum.lost += r.tally.lost
	}
	section.say("The test sent %s series of packets. It repeated %s of these series after a lost packet.", chart.Thousands(sum.floods), chart.Thousands(sum.lost))
	return nil
}

// compareFloods writes a list on all routers and opens connections through each in turn.
func compareFloods(routers []router, prefixes []netip.Prefix, limit measure.Limit, floods []flood) (measure.Figures, error) {
	for _, r := range routers {
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
func (b *bench) lengths(section *section, routers []router) error {
	count := 10_000
	if b.quick {
		count = 1000
	}
	section.say("These lists have prefixes of one length. If the length is a multiple of 8, the rules of iptables-nft load " +
		"only the bytes of the prefix. The kernel loads three bytes more slowly than four.")
	rows := [][]string{{fmt.Sprintf("µs, %s prefixes, no match", chart.Thousands(count)), "/24", "/32"}}
	var missing []flood
	for _, r := range routers {
		missing = append(missing, flood{r, scene.UDP, none, scene.Elsewhere()})
	}
	var columns []measure.Figures
	for _, bits := range []int{24, 32} {
		f, err := compareFloods(routers, scene.PrefixesOf(count, bits), b.limit(15, 6*time.Second), missing)
		if err != nil {
			return err
		}
		columns = append(columns, f)
	}
	for _, r := range routers {
		name := flood{r, scene.UDP, none, netip.Addr{}}.name()
		rows = append(rows, []string{r.name, columns[0].Of(name).String(), columns[1].Of(name).String()})
	}
	section.table(rows)
	return nil
}
