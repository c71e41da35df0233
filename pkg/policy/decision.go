// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"
	"strings"
)

// Decision is what the desired rules of a policy do with a packet, and why.
type Decision struct {
	Action Action
	// PrefixAction is the destination or source that decides, or nil.
	PrefixAction *PrefixAction
	// Origins are those of the entry, or of the key that puts the packet out of scope.
	Origins []Origin
	Reason  string // one sentence for people
}

// Decide returns what the desired rules do with a packet in POSTROUTING. A source
// that is not known (the zero Addr) and an output interface that is not ("") are
// replaced as Representative does; the reason then says for which the decision is
// true. The addresses have no zones.
func (p Policy) Decide(asked Packet) Decision {
	f := FamilyOf(asked.Dst)
	outOfScope := func(by []Origin, format string, args ...any) Decision {
		return Decision{Action: ActionOutOfScope, Origins: by, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case asked.Src.IsValid() && FamilyOf(asked.Src) != f:
		return outOfScope(nil, "no packet goes from %s to %s: they are of two families", asked.Src, asked.Dst)
	case asked.DstLocal:
		return outOfScope(nil, "%s is an address of the node itself", asked.Dst)
	case !slices.Contains(p.Families(), f):
		return outOfScope(p.EnableIPv6.Origins, "%s is not managed: %s is false", f, keyOf(p.EnableIPv6.Origins))
	}
	pkt, scope, c := p.Representative(asked), p.SourcesInScope(f), p.chain(f, Layout{}, Owner{})
	r := c.Walk(pkt)
	switch sources, interfaces, host := p.Sources.Origins, p.Interfaces.Origins, p.Host.Origins; {
	case r != nil:
		d := c.longest(r, pkt).decision(pkt, asked.Src.IsValid())
		d.Reason += p.condition(asked)
		return d
	case len(scope) == 0:
		return outOfScope(sources, "%s names no %s prefix", keyOf(sources), f)
	case !scope.Contains(pkt.Src):
		return outOfScope(sources, "the source %s is not in %s (%s)", pkt.Src, keyOf(sources), scope)
	case !slices.ContainsFunc(c.Jumps, func(j Rule) bool { return j.matchesInterface(pkt.Out) }):
		return outOfScope(interfaces, "the interface %s is not in %s (%s)", quoteUnlessWord(pkt.Out), keyOf(interfaces), firstOf(p.Interfaces.Value))
	default:
		return outOfScope(host, "the source %s is the node itself, and %s is false", pkt.Src, keyOf(host))
	}
}

// longest returns the rule with the longest prefix that matches the packet, given the
// first rule that does: prefixes of one action are in the written order.
func (c *Chain) longest(first *Rule, pkt Packet) *Rule {
	if first.PrefixAction == nil || first.PrefixAction.isSource() {
		return first
	}
	for i := range c.Rules {
		if r := &c.Rules[i]; r.PrefixAction != nil && r.Matches(pkt) && r.PrefixAction.Prefix.Bits() > first.PrefixAction.Prefix.Bits() {
			first = r
		}
	}
	return first
}

func (e *PrefixAction) isSource() bool { return e.Origins[0].Key == exemptSourcesKey }

// decision explains the desired rule that decides a packet.
func (r *Rule) decision(pkt Packet, sourceKnown bool) Decision {
	e := r.PrefixAction
	if e == nil {
		return Decision{Action: ActionMasquerade, Reason: fmt.Sprintf("no prefix covers %s, and what none covers is masqueraded", pkt.Dst)}
	}
	d := Decision{Action: ActionExempt, PrefixAction: e, Origins: e.Origins}
	if r.Verdict == Masquerade {
		d.Action = ActionMasquerade
	}
	switch {
	case !e.isSource():
		d.Reason = fmt.Sprintf("%s in %s is the longest prefix that covers %s", e.Prefix, keyOf(e.Origins), pkt.Dst)
	case sourceKnown:
		d.Reason = fmt.Sprintf("the source %s is in %s, which %s exempts", pkt.Src, e.Prefix, keyOf(e.Origins))
	default:
		d.Reason = fmt.Sprintf("every source in scope is exempt: %s is in %s, which %s exempts", pkt.Src, e.Prefix, keyOf(e.Origins))
	}
	return d
}

// keyOf names the key that sets a value, without its file and index: explain shows them.
func keyOf(origins []Origin) string {
	o := origins[0]
	o.File = ""
	return o.String()
}

// condition returns for which sources and interfaces a decision is true, if they are
// not known and the decision depends on them.
func (p Policy) condition(asked Packet) string {
	in, out := "", ""
	if !asked.Src.IsValid() {
		f := FamilyOf(asked.Dst)
		scope, exempt := p.SourcesInScope(f), p.SourcesExempt(f)
		if len(p.Sources.Value) > 0 {
			in = " in " + scope.String()
		}
		var but []string
		if !p.Host.Value {
			but = append(but, "the node itself")
		}
		if len(exempt) > 0 && len(scope.Without(exempt)) > 0 {
			but = append(but, "those in "+exempt.String())
		}
		if len(but) > 0 {
			in += " but " + strings.Join(but, " and ")
		}
		if in != "" {
			in = ", for any source" + in
		}
	}
	if asked.Out == "" && len(p.Interfaces.Value) > 0 {
		out = ", out of " + firstOf(p.Interfaces.Value)
	}
	return in + out
}

// Representative replaces what is not known of a packet, its source (the zero Addr) or
// its output interface (""), by one in scope: a source that is not exempt if there is
// one, and the first interface. If no source of the family is in scope it takes any;
// if all interfaces are in scope it leaves "".
func (p Policy) Representative(pkt Packet) Packet {
	f := FamilyOf(pkt.Dst)
	if !pkt.Src.IsValid() {
		pkt.SrcLocal = false
		pkt.Src = p.Candidates(f)[0].From()
	}
	if pkt.Out == "" && len(p.Interfaces.Value) > 0 {
		pkt.Out = p.Interfaces.Value[0]
		if prefix, wildcard := strings.CutSuffix(pkt.Out, "+"); wildcard {
			pkt.Out = prefix + "0"
		}
	}
	return pkt
}

// Candidates returns the sources that Decide assumes if the source is not known: those
// in scope that are not exempt, if there are any.
func (p Policy) Candidates(f Family) Ranges {
	scope := p.SourcesInScope(f)
	if left := scope.Without(p.SourcesExempt(f)); len(left) > 0 {
		return left
	}
	if len(scope) > 0 {
		return scope
	}
	return RangesOf(f.All())
}

// SourcesInScope returns the sources of a family that the policy applies to.
func (p Policy) SourcesInScope(f Family) Ranges {
	switch {
	case !slices.Contains(p.Families(), f):
		return Ranges{}
	case len(p.Sources.Value) == 0:
		return RangesOf(f.All())
	}
	return RangesOf(ofFamily(p.Sources.Value, f)...)
}

// SourcesExempt returns the sources of a family that are never masqueraded.
func (p Policy) SourcesExempt(f Family) Ranges { return exemptAddresses(entriesOf(p.ExemptSources, f)) }

// DestinationsExempt returns the destinations of a family that are not masqueraded,
// whatever the source.
func (p Policy) DestinationsExempt(f Family) Ranges {
	return exemptAddresses(entriesOf(p.Destinations, f))
}
