// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// Action is what a policy does with a packet.
type Action string

// The actions, by the names that metrics and explain use.
const (
	ActionMasquerade Action = "masquerade"
	ActionExempt     Action = "exempt"
	ActionOutOfScope Action = "out-of-scope"
)

// Origin is the key that a value comes from.
type Origin struct {
	Source SourceID
	Key    string
	Index  int    // of the item in a list; -1 for a scalar and for a default
	File   string // of the agent files; "" if it is not known
}

// String returns masqChain of network "podnet", or masqLinkLocal (built in), and the
// file of a value that has one. A built-in value without a key is "the built-in policy".
func (o Origin) String() string {
	switch {
	case o.Source.Kind == BuiltIn && o.Key == "":
		return "the built-in policy"
	case o.Source.Kind == BuiltIn:
		return fmt.Sprintf("%s (%s)", o.Key, o.Source)
	case o.File != "":
		return fmt.Sprintf("%s of %s (%s)", o.Key, o.Source, Printable(o.File))
	}
	return fmt.Sprintf("%s of %s", o.Key, o.Source)
}

// WithOrigins is a value with every key that sets it, BuiltIn for a default.
type WithOrigins[T any] struct {
	Value   T
	Origins []Origin
}

// Policy is the policy of one chain, merged from its sources.
type Policy struct {
	Chain   string
	Backend WithOrigins[Backend]

	// Destinations has each prefix once: link-local, multicast and broadcast, the defaults,
	// then those of networks by name and of the agent files, in the written order.
	Destinations []PrefixAction
	// ExemptSources are never masqueraded, regardless of the destination.
	ExemptSources []PrefixAction
	// Namespaces are those of nonMasqueradeNamespaces, and ExemptPods the addresses of their pods, which are exempt
	// sources too.
	Namespaces []NamedNamespace
	ExemptPods []PrefixAction

	// The scope: sourceCIDRs and outputInterfaces, where an empty list means all, and masqueradeHost.
	Sources    WithOrigins[[]netip.Prefix]
	Interfaces WithOrigins[[]string]
	Host       WithOrigins[bool]

	NomasqAllReservedRanges, MasqLinkLocal, MasqLinkLocalIPv6 WithOrigins[bool]

	EnableIPv6  WithOrigins[bool]
	RandomFully WithOrigins[bool]
	ToPorts     WithOrigins[Ports]

	PodCIDRs         WithOrigins[[]netip.Prefix]
	PodSubnets       []netip.Prefix // found by ADDs
	Pods             []netip.Prefix // the pod ranges of all sources; see PodRanges
	Guard            WithOrigins[GuardMode]
	StaleConnections WithOrigins[StaleConnections] // "" if none is stated; see ResetsConnections
	EnforceExempt    WithOrigins[bool]
	BypassMark       WithOrigins[Mark]

	OutputAddresses WithOrigins[AddressItems]
	Outputs         []OutputAddress // those in force; see OutputAddressesOf

	// Conflicts are those between the sources. The policy has the value that is in
	// force of each.
	Conflicts ConflictErrors
}

// PrefixAction is a prefix with the action for the packets whose longest match it is.
type PrefixAction struct {
	Prefix  netip.Prefix
	Action  Action
	Origins []Origin
}

// HasKey reports whether a key states the prefix, if only as its default. Multicast and broadcast have none.
func (e *PrefixAction) HasKey() bool {
	for _, o := range e.Origins {
		if o.Key != "" {
			return true
		}
	}
	return false
}

// NamedNamespace is a namespace with every item that names it.
type NamedNamespace struct {
	Name    string
	Origins []Origin
}

// Families returns the families that the policy manages.
func (p Policy) Families() []Family {
	if p.EnableIPv6.Value {
		return Families()
	}
	return []Family{IPv4}
}

// ConflictError is a conflict between two sources of a chain, or two agent files.
type ConflictError struct {
	Chain                         string
	InForce, Superseded           Origin
	InForceValue, SupersededValue string // as they are written
	Scope                         bool   // the key is about the scope
}

// Error names both sources, the key and the remedy.
func (e *ConflictError) Error() string {
	remedy := "make them agree"
	networks := e.InForce.Source.Kind == Network && e.Superseded.Source.Kind == Network
	if e.Scope || networks && e.Superseded.Index < 0 {
		remedy += " or give one of them another masqChain, and each sourceCIDRs or outputInterfaces of its own"
	}
	return fmt.Sprintf("chain %s: %s is %s, which conflicts with %s, %s; the latter is in force: %s",
		e.Chain, e.Superseded, e.SupersededValue, e.InForce, e.InForceValue, remedy)
}

// ConflictErrors are several conflicts. There can be a million: one for each prefix
// that two sources name.
type ConflictErrors []*ConflictError

// Error returns one line for each of those that Summary returns.
func (e ConflictErrors) Error() string { return errors.Join(e.Summary()...).Error() }

// Unwrap returns all of them.
func (e ConflictErrors) Unwrap() []error {
	list := make([]error, len(e))
	for i, c := range e {
		list[i] = c
	}
	return list
}

