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
	// NoRandomFully means that no rule can choose source ports at random.
	NoRandomFully bool
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
			c.Rules = append(c.Rules, Rule{From: nilIfAll(f, exempt), Verdict: Return})
		}
		if exempt := p.DestinationsExempt(f); len(exempt) > 0 {
			c.Rules = append(c.Rules, Rule{To: nilIfAll(f, exempt), Verdict: Return})
		}
		c.Rules = p.masquerade(f, l, c.Rules, Rule{})
		return c
	}
	sources, destinations := p.writtenAndPods(f), prefixActionsOf(p.Destinations, f)
	c.Rules = make([]Rule, 0, len(sources)+len(destinations)+1)
	for _, e := range sources {
		from := nilIfAll(f, RangesOf(e.Prefix))
		c.Rules = append(c.Rules, Rule{From: from, Verdict: Return, PrefixAction: e})
	}
	for _, e := range chainOrder(destinations) {
		r := Rule{To: nilIfAll(f, RangesOf(e.Prefix)), Verdict: Return, PrefixAction: e}
		if e.Action == ActionExempt {
			c.Rules = append(c.Rules, r)
		} else {
			c.Rules = p.masquerade(f, l, c.Rules, r)
		}
	}
	c.Rules = p.masquerade(f, l, c.Rules, Rule{})
	return c
}

// masquerade appends the rules that masquerade what r matches: those of pods with the addresses in force,
// then those of all other traffic.
func (p *Policy) masquerade(f Family, l Layout, rules []Rule, r Rule) []Rule {
	r.Verdict = Masquerade
	r.RandomFully = p.RandomFully.Value && !l.NoRandomFully
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
				share := float64(ports.Size()) / float64(left)
				with.Probability = uint32(math.Round(share * ProbabilityScale))
			}
			left -= ports.Size()
			rules = append(rules, with)
		}
	}
	return append(rules, r)
}

// chainOrder returns the prefixes in an order in which the first match is the longest
// one. They keep the written order where order does not matter: it matters only if a
// prefix covers one with another action. The covering prefix then comes right after all
// that it covers, which are sorted by length, the longest first.
func chainOrder(list []*PrefixAction) []*PrefixAction {
	if haveOneAction(list) {
		return list
	}
	sorted := byPrefix(list)
	place := make([]int, len(list)) // of each prefix in sorted
	for at, i := range sorted {
		place[i] = at
	}
	longestFirst := func(i, j int) int { return cmp.Or(list[j].Prefix.Bits()-list[i].Prefix.Bits(), i-j) }
	out := make([]*PrefixAction, 0, len(list))
	done := make([]bool, len(list))
	for i, e := range list {
		if done[i] {
			continue
		}
		covered := coveredBy(list, sorted[place[i]:])
		if !haveAction(list, covered, e.Action) {
			covered = slices.SortedFunc(slices.Values(covered), longestFirst)
			for _, within := range covered {
				if !done[within] {
					done[within] = true
					out = append(out, list[within])
				}
			}
		}
		done[i] = true
		out = append(out, e)
	}
	return out
}

// coveredBy returns the indexes of the prefixes that the first one covers, of indexes that are sorted by
// prefix.
func coveredBy(list []*PrefixAction, sorted []int) []int {
	outer := list[sorted[0]].Prefix
	end := 1
	for end < len(sorted) && outer.Contains(list[sorted[end]].Prefix.Addr()) {
		end++
	}
	return sorted[1:end]
}

// haveAction reports whether all prefixes at these indexes have an action.
func haveAction(list []*PrefixAction, indexes []int, action Action) bool {
	for _, i := range indexes {
		if list[i].Action != action {
			return false
		}
	}
	return true
}

func haveOneAction(list []*PrefixAction) bool {
	for _, e := range list {
		if e.Action != list[0].Action {
			return false
		}
	}
	return true
}

