// SPDX-License-Identifier: Apache-2.0

package policy

import "net/netip"

// entries collects prefixes in the order in which they first come, each once.
type entries struct {
	list  []Entry
	index map[netip.Prefix]int
}

func (e *entries) add(p netip.Prefix, a Action, o Origin) {
	if i, known := e.index[p]; known {
		e.list[i].Origins = append(e.list[i].Origins, o)
		return
	}
	if e.index == nil {
		e.index = map[netip.Prefix]int{}
	}
	e.index[p] = len(e.list)
	e.list = append(e.list, Entry{p, a, []Origin{o}})
}

// listed is one of the two lists of destinations that a source can state.
type listed struct {
	key      string
	action   Action
	prefixes []netip.Prefix
}

func destinationLists(s SourcePolicy) []listed {
	return []listed{
		{"nonMasqueradeCIDRs", Exempt, s.NonMasqueradeCIDRs},
		{"masqueradeCIDRs", Masqueraded, s.MasqueradeCIDRs},
	}
}

// destinations lists what is built in and what the sources name. What a source
// states beats what is built in; of two sources the one in force holds.
func (m *merger) destinations() []Entry {
	holds := m.heldActions()
	builtIns := m.builtInDestinations()
	most := len(holds) + len(builtIns)
	all := entries{list: make([]Entry, 0, most), index: make(map[netip.Prefix]int, most)}
	for _, b := range builtIns {
		if h, named := holds[b.Prefix]; !named || h.action == b.Action {
			all.add(b.Prefix, b.Action, b.Origins[0])
		}
	}
	for _, c := range m.inWrittenOrder() {
		for _, l := range destinationLists(c.Policy) {
			for i, p := range l.prefixes {
				if holds[p].action == l.action {
					all.add(p, l.action, Origin{c.ID, l.key, i})
				}
			}
		}
	}
	return all.list
}

// held is what holds for a prefix, and who said it first.
type held struct {
	action Action
	origin Origin
}

// heldActions decides for each prefix that a source names, and reports those
// that two name to opposite ends.
func (m *merger) heldActions() map[netip.Prefix]held {
	named := 0
	for _, c := range m.ranked {
		for _, l := range destinationLists(c.Policy) {
			named += len(l.prefixes)
		}
	}
	holds := make(map[netip.Prefix]held, named)
	for _, c := range m.ranked {
		for _, l := range destinationLists(c.Policy) {
			for i, p := range l.prefixes {
				o := Origin{c.ID, l.key, i}
				first, named := holds[p]
				switch {
				case !named:
					holds[p] = held{l.action, o}
				case first.action != l.action:
					m.conflict(first.origin, p, o, p, false)
				}
			}
		}
	}
	return holds
}

// builtInDestinations returns the link-local prefixes that no source wants
// masqueraded, and the defaults where no source names nonMasqueradeCIDRs.
func (m *merger) builtInDestinations() []Entry {
	linkLocal := map[Family]bool{}
	defaults := true
	for _, c := range m.ranked {
		s := c.Policy
		linkLocal[IPv4] = linkLocal[IPv4] || isTrue(s.MasqLinkLocal)
		linkLocal[IPv6] = linkLocal[IPv6] || isTrue(s.MasqLinkLocalIPv6)
		defaults = defaults && s.NonMasqueradeCIDRs == nil
	}
	keys := map[Family]string{IPv4: "masqLinkLocal", IPv6: "masqLinkLocalIPv6"}
	var out []Entry
	for _, f := range m.policy.Families() {
		if !linkLocal[f] {
			out = append(out, Entry{f.LinkLocal(), Exempt, builtIn(keys[f])})
		}
	}
	reserved := scalar(m, "nomasqAllReservedRanges", false, func(s SourcePolicy) *bool { return s.NomasqAllReservedRanges })
	if defaults {
		for _, p := range DefaultNonMasqueradeCIDRs(reserved.Value) {
			out = append(out, Entry{p, Exempt, builtIn("nonMasqueradeCIDRs")})
		}
	}
	return out
}

func isTrue(b *bool) bool { return b != nil && *b }

func (m *merger) exemptSources() []Entry {
	var all entries
	for _, c := range m.inWrittenOrder() {
		for i, p := range c.Policy.NonMasqueradeSourceCIDRs {
			all.add(p, Exempt, Origin{c.ID, "nonMasqueradeSourceCIDRs", i})
		}
	}
	return all.list
}
