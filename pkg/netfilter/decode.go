// SPDX-License-Identifier: Apache-2.0

package netfilter

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// LinkOf returns a family as nf_tables numbers it.
func LinkOf(f policy.Family) nfnetlink.Family { return nfnetlink.FamilyOf(f.All().Addr()) }

// ChainsOf returns the chains of a family.
func ChainsOf(rs policy.Ruleset, f policy.Family) []policy.Chain {
	return slices.DeleteFunc(slices.Clone(rs.Chains), func(c policy.Chain) bool { return c.Family != f })
}

// DecodedRule is a rule of the kernel in the terms of package policy.
type DecodedRule struct {
	policy.Rule        // Unrecognized if policy.Rule cannot express it
	Target      string // the chain that it jumps or goes to
	Owner       policy.Owner
}

// DecodeRule returns the rule in the terms of package policy. The function returns the addresses of a
// condition on the source or the destination, nil for all, and whether the backend writes such a condition.
func DecodeRule(d nfnetlink.Decoded, addresses func(nfnetlink.Condition) (policy.Ranges, bool)) DecodedRule {
	r := DecodedRule{Rule: policy.Rule{Connections: d.Packets}, Owner: policy.ParseOwner(d.Comment)}
	unrecognized := slices.Concat(d.Other, d.Unrecognized)
	decoded := 0 // a bit for each field
	for _, c := range d.Conditions {
		if decoded&(1<<c.Field) != 0 || !r.addCondition(c, addresses) {
			unrecognized = append(unrecognized, c.String())
		}
		decoded |= 1 << c.Field
	}
	if problem := r.setStatement(d); problem != "" {
		unrecognized = append(unrecognized, problem)
	}
	if len(unrecognized) > 0 {
		r.Unrecognize(unrecognized...)
	}
	return r
}

// Unrecognize makes the rule an unrecognized one with a text that has also the parts which cannot be
// expressed.
func (r *DecodedRule) Unrecognize(parts ...string) {
	text := r.String() + " " + r.Target
	if r.Verdict == "" {
		text += "rule"
	}
	if len(parts) > 0 {
		text += " with " + strings.Join(parts, ", ")
	}
	r.Rule = policy.Rule{Verdict: policy.Unrecognized, Text: strings.Join(strings.Fields(text), " "), Connections: r.Connections}
}

// addCondition reports whether policy.Rule can express the condition.
func (r *DecodedRule) addCondition(c nfnetlink.Condition, addresses func(nfnetlink.Condition) (policy.Ranges, bool)) (ok bool) {
	switch c.Field {
	case nfnetlink.Source:
		r.From, ok = addresses(c)
		return ok && !c.Not
	case nfnetlink.Destination:
		r.To, ok = addresses(c)
		return ok && !c.Not
	case nfnetlink.OutputName:
		if c.Name != "+" {
			r.Out = c.Name
		}
		return !c.Not
	case nfnetlink.SourceLocal:
		r.NotFromLocal = true
		return c.Not
	case nfnetlink.DestinationLocal:
		r.NotToLocal = true
		return c.Not
	case nfnetlink.Protocol:
		r.Protocol = map[uint32]policy.Protocol{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[c.Value]
		return r.Protocol != "" && !c.Not
	case nfnetlink.Probability:
		r.Probability = c.Value
		return true
	}
	return false
}

// setStatement returns what policy.Rule cannot express of the rule's statement.
func (r *DecodedRule) setStatement(d nfnetlink.Decoded) (problem string) {
	switch d.Statement {
	case nfnetlink.DoReturn:
		r.Verdict = policy.Return
	case nfnetlink.DoJump, nfnetlink.DoGoto:
		r.Verdict, r.Target = policy.Jump, d.Chain
		if d.Statement == nfnetlink.DoGoto {
			return "goto"
		}
	case nfnetlink.DoMasq, nfnetlink.DoSNAT:
		const known = unix.NF_NAT_RANGE_PROTO_SPECIFIED | unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY
		to := d.To
		r.Verdict, r.Address, r.RandomFully = policy.Masquerade, to.Address, to.Flags&unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY != 0
		r.Ports = policy.PortRange{First: to.PortMin, Last: to.PortMax}
		if (d.Statement == nfnetlink.DoSNAT) != to.Address.IsValid() || to.Flags&^known != 0 || to.PortMin > to.PortMax ||
			(to.Flags&unix.NF_NAT_RANGE_PROTO_SPECIFIED != 0) != (to.PortMin != 0) {
			return string(d.Statement) + " of another kind"
		}
	case nfnetlink.NoStatement:
		return "no verdict"
	default:
		return string(d.Statement)
	}
	return ""
}