// jumps returns the jumps to the chain, one for each element of the scope, and none if
// sourceCIDRs has prefixes of the other family only.
func (p *Policy) jumps(f Family, l Layout) []Rule {
	var jumps []Rule
	for _, from := range p.jumpSources(f, l) {
		for _, m := range p.Scope(f).InterfaceMatches() {
			m.NotFromLocal, m.NotToLocal = !p.Host.Value, true
			jumps = append(jumps, Rule{From: from, Match: m, Verdict: Jump})
		}
	}
	return jumps
}

// jumpSources returns the sources that jumps match: one nil if all are in scope.
func (p *Policy) jumpSources(f Family, l Layout) []Ranges {
	if len(p.Sources.Value) == 0 {
		return []Ranges{nil}
	}
	prefixes := ofFamily(p.Sources.Value, f)
	if l.Sets && len(prefixes) > 0 {
		return []Ranges{nilIfAll(f, RangesOf(prefixes...))}
	}
	var sources []Ranges
	for _, prefix := range prefixes {
		sources = append(sources, nilIfAll(f, RangesOf(prefix)))
	}
	return sources
}

// prefixActionsOf returns the items of a family.
func prefixActionsOf(list []PrefixAction, f Family) []*PrefixAction {
	out := make([]*PrefixAction, 0, len(list))
	for i := range list {
		if FamilyOf(list[i].Prefix.Addr()) == f {
			out = append(out, &list[i])
		}
	}
	return out
}

// nilIfAll returns what a rule matches for a set of addresses: nil if it is every address
// of the family. (iptables drops -d 0.0.0.0/0 as it reads it.)
func nilIfAll(f Family, r Ranges) Ranges {
	if coversAll(f, r) {
		return nil
	}
	return r
}

// coversAll reports whether the set has every address of the family.
func coversAll(f Family, r Ranges) bool {
	return len(r) == 1 && r[0] == netipx.RangeOfPrefix(f.All())
}

// byPrefix returns the indexes of the prefixes in the order of netip.Prefix.Compare. It sorts
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

// exemptAddresses returns the addresses whose longest prefix is exempt. The prefixes
// are different and of one family.
func exemptAddresses(list []*PrefixAction) Ranges {
	w := exemptWalk{list: list, sorted: byPrefix(list), exempt: make(Ranges, 0, len(list))}
	for at := 0; at < len(w.sorted); {
		at = w.walk(at)
	}
	return w.exempt
}

// exemptWalk is a walk through prefixes in the order of netip.Prefix.Compare: each comes before those that it
// covers.
type exemptWalk struct {
	list   []*PrefixAction
	sorted []int // indexes of the list
	exempt Ranges
}

func (w *exemptWalk) prefix(at int) *PrefixAction { return w.list[w.sorted[at]] }

// walk adds the addresses of the prefix at a place of the sorted list, and of those
// that it covers. It returns the place after them.
func (w *exemptWalk) walk(at int) int {
	e := w.prefix(at)
	all := netipx.RangeOfPrefix(e.Prefix)
	next := all.From() // the first address that is not decided yet
	at++
	for at < len(w.sorted) && e.Prefix.Contains(w.prefix(at).Prefix.Addr()) {
		within := netipx.RangeOfPrefix(w.prefix(at).Prefix)
		if e.Action == ActionExempt && next.Less(within.From()) {
			w.add(next, within.From().Prev())
		}
		next = within.To().Next()
		at = w.walk(at)
	}
	isDone := !next.IsValid() || all.To().Less(next)
	if e.Action == ActionExempt && !isDone {
		w.add(next, all.To())
	}
	return at
}

// add adds addresses that come after the others.
func (w *exemptWalk) add(from, to netip.Addr) {
	last := len(w.exempt) - 1
	if last >= 0 && w.exempt[last].To().Next() == from {
		w.exempt[last] = netipx.IPRangeFrom(w.exempt[last].From(), to)
		return
	}
	w.exempt = append(w.exempt, netipx.IPRangeFrom(from, to))
}
