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
	var of []policy.Chain
	for _, c := range rs.Chains {
		if c.Family == f {
			of = append(of, c)
		}
	}
	return of
}

// DecodedRule is a rule of the kernel in the terms of package policy.
type DecodedRule struct {
	policy.Rule        // Unrecognized if policy.Rule cannot express it
	Target      string // the chain that it jumps or goes to
	Owner       policy.Owner
}

// AddressReader returns the addresses of a condition on the source or the destination, nil for all, and whether
// the backend writes such a condition.
type AddressReader = func(nfnetlink.Condition) (addresses policy.Ranges, ok bool)

// DecodeRule returns the rule in the terms of package policy.
func DecodeRule(d nfnetlink.Decoded, addresses AddressReader) DecodedRule {
	r := DecodedRule{Rule: policy.Rule{Connections: d.Packets}, Owner: policy.ParseOwner(d.Comment)}
	unrecognized := slices.Concat(d.Other, d.Unrecognized)
	seen := 0 // a bit for each field
	for _, c := range d.Conditions {
		isSecond := seen&(1<<c.Field) != 0
		seen |= 1 << c.Field
		if isSecond {
			unrecognized = append(unrecognized, c.String())
			continue
		}
		isAdded := r.addCondition(c, addresses)
		if !isAdded {
			unrecognized = append(unrecognized, c.String())
		}
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
	text = strings.Join(strings.Fields(text), " ")
	r.Rule = policy.Rule{Verdict: policy.Unrecognized, Text: text, Connections: r.Connections}
}

// addCondition adds a condition to the rule, if policy.Rule can express it. Else the rule stays as it is: its
// text must not say what the kernel's rule does not.
func (r *DecodedRule) addCondition(c nfnetlink.Condition, addresses AddressReader) (ok bool) {
	// A policy.Rule has "not local", and no other negation.
	isNegated := c.Field == nfnetlink.SourceLocal || c.Field == nfnetlink.DestinationLocal
	if c.Not != isNegated {
		return false
	}
	switch c.Field {
	case nfnetlink.Source:
		from, ok := addresses(c)
		if !ok {
			return false
		}
		r.From = from
	case nfnetlink.Destination:
		to, ok := addresses(c)
		if !ok {
			return false
		}
		r.To = to
	case nfnetlink.OutputName:
		if c.Name != "+" {
			r.Out = c.Name
		}
	case nfnetlink.SourceLocal:
		r.NotFromLocal = true
	case nfnetlink.DestinationLocal:
		r.NotToLocal = true
	case nfnetlink.Protocol:
		r.Protocol = protocolOf(c.Value)
		return r.Protocol != ""
	case nfnetlink.Probability:
		r.Probability = c.Value
	default:
		return false
	}
	return true
}

// protocolOf returns the protocol of a number, "" if no rule of ip-masq names it.
func protocolOf(number uint32) policy.Protocol {
	switch number {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	}
	return ""
}

// setStatement returns what policy.Rule cannot express of the rule's statement.
func (r *DecodedRule) setStatement(d nfnetlink.Decoded) (problem string) {
	switch d.Statement {
	case nfnetlink.DoReturn:
		r.Verdict = policy.Return
	case nfnetlink.DoJump:
		r.Verdict, r.Target = policy.Jump, d.Chain
	case nfnetlink.DoGoto:
		r.Verdict, r.Target = policy.Jump, d.Chain
		return "goto"
	case nfnetlink.DoMasq, nfnetlink.DoSNAT:
		return r.setTranslation(d.Statement, d.To)
	case nfnetlink.NoStatement:
		return "no verdict"
	default:
		return string(d.Statement)
	}
	return ""
}

// setTranslation returns what policy.Rule cannot express of a masquerade or snat statement.
func (r *DecodedRule) setTranslation(
	statement nfnetlink.Statement, to nfnetlink.Translation,
) (problem string) {
	const known = unix.NF_NAT_RANGE_PROTO_SPECIFIED | unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY
	r.Verdict, r.Address = policy.Masquerade, to.Address
	r.RandomFully = to.Flags&unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY != 0
	r.Ports = policy.PortRange{First: to.PortMin, Last: to.PortMax}
	isSNAT := statement == nfnetlink.DoSNAT
	addressFits := isSNAT == to.Address.IsValid()
	saysPorts := to.Flags&unix.NF_NAT_RANGE_PROTO_SPECIFIED != 0
	portsFit := saysPorts == (to.PortMin != 0) && to.PortMin <= to.PortMax
	if !addressFits || !portsFit || to.Flags&^known != 0 {
		return string(statement) + " of another kind"
	}
	return ""
}
