// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// Decision is what the desired rules of a policy do with a packet, and why.
type Decision struct {
	Action Action
	// PrefixAction is the destination or source that decides, or nil.
	PrefixAction *PrefixAction
	// Origins are those of the PrefixAction, or of the key that puts the packet out of scope.
	Origins []Origin
	Reason  string // one sentence for people
}

// Decide returns what the desired rules do with a packet in POSTROUTING. A source
// that is not known (the zero Addr) and an output interface that is not ("") are
// replaced as Representative does; the reason then says for which the decision is
// true. The addresses have no zones.
//
// It walks the desired chain without sets, for every backend: each rule of that chain names the key that it
// comes from. A second implementation is only in the tests, as an oracle.
func (p Policy) Decide(asked Packet) Decision {
	f := FamilyOf(asked.Dst)
	isMixed := asked.Src.IsValid() && FamilyOf(asked.Src) != f
	if isMixed {
		reason := fmt.Sprintf("no packet goes from %s to %s: they are of two families", asked.Src, asked.Dst)
		return Decision{Action: ActionOutOfScope, Reason: reason}
	}
	isManaged := slices.Contains(p.Families(), f)
	if !isManaged && !asked.DstLocal {
		origins := p.EnableIPv6.Origins
		reason := fmt.Sprintf("%s is not managed: %s is false", f, keyOf(origins))
		return Decision{Action: ActionOutOfScope, Reason: reason, Origins: origins}
	}
	pkt := p.Representative(asked)
	reason, origins := p.outOfScope(pkt)
	if reason != "" {
		return Decision{Action: ActionOutOfScope, Reason: reason, Origins: origins}
	}
	// So that the first match is the longest prefix, the one to name.
	longestFirst := func(a, b PrefixAction) int { return b.Prefix.Bits() - a.Prefix.Bits() }
	p.Destinations = slices.SortedStableFunc(slices.Values(p.Destinations), longestFirst)
	c := p.chain(f, Layout{}, Owner{})
	d := c.Walk(pkt).decision(pkt, asked.Src.IsValid())
	d.Reason += p.condition(asked)
	return d
}

func (e *PrefixAction) isSource() bool { return e.Origins[0].Key == exemptSourcesKey || e.isPod() }

func (e *PrefixAction) isPod() bool { return e.Origins[0].Key == namespacesKey }

// decision explains the desired rule that decides a packet.
func (r *Rule) decision(pkt Packet, sourceKnown bool) Decision {
	e := r.PrefixAction
	if e == nil {
		reason := fmt.Sprintf("no prefix covers %s, so it is masqueraded by default", pkt.Dst)
		return Decision{Action: ActionMasquerade, Reason: reason}
	}
	d := Decision{Action: ActionExempt, PrefixAction: e, Origins: e.Origins}
	if r.Verdict == Masquerade {
		d.Action = ActionMasquerade
	}
	key := keyOf(e.Origins)
	switch {
	case !e.isSource():
		d.Reason = fmt.Sprintf("%s in %s is the longest prefix that covers %s", e.Prefix, key, pkt.Dst)
	case sourceKnown && e.isPod():
		d.Reason = fmt.Sprintf("the source %s is a pod of a namespace that %s exempts", pkt.Src, key)
	case sourceKnown:
		d.Reason = fmt.Sprintf("the source %s is in %s, which %s exempts", pkt.Src, e.Prefix, key)
	default:
		d.Reason = fmt.Sprintf("every source in scope is exempt: %s is in %s, which %s exempts",
			pkt.Src, e.Prefix, key)
	}
	return d
}

// keyOf names the key that sets a value, without its file and index: explain shows them.
func keyOf(origins []Origin) string {
	o := origins[0]
	o.File = ""
	return o.String()
}

// SourcesExempt returns the sources of a family that are never masqueraded.
func (p Policy) SourcesExempt(f Family) Ranges { return exemptAddresses(p.writtenAndPods(f)) }

// writtenAndPods returns the exempt sources of a family, each prefix once: those that are written, then the
// addresses of pods.
func (p *Policy) writtenAndPods(f Family) []*PrefixAction {
	all := prefixActionsOf(p.ExemptSources, f)
	pods := prefixActionsOf(p.ExemptPods, f)
	if len(pods) == 0 {
		return all
	}
	written := make(map[netip.Prefix]bool, len(all))
	for _, e := range all {
		written[e.Prefix] = true
	}
	for _, pod := range pods {
		if !written[pod.Prefix] {
			all = append(all, pod)
		}
	}
	return all
}

// DestinationsExempt returns the destinations of a family that are not masqueraded, regardless of the source.
func (p Policy) DestinationsExempt(f Family) Ranges {
	return exemptAddresses(prefixActionsOf(p.Destinations, f))
}
