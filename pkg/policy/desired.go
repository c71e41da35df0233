// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"math"
	"net/netip"
	"strings"

	"go4.org/netipx"
)

// Layout is the form in which a backend can hold a policy.
type Layout struct {
	// Sets tells that a rule can match a whole set of addresses. Otherwise
	// each prefix takes a rule of its own.
	Sets bool
	// PlainPorts tells that the kernel or its tools cannot choose source
	// ports fully at random.
	PlainPorts bool
}

// Desired returns the rules that the kernel must have for the policies. It is
// the one place where they are decided, for the plugin and the reconciler.
func Desired(policies []Policy, l Layout, o Owner) Ruleset {
	var rs Ruleset
	for _, p := range policies {
		for _, f := range p.Families() {
			rs.Chains = append(rs.Chains, p.chain(f, l, o))
		}
	}
	return rs
}

func (p Policy) chain(f Family, l Layout, o Owner) Chain {
	c := Chain{Family: f, Name: p.Chain, Owner: o, Jumps: p.jumps(f, l)}
	var sources []netip.Prefix
	for _, e := range p.ExemptSources {
		sources = append(sources, e.Prefix)
	}
	for _, from := range l.group(f, ofFamily(sources, f)) {
		c.Rules = append(c.Rules, Rule{From: from, Verdict: Return})
	}
	destinations := make([]Entry, 0, len(p.Destinations))
	for _, e := range p.Destinations {
		if FamilyOf(e.Prefix.Addr()) == f {
			destinations = append(destinations, e)
		}
	}
	if l.Sets {
		if exempt := exemptAddresses(destinations); len(exempt) > 0 {
			c.Rules = append(c.Rules, Rule{To: f.match(exempt), Verdict: Return})
		}
	} else {
		for _, e := range inChainOrder(destinations) {
			to := f.match(RangesOf(e.Prefix))
			if e.Action == Exempt {
				c.Rules = append(c.Rules, Rule{To: to, Verdict: Return})
			} else {
				c.Rules = append(c.Rules, p.masquerade(to, l)...)
			}
		}
	}
	c.Rules = append(c.Rules, p.masquerade(nil, l)...)
	return c
}

// group returns what one rule each can match: all of the prefixes, or one.
func (l Layout) group(f Family, prefixes []netip.Prefix) []Ranges {
	if l.Sets && len(prefixes) > 0 {
		return []Ranges{f.match(RangesOf(prefixes...))}
	}
	var out []Ranges
	for _, p := range prefixes {
		out = append(out, f.match(RangesOf(p)))
	}
	return out
}

// match returns what a rule has to match to reach the addresses: nothing where
// they are all that the family has. (iptables drops -d 0.0.0.0/0 as it reads it.)
func (f Family) match(r Ranges) Ranges {
	if len(r) == 1 && r[0] == netipx.RangeOfPrefix(f.All()) {
		return nil
	}
	return r
}

// jumps returns the jump to the chain, once per element of the scope: none
// where the scope names the other family only.
func (p Policy) jumps(f Family, l Layout) []Rule {
	from := []Ranges{nil}
	if len(p.Sources.Value) > 0 {
		from = l.group(f, ofFamily(p.Sources.Value, f))
	}
	out := p.Interfaces.Value
	if len(out) == 0 {
		out = []string{""}
	}
	var jumps []Rule
	for _, src := range from {
		for _, ifname := range out {
			jumps = append(jumps, Rule{From: src, Out: ifname, NotFromLocal: !p.Host.Value, NotToLocal: true, Verdict: Jump})
		}
	}
	return jumps
}

// masquerade returns the rules that masquerade what goes to the addresses:
// for each protocol that has ports one per range of ports, every range with its
// share of what the ranges before it left, and one for all other traffic.
func (p Policy) masquerade(to Ranges, l Layout) []Rule {
	last := Rule{To: to, Verdict: Masquerade, RandomFully: p.RandomFully.Value && !l.PlainPorts}
	var rules []Rule
	if len(p.ToPorts.Value) > 0 {
		for _, proto := range Protocols() {
			left := 0
			for _, r := range p.ToPorts.Value {
				left += r.Size()
			}
			for _, ports := range p.ToPorts.Value {
				r := last
				r.Protocol, r.Ports = proto, ports
				if ports.Size() < left {
					r.Share = uint32(math.Round(float64(ports.Size()) / float64(left) * ShareUnit))
				}
				left -= ports.Size()
				rules = append(rules, r)
			}
		}
	}
	return append(rules, last)
}

// exemptAddresses returns the addresses whose longest prefix exempts them. Of
// one length the exempt come first: the builder puts its ranges in order each
// time that one is added after one was removed.
func exemptAddresses(list []Entry) Ranges {
	var b netipx.IPSetBuilder
	widestFirst := func(a, b Entry) int {
		return cmp.Or(a.Prefix.Bits()-b.Prefix.Bits(), strings.Compare(string(a.Action), string(b.Action)))
	}
	for _, e := range sorted(list, widestFirst) {
		if e.Action == Exempt {
			b.AddPrefix(e.Prefix)
		} else {
			b.RemovePrefix(e.Prefix)
		}
	}
	return rangesFrom(&b)
}
