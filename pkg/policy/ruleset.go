// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Verdict is what a rule does with a packet that it matches.
type Verdict string

// The verdicts of rules. Unrecognized is the verdict of an observed rule that cannot be decoded: it equals
// nothing, and no desired rule has it.
const (
	Jump         Verdict = "jump"
	Return       Verdict = "return"
	Masquerade   Verdict = "masquerade"
	Unrecognized Verdict = "unrecognized"
)

// Protocol is the transport protocol that a rule matches; "" is any.
type Protocol string

// Protocols returns those with source ports that can be chosen.
func Protocols() []Protocol { return []Protocol{"tcp", "udp", "sctp"} }

// ProbabilityScale is the denominator of Rule.Probability: iptables and the kernel
// count probabilities in units of 2^-31 (xt_statistic).
const ProbabilityScale = 1 << 31

// Rule is a rule of a masquerade chain, or a jump to one, in the terms that both
// backends have in common. The zero value of a match field matches everything.
type Rule struct {
	From, To Ranges
	Match

	Verdict     Verdict
	Address     netip.Addr // of Masquerade; the zero Addr is the one that the kernel chooses
	Ports       PortRange  // of Masquerade
	RandomFully bool       // of Masquerade
	Text        string     // of Unrecognized: the rule as its backend prints it

	// Connections is the kernel's counter: a nat chain sees the first packet of each
	// connection. Comparisons ignore it.
	Connections uint64

	// PrefixAction is what a desired rule of a single prefix comes from. Comparisons ignore it.
	PrefixAction *PrefixAction
}

// Match is what a rule matches besides addresses.
type Match struct {
	Out                      string // output interface; a trailing + is a wildcard
	NotFromLocal, NotToLocal bool
	Protocol                 Protocol
	Probability              uint32 // of ProbabilityScale; 0 is always
}

// Equal reports whether the rules do the same to the same packets. An unrecognized
// rule equals nothing, itself included.
func (r Rule) Equal(s Rule) bool {
	if r.Verdict == Unrecognized || !r.sameEffect(&s) {
		return false
	}
	return r.Match == s.Match && r.From.Equal(s.From) && r.To.Equal(s.To)
}

// SameReading reports whether two readings found the same rule: unlike Equal also if it is unrecognized.
func (r Rule) SameReading(s Rule) bool {
	if r.Verdict == Unrecognized && s.Verdict == Unrecognized {
		return r.Text == s.Text
	}
	return r.Equal(s)
}

func (r *Rule) sameEffect(s *Rule) bool {
	return r.Verdict == s.Verdict && r.Address == s.Address && r.Ports == s.Ports &&
		r.RandomFully == s.RandomFully && r.Text == s.Text
}

// commutes reports whether the order of the two rules does not matter: no packet
// matches both, or they do the same with it.
func (r *Rule) commutes(s *Rule) bool {
	if r.Verdict == Unrecognized || s.Verdict == Unrecognized {
		return false
	}
	if r.sameEffect(s) && r.Probability == 0 && s.Probability == 0 {
		return true
	}
	apart := r.Protocol != "" && s.Protocol != "" && r.Protocol != s.Protocol
	return apart || !r.From.Overlaps(s.From) || !r.To.Overlaps(s.To)
}

// RuleKey is a key for maps. Rules have the same key if they are Equal.
type RuleKey struct {
	from, to    string
	match       Match
	verdict     Verdict
	address     netip.Addr
	ports       PortRange
	randomFully bool
	text        string
}

// Key returns the key of the rule.
func (r Rule) Key() RuleKey {
	return RuleKey{r.From.key(), r.To.key(), r.Match, r.Verdict, r.Address, r.Ports, r.RandomFully, r.Text}
}

