// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	natTable = "nat"
	// postrouting is the built-in chain whose rules jump to the masquerade chains.
	postrouting = "POSTROUTING"
)

// table is what was read of one family's table nat.
type table struct {
	chains []policy.Chain // those of the named chains that exist
	// targets are the chains or targets of the rules of POSTROUTING, in order.
	targets []string
	fault   string // why the rules of POSTROUTING do not have their effect; "": they have
}

// chainRules are the rules of a chain, as nf_tables expressions in both variants.
type chainRules struct {
	exists bool
	count  int
	rule   func(i int) nfnetlink.Rule // valid until the next call
}

// read fills the table from a function that reads one chain. POSTROUTING is read
// last, and only if there are chains that it can jump to.
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
// returns those that lead to the table's chains, by chain. It returns false if
// the lines are not those of the rules that were read.
func (t *table) jumpLines(lines []string) (map[string][]string, bool) {
	jumps := map[string][]string{}
	if len(lines) != len(t.targets) {
		return nil, false
	}
	for i, line := range lines {
		for _, c := range t.chains {
			leads := leadsTo(line, c.Name)
			if leads != (t.targets[i] == c.Name) {
				return nil, false
			}
			if leads {
				jumps[c.Name] = append(jumps[c.Name], line)
			}
		}
	}
	return jumps, true
}

// leadsTo reports whether a rule that `iptables -S` printed jumps or goes to the
// chain. Nothing follows the chain in such a line.
func leadsTo(line, chain string) bool {
	return strings.HasSuffix(line, " -j "+chain) || strings.HasSuffix(line, " -g "+chain)
}

// ruleLines returns the rules among the lines that `iptables -S` prints. It joins
// those of a comment with line feeds, which iptables prints as they are.
func ruleLines(lines []string) []string {
	var rules []string
	for _, line := range lines {
		if n := len(rules); n > 0 && inQuotes(rules[n-1]) {
			rules[n-1] += "\n" + line
		} else if strings.HasPrefix(line, "-A ") {
			rules = append(rules, line)
		}
	}
	return rules
}

// inQuotes reports whether a quotation is open at the end of the text.
func inQuotes(text string) bool {
	open := false
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] == '"':
			open = !open
		case text[i] == '\\' && open:
			i++
		}
	}
	return open
}

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
// It uses the array of buffer.
func decode(f policy.Family, rule nfnetlink.Rule, buffer []nfnetlink.Condition) entry {
	var r reading
	d := nfnetlink.Decode(nftFamily(f), rule, buffer)
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