// Summary returns the first conflicts and, if there are more, an error with their number.
func (e ConflictErrors) Summary() []error {
	const limit = 8
	list := e[:min(limit, len(e))].Unwrap()
	if more := len(e) - limit; more > 0 {
		list = append(list, fmt.Errorf("chain %s: and %d more conflicts", e[0].Chain, more))
	}
	return list
}

// BoundError reports that the sources together ask for more rules than a chain can have.
type BoundError struct{ Chain, Problem string }

// Error names the chain, the keys, the numbers, the sources and the remedy.
func (e *BoundError) Error() string { return fmt.Sprintf("chain %s: %s", e.Chain, e.Problem) }

// CountDestinations returns how many prefixes of a family the policy has, without link-local, multicast and broadcast.
func (p *Policy) CountDestinations(f Family) int {
	always := append(f.Multicast(), f.LinkLocal())
	count := 0
	for i := range p.Destinations {
		prefix := p.Destinations[i].Prefix
		if FamilyOf(prefix.Addr()) == f && !slices.Contains(always, prefix) {
			count++
		}
	}
	return count
}

// CheckBounds returns a BoundError if the policy has too many rules for its chain. Those that
// exempt multicast and broadcast do not count.
func (p Policy) CheckBounds(l Layout) error {
	if n := len(p.ExemptSources); n > MaxExemptSources {
		return p.boundError("write wider prefixes", p.ExemptSources,
			"nonMasqueradeSourceCIDRs has %d entries, more than the %d possible", n, MaxExemptSources)
	}
	if n := len(p.PodCIDRs.Value); n > MaxPodCIDRs {
		return p.boundError("write wider prefixes", []PrefixAction{{Origins: p.PodCIDRs.Origins}},
			"podCIDRs has %d entries, more than the %d possible", n, MaxPodCIDRs)
	}
	if n := len(p.Namespaces); n > MaxNamespaces {
		return p.boundError("remove some", []PrefixAction{{Origins: p.Namespaces[n-1].Origins}},
			"nonMasqueradeNamespaces has %d entries, more than the %d possible", n, MaxNamespaces)
	}
	if l.Sets {
		return nil
	}
	if n := len(p.ExemptPods); n > MaxExemptPods {
		return p.boundError("set backend to nftables", p.ExemptPods,
			"the pods of nonMasqueradeNamespaces have %d addresses, more than the %d possible in iptables", n, MaxExemptPods)
	}
	for _, f := range p.Families() {
		sources, destinations := len(entriesOf(p.ExemptSources, f))+len(entriesOf(p.ExemptPods, f)), entriesOf(p.Destinations, f)
		exempt, masqueraded, multicast := 0, 0, f.Multicast()
		for _, e := range destinations {
			switch {
			case e.Action == ActionMasquerade:
				masqueraded++
			case !slices.Contains(multicast, e.Prefix):
				exempt++
			}
		}
		each := (1 + len(p.Outputs)) * (1 + len(Protocols())*len(p.ToPorts.Value))
		if n := sources + exempt + (masqueraded+1)*each; n > MaxRules {
			return p.boundError("set backend to nftables", slices.Concat(p.Destinations, p.ExemptSources),
				"%d nonMasqueradeSourceCIDRs, %d nonMasqueradeCIDRs and %d masqueradeCIDRs with %d ranges of toPorts "+
					"make %d %s rules in iptables, more than the %d possible",
				sources, exempt, masqueraded, len(p.ToPorts.Value), n, f, MaxRules)
		}
	}
	return nil
}

// ScopeErrors returns FieldErrors if the merged lists of the scope, of exempt sources
// or of pods are too long.
func (p Policy) ScopeErrors() []error {
	var errs fieldErrors
	errs.checkCounts(len(p.Sources.Value), len(p.Interfaces.Value), len(p.ExemptSources), len(p.PodCIDRs.Value))
	return errs
}

func (p Policy) boundError(remedy string, by []PrefixAction, format string, args ...any) error {
	sources := map[string]bool{}
	for _, e := range by {
		for _, o := range e.Origins {
			if o.Source.Kind != BuiltIn {
				sources[o.Source.String()] = true
			}
		}
	}
	return &BoundError{p.Chain, fmt.Sprintf("%s, stated by %s; remove some, %s, or give a network another masqChain",
		fmt.Sprintf(format, args...), firstOf(slices.Sorted(maps.Keys(sources))), remedy)}
}

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

func (m *merger) conflict(inForce Origin, inForceValue any, superseded Origin, supersededValue any) {
	scope, empty := inForce.Key == "sourceCIDRs" || inForce.Key == "outputInterfaces", "empty"
	if scope {
		empty = "any"
	}
	text := func(v any) string { return cmp.Or(quoteUnlessWord(strings.Trim(fmt.Sprint(v), "[]")), empty) }
	m.policy.Conflicts = append(m.policy.Conflicts, &ConflictError{
		Chain: m.policy.Chain, InForce: inForce, Superseded: superseded, Scope: scope,
		InForceValue: text(inForceValue), SupersededValue: text(supersededValue),
	})
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
