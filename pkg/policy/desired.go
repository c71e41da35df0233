// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/binary"
	"math"
	"net/netip"
	"slices"

	"go4.org/netipx"
)

// Layout is the form of rules that a backend supports.
type Layout struct {
	// Sets means that a rule can match a set; otherwise each prefix has a rule of its own.
	Sets bool
}

// Desired returns the rules that the kernel must have for the policies.
func Desired(policies []Policy, l Layout, o Owner) Ruleset {
	var rs Ruleset
	for i := range policies {
		for _, f := range policies[i].Families() {
			rs.Chains = append(rs.Chains, policies[i].chain(f, l, o))
		}
	}
	return rs
}

// chain returns the chain of one family. It decides the order of the rules, which the
// backends keep: exempt sources, the destinations in the order of chainOrder, and
// MASQUERADE for the rest. Policy.Destinations has the written order.
func (p *Policy) chain(f Family, l Layout, o Owner) Chain {
	c := Chain{Family: f, Name: p.Chain, Owner: o, Jumps: p.jumps(f, l)}
	if l.Sets {
		if exempt := p.SourcesExempt(f); len(exempt) > 0 {
			c.Rules = append(c.Rules, Rule{From: f.match(exempt), Verdict: Return})
		}
		if exempt := p.DestinationsExempt(f); len(exempt) > 0 {
			c.Rules = append(c.Rules, Rule{To: f.match(exempt), Verdict: Return})
		}
		c.Rules = p.masquerade(f, c.Rules, Rule{})
		return c
	}
	sources, destinations := p.exemptSources(f), entriesOf(p.Destinations, f)
	c.Rules = make([]Rule, 0, len(sources)+len(destinations)+1)
	for _, e := range sources {
		c.Rules = append(c.Rules, Rule{From: f.match(RangesOf(e.Prefix)), Verdict: Return, PrefixAction: e})
	}
	for _, e := range chainOrder(destinations) {
		r := Rule{To: f.match(RangesOf(e.Prefix)), Verdict: Return, PrefixAction: e}
		if e.Action == ActionExempt {
			c.Rules = append(c.Rules, r)
		} else {
			c.Rules = p.masquerade(f, c.Rules, r)
		}
	}
	c.Rules = p.masquerade(f, c.Rules, Rule{})
	return c
}

// masquerade appends the rules that masquerade what r matches: those of pods with the addresses in force,
// then those of all other traffic.
func (p *Policy) masquerade(f Family, rules []Rule, r Rule) []Rule {
	r.Verdict, r.RandomFully = Masquerade, p.RandomFully.Value
	for _, o := range p.Outputs {
		if FamilyOf(o.Address) == f {
			with := r
			with.NotFromLocal, with.Out, with.Address = true, o.Interface, o.Address
			rules = p.withPorts(rules, with)
		}
	}
	return p.withPorts(rules, r)
}

// withPorts appends a rule that masquerades: for each protocol with ports one rule per port range, and one
// for all other traffic. The probability of a range is for the packets that the earlier ranges do not match.
func (p *Policy) withPorts(rules []Rule, r Rule) []Rule {
	total := 0
	for _, ports := range p.ToPorts.Value {
		total += ports.Size()
	}
	for _, protocol := range Protocols() {
		left := total
		for _, ports := range p.ToPorts.Value {
			with := r
			with.Protocol, with.Ports = protocol, ports
			if ports.Size() < left {
				with.Probability = uint32(math.Round(float64(ports.Size()) / float64(left) * ProbabilityScale))
			}
			left -= ports.Size()
			rules = append(rules, with)
		}
	}
	return append(rules, r)
}

// chainOrder returns the entries in an order in which the first match is the longest
// prefix. Entries keep the written order where order does not matter: it matters only
// if an entry covers one with another action. The covering entry then comes right after
// all entries that it covers, which are sorted by length, the longest first.
func chainOrder(list []*PrefixAction) []*PrefixAction {
	if !slices.ContainsFunc(list, func(e *PrefixAction) bool { return e.Action != list[0].Action }) {
		return list
	}
	sorted := byPrefix(list)
	place := make([]int, len(list)) // of each entry in sorted
	for at, i := range sorted {
		place[i] = at
	}
	longestFirst := func(i, j int) int { return cmp.Or(list[j].Prefix.Bits()-list[i].Prefix.Bits(), i-j) }
	out, done := make([]*PrefixAction, 0, len(list)), make([]bool, len(list))
	take := func(i int) {
		if !done[i] {
			done[i] = true
			out = append(out, list[i])
		}
	}
	for i, e := range list {
		if done[i] {
			continue
		}
		end, mixed := place[i]+1, false
		for ; end < len(sorted) && e.Prefix.Contains(list[sorted[end]].Prefix.Addr()); end++ {
			mixed = mixed || list[sorted[end]].Action != e.Action
		}
		if mixed {
			for _, within := range slices.SortedFunc(slices.Values(sorted[place[i]+1:end]), longestFirst) {
				take(within)
			}
		}
		take(i)
	}
	return out
}

