// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// entry is a rule of a chain as a reader found it.
type entry struct {
	rule   policy.Rule // Unrecognized if policy.Rule cannot express it
	text   string      // what was decoded, of an unrecognized rule and of a jump
	target string      // the chain that it jumps or goes to, or another target
	owner  policy.Owner
}

// reading is an entry in the making. Each reader takes a rule apart in its own
// way and says here what it found; what it does not say is not in the rule, so
// whatever it cannot read it has to refuse.
type reading struct {
	entry
	share   bool // a statistic match was found
	refused []string
}

// refuse notes a part of the rule that makes it an alien.
func (r *reading) refuse(part string) { r.refused = append(r.refused, part) }

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

// done ends the reading.
func (r *reading) done() entry {
	if r.rule.Verdict == "" {
		r.refuse("no verdict")
	}
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

// portRange notes the source ports of MASQUERADE.
func (r *reading) portRange(first, last uint16) {
	if first == 0 || first > last || !r.rule.Ports.IsZero() {
		r.refuse("ports that cannot be")
		return
	}
	r.rule.Ports = policy.PortRange{First: first, Last: last}
}
