// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"maps"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// series are the labels of a number. A metric may have only the first of them.
type series struct {
	policy.ChainFamily
	action string
}

// kernelChain is a chain whose counters the kernel or the record has. Without a Choice it is that of a
// guard table or, for resets, one in any backend.
type kernelChain struct {
	netfilter.Choice
	policy.ChainFamily
}

// totals adds up the kernel's counters by action. The first value counts in full, as the rules may be older
// than this process. One that fell adds nothing: rules were recreated, or removed. What is counted between
// the observations before and after that is lost.
type totals struct {
	last   map[kernelChain]map[string]uint64
	sums   map[series]uint64
	chains map[string]bool // that have series
}

func newTotals() totals {
	return totals{map[kernelChain]map[string]uint64{}, map[series]uint64{}, map[string]bool{}}
}

// observe adds what counters counted since their last observation, and forgets those of chains that are gone.
func (t *totals) observe(now map[kernelChain]map[string]uint64, gone func(kernelChain) bool) {
	chains := slices.SortedFunc(maps.Keys(now), compareByName) // of too many chains, the first get series
	for _, p := range chains {
		for action, n := range now[p] {
			before := min(n, t.last[p][action])
			t.addTo(p.ChainFamily, action, n-before)
		}
		t.last[p] = now[p]
	}
	for p := range t.last {
		if now[p] == nil && gone(p) {
			delete(t.last, p)
		}
	}
}

func compareByName(a, b kernelChain) int { return strings.Compare(a.Chain, b.Chain) }

// addTo adds a number to a series, which exists from then on.
func (t *totals) addTo(c policy.ChainFamily, action string, n uint64) {
	if t.chains[c.Chain] || len(t.chains) < maxNames {
		t.chains[c.Chain] = true
		t.sums[series{c, action}] += n
	}
}

// count adds the connections, and the packets that guards counted or dropped, since the state before. The
// series of guards and resets begin with their keys. It ignores nil.
func (m *Monitor) count(s *enforce.State) {
	if s == nil {
		return
	}
	gone := func(p kernelChain) bool { return hasGone(s, p) }
	m.connections.observe(connectionsOf(s), gone)
	for _, g := range s.Guard.Desired {
		if g.Mode != policy.GuardOff {
			m.guards.addTo(policy.ChainFamily{Chain: g.Chain, Family: g.Family}, string(g.Mode), 0)
		}
	}
	m.guards.observe(guardPacketsOf(s), gone)
	for _, p := range limited(s.Policies()) {
		if !p.ResetsConnections() {
			continue
		}
		for _, f := range p.Families() {
			if len(p.Scope(f).Sources) > 0 { // else sourceCIDRs has only the other family
				m.resets.addTo(policy.ChainFamily{Chain: p.Chain, Family: f}, "", 0)
			}
		}
	}
}

// hasGone reports whether a chain that a state does not have is gone. One that could not be observed may
// still exist: its counters must not count twice.
func hasGone(s *enforce.State, p kernelChain) bool {
	if p.Choice == (netfilter.Choice{}) {
		return s.Guard.Err == nil
	}
	chain := s.Find(p.Chain)
	return chain == nil || chain.Err == nil
}

// connectionsOf returns the connections that the chains of a state counted, by action.
func connectionsOf(s *enforce.State) map[kernelChain]map[string]uint64 {
	const exempt, masquerade = string(policy.ActionExempt), string(policy.ActionMasquerade)
	connections := map[kernelChain]map[string]uint64{}
	for _, chain := range s.Chains {
		for _, observed := range chain.Observed.Chains {
			n := map[policy.Verdict]uint64{}
			for _, r := range observed.Rules {
				n[r.Verdict] += r.Connections
			}
			at := kernelChain{chain.Choice, policy.ChainFamily{Chain: observed.Name, Family: observed.Family}}
			connections[at] = map[string]uint64{exempt: n[policy.Return], masquerade: n[policy.Masquerade]}
		}
	}
	for bound, n := range s.Guard.Observed.Bound { // before the masquerade chain sees them
		if s.Find(bound.Chain) != nil {
			connections[kernelChain{ChainFamily: bound}] = map[string]uint64{exempt: n}
		}
	}
	return connections
}

// guardPacketsOf returns the packets that the guards of a state counted, by what they did with them.
func guardPacketsOf(s *enforce.State) map[kernelChain]map[string]uint64 {
	packets := map[kernelChain]map[string]uint64{}
	for _, g := range s.Guard.Observed.Guards {
		at := policy.ChainFamily{Chain: g.Chain, Family: g.Family}
		desired := s.Guard.Of(at)
		isDesired := desired != nil && desired.Mode != policy.GuardOff
		if g.Mode != policy.GuardOff && isDesired {
			n := s.Guard.Observed.Packets[at]
			packets[kernelChain{ChainFamily: at}] = map[string]uint64{string(g.Mode): n}
		}
	}
	return packets
}
