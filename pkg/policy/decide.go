// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
)

// Outcome is what a policy decides about a packet.
type Outcome string

// The outcomes, as explanations name them.
const (
	OutcomeMasquerade Outcome = "masquerade"
	OutcomeExempt     Outcome = "exempt"
	OutcomeOutOfScope Outcome = "out-of-scope"
)

// Decision is what a policy decides about a packet, and why.
type Decision struct {
	Outcome Outcome
	// Entry is the destination or the source that decided; nil where none did.
	Entry *Entry
	// Origins are where that which decided comes from: the entry, or the scalar
	// or scope that put the packet out of scope. There are none where nothing
	// that anybody stated, and no default, decided.
	Origins []Origin
	Reason  string // one sentence for people
}

// Decide tells what the policy does with a packet in POSTROUTING. A source that
// is not known (the zero Addr) and an output interface that is not ("") are
// taken from within the scope, as Representative does; the reason then says for
// which the decision holds. The addresses have no zones, and the policy is one
// that Merge made.
func (p Policy) Decide(pkt Packet) Decision {
	asked := pkt
	if pkt.Src.IsValid() && FamilyOf(pkt.Src) != FamilyOf(pkt.Dst) {
		return Decision{Outcome: OutcomeOutOfScope, Reason: fmt.Sprintf("no packet goes from %s to %s: they are of two families", pkt.Src, pkt.Dst)}
	}
	pkt = p.Representative(pkt)
	d := p.unmanaged(pkt)
	if d == nil {
		d = p.outOfScope(pkt)
	}
	if d == nil {
		d = p.exemptSource(pkt, asked.Src.IsValid())
	}
	if d == nil {
		d = p.destination(pkt.Dst)
	}
	d.Reason += p.provided(asked, d.Outcome)
	return *d
}

func (p Policy) unmanaged(pkt Packet) *Decision {
	f := FamilyOf(pkt.Dst)
	switch {
	case pkt.DstLocal:
		return &Decision{Outcome: OutcomeOutOfScope, Reason: fmt.Sprintf("%s is an address of the node itself", pkt.Dst)}
	case !slices.Contains(p.Families(), f):
		return &Decision{
			Outcome: OutcomeOutOfScope, Origins: p.EnableIPv6.Origins,
			Reason: fmt.Sprintf("%s is not managed: %s is false", f, said(p.EnableIPv6.Origins)),
		}
	}
	return nil
}

func (p Policy) outOfScope(pkt Packet) *Decision {
	out := func(by []Origin, format string, args ...any) *Decision {
		return &Decision{Outcome: OutcomeOutOfScope, Origins: by, Reason: fmt.Sprintf(format, args...)}
	}
	f := FamilyOf(pkt.Dst)
	sources := ofFamily(p.Sources.Value, f)
	switch {
	case len(p.Sources.Value) > 0 && len(sources) == 0:
		return out(p.Sources.Origins, "%s names no %s prefix", said(p.Sources.Origins), f)
	case len(sources) > 0 && !RangesOf(sources...).Contains(pkt.Src):
		return out(p.Sources.Origins, "the source %s is not in %s (%s)", pkt.Src, said(p.Sources.Origins), RangesOf(sources...))
	case len(p.Interfaces.Value) > 0 && !matchAnyInterface(p.Interfaces.Value, pkt.Out):
		return out(p.Interfaces.Origins, "the interface %s is not in %s (%s)", plainOrQuoted(pkt.Out), said(p.Interfaces.Origins), anyOf(p.Interfaces.Value))
	case !p.Host.Value && pkt.SrcLocal:
		return out(p.Host.Origins, "the source %s is the node itself, and %s is false", pkt.Src, said(p.Host.Origins))
	}
	return nil
}

// exemptSource decides by the first entry that covers the source, as the rules
// of a chain do. If the source was not known, all that it could be are exempt.
func (p Policy) exemptSource(pkt Packet, known bool) *Decision {
	i := slices.IndexFunc(p.ExemptSources, func(e Entry) bool { return e.Prefix.Contains(pkt.Src) })
	if i < 0 {
		return nil
	}
	e := &p.ExemptSources[i]
	reason := fmt.Sprintf("the source %s is in %s, which %s exempts", pkt.Src, e.Prefix, said(e.Origins))
	if !known {
		reason = "every source in scope is exempt: " + strings.TrimPrefix(reason, "the source ")
	}
	return &Decision{Outcome: OutcomeExempt, Entry: e, Origins: e.Origins, Reason: reason}
}

func (p Policy) destination(dst netip.Addr) *Decision {
	e := p.Lookup(dst)
	if e == nil {
		return &Decision{Outcome: OutcomeMasquerade, Reason: fmt.Sprintf("no prefix covers %s, and what none covers is masqueraded", dst)}
	}
	d := &Decision{Outcome: OutcomeExempt, Entry: e, Origins: e.Origins}
	if e.Action == Masqueraded {
		d.Outcome = OutcomeMasquerade
	}
	d.Reason = fmt.Sprintf("%s in %s is the longest prefix that covers %s", e.Prefix, said(e.Origins), dst)
	return d
}

