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
//
// Of the agent files only the key or prefix in question is not in force. Without the
// rest, ip-masq would masquerade traffic that all sources exempt.
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

// comparePrecedence orders sources: networks that are not superseded, in the order in
// which they came into force, those that are, and the agent files.
func comparePrecedence(a, b Source) int {
	return cmp.Or(a.rank()-b.rank(), cmp.Compare(a.Order, b.Order), a.ID.Compare(b.ID))
}

func (s *Source) rank() int {
	switch {
	case s.ID.Kind != Network:
		return 2
	case s.Superseded:
		return 1
	}
	return 0
}

// mergeChain merges the sources of a chain, in the order of precedence, without the
// networks that conflict with one before them.
//
// A network is superseded as a whole, not key by key: a part of its lists, such as
// podCIDRs, would change the policy of the other network.
func mergeChain(chain string, sources []Source) Policy {
	m := newMerger(chain, sources)
	m.merge()
	lost := m.policy.Conflicts.bySuperseded()
	for i, s := range sources {
		if s.ID.Kind != Network || lost[s.ID] == nil {
			continue
		}
		// One at a time: what it conflicts with is in force, and others may conflict with it alone.
		p := mergeChain(chain, slices.Concat(sources[:i], sources[i+1:]))
		p.Conflicts = append(lost[s.ID], p.Conflicts...)
		return p
	}
	return m.policy
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

func newMerger(chain string, sources []Source) *merger {
	m := &merger{policy: defaultPolicy(chain), sources: sources}
	for _, s := range sources {
		for _, f := range s.files() {
			m.parts = append(m.parts, part{s.ID, f.File, f.Policy})
		}
	}
	return m
}

// defaultPolicy has the values of keys that no source states.
func defaultPolicy(chain string) Policy {
	return Policy{
		Chain:                   chain,
		Backend:                 byDefault("backend", Auto),
		Host:                    byDefault("masqueradeHost", true),
		NomasqAllReservedRanges: byDefault("nomasqAllReservedRanges", false),
		MasqLinkLocal:           byDefault("masqLinkLocal", false),
		MasqLinkLocalIPv6:       byDefault("masqLinkLocalIPv6", false),
		EnableIPv6:              byDefault("enableIPv6", false),
		RandomFully:             byDefault("randomFully", true),
		ToPorts:                 byDefault("toPorts", Ports{}),
		Guard:                   byDefault("guard", GuardOff),
		StaleConnections:        byDefault("staleConnections", StaleConnections("")),
		EnforceExempt:           byDefault("enforceExempt", false),
		BypassMark:              byDefault("bypassMark", DefaultBypassMark),
		OutputAddresses:         byDefault("outputAddresses", AddressItems(nil)),
	}
}

func byDefault[T any](key string, value T) WithOrigins[T] { return WithOrigins[T]{value, builtIn(key)} }

func builtIn(key string) []Origin {
	return []Origin{{Source: SourceID{Kind: BuiltIn}, Key: key, Index: -1}}
}

func (m *merger) merge() {
	p := &m.policy
	for i := range m.parts {
		m.mergeScalars(&m.parts[i])
		m.mergeNamespaces(&m.parts[i])
		m.mergePodCIDRs(&m.parts[i])
	}
	p.Sources = mergeList(m, "sourceCIDRs", netip.Prefix.Compare,
		func(s *SourcePolicy) []netip.Prefix { return s.SourceCIDRs })
	p.Interfaces = mergeList(m, "outputInterfaces", strings.Compare,
		func(s *SourcePolicy) []string { return s.OutputInterfaces })
	m.mergePodPrefixes()
	p.Destinations = m.mergePrefixes(m.defaults(), destinationLists)
	p.ExemptSources = m.mergePrefixes(nil, exemptSourceLists)
}

// mergeScalars merges the keys that have one value, in the order of the table. The functions agree,
// agreeWord, oneTrueWins and addStated say how the values of several sources become one. What a source leaves
// out agrees with everything.
func (m *merger) mergeScalars(part *part) {
	s, p := &part.policy, &m.policy
	reservedRanges := part.origin("nomasqAllReservedRanges", -1)
	agree(m, &p.NomasqAllReservedRanges, s.NomasqAllReservedRanges, reservedRanges)
	oneTrueWins(m, &p.MasqLinkLocal, s.MasqLinkLocal, part.origin("masqLinkLocal", -1))
	oneTrueWins(m, &p.MasqLinkLocalIPv6, s.MasqLinkLocalIPv6, part.origin("masqLinkLocalIPv6", -1))
	agree(m, &p.EnableIPv6, s.EnableIPv6, part.origin("enableIPv6", -1))
	agree(m, &p.Host, s.MasqueradeHost, part.origin("masqueradeHost", -1))
	agree(m, &p.RandomFully, s.RandomFully, part.origin("randomFully", -1))
	if s.ToPorts != nil {
		isSame := p.ToPorts.Value.sameSet(*s.ToPorts)
		addStated(m, &p.ToPorts, *s.ToPorts, isSame, part.origin("toPorts", -1))
	}
	agreeWord(m, &p.Guard, s.Guard, part.origin("guard", -1))
	agreeWord(m, &p.StaleConnections, s.StaleConnections, part.origin("staleConnections", -1))
	agree(m, &p.EnforceExempt, s.EnforceExempt, part.origin("enforceExempt", -1))
	agree(m, &p.BypassMark, s.BypassMark, part.origin("bypassMark", -1))
	if s.OutputAddresses != nil { // whose order has a meaning
		isSame := slices.Equal(p.OutputAddresses.Value, s.OutputAddresses)
		addStated(m, &p.OutputAddresses, s.OutputAddresses, isSame, part.origin("outputAddresses", -1))
	}
	// auto agrees with every value, or each network that writes the default would conflict with one that
	// chooses.
	if s.Backend != Auto {
		agreeWord(m, &p.Backend, s.Backend, part.origin("backend", -1))
	}
}

// agree merges a value that must be the same in all sources that state it.
func agree[T comparable](m *merger, merged *WithOrigins[T], stated *T, o Origin) {
	if stated != nil {
		addStated(m, merged, *stated, merged.Value == *stated, o)
	}
}

// agreeWord is agree for words, of which "" is not stated.
func agreeWord[T ~string](m *merger, merged *WithOrigins[T], stated T, o Origin) {
	if stated != "" {
		agree(m, merged, &stated, o)
	}
}

// oneTrueWins merges booleans of which false says nothing.
func oneTrueWins(m *merger, merged *WithOrigins[bool], stated *bool, o Origin) {
	if isTrue(stated) {
		agree(m, merged, stated, o)
	}
}

// addStated takes a value in place of the default, or as the same value with more origins, or as a conflict
// of the first of these.
func addStated[T any](m *merger, merged *WithOrigins[T], value T, isSame bool, origins ...Origin) {
	isDefault := merged.Origins[0].Source.Kind == BuiltIn
	switch {
	case isDefault:
		*merged = WithOrigins[T]{value, origins}
	case isSame:
		merged.Origins = append(merged.Origins, origins...)
	default:
		m.conflict(merged.Origins[0], merged.Value, origins[0], value)
	}
}

// mergeNamespaces unites nonMasqueradeNamespaces.
func (m *merger) mergeNamespaces(part *part) {
	p := &m.policy
	for i, name := range part.policy.NonMasqueradeNamespaces {
		o := part.origin(namespacesKey, i)
		named := findNamespace(p.Namespaces, name)
		if named == nil {
			p.Namespaces = append(p.Namespaces, NamedNamespace{name, []Origin{o}})
		} else {
			named.Origins = append(named.Origins, o)
		}
	}
}

// mergePodCIDRs unites podCIDRs.
func (m *merger) mergePodCIDRs(part *part) {
	if len(part.policy.PodCIDRs) > 0 {
		all := &m.policy.PodCIDRs
		all.Value = append(all.Value, part.policy.PodCIDRs...)
		all.Origins = append(all.Origins, part.origin("podCIDRs", -1))
	}
}

// mergePodPrefixes unites the prefixes of pods of the sources. It comes after the scope is merged.
func (m *merger) mergePodPrefixes() {
	p := &m.policy
	scopes := map[SourceID][]netip.Prefix{} // those of agent files may be superseded
	for _, o := range p.Sources.Origins {
		scopes[o.Source] = p.Sources.Value
	}
	for _, s := range m.sources {
		p.PodSubnets = append(p.PodSubnets, s.PodSubnets...)
		p.PodPrefixes = append(p.PodPrefixes, s.podPrefixes(scopes[s.ID])...)
	}
	for _, list := range []*[]netip.Prefix{&p.PodCIDRs.Value, &p.PodSubnets, &p.PodPrefixes} {
		slices.SortFunc(*list, netip.Prefix.Compare)
		*list = slices.Compact(*list)
	}
}

// podPrefixes returns the prefixes of a source's pods, for each family: its podCIDRs, else its
// sourceCIDRs, if they are in force, else the subnets that ADDs found.
func (s Source) podPrefixes(sourceCIDRs []netip.Prefix) (pods []netip.Prefix) {
	var podCIDRs []netip.Prefix
	for _, f := range s.files() {
		podCIDRs = append(podCIDRs, f.Policy.PodCIDRs...)
	}
	for _, f := range Families() {
		for _, list := range [][]netip.Prefix{podCIDRs, sourceCIDRs, s.PodSubnets} {
			list = ofFamily(list, f)
			if len(list) > 0 {
				pods = append(pods, list...)
				break
			}
		}
	}
	return pods
}

// mergeList merges a list of the scope, which has to be the same in all
// sources. A network without the list means any; the agent files without it follow
// the networks. The lists of the agent files are united.
func mergeList[T comparable](
	m *merger, key string, compare func(a, b T) int, get func(*SourcePolicy) []T,
) WithOrigins[[]T] {
	merged := byDefault(key, []T(nil))
	for _, s := range m.sources {
		var value []T
		var origins []Origin
		for _, f := range s.files() {
			list := get(&f.Policy)
			isStated := len(list) > 0 || s.ID.Kind == Network
			if isStated {
				value = append(value, list...)
				origins = append(origins, Origin{s.ID, key, -1, f.File})
			}
		}
		if len(origins) == 0 {
			continue
		}
		slices.SortFunc(value, compare)
		value = slices.Compact(value)
		addStated(m, &merged, value, slices.Equal(merged.Value, value), origins...)
	}
	return merged
}

// defaults returns the link-local prefixes that no source wants masqueraded, multicast and
// broadcast, and the default destinations if no source has nonMasqueradeCIDRs.
//
// A chain of the agent files alone lacks multicast and broadcast: the agents masquerade them,
// and an agent that runs beside ip-masq would remove these rules again.
func (m *merger) defaults() []PrefixAction {
	p := &m.policy
	var out []PrefixAction
	if !p.MasqLinkLocal.Value {
		out = append(out, PrefixAction{IPv4.LinkLocal(), ActionExempt, p.MasqLinkLocal.Origins})
	}
	if p.EnableIPv6.Value && !p.MasqLinkLocalIPv6.Value {
		out = append(out, PrefixAction{IPv6.LinkLocal(), ActionExempt, p.MasqLinkLocalIPv6.Origins})
	}
	if m.hasNetwork() {
		for _, f := range p.Families() {
			for _, prefix := range f.Multicast() {
				out = append(out, PrefixAction{prefix, ActionExempt, builtIn("")})
			}
		}
	}
	if !m.namesDestinations() {
		for _, prefix := range DefaultNonMasqueradeCIDRs(p.NomasqAllReservedRanges.Value) {
			out = append(out, PrefixAction{prefix, ActionExempt, builtIn("nonMasqueradeCIDRs")})
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

// namesDestinations reports whether a source states nonMasqueradeCIDRs, if only as an empty list.
func (m *merger) namesDestinations() bool {
	for i := range m.parts {
		if m.parts[i].policy.NonMasqueradeCIDRs != nil {
			return true
		}
	}
	return false
}

// prefixList is a list of a part's prefixes, and what they say.
type prefixList struct {
	key      string
	action   Action
	prefixes []netip.Prefix
}

func destinationLists(s *SourcePolicy) []prefixList {
	return []prefixList{
		{"nonMasqueradeCIDRs", ActionExempt, s.NonMasqueradeCIDRs},
		{"masqueradeCIDRs", ActionMasquerade, s.MasqueradeCIDRs},
	}
}

func exemptSourceLists(s *SourcePolicy) []prefixList {
	return []prefixList{{exemptSourcesKey, ActionExempt, s.NonMasqueradeSourceCIDRs}}
}

// listedPrefix is a prefix of the lists with the item that is in force.
type listedPrefix struct {
	action Action
	part   *part
	key    string
	index  int // of the item in its list
	place  int // in the result; -1 while it is not there
}

// mergePrefixes returns the defaults, then the prefixes of all lists as they are written,
// each once. A prefix in the lists supersedes a default with another action; of two
// sources that give a prefix different actions, the one with the higher precedence
// is in force.
//
// There can be a million prefixes, so they are allocated together, as are the origins.
func (m *merger) mergePrefixes(
	defaults []PrefixAction, lists func(*SourcePolicy) []prefixList,
) []PrefixAction {
	all, at := m.prefixesInForce(lists)
	out := make([]PrefixAction, 0, len(all)+len(defaults))
	for _, e := range defaults {
		i, isListed := at[e.Prefix]
		if isListed && all[i].action != e.Action {
			continue
		}
		if isListed {
			all[i].place = len(out)
		}
		out = append(out, e)
	}
	origins := make([]Origin, 0, len(all))
	for _, part := range m.writtenParts() {
		for _, l := range lists(&part.policy) {
			for i, prefix := range l.prefixes {
				e := &all[at[prefix]]
				switch {
				case e.action != l.action: // superseded
				case e.place >= 0:
					named := &out[e.place]
					named.Origins = append(named.Origins, part.origin(l.key, i))
				default:
					n := len(origins)
					origins = append(origins, part.origin(l.key, i))
					e.place = len(out)
					out = append(out, PrefixAction{prefix, l.action, origins[n : n+1 : n+1]})
				}
			}
		}
	}
	return out
}

// prefixesInForce returns each prefix of the lists once, and where it is. It records the conflicts.
func (m *merger) prefixesInForce(
	lists func(*SourcePolicy) []prefixList,
) (all []listedPrefix, at map[netip.Prefix]int) {
	size := 0
	for i := range m.parts {
		for _, l := range lists(&m.parts[i].policy) {
			size += len(l.prefixes)
		}
	}
	all, at = make([]listedPrefix, 0, size), make(map[netip.Prefix]int, size)
	for i := range m.parts {
		part := &m.parts[i]
		for _, l := range lists(&part.policy) {
			for j, prefix := range l.prefixes {
				first, isKnown := at[prefix]
				if !isKnown {
					at[prefix] = len(all)
					all = append(all, listedPrefix{l.action, part, l.key, j, -1})
					continue
				}
				e := &all[first]
				if e.action != l.action {
					m.conflict(e.part.origin(e.key, e.index), prefix, part.origin(l.key, j), prefix)
				}
			}
		}
	}
	return all, at
}

// writtenParts returns the parts in the order in which rules list their prefixes: networks by name, then
// agent files.
func (m *merger) writtenParts() []part {
	written := slices.Clone(m.parts)
	slices.SortStableFunc(written, func(a, b part) int { return a.id.Compare(b.id) })
	return written
}
