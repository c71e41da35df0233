// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Merge merges sources into one policy per chain, sorted by the chain's name. The
// order of the sources does not matter. Of two that conflict the one with the higher
// precedence is in force: a network before the agent files, and of networks the one
// that came into force first. Nothing of the other network is in force then.
func Merge(sources []Source) []Policy {
	byChain := map[string][]Source{}
	for _, s := range sources {
		byChain[s.Policy.Chain] = append(byChain[s.Policy.Chain], s)
	}
	var policies []Policy
	for _, chain := range slices.Sorted(maps.Keys(byChain)) {
		slices.SortFunc(byChain[chain], comparePrecedence)
		policies = append(policies, mergeChain(chain, byChain[chain]))
	}
	return policies
}

// mergeChain merges the sources of a chain, in the order of precedence, without the
// networks that conflict with one before them.
func mergeChain(chain string, sources []Source) Policy {
	m := merger{policy: Policy{Chain: chain}, sources: sources}
	for _, s := range sources {
		for _, f := range s.files() {
			m.parts = append(m.parts, part{s.ID, f.File, f.Policy})
		}
	}
	p := m.merge()
	superseded := map[SourceID]ConflictErrors{}
	for _, c := range p.Conflicts {
		superseded[c.Superseded.Source] = append(superseded[c.Superseded.Source], c)
	}
	// One at a time: what it conflicts with is in force, and others may conflict with it alone.
	i := slices.IndexFunc(sources, func(s Source) bool { return s.ID.Kind == Network && superseded[s.ID] != nil })
	if i >= 0 {
		p = mergeChain(chain, slices.Delete(slices.Clone(sources), i, i+1))
		p.Conflicts = append(superseded[sources[i].ID], p.Conflicts...)
	}
	return p
}

// comparePrecedence orders sources: networks that are not superseded, in the order in
// which they came into force, those that are, and the agent files.
func comparePrecedence(a, b Source) int {
	class := func(s Source) int {
		switch {
		case s.ID.Kind != Network:
			return 2
		case s.Superseded:
			return 1
		}
		return 0
	}
	return cmp.Or(class(a)-class(b), cmp.Compare(a.Order, b.Order), a.ID.Compare(b.ID))
}

type merger struct {
	policy  Policy
	sources []Source // by precedence
	parts   []part   // of the sources, in the same order
}

// part is a network's policy, or one of the agent files.
type part struct {
	id     SourceID
	file   string
	policy SourcePolicy
}

func (p *part) origin(key string, index int) Origin { return Origin{p.id, key, index, p.file} }

func (m *merger) merge() Policy {
	p := &m.policy
	for i := range m.parts {
		part := &m.parts[i]
		for _, k := range m.keys(&part.policy) {
			if k.merge != nil {
				k.merge(part.origin(k.Name, -1))
			}
		}
		if len(part.policy.PodCIDRs) > 0 {
			p.PodCIDRs.Value = append(p.PodCIDRs.Value, part.policy.PodCIDRs...)
			p.PodCIDRs.Origins = append(p.PodCIDRs.Origins, part.origin("podCIDRs", -1))
		}
		for j, name := range part.policy.NonMasqueradeNamespaces {
			k := slices.IndexFunc(p.Namespaces, func(n NamedNamespace) bool { return n.Name == name })
			if k < 0 {
				k, p.Namespaces = len(p.Namespaces), append(p.Namespaces, NamedNamespace{Name: name})
			}
			p.Namespaces[k].Origins = append(p.Namespaces[k].Origins, part.origin(namespacesKey, j))
		}
	}
	p.Sources = scope(m, "sourceCIDRs", netip.Prefix.Compare, func(s *SourcePolicy) []netip.Prefix { return s.SourceCIDRs })
	scopes := map[SourceID][]netip.Prefix{} // those of agent files may be superseded
	for _, o := range p.Sources.Origins {
		scopes[o.Source] = p.Sources.Value
	}
	for _, s := range m.sources {
		p.PodSubnets = append(p.PodSubnets, s.PodSubnets...)
		p.Pods = append(p.Pods, s.podRanges(scopes[s.ID])...)
	}
	for _, list := range []*[]netip.Prefix{&p.PodCIDRs.Value, &p.PodSubnets, &p.Pods} {
		slices.SortFunc(*list, netip.Prefix.Compare)
		*list = slices.Compact(*list)
	}
	p.Interfaces = scope(m, "outputInterfaces", strings.Compare, func(s *SourcePolicy) []string { return s.OutputInterfaces })
	p.Destinations = m.entries(m.defaults(), func(s *SourcePolicy) []entryList {
		return []entryList{
			{"nonMasqueradeCIDRs", ActionExempt, s.NonMasqueradeCIDRs},
			{"masqueradeCIDRs", ActionMasquerade, s.MasqueradeCIDRs},
		}
	})
	p.ExemptSources = m.entries(nil, func(s *SourcePolicy) []entryList {
		return []entryList{{exemptSourcesKey, ActionExempt, s.NonMasqueradeSourceCIDRs}}
	})
	return *p
}

// podRanges returns the pod ranges of a source, for each family: its podCIDRs, else its
// sourceCIDRs, if they are in force, else the subnets that ADDs found.
func (s Source) podRanges(sourceCIDRs []netip.Prefix) (pods []netip.Prefix) {
	var podCIDRs []netip.Prefix
	for _, f := range s.files() {
		podCIDRs = append(podCIDRs, f.Policy.PodCIDRs...)
	}
	for _, f := range Families() {
		for _, list := range [][]netip.Prefix{podCIDRs, sourceCIDRs, s.PodSubnets} {
			if list = ofFamily(list, f); len(list) > 0 {
				pods = append(pods, list...)
				break
			}
		}
	}
	return pods
}

