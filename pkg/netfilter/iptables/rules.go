// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	natTable = "nat"
	// postrouting is the built-in chain whose rules jump to the masquerade chains.
	postrouting = "POSTROUTING"
)

// table is the part of one family's table nat that was read.
type table struct {
	chains  []policy.Chain // those of the named chains that exist
	targets []string       // of the rules of POSTROUTING, in order: the chain that each leads to
	fault   string         // why the rules of POSTROUTING do not have their usual effect
}

// chainRules are the rules of a chain, as nf_tables expressions in both variants.
type chainRules struct {
	exists bool
	count  int
	rule   func(i int) nfnetlink.Rule // valid until the next call
}

// read fills the table from a function that reads one chain. It reads POSTROUTING
// last, and only if one of the named chains exists.
func (t *table) read(f policy.Family, names []string, rulesOf func(chain string) (chainRules, error)) error {
	buffer := make([]nfnetlink.Condition, 0, 8)
	for _, name := range names {
		rules, err := rulesOf(name)
		if err != nil {
			return err
		}
		if rules.exists {
			t.chains = append(t.chains, decodeChain(f, name, rules, buffer))
		}
	}
	if len(t.chains) == 0 {
		return nil
	}
	rules, err := rulesOf(postrouting)
	for i := range rules.count {
		e := decode(f, rules.rule(i), buffer)
		t.targets = append(t.targets, e.target)
		if c := t.chain(e.target); c != nil {
			c.Jumps = append(c.Jumps, e.rule)
		}
	}
	return err
}

func decodeChain(f policy.Family, name string, rules chainRules, buffer []nfnetlink.Condition) policy.Chain {
	c := policy.Chain{Family: f, Name: name, Rules: make([]policy.Rule, rules.count)}
	for i := range c.Rules {
		e := decode(f, rules.rule(i), buffer)
		if e.rule.Verdict == policy.Jump { // policy has no jumps out of a masquerade chain
			e.rule = policy.Rule{Verdict: policy.Unrecognized, Text: e.text, Connections: e.rule.Connections}
		}
		c.Rules[i] = e.rule
		if e.owner != (policy.Owner{}) {
			c.Owner = e.owner
		}
	}
	return c
}

// chain returns a chain of the table, nil if it does not exist.
func (t *table) chain(name string) *policy.Chain {
	i := slices.IndexFunc(t.chains, func(c policy.Chain) bool { return c.Name == name })
	if i < 0 {
		return nil
	}
	return &t.chains[i]
}

// jumpLines takes the rules of POSTROUTING as `iptables -S` prints them and
// returns those that lead to the table's chains, by chain. It returns errChanging if
// the lines are not those of the rules that were read.
func (t *table) jumpLines(lines []string) (map[string][]string, error) {
	jumps := map[string][]string{}
	if len(lines) != len(t.targets) {
		return nil, errChanging
	}
	for i, line := range lines {
		for _, c := range t.chains {
			leads := leadsTo(line, c.Name)
			if leads != (t.targets[i] == c.Name) {
				return nil, errChanging
			}
			if leads {
				jumps[c.Name] = append(jumps[c.Name], line)
			}
		}
	}
	return jumps, nil
}

// leadsTo reports whether a rule that `iptables -S` printed jumps or goes to the
// chain. Nothing follows the chain in such a line.
func leadsTo(line, chain string) bool {
	return strings.HasSuffix(line, " -j "+chain) || strings.HasSuffix(line, " -g "+chain)
}

// decodedRule is a rule of a chain in the kernel.
type decodedRule struct {
	rule   policy.Rule // Unrecognized if policy.Rule cannot express it
	text   string      // of an unrecognized rule or a jump
	target string      // the chain that it jumps or goes to, or ACCEPT
	owner  policy.Owner
}

// decode decodes a rule of iptables-nft. It knows the native form of nft as well:
// `nft list ruleset` prints the rules in it, and `nft -f` loads them so. The
// conditions are decoded into the array of buffer.
func decode(f policy.Family, rule nfnetlink.Rule, buffer []nfnetlink.Condition) decodedRule {
	d := nfnetlink.Decode(nftFamily(f), rule, buffer)
	r := decodedRule{rule: policy.Rule{Connections: d.Packets}}
	if d.Comment != "" {
		r.owner = policy.ParseOwner(d.Comment)
	}
	unrecognized := slices.Concat(d.Other, d.Unrecognized)
	decoded := 0 // a bit for each field
	for _, c := range d.Conditions {
		if decoded&(1<<c.Field) != 0 || !r.addCondition(c) {
			unrecognized = append(unrecognized, c.String())
		}
		decoded |= 1 << c.Field
	}
	if problem := r.setStatement(d); problem != "" {
		unrecognized = append(unrecognized, problem)
	}
	if len(unrecognized) == 0 && r.target == "" {
		return r
	}
	words := []string{r.rule.String(), r.target}
	if len(unrecognized) > 0 {
		words = append(words, "with", strings.Join(unrecognized, ", "))
	}
	r.text = strings.Join(strings.Fields(strings.Join(words, " ")), " ")
	if len(unrecognized) > 0 {
		r.rule = policy.Rule{Verdict: policy.Unrecognized, Text: r.text, Connections: d.Packets}
	}
	return r
}

// addCondition reports whether policy.Rule can express the condition.
func (r *decodedRule) addCondition(c nfnetlink.Condition) bool {
	switch c.Field {
	case nfnetlink.Source:
		return setPrefix(&r.rule.From, c)
	case nfnetlink.Destination:
		return setPrefix(&r.rule.To, c)
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
	case nfnetlink.Probability:
		r.rule.Probability = c.Value
		return true
	}
	return false
}

func setPrefix(side *policy.Ranges, c nfnetlink.Condition) bool {
	p, ok := c.Range.Prefix()
	if p.Bits() > 0 {
		*side = policy.Ranges{c.Range}
	}
	return ok && !c.Not
}

// setStatement returns what policy.Rule cannot express of the rule's statement.
func (r *decodedRule) setStatement(d nfnetlink.Decoded) (problem string) {
	switch d.Statement {
	case nfnetlink.DoReturn:
		r.rule.Verdict = policy.Return
	case nfnetlink.DoAccept:
		r.rule.Verdict, r.target = policy.Jump, "ACCEPT"
	case nfnetlink.DoJump, nfnetlink.DoGoto:
		r.rule.Verdict, r.target = policy.Jump, d.Chain
		if d.Statement == nfnetlink.DoGoto {
			return "goto"
		}
	case nfnetlink.DoMasq, nfnetlink.DoSNAT:
		const known = unix.NF_NAT_RANGE_PROTO_SPECIFIED | unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY
		m := d.To
		r.rule.Verdict, r.rule.Address, r.rule.RandomFully = policy.Masquerade, m.Address, m.Flags&unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY != 0
		r.rule.Ports = policy.PortRange{First: m.PortMin, Last: m.PortMax}
		if (d.Statement == nfnetlink.DoSNAT) != m.Address.IsValid() || m.Flags&^known != 0 || m.PortMin > m.PortMax || (m.Flags&unix.NF_NAT_RANGE_PROTO_SPECIFIED != 0) != (m.PortMin != 0) {
			return string(d.Statement) + " of another kind"
		}
	case nfnetlink.NoStatement:
		return "no verdict"
	default:
		return string(d.Statement)
	}
	return ""
}
