// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
)

// ChainFamily is a masquerade chain of one family.
type ChainFamily struct {
	Chain  string `json:"chain"`
	Family Family `json:"family"`
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
	v4, v6                   familyJudge
	translated, untranslated bool
	left                     map[netip.Addr]string // see Left
	passed                   map[netip.Addr]string // see Passed
}

// familyJudge is a ConnectionJudge of one family.
type familyJudge struct {
	pods         []podRange
	now          []chainVerdict
	before       [][]chainVerdict
	untranslated bool
	scoped       bool // some policy has outputInterfaces
}

// podRange is the addresses of pods whose connections a chain resets.
type podRange struct {
	chain string
	pods  numericRanges
}

// chainVerdict is what one chain masquerades. Chains with the same interfaces have the
// same bit; the one of chains without is anyInterface.
type chainVerdict struct {
	scope, from, exempt numericRanges
	interfaces          []string
	bit                 uint64
}

const anyInterface = 1

// numericRanges is Ranges as numbers: a search takes less than half the time of Ranges.Contains, and there can be a
// million entries.
type numericRanges []struct{ from, to number }

// number is an address of one family.
type number struct{ high, low uint64 }

func numberOf(a netip.Addr) number {
	if a.Is4() {
		b := a.As4()
		return number{0, uint64(binary.BigEndian.Uint32(b[:]))}
	}
	b := a.As16()
	return number{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func (n number) less(m number) bool { return n.high < m.high || n.high == m.high && n.low < m.low }

func numeric(r Ranges) numericRanges {
	s := make(numericRanges, len(r))
	for i, x := range r {
		s[i].from, s[i].to = numberOf(x.From()), numberOf(x.To())
	}
	return s
}

func (s numericRanges) contains(a number) bool {
	first, end := 0, len(s) // of the ranges that may have the address
	for first < end {
		switch middle := int(uint(first+end) >> 1); {
		case a.less(s[middle].from):
			end = middle
		case s[middle].to.less(a):
			first = middle + 1
		default:
			return true
		}
	}
	return false
}

// NewConnectionJudge returns the judge for the policies in force. An entry whose verdict
// differs from that of some policies before is stale if its translation contradicts the
// present one. With untranslated, every untranslated entry is stale that is masqueraded now.
func NewConnectionJudge(now []Policy, before [][]Policy, untranslated bool) *ConnectionJudge {
	var lists interfaceLists
	judge := func(f Family) familyJudge {
		j := familyJudge{untranslated: untranslated}
		addPods := func(p *Policy, chain string) {
			if pods := p.PodRanges(f); len(pods) > 0 {
				j.pods = append(j.pods, podRange{chain, numeric(pods)})
			}
		}
		resets, exists, first := map[string]bool{}, map[string]bool{}, ""
		for i := range now {
			exists[now[i].Chain] = true
			if now[i].ResetsConnections() {
				resets[now[i].Chain], first = true, cmp.Or(first, now[i].Chain)
				addPods(&now[i], now[i].Chain)
			}
		}
		j.now = j.compile(f, now, &lists)
		for _, policies := range before {
			j.before = append(j.before, j.compile(f, policies, &lists))
			for i := range policies {
				switch p := &policies[i]; { // sources that are exempt or out of scope now
				case resets[p.Chain]:
					addPods(p, p.Chain)
				case !exists[p.Chain] && first != "": // of a chain with another name now
					addPods(p, first)
				}
			}
		}
		return j
	}
	out := &ConnectionJudge{v4: judge(IPv4), v6: judge(IPv6), untranslated: untranslated}
	out.left, out.passed = map[netip.Addr]string{}, map[netip.Addr]string{}
	for _, policies := range before {
		out.translated = out.translated || masqueradeMore(policies, now)
		out.untranslated = out.untranslated || masqueradeMore(now, policies)
	}
	return out
}

// compile returns what the policies decide, in the form that is fast to ask.
func (f *familyJudge) compile(family Family, policies []Policy, lists *interfaceLists) (out []chainVerdict) {
	for i := range policies {
		p := &policies[i]
		scope := p.Scope(family)
		m := chainVerdict{
			scope: numeric(scope.Sources), from: numeric(p.masqueradeScope(family).Sources),
			exempt: numeric(p.DestinationsExempt(family)), interfaces: scope.Interfaces, bit: anyInterface,
		}
		if len(m.interfaces) > 0 {
			m.bit <<= min(1+lists.index(m.interfaces), 63)
			f.scoped = true
		}
		out = append(out, m)
	}
	return out
}

// interfaceLists are the different lists of output interfaces; the index of each is that of its bit.
type interfaceLists [][]string

func (l *interfaceLists) index(names []string) int {
	i := slices.IndexFunc(*l, func(list []string) bool { return slices.Equal(list, names) })
	if i < 0 {
		i, *l = len(*l), append(*l, names)
	}
	return i
}

// IsEmpty reports whether no entry can be stale: no pod range is known, nor an address that left or passed.
func (j *ConnectionJudge) IsEmpty() bool {
	return len(j.v4.pods)+len(j.v6.pods)+len(j.left)+len(j.passed) == 0
}

// Left also makes the connections stale that a chain translated to addresses that are no longer on the node. The
// kernel deletes such entries of MASQUERADE by itself (nf_nat_masquerade.c), and not those of SNAT.
func (j *ConnectionJudge) Left(chain string, a netip.Addr) {
	j.translated = true
	j.left[a] = chain
}

// Passed also makes the connections of the former pods with these addresses stale. The present pods have another
// verdict. Connections that are translated and masqueraded now are kept, because they can belong to the present pods.
func (j *ConnectionJudge) Passed(chain string, a netip.Addr) { j.passed[a] = chain }

// Sources returns the only sources that stale entries can have, nil if every pod can be one.
func (j *ConnectionJudge) Sources() []netip.Addr {
	if j.translated || j.untranslated || len(j.left) > 0 {
		return nil
	}
	return slices.SortedFunc(maps.Keys(j.passed), netip.Addr.Compare)
}

// StaleKinds reports whether translated entries can be stale, because a change made exempt what
// was masqueraded, and whether untranslated ones can.
func (j *ConnectionJudge) StaleKinds() (translated, untranslated bool) {
	return j.translated || len(j.passed) > 0, j.untranslated || len(j.passed) > 0
}

// masqueradeMore reports whether some policy may masquerade what none of others does.
func masqueradeMore(policies, others []Policy) bool {
	return slices.ContainsFunc(policies, func(p Policy) bool { return !slices.ContainsFunc(others, p.masqueradesNoMoreThan) })
}

// masqueradesNoMoreThan reports whether q masquerades all that p does.
func (p *Policy) masqueradesNoMoreThan(q Policy) bool {
	return !slices.ContainsFunc(Families(), func(f Family) bool {
		scope := p.masqueradeScope(f)
		return len(scope.Sources) > 0 &&
			(!scope.within(q.masqueradeScope(f)) || len(q.DestinationsExempt(f).Without(p.DestinationsExempt(f))) > 0)
	})
}

// Families returns the families that have entries to judge.
func (j *ConnectionJudge) Families() []Family {
	named := slices.AppendSeq(slices.Collect(maps.Keys(j.left)), maps.Keys(j.passed))
	return slices.DeleteFunc(Families(), func(f Family) bool {
		inFamily := func(a netip.Addr) bool { return FamilyOf(a) == f }
		return len(j.of(f).pods) == 0 && !slices.ContainsFunc(named, inFamily)
	})
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
	if chain := j.left[c.ReplyDst]; chain != "" && c.Src != c.ReplyDst {
		return chain, true
	}
	f, src := j.of(FamilyOf(c.Src)), numberOf(c.Src)
	if chain := j.passed[c.Src]; chain != "" {
		if routes.IsLocal(c.Src) { // a pod claims an address of the node
			return chain, false
		}
		out := ""
		if f.scoped && c.ReplyDst != c.Src {
			out = routes.OutputInterface(c.Src, c.ReplySrc)
		}
		return chain, c.ReplyDst == c.Src || !verdict(f.now, src, numberOf(c.ReplySrc), out)
	}
	i := slices.IndexFunc(f.pods, func(r podRange) bool { return r.pods.contains(src) })
	if i < 0 {
		return "", false
	}
	endpoint, translated := numberOf(c.ReplySrc), c.ReplyDst != c.Src
	if translated && c.ReplySrc != c.Dst || !f.mayBeStale(src, endpoint, translated) ||
		routes.IsLocal(c.Src) || routes.IsLocal(c.ReplySrc) {
		return "", false
	}
	out := ""
	if f.scoped {
		if out = routes.OutputInterface(c.Src, c.ReplySrc); out == "" || f.routeOutOfScope(src, out) {
			return "", false
		}
	}
	now := verdict(f.now, src, endpoint, out)
	stale = now != translated && (f.untranslated && now ||
		slices.ContainsFunc(f.before, func(before []chainVerdict) bool { return verdict(before, src, endpoint, out) != now }))
	return f.pods[i].chain, stale
}

// mayBeStale reports whether the entry is stale if its output interface is the right one.
func (f *familyJudge) mayBeStale(src, endpoint number, translated bool) bool {
	now := interfaceBits(f.now, src, endpoint)
	switch {
	case translated && now == anyInterface, !translated && now == 0:
		return false
	case !translated && f.untranslated:
		return true
	}
	return slices.ContainsFunc(f.before, func(before []chainVerdict) bool { return interfaceBits(before, src, endpoint) != now })
}

// interfaceBits returns the bits of the chains that masquerade the connection if it leaves
// by one of their interfaces, or only anyInterface if one of them has no list.
func interfaceBits(chains []chainVerdict, src, endpoint number) (bits uint64) {
	for i := range chains {
		if m := &chains[i]; m.applies(src, endpoint) {
			if bits |= m.bit; m.bit == anyInterface {
				return anyInterface
			}
		}
	}
	return bits
}

func (m *chainVerdict) applies(src, endpoint number) bool {
	return m.from.contains(src) && !m.exempt.contains(endpoint)
}

// verdict reports whether a chain masquerades the connection.
func verdict(chains []chainVerdict, src, endpoint number, out string) bool {
	return slices.ContainsFunc(chains, func(m chainVerdict) bool { return m.applies(src, endpoint) && m.leavesBy(out) })
}

func (m *chainVerdict) leavesBy(out string) bool {
	return len(m.interfaces) == 0 || slices.ContainsFunc(m.interfaces, func(pattern string) bool { return InterfaceWithin(out, pattern) })
}

// routeOutOfScope reports whether the source is in scope of a chain and the interface of none.
func (f *familyJudge) routeOutOfScope(src number, out string) (outOfScope bool) {
	for i := range f.now {
		if m := &f.now[i]; m.scope.contains(src) {
			if m.leavesBy(out) {
				return false
			}
			outOfScope = true
		}
	}
	return outOfScope
}
