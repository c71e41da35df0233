// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// verdict is what becomes of a packet, as the documentation words it.
type verdict string

const (
	notMasqueraded verdict = "not masqueraded"
	masqueraded    verdict = "masqueraded"
	notItsAffair   verdict = "no policy manages it"
)

// oracle decides about a packet from the words of the sources alone, by trying
// every prefix there is. It shares nothing with what it is held against.
type oracle struct{ strongestFirst []policy.Source }

func newOracle(sources []policy.Source) oracle {
	rest := slices.Clone(sources)
	o := oracle{}
	for len(rest) > 0 {
		best := 0
		for i := range rest {
			if stronger(rest[i], rest[best]) {
				best = i
			}
		}
		o.strongestFirst = append(o.strongestFirst, rest[best])
		rest = slices.Delete(rest, best, best+1)
	}
	return o
}

// stronger: a network beats the agent files; among networks the one that does
// not yield, then the one that came first, then the one whose name does.
func stronger(a, b policy.Source) bool {
	aNet, bNet := a.ID.Kind == policy.Network, b.ID.Kind == policy.Network
	switch {
	case aNet != bNet:
		return aNet
	case a.Superseded != b.Superseded:
		return b.Superseded
	case a.Order != b.Order:
		return a.Order < b.Order
	}
	return a.ID.Name < b.ID.Name
}

// saidFirst returns what the strongest source that states a scalar says.
func saidFirst[T any](o oracle, otherwise T, get func(policy.SourcePolicy) *T) T {
	for _, c := range o.strongestFirst {
		if v := get(c.Policy); v != nil {
			return *v
		}
	}
	return otherwise
}

// scopeOf returns the scope that holds: that of the strongest network, which
// means any if it names none; without networks, that of the agent files.
func scopeOf[T any](o oracle, get func(policy.SourcePolicy) []T) []T {
	return get(o.strongestFirst[0].Policy)
}

func (o oracle) decide(p policy.Packet) verdict {
	ipv6 := saidFirst(o, false, func(s policy.SourcePolicy) *bool { return s.EnableIPv6 })
	host := saidFirst(o, true, func(s policy.SourcePolicy) *bool { return s.MasqueradeHost })
	if p.Dst.Is6() && !ipv6 {
		return notItsAffair
	}
	sources := scopeOf(o, func(s policy.SourcePolicy) []netip.Prefix { return s.SourceCIDRs })
	interfaces := scopeOf(o, func(s policy.SourcePolicy) []string { return s.OutputInterfaces })
	switch {
	case p.DstLocal,
		len(sources) > 0 && !anyContains(sources, p.Src),
		len(interfaces) > 0 && !anyNames(interfaces, p.Out),
		!host && p.SrcLocal:
		return notMasqueraded
	}
	for _, c := range o.strongestFirst {
		if anyContains(c.Policy.NonMasqueradeSourceCIDRs, p.Src) {
			return notMasqueraded
		}
	}
	longest, decided := -1, masqueraded
	for prefix, v := range o.destinations() {
		if prefix.Contains(p.Dst) && prefix.Bits() > longest {
			longest, decided = prefix.Bits(), v
		}
	}
	return decided
}

// destinations returns what each prefix does: first what is built in, then over
// it what the sources state, the strongest last.
func (o oracle) destinations() map[netip.Prefix]verdict {
	out := map[netip.Prefix]verdict{}
	listNamed := false
	linkLocal := map[string]bool{"169.254.0.0/16": false, "fe80::/10": false}
	for _, c := range o.strongestFirst {
		s := c.Policy
		listNamed = listNamed || s.NonMasqueradeCIDRs != nil
		linkLocal["169.254.0.0/16"] = linkLocal["169.254.0.0/16"] || s.MasqLinkLocal != nil && *s.MasqLinkLocal
		linkLocal["fe80::/10"] = linkLocal["fe80::/10"] || s.MasqLinkLocalIPv6 != nil && *s.MasqLinkLocalIPv6
	}
	for prefix, masquerade := range linkLocal {
		if !masquerade {
			out[netip.MustParsePrefix(prefix)] = notMasqueraded
		}
	}
	if !listNamed {
		builtIn := "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16"
		if saidFirst(o, false, func(s policy.SourcePolicy) *bool { return s.NomasqAllReservedRanges }) {
			builtIn += " 100.64.0.0/10 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15" +
				" 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4"
		}
		for prefix := range strings.FieldsSeq(builtIn) {
			out[netip.MustParsePrefix(prefix)] = notMasqueraded
		}
	}
	for _, c := range slices.Backward(o.strongestFirst) {
		for _, prefix := range c.Policy.NonMasqueradeCIDRs {
			out[prefix] = notMasqueraded
		}
		for _, prefix := range c.Policy.MasqueradeCIDRs {
			out[prefix] = masqueraded
		}
	}
	return out
}

func anyContains(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func anyNames(list []string, name string) bool {
	for _, pattern := range list {
		if pattern == name || pattern[len(pattern)-1] == '+' && strings.HasPrefix(name, pattern[:len(pattern)-1]) {
			return true
		}
	}
	return false
}

// decided is what the chains of a ruleset do with a packet.
func decided(rs policy.Ruleset, chain string, p policy.Packet) (verdict, *policy.Rule) {
	c := rs.Find(policy.FamilyOf(p.Dst), chain)
	if c == nil {
		return notItsAffair, nil
	}
	r := c.Walk(p)
	if r != nil && r.Verdict == policy.Masquerade {
		return masqueraded, r
	}
	return notMasqueraded, r
}
