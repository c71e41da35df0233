// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// postrouting is the built-in chain from which jumps lead to ours.
const postrouting = "POSTROUTING"

// natTable is the table that both are in.
const natTable = "nat"

// entry is a rule of a chain as a reader found it.
type entry struct {
	rule   policy.Rule // an Alien where it holds what policy has no terms for
	text   string      // as iptables shows it, or what could be made out
	target string      // the chain that it jumps or goes to
	owner  policy.Owner
	// unsure tells of an alien that iptables may be able to read: nothing is
	// wrong with it but the form of an extension. With anything else iptables
	// is not to be believed, for it shows an expression that it does not know
	// as nothing at all, and so a rule that matches more.
	unsure bool
}

// reading is an entry in the making. Each reader takes a rule apart in its own
// way and says here what it found; what it does not say is not in the rule, so
// whatever it cannot read it has to refuse.
type reading struct {
	entry
	share   bool // a statistic match was found
	refused []string
	asked   int // of those: extensions in a form that is not known here
}

// refuse notes a part of the rule that makes it an alien.
func (r *reading) refuse(part string) { r.refused = append(r.refused, part) }

// ask notes an extension that has another form than is known.
func (r *reading) ask(x extension, err error) {
	r.asked++
	r.refuse(x.String() + ": " + err.Error())
}

// address notes a match of an address against a prefix, whose host bits have to
// be zero: with others the kernel's comparison never holds.
func (r *reading) address(side *policy.Ranges, p netip.Prefix, what string) {
	switch {
	case !p.IsValid() || p != p.Masked():
		r.refuse(what + " that is no prefix")
	case *side != nil:
		r.refuse("a second " + what)
	case p.Bits() > 0:
		*side = policy.RangesOf(p)
	}
}

// out notes a match of the output interface; a trailing + is a wildcard.
func (r *reading) out(name string) {
	switch {
	case r.rule.Out != "":
		r.refuse("a second output interface")
	case name != "+":
		r.rule.Out = name
	}
}

// outBytes notes a match of the first bytes of the output interface's name, as
// the kernel has it: with the NUL that ends a name it is exact, else a wildcard.
func (r *reading) outBytes(b []byte) {
	const most = 15 // IFNAMSIZ, less the NUL
	name, end, exact := bytes.Cut(b, []byte{0})
	switch {
	case len(name) > most || exact && len(name) == 0 || slices.ContainsFunc(end, func(b byte) bool { return b != 0 }):
		r.refuse("an output interface that is no name")
	case exact && name[len(name)-1] == '+':
		r.refuse("an output interface whose name ends in +") // which stands for a wildcard here
	case exact:
		r.out(string(name))
	default:
		r.out(string(name) + "+")
	}
}

// protocol notes a match of the protocol, by its number.
func (r *reading) protocol(number int) {
	known := map[int]policy.Protocol{6: "tcp", 17: "udp", 132: "sctp"}
	switch p := known[number]; {
	case p == "":
		r.refuse("a protocol without ports")
	case r.rule.Protocol != "":
		r.refuse("a second protocol")
	default:
		r.rule.Protocol = p
	}
}

// random notes a match of that share of all packets, in policy.ShareUnit. One
// that never matches has no terms in policy.
func (r *reading) random(share uint32) {
	if r.share || share == 0 || share > policy.ShareUnit {
		r.refuse("a statistic match that cannot be")
	}
	r.share = true
	r.rule.Share = share
}

// comment notes a comment, which says nothing unless it names an owner.
func (r *reading) comment(text string) {
	if o := policy.ParseOwner(text); o != (policy.Owner{}) {
		r.owner = o
	}
}

// verdict notes what the rule does with packets.
func (r *reading) verdict(v policy.Verdict) {
	if r.rule.Verdict != "" {
		r.refuse("a second verdict")
	}
	r.rule.Verdict = v
}

// jump notes that the rule leads to a chain.
func (r *reading) jump(chain string) {
	r.verdict(policy.Jump)
	r.target = chain
}

// done ends the reading. The text is that of the rule, should it be an alien;
// where there is none what was found of it has to do.
func (r *reading) done(text string) entry {
	if r.rule.Verdict == "" {
		r.refuse("no verdict")
	}
	if text == "" && (len(r.refused) > 0 || r.target != "") {
		words := []string{r.rule.String(), r.target}
		if len(r.refused) > 0 {
			words = append(words, "with", strings.Join(r.refused, ", "))
		}
		text = strings.Join(strings.Fields(strings.Join(words, " ")), " ")
	}
	r.text = text
	if len(r.refused) > 0 {
		r.rule = r.alien()
		r.unsure = r.asked == len(r.refused)
	}
	return r.entry
}

// alien returns the rule as one that equals nothing.
func (e entry) alien() policy.Rule {
	return policy.Rule{Verdict: policy.Unrecognized, Text: e.text, Connections: e.rule.Connections}
}

// table is one family's nat table.
type table struct {
	entries map[string][]entry // of those chains that were asked for and are there
	fault   string             // why the rules of POSTROUTING have no effect, or another one
}

// chains returns what the table holds of the named chains.
func (t table) chains(f policy.Family, names []string) []policy.Chain {
	var out []policy.Chain
	for _, name := range names {
		entries, there := t.entries[name]
		if !there {
			continue
		}
		c := policy.Chain{Family: f, Name: name, Jumps: t.jumps(name), Rules: make([]policy.Rule, 0, len(entries))}
		for _, e := range entries {
			if e.rule.Verdict == policy.Jump {
				// policy has no terms for a jump onwards.
				e.rule = e.alien()
			}
			c.Rules = append(c.Rules, e.rule)
			if e.owner != (policy.Owner{}) {
				c.Owner = e.owner
			}
		}
		out = append(out, c)
	}
	return out
}

// jumps returns the rules of POSTROUTING that lead to the chain.
func (t table) jumps(name string) []policy.Rule {
	var out []policy.Rule
	for _, e := range t.entries[postrouting] {
		if e.target == name {
			out = append(out, e.rule)
		}
	}
	return out
}

// legible reports whether all that bears on the named chains could be read. If
// it is terse, an alien that is one for certain will do as it is.
func (t table) legible(names []string, terse bool) bool {
	known := func(e entry) bool {
		alien := e.rule.Verdict == policy.Unrecognized
		return !e.unsure && (terse || !alien)
	}
	for _, name := range names {
		for _, e := range t.entries[name] {
			if !known(e) || e.rule.Verdict == policy.Jump && !terse {
				return false
			}
		}
	}
	return !slices.ContainsFunc(t.entries[postrouting], func(e entry) bool { return !known(e) && slices.Contains(names, e.target) })
}
