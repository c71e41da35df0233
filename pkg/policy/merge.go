// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Merge unites what the sources contribute into one policy per chain, sorted by
// the chain's name. The order of the contributions has no influence. Conflicts
// are reported in the policy; of each the stronger source's side holds: a
// network before the agent files, and among networks the one in force.
func Merge(contributions []Source) []Policy {
	byChain := map[string][]Source{}
	for _, c := range contributions {
		byChain[c.Policy.Chain] = append(byChain[c.Policy.Chain], c)
	}
	var policies []Policy
	for chain, sources := range byChain {
		m := merger{policy: Policy{Chain: chain}, ranked: sorted(sources, inForce)}
		policies = append(policies, m.merge())
	}
	return sorted(policies, func(a, b Policy) int { return strings.Compare(a.Chain, b.Chain) })
}

// merger unites the contributions to one chain.
type merger struct {
	policy Policy
	ranked []Source // the strongest first
}

func (m *merger) merge() Policy {
	p := &m.policy
	backend := func(s SourcePolicy) *Backend {
		if s.Backend == "" || s.Backend == Auto {
			return nil
		}
		return &s.Backend
	}
	p.Backend = scalar(m, "backend", Auto, backend)
	p.EnableIPv6 = scalar(m, "enableIPv6", false, func(s SourcePolicy) *bool { return s.EnableIPv6 })
	p.RandomFully = scalar(m, "randomFully", true, func(s SourcePolicy) *bool { return s.RandomFully })
	p.Host = scalar(m, "masqueradeHost", true, func(s SourcePolicy) *bool { return s.MasqueradeHost })
	p.ToPorts = m.toPorts()
	m.scope()
	p.Destinations = m.destinations()
	p.ExemptSources = m.exemptSources()
	return *p
}

// inWrittenOrder returns the contributions in the order in which their lists
// are written one after the other.
func (m *merger) inWrittenOrder() []Source {
	return sorted(m.ranked, func(a, b Source) int { return a.ID.Compare(b.ID) })
}

func builtIn(key string) []Origin { return []Origin{{SourceID{Kind: BuiltIn}, key, -1}} }

// scalar finds the value that the strongest source states, and reports those
// that state another.
func scalar[T comparable](m *merger, key string, otherwise T, get func(SourcePolicy) *T) Stated[T] {
	return stated(m, key, otherwise, get, func(a, b T) bool { return a == b })
}

func stated[T any](m *merger, key string, otherwise T, get func(SourcePolicy) *T, equal func(a, b T) bool) Stated[T] {
	var out Stated[T]
	for _, c := range m.ranked {
		value := get(c.Policy)
		if value == nil {
			continue
		}
		o := Origin{c.ID, key, -1}
		switch {
		case out.Origins == nil:
			out = Stated[T]{*value, []Origin{o}}
		case equal(out.Value, *value):
			out.Origins = append(out.Origins, o)
		default:
			m.conflict(out.Origins[0], out.Value, o, *value, false)
		}
	}
	if out.Origins == nil {
		return Stated[T]{otherwise, builtIn(key)}
	}
	return out
}

func (m *merger) conflict(holds Origin, holdsValue any, yields Origin, yieldsValue any, scope bool) {
	m.policy.Conflicts = append(m.policy.Conflicts, &ConflictError{
		Chain: m.policy.Chain, InForce: holds, Superseded: yields, Scope: scope,
		InForceValue: describe(holdsValue), SupersededValue: describe(yieldsValue),
	})
}

func describe(v any) string {
	if text := plainOrQuoted(strings.Trim(fmt.Sprint(v), "[]")); text != "" {
		return text
	}
	return "empty"
}

func (m *merger) toPorts() Stated[Ports] {
	equal := func(a, b Ports) bool { return slices.Equal(a.sorted(), b.sorted()) }
	return stated(m, "toPorts", Ports{}, func(s SourcePolicy) *Ports { return s.ToPorts }, equal)
}

// scope finds what the policy is about. A network that names no sources or
// interfaces means any; agent files that name none follow the networks.
func (m *merger) scope() {
	p := &m.policy
	p.Sources = scopeOf(m, "sourceCIDRs", comparePrefixes, func(s SourcePolicy) []netip.Prefix { return s.SourceCIDRs })
	p.Interfaces = scopeOf(m, "outputInterfaces", strings.Compare, func(s SourcePolicy) []string { return s.OutputInterfaces })
}

func scopeOf[T comparable](m *merger, key string, order func(a, b T) int, get func(SourcePolicy) []T) Stated[[]T] {
	out := Stated[[]T]{Origins: builtIn(key)}
	for _, c := range m.ranked {
		value := slices.Compact(sorted(get(c.Policy), order))
		o := Origin{c.ID, key, -1}
		switch nobodyYet := out.Origins[0].Source.Kind == BuiltIn; {
		case len(value) == 0 && c.ID.Kind != Network:
		case nobodyYet:
			out = Stated[[]T]{value, []Origin{o}}
		case slices.Equal(out.Value, value):
			out.Origins = append(out.Origins, o)
		default:
			m.conflict(out.Origins[0], anyIfEmpty(out.Value), o, anyIfEmpty(value), true)
		}
	}
	return out
}

func anyIfEmpty[T any](list []T) any {
	if len(list) == 0 {
		return "any"
	}
	return list
}

func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), a.Bits()-b.Bits())
}
