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
	v4, v6 familyJudge
	left   map[netip.Addr]string // chains by address, see AddLeft
	passed map[netip.Addr]string // the same, see AddPassed

	// Whether a change of the policies, or an address that left, can make such entries stale.
	translatedMayBeStale, untranslatedMayBeStale bool
}

// familyJudge is a ConnectionJudge of one family.
type familyJudge struct {
	pods   []podRange
	now    []chainVerdict
	before [][]chainVerdict
	scoped bool // some policy has outputInterfaces

	// findUntranslated makes every untranslated entry stale that is masqueraded now, whatever was before.
	findUntranslated bool
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

// numericRanges is Ranges as numbers: a search takes less than half the time of Ranges.Contains, and there
// can be a million entries.
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

// contains reports whether an address is in the ranges, by bisection.
func (s numericRanges) contains(a number) bool {
	first, end := 0, len(s) // of the ranges that may have the address
	for first < end {
		middle := int(uint(first+end) >> 1)
		if a.less(s[middle].from) {
			end = middle
			continue
		}
		if !s[middle].to.less(a) {
			return true
		}
		first = middle + 1
	}
	return false
}

// NewConnectionJudge returns the judge for the policies in force. An entry whose verdict
// differs from that of some policies before is stale if its translation contradicts the
// present one. With findUntranslated, every untranslated entry is stale that is masqueraded now.
func NewConnectionJudge(now []Policy, before [][]Policy, findUntranslated bool) *ConnectionJudge {
	var lists interfaceLists
	judge := &ConnectionJudge{
		v4:     newFamilyJudge(IPv4, now, before, &lists),
		v6:     newFamilyJudge(IPv6, now, before, &lists),
		left:   map[netip.Addr]string{},
		passed: map[netip.Addr]string{},

		untranslatedMayBeStale: findUntranslated,
	}
	judge.v4.findUntranslated, judge.v6.findUntranslated = findUntranslated, findUntranslated
	for _, policies := range before {
		if masqueradeMore(policies, now) {
			judge.translatedMayBeStale = true
		}
		if masqueradeMore(now, policies) {
			judge.untranslatedMayBeStale = true
		}
	}
	return judge
}

func newFamilyJudge(f Family, now []Policy, before [][]Policy, lists *interfaceLists) familyJudge {
	judge := familyJudge{now: compile(f, now, lists)}
	judge.addPresentPods(f, now)
	for _, policies := range before {
		judge.before = append(judge.before, compile(f, policies, lists))
		judge.addFormerPods(f, policies, now)
	}
	for _, verdicts := range append(judge.before, judge.now) {
		for i := range verdicts {
			judge.scoped = judge.scoped || len(verdicts[i].interfaces) > 0
		}
	}
	return judge
}

// addPresentPods adds the pod ranges of the chains that reset connections.
func (f *familyJudge) addPresentPods(family Family, now []Policy) {
	for i := range now {
		if now[i].ResetsConnections() {
			f.addPods(now[i].PodRanges(family), now[i].Chain)
		}
	}
}

// addFormerPods adds the pod ranges that policies had before: those of a chain that resets connections, whose
// sources may be exempt or out of scope now, and those of a chain that does not exist now and may have got
// another name.
func (f *familyJudge) addFormerPods(family Family, before, now []Policy) {
	resets, exists, first := map[string]bool{}, map[string]bool{}, ""
	for i := range now {
		exists[now[i].Chain] = true
		if now[i].ResetsConnections() {
			resets[now[i].Chain] = true
			first = cmp.Or(first, now[i].Chain)
		}
	}
	for i := range before {
		p := &before[i]
		if resets[p.Chain] {
			f.addPods(p.PodRanges(family), p.Chain)
		} else if !exists[p.Chain] && first != "" {
			f.addPods(p.PodRanges(family), first)
		}
	}
}

func (f *familyJudge) addPods(pods Ranges, chain string) {
	if len(pods) > 0 {
		f.pods = append(f.pods, podRange{chain, numeric(pods)})
	}
}

// compile returns what the policies decide, in the form that is fast to ask.
func compile(family Family, policies []Policy, lists *interfaceLists) []chainVerdict {
	var verdicts []chainVerdict
	for i := range policies {
		p := &policies[i]
		scope := p.Scope(family)
		verdicts = append(verdicts, chainVerdict{
			scope:      numeric(scope.Sources),
			from:       numeric(p.masqueradeScope(family).Sources),
			exempt:     numeric(p.DestinationsExempt(family)),
			interfaces: scope.Interfaces,
			bit:        lists.bit(scope.Interfaces),
		})
	}
	return verdicts
}

// interfaceLists are the different lists of output interfaces, which have a bit each. Beyond 62 lists they
// share the last.
type interfaceLists [][]string

func (l *interfaceLists) bit(names []string) uint64 {
	if len(names) == 0 {
		return anyInterface
	}
	for i, list := range *l {
		if slices.Equal(list, names) {
			return anyInterface << min(1+i, 63)
		}
	}
	*l = append(*l, names)
	return anyInterface << min(len(*l), 63)
}

// IsEmpty reports whether no entry can be stale: no pod range is known, nor an address that left or passed.
func (j *ConnectionJudge) IsEmpty() bool {
	return len(j.v4.pods)+len(j.v6.pods)+len(j.left)+len(j.passed) == 0
}

// AddLeft makes the connections stale, too, that a chain translated to an address that left the node. The
// kernel deletes such entries of MASQUERADE by itself (nf_nat_masquerade.c), and not those of SNAT.
func (j *ConnectionJudge) AddLeft(chain string, a netip.Addr) {
	j.translatedMayBeStale = true
	j.left[a] = chain
}

// AddPassed makes the connections of an address stale, too, that contradict the present verdict: the address
// passed to a pod with another verdict. Connections that agree with it are kept, because they can belong to
// that pod.
func (j *ConnectionJudge) AddPassed(chain string, a netip.Addr) { j.passed[a] = chain }

// Sources returns the only sources that stale entries can have. It returns nil if every pod can be one, or if
// no entry can be stale.
func (j *ConnectionJudge) Sources() []netip.Addr {
	if j.translatedMayBeStale || j.untranslatedMayBeStale {
		return nil
	}
	return slices.SortedFunc(maps.Keys(j.passed), netip.Addr.Compare)
}

// StaleKinds reports whether translated entries can be stale, and whether untranslated ones can.
func (j *ConnectionJudge) StaleKinds() (translated, untranslated bool) {
	somePassed := len(j.passed) > 0
	return j.translatedMayBeStale || somePassed, j.untranslatedMayBeStale || somePassed
}

// masqueradeMore reports whether some policy may masquerade what none of others does.
func masqueradeMore(policies, others []Policy) bool {
	for i := range policies {
		if !slices.ContainsFunc(others, policies[i].masqueradesNoMoreThan) {
			return true
		}
	}
	return false
}

// masqueradesNoMoreThan reports whether q masquerades all that p does.
func (p *Policy) masqueradesNoMoreThan(q Policy) bool {
	for _, f := range Families() {
		scope := p.masqueradeScope(f)
		if len(scope.Sources) == 0 {
			continue
		}
		exemptsMore := len(q.DestinationsExempt(f).Without(p.DestinationsExempt(f))) > 0
		if exemptsMore || !scope.within(q.masqueradeScope(f)) {
			return false
		}
	}
	return true
}

// Families returns the families that have entries to judge.
func (j *ConnectionJudge) Families() []Family {
	var families []Family
	for _, f := range Families() {
		if len(j.of(f).pods) > 0 || hasFamily(j.left, f) || hasFamily(j.passed, f) {
			families = append(families, f)
		}
	}
	return families
}

func hasFamily(addresses map[netip.Addr]string, f Family) bool {
	for a := range addresses {
		if FamilyOf(a) == f {
			return true
		}
	}
	return false
}

func (j *ConnectionJudge) of(f Family) *familyJudge {
	if f == IPv4 {
		return &j.v4
	}
	return &j.v6
}

// Judge reports whether the entry is stale, and the chain for which it is. The endpoint of a connection,
// which a Service may have chosen, is the source of its replies.
//
// Addresses that left or passed decide first, see AddLeft and AddPassed. The chain of any other entry is the
// one whose pod range has its source. An entry that is both destination NATed and translated is kept then:
// kube-proxy may have translated it.
func (j *ConnectionJudge) Judge(c *Connection, routes NodeRoutes) (chain string, stale bool) {
	if chain := j.left[c.ReplyDst]; chain != "" && c.Src != c.ReplyDst {
		return chain, true
	}
	f := j.of(FamilyOf(c.Src))
	if chain := j.passed[c.Src]; chain != "" {
		return chain, f.contradictsPresentPod(c, routes)
	}
	src, endpoint := numberOf(c.Src), numberOf(c.ReplySrc)
	pods := f.podsOf(src)
	if pods == nil {
		return "", false
	}
	translated := c.ReplyDst != c.Src
	isToService := c.ReplySrc != c.Dst
	if translated && isToService || !f.mayBeStale(src, endpoint, translated) {
		return "", false
	}
	if routes.IsLocal(c.Src) || routes.IsLocal(c.ReplySrc) {
		return "", false
	}
	out := ""
	if f.scoped {
		out = routes.OutputInterface(c.Src, c.ReplySrc)
		if out == "" || f.routeOutOfScope(src, out) {
			return "", false
		}
	}
	now := verdict(f.now, src, endpoint, out)
	if now == translated {
		return pods.chain, false
	}
	return pods.chain, now && f.findUntranslated || f.verdictChanged(src, endpoint, out, now)
}

// contradictsPresentPod reports whether an entry of an address that passed to another pod is translated
// although no chain masquerades it now, or not translated although one does. So it is of the former pod,
// unless another program translates connections of the present one.
//
// Any other entry is kept: it can be of the present pod, because a walk can end after the ADD of that pod has
// returned. To delete such an entry would end a connection to a Service, whose next packet another endpoint
// gets.
func (f *familyJudge) contradictsPresentPod(c *Connection, routes NodeRoutes) bool {
	if routes.IsLocal(c.Src) { // a pod claims an address of the node
		return false
	}
	isTranslated := c.ReplyDst != c.Src
	if routes.IsLocal(c.ReplySrc) { // no chain masquerades what stays on the node
		return isTranslated
	}
	src, endpoint := numberOf(c.Src), numberOf(c.ReplySrc)
	if !f.scoped {
		return isTranslated != verdict(f.now, src, endpoint, "")
	}
	out := routes.OutputInterface(c.Src, c.ReplySrc)
	if out == "" {
		// Without a route no packet of the entry leaves, and the route to come is assumed to be one by which
		// a chain masquerades: an untranslated entry of an exempt pod must not stay for a masqueraded one.
		maybeMasqueraded := interfaceBits(f.now, src, endpoint) != 0
		return isTranslated != maybeMasqueraded
	}
	return isTranslated != verdict(f.now, src, endpoint, out)
}

// podsOf returns the first pod range that has the source, or nil.
func (f *familyJudge) podsOf(src number) *podRange {
	for i := range f.pods {
		if f.pods[i].pods.contains(src) {
			return &f.pods[i]
		}
	}
	return nil
}

// verdictChanged reports whether some policies before had another verdict on the connection.
func (f *familyJudge) verdictChanged(src, endpoint number, out string, now bool) bool {
	for _, before := range f.before {
		if verdict(before, src, endpoint, out) != now {
			return true
		}
	}
	return false
}

// mayBeStale reports whether the entry is stale for at least one output interface. So most entries need no
// question to the routing tables, which takes longest.
func (f *familyJudge) mayBeStale(src, endpoint number, translated bool) bool {
	now := interfaceBits(f.now, src, endpoint)
	agreesWithNow := translated && now == anyInterface || !translated && now == 0
	if agreesWithNow {
		return false
	}
	if f.findUntranslated && !translated {
		return true
	}
	for _, before := range f.before {
		if interfaceBits(before, src, endpoint) != now {
			return true
		}
	}
	return false
}

// interfaceBits returns the bits of the chains that masquerade the connection if it leaves
// by one of their interfaces, or only anyInterface if one of them has no list.
func interfaceBits(chains []chainVerdict, src, endpoint number) (bits uint64) {
	for i := range chains {
		m := &chains[i]
		if !m.applies(src, endpoint) {
			continue
		}
		if m.bit == anyInterface {
			return anyInterface
		}
		bits |= m.bit
	}
	return bits
}

func (m *chainVerdict) applies(src, endpoint number) bool {
	return m.from.contains(src) && !m.exempt.contains(endpoint)
}

// verdict reports whether a chain masquerades the connection.
func verdict(chains []chainVerdict, src, endpoint number, out string) bool {
	for i := range chains {
		m := &chains[i]
		if m.applies(src, endpoint) && m.leavesBy(out) {
			return true
		}
	}
	return false
}

func (m *chainVerdict) leavesBy(out string) bool {
	for _, pattern := range m.interfaces {
		if InterfaceWithin(out, pattern) {
			return true
		}
	}
	return len(m.interfaces) == 0
}

// routeOutOfScope reports whether the source is in scope of a chain and the interface of none.
func (f *familyJudge) routeOutOfScope(src number, out string) (outOfScope bool) {
	for i := range f.now {
		m := &f.now[i]
		if !m.scope.contains(src) {
			continue
		}
		if m.leavesBy(out) {
			return false
		}
		outOfScope = true
	}
	return outOfScope
}
