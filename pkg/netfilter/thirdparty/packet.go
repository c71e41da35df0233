// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"net/netip"
	"slices"
)

// Answer is a truth value of Kleene's three-valued logic: min is its AND, max its OR, notIf its NOT.
type Answer uint8

// The answers.
const (
	No Answer = iota
	Perhaps
	Yes
)

// notIf returns what an inverted condition answers, or the answer itself.
func (a Answer) notIf(inverted bool) Answer {
	if inverted {
		return Yes - a
	}
	return a
}

// AnswerOf returns Yes or No.
func AnswerOf(is bool) Answer {
	if is {
		return Yes
	}
	return No
}

// MarshalJSON writes true, false, or null for Perhaps.
func (a Answer) MarshalJSON() ([]byte, error) {
	switch a {
	case Yes:
		return []byte("true"), nil
	case No:
		return []byte("false"), nil
	}
	return []byte("null"), nil
}

// Packet is the first packet of a new connection, as it leaves the node for an address that is not local.
// What it does not state is unknown: it stands for all packets with these properties.
type Packet struct {
	Src, Dst netip.Prefix // of which the bits of the prefix are known; the zero Prefix is any address
	SrcLocal Answer       // whether the node itself sends it
	Out      string       // the output interface; "" if unknown
	OutIndex int          // its number; 0 if unknown
	Mark     uint32
}

// HostPrefix returns the prefix that has one address, or the zero Prefix for the zero Addr.
func HostPrefix(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// halves returns both halves of a prefix.
func halves(p netip.Prefix) [2]netip.Prefix {
	low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	bytes := p.Addr().AsSlice()
	bytes[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	high, _ := netip.AddrFromSlice(bytes)
	return [2]netip.Prefix{low, netip.PrefixFrom(high, p.Bits()+1)}
}

// Fate is what becomes of the source address of a packet.
type Fate string

// The fates.
const (
	Untouched   Fate = "untouched"  // no rule translates it
	Owned       Fate = "owned"      // a rule of ip-masq decides
	Masqueraded Fate = "masquerade" // it becomes an address of the output interface
	Translated  Fate = "snat"       // it becomes another address
	Dropped     Fate = "drop"
)

// Outcome is a fate, and the rule that decides it.
type Outcome struct {
	Fate Fate
	Rule *Rule        // nil of Untouched and Owned
	To   netip.Prefix // of Translated: it has the new address; the zero Prefix if that is unknown
}

// Verdict is what rules do with a packet.
type Verdict struct {
	// Outcomes are all that are possible: one if it is certain.
	Outcomes []Outcome
	// Bypasses are rules by which a packet that is not translated may have left a base chain before an owned
	// chain in it.
	Bypasses []*Rule
	// Untrackers are rules that may keep the packet from connection tracking.
	Untrackers []*Rule
	// Splits tells for which of the packet's addresses an answer depends on a bit that is unknown.
	Splits Addresses

	seen  map[Outcome]bool // of Outcomes
	steps int              // that it took: rules and elements of sets
}

// Addresses is a set of the addresses of a packet.
type Addresses uint8

// The addresses.
const (
	Source Addresses = 1 << iota
	Destination
)

func (v *Verdict) add(o Outcome) {
	if v.seen[o] {
		return
	}
	if v.seen == nil {
		v.seen = map[Outcome]bool{}
	}
	v.seen[o] = true
	v.Outcomes = append(v.Outcomes, o)
}

// mayTranslate reports whether a rule or an owned chain may have translated the packet.
func (v *Verdict) mayTranslate() bool {
	for _, o := range v.Outcomes {
		if o.Fate != Untouched {
			return true
		}
	}
	return false
}

// addRule appends a rule unless the list has it.
func addRule(rules []*Rule, r *Rule) []*Rule {
	if slices.Contains(rules, r) {
		return rules
	}
	return append(rules, r)
}

// Merge adds what rules do with another packet.
func (v *Verdict) Merge(other Verdict) {
	for _, o := range other.Outcomes {
		v.add(o)
	}
	for _, r := range other.Bypasses {
		v.Bypasses = addRule(v.Bypasses, r)
	}
	for _, r := range other.Untrackers {
		v.Untrackers = addRule(v.Untrackers, r)
	}
}

// Against returns the rules because of which an outcome is not what a policy wants, and Yes if that is so for
// all outcomes. The function tells whether an outcome is not. Without a rule that is the cause, the answer is
// No.
func (v Verdict) Against(against func(Outcome) Answer) (rules []*Rule, a Answer) {
	certain := true
	for _, o := range v.Outcomes {
		is := against(o)
		certain = certain && is == Yes
		if is == No {
			continue
		}
		if o.Fate == Untouched {
			for _, bypass := range v.Bypasses {
				rules = addRule(rules, bypass)
			}
		}
		if o.Rule != nil {
			rules = addRule(rules, o.Rule)
		}
	}
	if len(rules) == 0 {
		return nil, No
	}
	if certain {
		return rules, Yes
	}
	return rules, Perhaps
}

// TranslatesExempt reports whether the outcome changes the source address of a packet, which is to stay, or
// drops the packet.
func (o Outcome) TranslatesExempt(p Packet) Answer {
	from := p.Src
	switch {
	case o.Fate == Untouched || o.Fate == Owned:
		return No
	case o.Fate == Masqueraded && p.SrcLocal == Yes:
		return Perhaps // the kernel may choose the same address
	case o.Fate != Translated:
		return Yes
	case o.To == from && from.IsSingleIP():
		return No // as `snat to ip saddr`
	case !o.To.IsValid() || !from.IsValid() || o.To.Overlaps(from):
		return Perhaps
	}
	return Yes
}
