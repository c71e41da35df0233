// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"strings"
)

// Verdict is what a rule does with a packet that it matches.
type Verdict string

// The verdicts of rules. An Alien rule is one that we never write: it stands in
// an observed chain for whatever could not be read, and equals nothing.
const (
	Jump         Verdict = "jump"
	Return       Verdict = "return"
	Masquerade   Verdict = "masquerade"
	Unrecognized Verdict = "unrecognized"
)

// Protocol is a transport protocol that a rule is about; "" is any.
type Protocol string

// Protocols returns those that have ports which can be chosen.
func Protocols() []Protocol { return []Protocol{"tcp", "udp", "sctp"} }

// ShareUnit is the whole of which Rule.Share is a part: iptables and the kernel
// count probabilities in units of 2^-31 (xt_statistic).
const ShareUnit = 1 << 31

// Rule is one rule of a masquerade chain, or a jump to one, in the terms that
// both backends have in common. The zero value of a field matches everything.
type Rule struct {
	From, To                 Ranges
	Out                      string // output interface; a trailing + is a wildcard
	NotFromLocal, NotToLocal bool
	Protocol                 Protocol
	Share                    uint32 // of ShareUnit; 0 is always

	Verdict     Verdict
	Ports       PortRange // of Masquerade
	RandomFully bool      // of Masquerade
	Text        string    // of Alien: the rule as its backend shows it

	// Connections is how many the kernel counted. A nat chain sees the first
	// packet of each. It does not take part in comparisons.
	Connections uint64
}

// Equal reports whether the rules do the same to the same packets. An alien
// equals nothing, itself included.
func (r Rule) Equal(s Rule) bool {
	return r.Verdict != Unrecognized && r.sameEffect(s) && r.Share == s.Share && r.Protocol == s.Protocol &&
		r.Out == s.Out && r.NotFromLocal == s.NotFromLocal && r.NotToLocal == s.NotToLocal &&
		r.From.Equal(s.From) && r.To.Equal(s.To)
}

func (r Rule) sameEffect(s Rule) bool {
	return r.Verdict == s.Verdict && r.Ports == s.Ports && r.RandomFully == s.RandomFully && r.Text == s.Text
}

// commutes reports whether the order of the two rules has no meaning: no packet
// matches both, or they do the same with it.
func (r Rule) commutes(s Rule) bool {
	if r.Verdict == Unrecognized || s.Verdict == Unrecognized {
		return false
	}
	if r.sameEffect(s) && r.Share == 0 && s.Share == 0 {
		return true
	}
	apart := r.Protocol != "" && s.Protocol != "" && r.Protocol != s.Protocol
	return apart || !r.From.Overlaps(s.From) || !r.To.Overlaps(s.To)
}

// key tells rules apart that are not Equal.
func (r Rule) key() string {
	b := fmt.Appendf(nil, "%t %d %t %d %q %t %t %q %d %s %s %t %q",
		r.From == nil, len(r.From), r.To == nil, len(r.To), r.Out, r.NotFromLocal, r.NotToLocal,
		r.Protocol, r.Share, r.Verdict, r.Ports, r.RandomFully, r.Text)
	for _, addresses := range []Ranges{r.From, r.To} {
		for _, x := range addresses {
			from, to := x.From().As16(), x.To().As16()
			b = append(append(b, from[:]...), to[:]...)
		}
	}
	return string(b)
}

// String writes the rule for people.
func (r Rule) String() string {
	if r.Verdict == Unrecognized {
		return onOneLine(r.Text)
	}
	var b strings.Builder
	word := func(format string, args ...any) {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, format, args...)
	}
	if r.From != nil {
		word("from %s", r.From)
	}
	if r.NotFromLocal {
		word("from non-local")
	}
	if r.To != nil {
		word("to %s", r.To)
	}
	if r.NotToLocal {
		word("to non-local")
	}
	if r.Out != "" {
		word("out %s", r.Out)
	}
	if r.Protocol != "" {
		word("%s", r.Protocol)
	}
	if r.Share != 0 {
		word("%.2f%%", 100*float64(r.Share)/ShareUnit)
	}
	word("%s", r.Verdict)
	if !r.Ports.IsZero() {
		word("to ports %s", r.Ports)
	}
	if r.RandomFully {
		word("random-fully")
	}
	return b.String()
}

// Packet is what a masquerade chain knows of the first packet of a connection
// when it reaches POSTROUTING.
type Packet struct {
	Src, Dst           netip.Addr
	Out                string // output interface
	SrcLocal, DstLocal bool   // the address is one of the node's own
	Protocol           Protocol
}

// Matches reports whether the rule is about the packet. A rule with a Share is
// taken to match: the others of its group do the same.
func (r Rule) Matches(p Packet) bool {
	return (r.From == nil || r.From.Contains(p.Src)) &&
		(r.To == nil || r.To.Contains(p.Dst)) &&
		(!r.NotFromLocal || !p.SrcLocal) && (!r.NotToLocal || !p.DstLocal) &&
		(r.Out == "" || matchInterface(r.Out, p.Out)) &&
		(r.Protocol == "" || r.Protocol == p.Protocol)
}

func matchInterface(pattern, name string) bool {
	if prefix, wild := strings.CutSuffix(pattern, "+"); wild {
		return strings.HasPrefix(name, prefix)
	}
	return pattern == name
}