// jumps returns the jumps to the chain, one for each element of the scope, and none if
// sourceCIDRs has prefixes of the other family only.
func (p *Policy) jumps(f Family, l Layout) []Rule {
	sources, prefixes := []Ranges{nil}, ofFamily(p.Sources.Value, f)
	switch {
	case len(p.Sources.Value) == 0:
	case l.Sets && len(prefixes) > 0:
		sources = []Ranges{f.match(RangesOf(prefixes...))}
	default:
		sources = nil
		for _, prefix := range prefixes {
			sources = append(sources, f.match(RangesOf(prefix)))
		}
	}
	var jumps []Rule
	for _, from := range sources {
		for _, m := range p.Scope(f).Matches() {
			m.NotFromLocal, m.NotToLocal = !p.Host.Value, true
			jumps = append(jumps, Rule{From: from, Match: m, Verdict: Jump})
		}
	}
	return jumps
}

func entriesOf(list []PrefixAction, f Family) []*PrefixAction {
	out := make([]*PrefixAction, 0, len(list))
	for i := range list {
		if FamilyOf(list[i].Prefix.Addr()) == f {
			out = append(out, &list[i])
		}
	}
	return out
}

// match returns the match for a set of addresses: nil if it is every address of the
// family. (iptables drops -d 0.0.0.0/0 as it reads it.)
func (f Family) match(r Ranges) Ranges {
	if len(r) == 1 && r[0] == netipx.RangeOfPrefix(f.All()) {
		return nil
	}
	return r
}

// byPrefix returns the indexes of the entries in the order of netip.Prefix.Compare. It sorts
// keys without pointers, which take a third of the time.
func byPrefix(list []*PrefixAction) []int {
	type key struct {
		high, low uint64
		bits      int
		index     int
	}
	keys := make([]key, len(list))
	for i, e := range list {
		a := e.Prefix.Addr().As16()
		keys[i] = key{binary.BigEndian.Uint64(a[:8]), binary.BigEndian.Uint64(a[8:]), e.Prefix.Bits(), i}
	}
	slices.SortFunc(keys, func(a, b key) int {
		return cmp.Or(cmp.Compare(a.high, b.high), cmp.Compare(a.low, b.low), a.bits-b.bits)
	})
	out := make([]int, len(keys))
	for i, k := range keys {
		out[i] = k.index
	}
	return out
}

// exemptAddresses returns the addresses whose longest prefix is exempt. The entries
// have different prefixes of one family.
func exemptAddresses(list []*PrefixAction) Ranges {
	out := make(Ranges, 0, len(list))
	add := func(from, to netip.Addr) {
		if n := len(out); n > 0 && out[n-1].To().Next() == from {
			out[n-1] = netipx.IPRangeFrom(out[n-1].From(), to)
		} else {
			out = append(out, netipx.IPRangeFrom(from, to))
		}
	}
	sorted := byPrefix(list)
	// walk adds the addresses of the entry at a place of the sorted list, and of those
	// that it covers. It returns the place after them.
	var walk func(at int) int
	walk = func(at int) int {
		e := list[sorted[at]]
		all := netipx.RangeOfPrefix(e.Prefix)
		next := all.From() // the first address that is not decided yet
		for at++; at < len(sorted) && e.Prefix.Contains(list[sorted[at]].Prefix.Addr()); {
			within := netipx.RangeOfPrefix(list[sorted[at]].Prefix)
			if e.Action == ActionExempt && next.Less(within.From()) {
				add(next, within.From().Prev())
			}
			next, at = within.To().Next(), walk(at)
		}
		if e.Action == ActionExempt && next.IsValid() && !all.To().Less(next) {
			add(next, all.To())
		}
		return at
	}
	for at := 0; at < len(sorted); {
		at = walk(at)
	}
	return out
}