// String returns the rule for people.
func (r Rule) String() string {
	if r.Verdict == Unrecognized {
		return Printable(r.Text)
	}
	var text words
	text.add(r.From != nil, "from %s", r.From)
	text.add(r.NotFromLocal, "from non-local")
	text.add(r.To != nil, "to %s", r.To)
	text.add(r.NotToLocal, "to non-local")
	text.add(r.Out != "", "out %s", r.Out)
	text.add(r.Protocol != "", "%s", r.Protocol)
	text.add(r.Probability != 0, "%.2f%%", 100*float64(r.Probability)/ProbabilityScale)
	text.add(!r.Address.IsValid(), "%s", r.Verdict)
	text.add(r.Address.IsValid(), "snat to %s", r.Address)
	text.add(!r.Ports.IsZero(), "to ports %s", r.Ports)
	text.add(r.RandomFully, "random-fully")
	return strings.Join(text, " ")
}

type words []string

// add adds a part of a rule that is set.
func (w *words) add(isSet bool, format string, args ...any) {
	if isSet {
		*w = append(*w, fmt.Sprintf(format, args...))
	}
}

// Packet is the first packet of a connection in POSTROUTING.
type Packet struct {
	Src, Dst           netip.Addr
	Out                string // output interface
	SrcLocal, DstLocal bool   // the address is one of the node's own
	Protocol           Protocol
}

// Matches reports whether the rule matches the packet.
func (r Rule) Matches(p Packet) bool {
	isFrom := r.From == nil || r.From.Contains(p.Src)
	isTo := r.To == nil || r.To.Contains(p.Dst)
	return isFrom && isTo && r.matches(&p)
}

// matches reports whether the packet meets the conditions. A Probability counts as met: the other rules of
// its group have the same verdict.
func (m *Match) matches(p *Packet) bool {
	isLocal := m.NotFromLocal && p.SrcLocal || m.NotToLocal && p.DstLocal
	isProtocol := m.Protocol == "" || m.Protocol == p.Protocol
	return !isLocal && isProtocol && InterfaceWithin(p.Out, m.Out)
}

// InterfaceWithin reports whether an interface, or all interfaces of a pattern, match another pattern. A
// trailing + is a wildcard, as in iptables, and "" matches any.
func InterfaceWithin(pattern, other string) bool {
	prefix, wildcard := strings.CutSuffix(other, "+")
	return pattern == other || other == "" || wildcard && strings.HasPrefix(pattern, prefix)
}

// Chain is a masquerade chain of one family, with the jumps to it from POSTROUTING.
type Chain struct {
	Family Family
	Name   string
	Jumps  []Rule
	Rules  []Rule
	Owner  Owner
	// Printed are the rules as the backend's own program prints them, and PrintedJumps the jumps, of a chain
	// without an owner that an agent cannot have written, and if that program could be run.
	Printed      []string
	PrintedJumps []PrintedJump
}

// PrintedJump is a jump as the backend's own program prints it.
type PrintedJump struct {
	From   string // the chain that has it
	Number int    // there, from 1
	Text   string
}

// IsOfAgents reports whether an agent may have written the chain with its jumps.
func (c *Chain) IsOfAgents() bool { return len(c.NotOfAgents()) == 0 && !c.HasOtherJumps() }

// HasOtherJumps reports whether some packets reach the chain and others do not. Every packet reaches it by the
// jump of the agents, or by one without a condition. ip-masq replaces the jumps of a chain that it adopts: the
// packets that do not meet the condition of another jump would be masqueraded without anybody having asked for
// that.
func (c *Chain) HasOtherJumps() bool {
	unconditional := Rule{Verdict: Jump}
	ofAgents := Rule{Match: Match{NotToLocal: true}, Verdict: Jump}
	for _, j := range c.Jumps {
		if j.Equal(ofAgents) || j.Equal(unconditional) {
			return false
		}
	}
	return len(c.Jumps) > 0
}

// NotOfAgents returns the numbers, from 0, of the rules that no agent writes.
func (c *Chain) NotOfAgents() []int {
	var numbers []int
	for i, r := range c.Rules {
		if !r.isOfAgents() {
			numbers = append(numbers, i)
		}
	}
	return numbers
}

