// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// decoded is a rule with the names that stand in it.
type decoded struct {
	rule   policy.Rule
	set    string
	target string // of a jump
}

// decode returns the rule that the expressions were encoded from. A rule that encode
// does not write, or one with a set that is not as this package makes it, is
// unrecognized.
func decode(f policy.Family, exprs []nfnetlink.Expr, sets func(string) (policy.Ranges, error)) (decoded, error) {
	d := nfnetlink.Decode(headerOf(f).link, nfnetlink.Rule{Exprs: exprs}, nil)
	var out decoded
	ok := len(d.Unrecognized)+len(d.Other) == 0 && out.statement(d)
	var addresses *policy.Ranges
	seen := 0 // fields
	for _, c := range d.Conditions {
		ok = ok && seen&(1<<c.Field) == 0 && out.condition(c)
		seen |= 1 << c.Field
		switch c.Field {
		case nfnetlink.Source:
			addresses = &out.rule.From
		case nfnetlink.Destination:
			addresses = &out.rule.To
		}
	}
	if !ok {
		return decoded{rule: unrecognizedRule(exprs)}, nil
	}
	if out.set != "" {
		ranges, err := sets(out.set)
		if err != nil {
			return decoded{}, err
		}
		if ranges == nil {
			return decoded{rule: unrecognizedRule(exprs), set: out.set}, nil
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

// condition adds a condition to the rule and reports whether encode writes such.
func (d *decoded) condition(c nfnetlink.Condition) bool {
	r := &d.rule
	switch c.Field {
	case nfnetlink.Source, nfnetlink.Destination:
		another := d.set != ""
		d.set = c.Set
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
	case nfnetlink.Share:
		r.Share = c.Value
		return true
	}
	return false
}

// statement sets what the rule does and reports whether encode writes such.
func (d *decoded) statement(from nfnetlink.Decoded) bool {
	r := &d.rule
	r.Connections = from.Packets
	switch from.Statement {
	case nfnetlink.DoReturn:
		r.Verdict = policy.Return
	case nfnetlink.DoJump:
		r.Verdict, d.target = policy.Jump, from.Chain
	case nfnetlink.DoMasq:
		m := from.Masq
		r.Verdict, r.RandomFully = policy.Masquerade, m.Flags&natRandomFully != 0
		r.Ports = policy.PortRange{First: m.PortMin, Last: m.PortMax}
		return m.Flags&^(natRandomFully|natPorts) == 0
	default:
		return false
	}
	return true
}