const exemptSourcesKey = "nonMasqueradeSourceCIDRs"

func builtIn(key string) []Origin {
	return []Origin{{Source: SourceID{Kind: BuiltIn}, Key: key, Index: -1}}
}

// scope returns the value of a list of the scope, which has to be the same in all
// sources. A network without the list means any; the agent files without it follow
// the networks. The lists of the agent files are united.
func scope[T comparable](m *merger, key string, compare func(a, b T) int, get func(*SourcePolicy) []T) WithOrigins[[]T] {
	out := WithOrigins[[]T]{Origins: builtIn(key)}
	for _, s := range m.sources {
		var value []T
		var origins []Origin
		for _, f := range s.files() {
			if list := get(&f.Policy); len(list) > 0 || s.ID.Kind == Network {
				value = append(value, list...)
				origins = append(origins, Origin{s.ID, key, -1, f.File})
			}
		}
		if slices.SortFunc(value, compare); len(origins) > 0 {
			value = slices.Compact(value)
			out.agree(m, &value, origins[0], nil, slices.Equal[[]T])
		}
		if len(origins) > 1 && slices.Equal(out.Value, value) {
			out.Origins = append(out.Origins, origins[1:]...)
		}
	}
	return out
}

// defaults returns the link-local prefixes that no source wants masqueraded, multicast and
// broadcast, and the default destinations if no source has nonMasqueradeCIDRs.
//
// A chain of the agent files alone lacks multicast and broadcast: the agents masquerade them,
// and an agent that runs beside ip-masq would remove these rules again.
func (m *merger) defaults() []PrefixAction {
	var out []PrefixAction
	if !m.policy.MasqLinkLocal.Value {
		out = append(out, PrefixAction{IPv4.LinkLocal(), ActionExempt, m.policy.MasqLinkLocal.Origins})
	}
	if m.policy.EnableIPv6.Value && !m.policy.MasqLinkLocalIPv6.Value {
		out = append(out, PrefixAction{IPv6.LinkLocal(), ActionExempt, m.policy.MasqLinkLocalIPv6.Origins})
	}
	if m.hasNetwork() {
		for _, f := range m.policy.Families() {
			for _, p := range f.Multicast() {
				out = append(out, PrefixAction{p, ActionExempt, builtIn("")})
			}
		}
	}
	if !slices.ContainsFunc(m.parts, func(p part) bool { return p.policy.NonMasqueradeCIDRs != nil }) {
		for _, p := range DefaultNonMasqueradeCIDRs(m.policy.NomasqAllReservedRanges.Value) {
			out = append(out, PrefixAction{p, ActionExempt, builtIn("nonMasqueradeCIDRs")})
		}
	}
	return out
}

func (m *merger) hasNetwork() bool {
	for _, s := range m.sources {
		if s.ID.Kind == Network {
			return true
		}
	}
	return false
}

type entryList struct {
	key      string
	action   Action
	prefixes []netip.Prefix
}

// entries returns the defaults, then the prefixes of all lists as they are written,
// each once. A prefix in the lists supersedes a default with another action; of two
// sources that give a prefix different actions, the one with the higher precedence
// is in force.
func (m *merger) entries(defaults []PrefixAction, lists func(*SourcePolicy) []entryList) []PrefixAction {
	type decided struct {
		action Action
		part   *part
		key    string
		index  int
		entry  int // in the result, plus 1
	}
	size := 0
	for i := range m.parts {
		for _, l := range lists(&m.parts[i].policy) {
			size += len(l.prefixes)
		}
	}
	all, at := make([]decided, 0, size), make(map[netip.Prefix]int, size)
	for i := range m.parts {
		part := &m.parts[i]
		for _, l := range lists(&part.policy) {
			for j, p := range l.prefixes {
				if k, named := at[p]; !named {
					at[p] = len(all)
					all = append(all, decided{l.action, part, l.key, j, 0})
				} else if d := all[k]; d.action != l.action {
					m.conflict(d.part.origin(d.key, d.index), p, part.origin(l.key, j), p)
				}
			}
		}
	}
	out := make([]PrefixAction, 0, size+len(defaults))
	for _, e := range defaults {
		k, named := at[e.Prefix]
		if named && all[k].action != e.Action {
			continue
		}
		if out = append(out, e); named {
			all[k].entry = len(out)
		}
	}
	origins := make([]Origin, 0, size)
	written := slices.Clone(m.parts) // in the order in which rules list their prefixes
	slices.SortStableFunc(written, func(a, b part) int { return a.id.Compare(b.id) })
	for _, part := range written {
		for _, l := range lists(&part.policy) {
			for j, p := range l.prefixes {
				switch d := &all[at[p]]; {
				case d.action != l.action:
				case d.entry > 0:
					e := &out[d.entry-1]
					e.Origins = append(e.Origins, part.origin(l.key, j))
				default:
					origins = append(origins, part.origin(l.key, j))
					out = append(out, PrefixAction{p, l.action, origins[len(origins)-1 : len(origins) : len(origins)]})
					d.entry = len(out)
				}
			}
		}
	}
	return out
}
