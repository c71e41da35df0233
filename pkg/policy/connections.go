// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"net/netip"
	"slices"
)

// ChainFamily is a masquerade chain of one family.
type ChainFamily struct {
	Chain  string
	Family Family
}

// Connection is a conntrack entry: the addresses of its original and of its reply tuple.
type Connection struct{ Src, Dst, ReplySrc, ReplyDst netip.Addr }

// NodeRoutes is what a ConnectionJudge needs of the node's routing tables.
type NodeRoutes interface {
	// IsLocal reports whether the address is one of the node's own, as fib daddr type local.
	IsLocal(netip.Addr) bool
	// OutputInterface returns the interface by which packets leave, "" if it is not known.
	OutputInterface(src, dst netip.Addr) string
}

// ConnectionJudge decides which conntrack entries of pods are stale: translated although
// no chain masquerades them now, or not translated although one does.
type ConnectionJudge struct {
	v4, v6 familyJudge
}

// familyJudge is a ConnectionJudge of one family.
type familyJudge struct {
	pods         []podRange
	now          []masqueraded
	before       [][]masqueraded
	untranslated bool
	scoped       bool // some policy has outputInterfaces
}

// podRange is the addresses of pods whose connections a chain resets.
type podRange struct {
	chain string
	Ranges
}

// masqueraded is what one chain masquerades. Chains with the same interfaces have the
// same bit; the one of chains without is anyInterface.
type masqueraded struct {
	scope, from, exempt Ranges
	interfaces          []string
	bit                 uint64
}

const anyInterface = 1

// NewConnectionJudge returns the judge for the policies in force. An entry whose verdict
// differs from that of some policies before is stale if its translation contradicts the
// present one. With untranslated, every untranslated entry is stale that is masqueraded now.
func NewConnectionJudge(now []Policy, before [][]Policy, untranslated bool) *ConnectionJudge {
	var lists [][]string // of interfaces, by bit
	judge := func(f Family) familyJudge {
		j := familyJudge{untranslated: untranslated}
		compile := func(policies []Policy) (out []masqueraded) {
			for i := range policies {
				p := &policies[i]
				scope := p.SourcesInScope(f)
				m := masqueraded{scope, scope.Without(p.SourcesExempt(f)), p.DestinationsExempt(f), p.Interfaces.Value, anyInterface}
				if len(m.interfaces) > 0 {
					same := func(list []string) bool { return slices.Equal(list, m.interfaces) }
					if !slices.ContainsFunc(lists, same) {
						lists = append(lists, m.interfaces)
					}
					m.bit <<= min(1+slices.IndexFunc(lists, same), 63)
					j.scoped = true
				}
				out = append(out, m)
			}
			return out
		}
		addPods := func(p *Policy) {
			if pods := p.PodRanges(f); len(pods) > 0 {
				j.pods = append(j.pods, podRange{p.Chain, pods})
			}
		}
		resets := map[string]bool{}
		for i := range now {
			if now[i].ResetsConnections() {
				resets[now[i].Chain] = true
				addPods(&now[i])
			}
		}
		j.now = compile(now)
		for _, policies := range before {
			j.before = append(j.before, compile(policies))
			for i := range policies {
				if resets[policies[i].Chain] { // sources that are exempt or out of scope now
					addPods(&policies[i])
				}
			}
		}
		return j
	}
	return &ConnectionJudge{judge(IPv4), judge(IPv6)}
}

// Families returns the families that have entries to judge.
func (j *ConnectionJudge) Families() (families []Family) {
	for _, f := range Families() {
		if len(j.of(f).pods) > 0 {
			families = append(families, f)
		}
	}
	return families
}

func (j *ConnectionJudge) of(f Family) *familyJudge {
	if f == IPv4 {
		return &j.v4
	}
	return &j.v6
}

// Judge reports whether the entry is stale, and the chain whose pod range has its source.
// The endpoint of a connection, which a Service may have chosen, is the source of its
// replies. An entry that is both destination NATed and translated is kept.
func (j *ConnectionJudge) Judge(c *Connection, routes NodeRoutes) (chain string, stale bool) {
	f := j.of(FamilyOf(c.Src))
	i := slices.IndexFunc(f.pods, func(r podRange) bool { return r.Contains(c.Src) })
	if i < 0 {
		return "", false
	}
	translated := c.ReplyDst != c.Src
	if translated && c.ReplySrc != c.Dst || !f.mayBeStale(c, translated) ||
		routes.IsLocal(c.Src) || routes.IsLocal(c.ReplySrc) {
		return "", false
	}
	out := ""
	if f.scoped {
		if out = routes.OutputInterface(c.Src, c.ReplySrc); out == "" || f.routeOutOfScope(c, out) {
			return "", false
		}
	}
	now := verdict(f.now, c, out)
	stale = now != translated && (f.untranslated && now ||
		slices.ContainsFunc(f.before, func(before []masqueraded) bool { return verdict(before, c, out) != now }))
	return f.pods[i].chain, stale
}

// mayBeStale reports whether the entry is stale if its output interface is the right one.
func (f *familyJudge) mayBeStale(c *Connection, translated bool) bool {
	now := interfaceBits(f.now, c)
	switch {
	case translated && now == anyInterface, !translated && now == 0:
		return false
	case !translated && f.untranslated:
		return true
	}
	return slices.ContainsFunc(f.before, func(before []masqueraded) bool { return interfaceBits(before, c) != now })
}

// interfaceBits returns the bits of the chains that masquerade the connection if it leaves
// by one of their interfaces, or only anyInterface if one of them has no list.
func interfaceBits(chains []masqueraded, c *Connection) (bits uint64) {
	for i := range chains {
		if m := &chains[i]; m.applies(c) {
			if bits |= m.bit; m.bit == anyInterface {
				return anyInterface
			}
		}
	}
	return bits
}

func (m *masqueraded) applies(c *Connection) bool {
	return m.from.Contains(c.Src) && !m.exempt.Contains(c.ReplySrc)
}

// verdict reports whether a chain masquerades the connection.
func verdict(chains []masqueraded, c *Connection, out string) bool {
	return slices.ContainsFunc(chains, func(m masqueraded) bool { return m.applies(c) && m.leavesBy(out) })
}

func (m *masqueraded) leavesBy(out string) bool {
	return len(m.interfaces) == 0 ||
		slices.ContainsFunc(m.interfaces, func(name string) bool { return Rule{Out: name}.matchesInterface(out) })
}

// routeOutOfScope reports whether the source is in scope of a chain and the interface of none.
func (f *familyJudge) routeOutOfScope(c *Connection, out string) (outOfScope bool) {
	for i := range f.now {
		if m := &f.now[i]; m.scope.Contains(c.Src) {
			if m.leavesBy(out) {
				return false
			}
			outOfScope = true
		}
	}
	return outOfScope
}