// isOfAgents reports whether the rule has a form of the agents: RETURN or MASQUERADE by destination, and
// MASQUERADE to ports by protocol and at random, too. ip-masq replaces the rules of an agent. If one had any
// other match, such as a source or an interface, the verdict of its packets would change without anybody
// having asked for that. NotToLocal is a match of the agents, and ip-masq masquerades no packet to a local
// address either.
func (r Rule) isOfAgents() bool {
	if r.From != nil || r.NotFromLocal || r.Out != "" || r.Address.IsValid() {
		return false
	}
	hasPorts := r.Verdict == Masquerade && !r.Ports.IsZero()
	if (r.Protocol != "" || r.Probability != 0) && !hasPorts {
		return false
	}
	return r.Verdict == Return || r.Verdict == Masquerade
}

// Walk returns the rule that decides the packet, or nil if no jump matches it or it
// reaches the end of the chain.
func (c *Chain) Walk(p Packet) *Rule {
	if firstMatch(c.Jumps, p) == nil {
		return nil
	}
	return firstMatch(c.Rules, p)
}

func firstMatch(rules []Rule, p Packet) *Rule {
	for i := range rules {
		if rules[i].Matches(p) {
			return &rules[i]
		}
	}
	return nil
}

// Ruleset is the masquerade chains of a node, desired or observed.
type Ruleset struct {
	Chains []Chain
	// Unrecognized is what else is in a table that only ip-masq may write.
	Unrecognized []UnrecognizedObject
}

// UnrecognizedObject is an object other than a rule of an owned chain: a chain, a
// set, a flag of a table.
type UnrecognizedObject struct {
	Family Family
	Text   string
}

// Find returns the chain, or nil.
func (rs *Ruleset) Find(f Family, name string) *Chain {
	for i := range rs.Chains {
		if c := &rs.Chains[i]; c.Family == f && c.Name == name {
			return c
		}
	}
	return nil
}

// RulesSchema is the version of the form in which chains are written: the 1 in ip-masq/1. A chain
// whose owner comment has a newer one is not changed.
const RulesSchema = 1

// Owner identifies the writer of a chain, in a comment on its last rule, where iptables -L and
// nft list show it. The zero Owner is that of a chain without the comment.
type Owner struct {
	Schema  int
	DataDir string
}

// OwnedBy returns the owner of chains that are written from the state in dataDir, whose path fits into a
// comment unquoted (see package config).
func OwnedBy(dataDir string) Owner { return Owner{Schema: RulesSchema, DataDir: dataDir} }

// Differs reports whether the owner names a dataDir other than that of p.
func (o Owner) Differs(p Owner) bool { return o.DataDir != "" && o.DataDir != p.DataDir }

// A comment is ip-masq/SCHEMA keeps its state in DATADIR.
const ownerPrefix, ownerText = "ip-masq/", "keeps its state in "

// Comment returns the text of the comment, which people read too.
func (o Owner) Comment() string {
	if o == (Owner{}) {
		return ""
	}
	return ownerPrefix + strconv.Itoa(o.Schema) + " " + ownerText + o.DataDir
}

// ParseOwner parses a comment. It returns the zero Owner for the comment of another
// program. The text after the number of a newer schema is unknown.
func ParseOwner(comment string) Owner {
	rest, isOurs := strings.CutPrefix(comment, ownerPrefix)
	if !isOurs { // as of nearly every rule
		return Owner{}
	}
	number, text, _ := strings.Cut(rest, " ")
	schema, err := strconv.Atoi(number)
	if err != nil || schema < 1 {
		return Owner{}
	}
	dir, isKnownText := strings.CutPrefix(text, ownerText)
	switch {
	case isKnownText:
		return Owner{Schema: schema, DataDir: dir}
	case schema > RulesSchema:
		return Owner{Schema: schema}
	}
	return Owner{}
}
