// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// entry is a rule of a chain in the kernel.
type entry struct {
	rule   policy.Rule // Unrecognized if policy.Rule cannot express it
	text   string      // what was decoded, of an unrecognized rule and of a jump
	target string      // the chain that it jumps or goes to
	owner  policy.Owner
}

// reading is an entry in the making. What is refused makes the rule unrecognized.
type reading struct {
	entry
	refused []string
}

// decode decodes a rule in the form in which iptables-nft writes it, or in the native
// form of nft: a ruleset that nft saved and loaded comes back in it.
func decode(f policy.Family, rule nfnetlink.Rule) entry {
	var buffer [4]nfnetlink.Condition
	var r reading
	d := nfnetlink.Decode(nftFamily(f), rule, buffer[:])
	r.rule.Connections = d.Packets
	if d.Comment != "" {
		r.owner = policy.ParseOwner(d.Comment)
	}
	seen := 0 // fields
	for _, c := range d.Conditions {
		if seen&(1<<c.Field) != 0 || !r.condition(c) {
			r.refuse(c.String())
		}
		seen |= 1 << c.Field
	}
	r.refused = append(append(r.refused, d.Other...), d.Unrecognized...)
	r.statement(d)
	return r.done()
}

func (r *reading) refuse(part string) { r.refused = append(r.refused, part) }

// condition notes what a rule matches and reports whether policy.Rule can express it.
func (r *reading) condition(c nfnetlink.Condition) bool {
	switch c.Field {
	case nfnetlink.Source:
		return prefix(&r.rule.From, c)
	case nfnetlink.Destination:
		return prefix(&r.rule.To, c)
	case nfnetlink.OutputName:
		if c.Name != "+" {
			r.rule.Out = c.Name
		}
		return !c.Not
	case nfnetlink.Protocol:
		r.rule.Protocol = map[uint32]policy.Protocol{6: "tcp", 17: "udp", 132: "sctp"}[c.Value]
		return r.rule.Protocol != "" && !c.Not
	case nfnetlink.SourceLocal:
		r.rule.NotFromLocal = true
		return c.Not
	case nfnetlink.DestinationLocal:
		r.rule.NotToLocal = true
		return c.Not
	case nfnetlink.Share:
		r.rule.Share = c.Value
		return true
	}
	return false
}

func prefix(side *policy.Ranges, c nfnetlink.Condition) bool {
	p, ok := c.Range.Prefix()
	if p.Bits() > 0 {
		*side = policy.Ranges{c.Range}
	}
	return ok && !c.Not
}

// statement notes what the rule does.
func (r *reading) statement(d nfnetlink.Decoded) {
	switch d.Statement {
	case nfnetlink.DoReturn:
		r.rule.Verdict = policy.Return
	case nfnetlink.DoAccept:
		r.rule.Verdict, r.target = policy.Jump, "ACCEPT" // as iptables calls it
	case nfnetlink.DoJump:
		r.rule.Verdict, r.target = policy.Jump, d.Chain
	case nfnetlink.DoGoto:
		r.rule.Verdict, r.target = policy.Jump, d.Chain
		r.refuse("goto")
	case nfnetlink.DoMasq:
		const known = nfnetlink.RangeProtoSpecified | nfnetlink.RangeRandomFully
		m := d.Masq
		r.rule.Verdict, r.rule.RandomFully = policy.Masquerade, m.Flags&nfnetlink.RangeRandomFully != 0
		r.rule.Ports = policy.PortRange{First: m.PortMin, Last: m.PortMax}
		if m.Flags&^known != 0 || m.PortMin > m.PortMax || (m.Flags&nfnetlink.RangeProtoSpecified != 0) != (m.PortMin != 0) {
			r.refuse("masquerade of another kind")
		}
	case nfnetlink.DoDrop, nfnetlink.DoSNAT:
		r.refuse(string(d.Statement))
	}
	if r.rule.Verdict == "" {
		r.refuse("no verdict")
	}
}

// done returns the entry.
func (r *reading) done() entry {
	if len(r.refused) > 0 || r.target != "" {
		words := []string{r.rule.String(), r.target}
		if len(r.refused) > 0 {
			words = append(words, "with", strings.Join(r.refused, ", "))
		}
		r.text = strings.Join(strings.Fields(strings.Join(words, " ")), " ")
	}
	if len(r.refused) > 0 {
		r.rule = policy.Rule{Verdict: policy.Unrecognized, Text: r.text, Connections: r.rule.Connections}
	}
	return r.entry
}
