// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// decode returns the rule that the expressions were encoded from. A rule that encode does not write is
// unrecognized, as is one with a set that differs from nfnetlink.AddressRanges.
func decode(f policy.Family, exprs []nfnetlink.Expr, sets func(string) (policy.Ranges, error)) (rule, error) {
	d := nfnetlink.Decode(headerOf(f).link, nfnetlink.Rule{Exprs: exprs}, nil)
	var out rule
	ok := len(d.Unrecognized)+len(d.Other) == 0 && out.statement(d)
	var addresses *policy.Ranges
	seen := 0 // fields
	for _, c := range d.Conditions {
		ok = ok && seen&(1<<c.Field) == 0 && out.condition(c)
		seen |= 1 << c.Field
		switch c.Field {
		case nfnetlink.Source:
			addresses = &out.From
		case nfnetlink.Destination:
			addresses = &out.To
		}
	}
	if !ok {
		return rule{Rule: unrecognizedRule(exprs)}, nil
	}
	if out.set != "" {
		ranges, err := sets(out.set)
		if err != nil {
			return rule{}, err
		}
		if ranges == nil {
			return rule{Rule: unrecognizedRule(exprs), set: out.set}, nil
		}
		*addresses = ranges
	}
	return out, nil
}

func unrecognizedRule(exprs []nfnetlink.Expr) policy.Rule {
	text := "rule of"
	for _, e := range exprs {
		text += " " + nfnetlink.ExprName(e)
	}
	return policy.Rule{Verdict: policy.Unrecognized, Text: text}
}

// condition adds a condition to the rule and reports whether encode writes such a condition.
func (r *rule) condition(c nfnetlink.Condition) bool {
	switch c.Field {
	case nfnetlink.Source, nfnetlink.Destination:
		another := r.set != ""
		r.set = c.Set
		return c.Set != "" && !c.Not && !another
	case nfnetlink.OutputName:
		r.Out = c.Name
		return !c.Not
	case nfnetlink.SourceLocal:
		r.NotFromLocal = true
		return c.Not
	case nfnetlink.DestinationLocal:
		r.NotToLocal = true
		return c.Not
	case nfnetlink.Protocol:
		for _, p := range policy.Protocols() {
			if uint32(protocolNumber(p)) == c.Value {
				r.Protocol = p
			}
		}
		return !c.Not && r.Protocol != ""
	case nfnetlink.Probability:
		r.Probability = c.Value
		return true
	}
	return false
}

// statement sets what the rule does and reports whether encode writes such a statement.
func (r *rule) statement(from nfnetlink.Decoded) bool {
	r.Connections = from.Packets
	switch from.Statement {
	case nfnetlink.DoReturn:
		r.Verdict = policy.Return
	case nfnetlink.DoJump:
		r.Verdict, r.target = policy.Jump, from.Chain
	case nfnetlink.DoMasq, nfnetlink.DoSNAT:
		m := from.To
		r.Verdict, r.Address, r.RandomFully = policy.Masquerade, m.Address, m.Flags&unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY != 0
		r.Ports = policy.PortRange{First: m.PortMin, Last: m.PortMax}
		return (from.Statement == nfnetlink.DoSNAT) == m.Address.IsValid() && m.Flags&^(unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY|unix.NF_NAT_RANGE_PROTO_SPECIFIED) == 0
	default:
		return false
	}
	return true
}
