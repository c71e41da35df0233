// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"net"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

type condition struct {
	Packets
	unread []string // conditions that were not decoded
	never  bool     // it matches no packet
}

// exact reports whether the rule applies to all packets of the set.
func (c condition) exact() bool { return len(c.unread) == 0 }

// uncertain returns what is not known about packets that leave a chain by a rule with the condition.
func (c condition) uncertain() uint8 {
	if c.exact() {
		return 0
	}
	return maybeAccepted
}

// and returns the condition that packets meet if they meet both.
func (c condition) and(d condition) condition {
	p, some := c.intersect(d.Packets)
	return condition{Packets: p, never: c.never || d.never || !some, unread: append(slices.Clip(c.unread), d.unread...)}
}

// decoded is a rule as far as it could be decoded.
type decoded struct {
	condition
	statement nfnetlink.Statement
	target    string // the chain that it jumps or goes to
	untracks  bool
	comment   string
}

// returnsDestinations reports whether the rule returns for destinations alone.
func (d decoded) returnsDestinations() bool {
	return d.statement == nfnetlink.DoReturn && d.exact() && d.To != nil && d.From == nil && d.Out == "" &&
		d.NotOut == nil && d.protocol == "" && d.notOrigins == 0 && !d.never
}

// decode decodes a rule as packets of the family meet it.
func decode(f policy.Family, rule nfnetlink.Rule, in table) decoded {
	d := nfnetlink.Decode(netfilter.LinkOf(f), rule, nil)
	out := decoded{statement: d.Statement, target: d.Chain, comment: d.Comment, untracks: slices.Contains(d.Other, nfnetlink.NoTrack)}
	out.unread = d.Unrecognized
	for _, c := range d.Conditions {
		out.condition = out.and(conditionOf(f, c, in))
	}
	return out
}

// conditionOf returns the packets that meet a condition, of those that have no mark and begin a connection.
func conditionOf(f policy.Family, c nfnetlink.Condition, in table) condition {
	var out condition
	if c.Field == nfnetlink.OutputIndex {
		device, err := net.InterfaceByIndex(int(c.Value))
		if err != nil {
			return condition{unread: []string{fmt.Sprintf("oif %d", c.Value)}}
		}
		c.Field, c.Name = nfnetlink.OutputName, device.Name
	}
	switch c.Field {
	case nfnetlink.Source, nfnetlink.Destination:
		addresses, err := addressesOf(f, c, in)
		switch {
		case err != nil:
			out.unread = []string{"set " + policy.Quote(c.Set)}
		case c.Field == nfnetlink.Source:
			out.From = addresses
		default:
			out.To = addresses
		}
	case nfnetlink.OutputName:
		switch {
		case c.Name == "+":
			out.never = c.Not
		case c.Not:
			out.NotOut = []string{c.Name}
		default:
			out.Out = c.Name
		}
	case nfnetlink.Protocol:
		out.protocol = map[uint32]policy.Protocol{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[c.Value]
		if out.protocol == "" || c.Not {
			out.protocol, out.unread = "", []string{fmt.Sprintf("protocol %d", c.Value)}
		}
	case nfnetlink.SourceLocal:
		out.notOrigins = map[bool]uint8{true: fromNode, false: fromOthers}[c.Not]
	case nfnetlink.DestinationLocal: // no packet leaves for an address of the node
		out.never = !c.Not
	case nfnetlink.Probability:
		out.unread = []string{"a random choice"}
	case nfnetlink.NFProto:
		out.never = (c.Value == uint32(netfilter.LinkOf(f))) == c.Not
	case nfnetlink.Mark:
		out.never = (c.Value == 0) == c.Not
	case nfnetlink.ConnState:
		out.never = (nfnetlink.NewConnection&c.Mask == c.Value) == c.Not
	}
	return out
}

func addressesOf(f policy.Family, c nfnetlink.Condition, in table) (policy.Ranges, error) {
	addresses, err := policy.Ranges{}, error(nil)
	if c.Set != "" {
		addresses, err = in.set(c.Set)
	} else if c.Range.IsValid() {
		addresses = append(addresses, c.Range)
	}
	if c.Not {
		addresses = policy.RangesOf(f.All()).Without(addresses)
	}
	return addresses, err
}