// said names who stated something first, without the place in a list: where that
// is in a file, only who knows the files can tell.
func said(by []Origin) string {
	if by[0].Source.Kind == BuiltIn {
		return fmt.Sprintf("%s (%s)", by[0].Key, by[0].Source)
	}
	return fmt.Sprintf("%s of %s", by[0].Key, by[0].Source)
}

// provided says for which sources and interfaces a decision holds, where they
// were not known and the decision depends on them.
func (p Policy) provided(known Packet, o Outcome) string {
	if o == OutcomeOutOfScope {
		return "" // whatever the unknown may be
	}
	f := FamilyOf(known.Dst)
	var holds []string
	if !known.Src.IsValid() {
		if text := p.anySource(f); text != "" {
			holds = append(holds, text)
		}
	}
	if known.Out == "" && len(p.Interfaces.Value) > 0 {
		holds = append(holds, "out of "+anyOf(p.Interfaces.Value))
	}
	if len(holds) == 0 {
		return ""
	}
	return ", " + strings.Join(holds, ", ")
}

func (p Policy) anySource(f Family) string {
	text := "for any source"
	sources := ofFamily(p.Sources.Value, f)
	if len(sources) > 0 {
		text += " in " + RangesOf(sources...).String()
	}
	var but []string
	if !p.Host.Value {
		but = append(but, "the node itself")
	}
	if exempt := p.exemptOf(f); len(exempt) > 0 {
		if len(p.sourcesLeft(f)) == 0 {
			return text // whatever it is, an exempt one
		}
		but = append(but, "those in "+RangesOf(exempt...).String())
	}
	if len(but) > 0 {
		text += " but " + strings.Join(but, " and ")
	}
	if text == "for any source" {
		return "" // as everybody expects
	}
	return text
}

// Representative fills in what is not known of a packet, its source (the zero
// Addr) or its output interface (""), with one that the policy looks at: a source
// in scope and, if there is one, not exempt; an interface in scope. Where
// the scope is empty in the family of the destination it takes any source, and
// where all interfaces are in scope it leaves "".
func (p Policy) Representative(pkt Packet) Packet {
	f := FamilyOf(pkt.Dst)
	if !pkt.Src.IsValid() {
		pkt.SrcLocal = false
		pkt.Src = p.Candidates(f).firstIn(f.unicast())
	}
	if pkt.Out == "" && len(p.Interfaces.Value) > 0 {
		pkt.Out = p.Interfaces.Value[0]
		if prefix, wild := strings.CutSuffix(pkt.Out, "+"); wild {
			pkt.Out = prefix + "0"
		}
	}
	return pkt
}

// Candidates returns the sources that Decide decides about where the source is not
// known.
func (p Policy) Candidates(f Family) Ranges {
	for _, candidates := range []Ranges{p.sourcesLeft(f), p.sourcesInScope(f)} {
		if len(candidates) > 0 {
			return candidates
		}
	}
	return RangesOf(f.All())
}

// sourcesInScope returns the sources that the policy looks at.
func (p Policy) sourcesInScope(f Family) Ranges {
	if len(p.Sources.Value) == 0 {
		return RangesOf(f.All())
	}
	return RangesOf(ofFamily(p.Sources.Value, f)...)
}

// sourcesLeft returns the sources in scope whose packets are not exempt for
// them.
func (p Policy) sourcesLeft(f Family) Ranges {
	return p.sourcesInScope(f).Without(RangesOf(p.exemptOf(f)...))
}

func (p Policy) exemptOf(f Family) []netip.Prefix {
	var all []netip.Prefix
	for _, e := range p.ExemptSources {
		all = append(all, e.Prefix)
	}
	return ofFamily(all, f)
}

// firstIn returns the first address of the set that is in the range or, where
// none is, the first of all.
func (r Ranges) firstIn(in netipx.IPRange) netip.Addr {
	for _, x := range r {
		switch {
		case !x.Overlaps(in):
		case x.From().Less(in.From()):
			return in.From()
		default:
			return x.From()
		}
	}
	return r[0].From()
}

// unicast returns the range in which the addresses of hosts are: those between
// 0.0.0.0/8 and 224.0.0.0/4 (RFC 1122 3.2.1.3), and global unicast (RFC 4291 2.4).
func (f Family) unicast() netipx.IPRange {
	if f == IPv4 {
		return netipx.IPRangeFrom(netip.AddrFrom4([4]byte{1}), netip.AddrFrom4([4]byte{223, 255, 255, 255}))
	}
	return netipx.RangeOfPrefix(netip.PrefixFrom(netip.AddrFrom16([16]byte{0x20}), 3))
}

func matchAnyInterface(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool { return matchInterface(pattern, name) })
}

// anyOf writes the items of a list, as many as people read.
func anyOf(list []string) string {
	const most = 8
	if len(list) > most {
		list = append(slices.Clone(list[:most]), "…")
	}
	return strings.Join(list, ", ")
}
