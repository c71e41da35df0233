// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// masqTable is the table of nftables that has the masquerade chains.
const masqTable = "ip-masq"

// masqChainOf returns the name of the masquerade chain that the chain is, and whether it may be one: of table
// nat of iptables each chain may be.
func masqChainOf(p thirdparty.Place) (string, bool) {
	switch {
	case p.Backend == policy.NFTables && p.Table == masqTable:
		return strings.CutPrefix(p.Chain, "masq-")
	case p.Backend == policy.IPTables && p.Table == "nat":
		return p.Chain, true
	}
	return "", false
}

// Owned returns a function that tells whether a chain is owned: by state, record or comment.
func Owned(s *enforce.State, rec store.Record, dataDir string) func(thirdparty.Place) bool {
	inIPTables := map[string]bool{}
	for _, o := range rec.Chains {
		inIPTables[o.Chain] = inIPTables[o.Chain] || o.Backend == policy.IPTables
	}
	for _, c := range s.Chains {
		inIPTables[c.Policy.Chain] = inIPTables[c.Policy.Chain] || c.Choice.Backend == policy.IPTables
	}
	own := policy.OwnedBy(dataDir).DataDir
	return func(p thirdparty.Place) bool {
		name, _ := masqChainOf(p)
		hasOwnComment := p.Owner.DataDir != "" && p.Owner.DataDir == own
		switch {
		case p.Backend == policy.IPTables && inIPTables[name]:
			return true
		case p.Backend == policy.NFTables && (p.Table == masqTable || p.Table == netfilter.GuardTable):
			return true
		}
		return hasOwnComment || p.Owner.Schema > policy.RulesSchema
	}
}

// violation is a third-party rule that translates, or may translate, what a policy exempts.
type violation struct {
	rule   *thirdparty.Rule
	chain  string // of the policy
	exempt []string
	doubt  string // why the rule may not apply to pods; "" if it does
}

// CountThirdParty returns how many third-party rules translate for certain what a policy exempts: those of
// the problem foreign-masquerade.
func CountThirdParty(h Host) (int, error) {
	e := &examination{Host: h}
	e.readLists()
	e.readPodNetworks()
	err := e.findViolations()
	certain := map[*thirdparty.Rule]bool{}
	for _, v := range e.violations {
		if v.doubt == "" {
			certain[v.rule] = true
		}
	}
	return len(certain), err
}

// findViolations asks about the packets that exist: from each network's pods to each exempt prefix, through
// the interfaces that the routes of the prefix use.
func (e *examination) findViolations() error {
	steps := maxSteps
	var failed error
	for _, f := range policy.Families() {
		failed = errors.Join(failed, e.findViolationsOf(f, &steps))
	}
	return failed
}

// findViolationsOf asks about those of a family. Steps is how many are left for all families.
func (e *examination) findViolationsOf(f policy.Family, steps *int) error {
	var policies []policy.Policy
	for _, p := range e.Rules.Policies() {
		if slices.Contains(p.Families(), f) {
			policies = append(policies, p)
		}
	}
	if len(policies) == 0 {
		return nil
	}
	rules, err := thirdparty.ReadPostrouting(f, Owned(e.Rules, e.State.Record, e.DataDir))
	if err != nil {
		err = fmt.Errorf("read third-party NAT rules of %s: %w", f, err)
	}
	if !mayTranslate(rules, f) {
		return err
	}
	routes := e.readRoutes(f)
	for _, p := range policies {
		s := survey{
			rules: rules, routes: routes, family: f, policy: p,
			pods: podsOf(f, e.pods), interfaces: routes.interfacesOf(p),
			guard:   e.Rules.Guard.Of(policy.ChainFamily{Chain: p.Chain, Family: f}),
			indexOf: map[*thirdparty.Rule]int{}, parts: map[part]*thirdparty.Ruleset{}, steps: steps,
		}
		e.violations = append(e.violations, s.findAll()...)
	}
	return err
}

// mayTranslate reports whether the rules translate anything. Mostly they do not, and nothing more is asked.
func mayTranslate(rules *thirdparty.Ruleset, f policy.Family) bool {
	all := thirdparty.Packet{Src: f.All(), Dst: f.All()}
	_, answer := againstExempt(all, rules.Judge(all, notBound))
	return answer != thirdparty.No
}

func notBound(thirdparty.Place) thirdparty.Answer { return thirdparty.No }

func bound(thirdparty.Place) thirdparty.Answer { return thirdparty.Yes }

// againstExempt returns the rules that translate exempt packets.
func againstExempt(p thirdparty.Packet, v thirdparty.Verdict) ([]*thirdparty.Rule, thirdparty.Answer) {
	return v.Against(func(o thirdparty.Outcome) thirdparty.Answer { return o.TranslatesExempt(p) })
}

// survey asks about what one policy exempts in a family.
type survey struct {
	rules      *thirdparty.Ruleset
	routes     *routingTable
	family     policy.Family
	policy     policy.Policy
	pods       policy.Ranges // that are known
	interfaces []string      // in scope; "" is any
	guard      *policy.Guard // nil if it is not in force

	found   []violation
	indexOf map[*thirdparty.Rule]int // in found
	parts   map[part]*thirdparty.Ruleset
	steps   *int // that are left for all surveys
}

// maxSteps is how many rules and elements of sets are looked at. It takes about a second.
const maxSteps = 1_000_000

// part is packets, of which there can be as many as prefixes: thousands, beside thousands of rules.
type part struct{ src, dst netip.Prefix }

// rulesFor returns the rules that packets can meet, of those for destinations that are 8 bits shorter.
func (s *survey) rulesFor(p part) *thirdparty.Ruleset {
	const step = 8
	rules := s.parts[p]
	if rules != nil {
		return rules
	}
	rules = s.rules
	if p.dst.Bits() > 0 {
		wider := netip.PrefixFrom(p.dst.Addr(), max(p.dst.Bits()-step, 0)).Masked()
		rules = s.rulesFor(part{p.src, wider})
	}
	packet := thirdparty.Packet{Src: p.src, Dst: p.dst, SrcLocal: thirdparty.Perhaps}
	s.parts[p] = rules.Restrict(packet, s.steps)
	return s.parts[p]
}

func (s *survey) findAll() []violation {
	exempt := s.policy.DestinationsExempt(s.family)
	scope := s.policy.Scope(s.family).Sources
	for _, d := range s.policy.Destinations {
		isOfFamily := policy.FamilyOf(d.Prefix.Addr()) == s.family
		// Multicast and broadcast, which no key states, are not routed. A rule for them alone would be a
		// finding on every node with a rule such as kindnet's.
		isStated := d.HasKey()
		if d.Action == policy.ActionExempt && isStated && isOfFamily {
			s.about(d.Prefix.String(), scope, partOf(exempt, d.Prefix))
		}
	}
	exemptSources := s.policy.ExemptSources
	if !s.bindsPods() {
		exemptSources = slices.Concat(exemptSources, s.policy.ExemptPods)
	}
	all := policy.RangesOf(s.family.All())
	for _, e := range exemptSources {
		if policy.FamilyOf(e.Prefix.Addr()) == s.family {
			s.about("all from "+e.Prefix.String(), policy.RangesOf(e.Prefix).Intersect(scope), all)
		}
	}
	if *s.steps <= 0 {
		s.noteAll()
	}
	return s.found
}

// noteAll adds all rules that may translate packets.
func (s *survey) noteAll() {
	all := thirdparty.Packet{Src: s.family.All(), Dst: s.family.All()}
	rules, _ := againstExempt(all, s.rules.Judge(all, notBound))
	for _, r := range rules {
		s.note(r, "destinations", "there are too many rules and prefixes to examine each")
	}
}

// bindsPods reports whether enforceExempt keeps pods' packets from third-party rules.
func (s *survey) bindsPods() bool { return s.guard != nil && s.guard.Bound != nil }

// about asks about packets from some sources to some destinations: those of pods through the interfaces of
// routes, then through other interfaces, then those of other sources.
func (s *survey) about(exempt string, sources, destinations policy.Ranges) {
	used, others := s.hops(sources, destinations)
	search := &thirdparty.Search{Ask: s.againstRemoteExempt, Steps: s.steps}
	search.By = thirdparty.Source | thirdparty.Destination
	pods := sources.Intersect(s.pods)
	doubt := "it depends on what is not known of packets"
	if len(s.pods) == 0 {
		search.By = thirdparty.Destination
		pods = sources
		doubt = "no pod network is known"
	}
	s.ask(search, pods, used)
	for _, r := range search.Rules {
		if search.IsCertain(r) {
			s.note(r, exempt, "")
		} else {
			s.note(r, exempt, doubt)
		}
	}
	search.By, search.AnyAnswer = thirdparty.Destination, true
	s.askMore(search, pods, others, exempt, "only packets through other interfaces can meet it")
	if !s.bindsPods() { // else it is about pods alone
		s.askMore(search, sources, others, exempt, "its sources are not in a known pod network")
	}
}

// hops returns the hops to destinations that routes use, and those through each interface in scope.
func (s *survey) hops(sources, destinations policy.Ranges) (used, others []hop) {
	for _, to := range prefixesOf(destinations) {
		if !s.mayBeTranslated(sources, to) {
			continue
		}
		for _, h := range s.routes.hops(to) {
			if h.out == "" || isInterfaceOf(s.policy, h.out) {
				used = append(used, h)
			}
		}
		for _, out := range s.interfaces {
			others = append(others, hop{to, out})
		}
	}
	return used, others
}

// mayBeTranslated reports whether a rule may translate packets to a prefix, through any interface. Mostly
// none does.
func (s *survey) mayBeTranslated(sources policy.Ranges, to netip.Prefix) bool {
	search := &thirdparty.Search{Ask: s.againstRemoteExempt, Binds: notBound, Steps: s.steps}
	s.askFrom(search, sources, policy.RangesOf(to), thirdparty.Packet{})
	return len(search.Rules) > 0
}

// askMore asks about packets that may exist. The rules that are found by that alone are doubtful.
func (s *survey) askMore(search *thirdparty.Search, sources policy.Ranges, to []hop, exempt, doubt string) {
	known := len(search.Rules)
	s.ask(search, sources, to)
	for _, r := range search.Rules[known:] {
		s.note(r, exempt, doubt)
	}
}

// podsOf returns those of the networks that are of a family.
func podsOf(f policy.Family, networks []netip.Prefix) policy.Ranges {
	var of []netip.Prefix
	for _, p := range networks {
		if policy.FamilyOf(p.Addr()) == f {
			of = append(of, p)
		}
	}
	return policy.RangesOf(of...)
}

// isInterfaceOf reports whether packets through an interface are in the scope of a policy.
func isInterfaceOf(p policy.Policy, out string) bool {
	for _, pattern := range p.Interfaces.Value {
		if policy.InterfaceWithin(out, pattern) {
			return true
		}
	}
	return len(p.Interfaces.Value) == 0
}

// interfacesOf returns the interfaces in the scope of a policy, whether packets can leave through them or
// not; "" is any.
func (t *routingTable) interfacesOf(p policy.Policy) (names []string) {
	if len(p.Interfaces.Value) == 0 {
		return []string{""}
	}
	for _, pattern := range p.Interfaces.Value {
		if !strings.HasSuffix(pattern, "+") {
			names = append(names, pattern)
		}
	}
	for name := range t.index {
		if isInterfaceOf(p, name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// againstRemoteExempt is about packets that leave: none does to an address of the node.
func (s *survey) againstRemoteExempt(
	p thirdparty.Packet, v thirdparty.Verdict,
) ([]*thirdparty.Rule, thirdparty.Answer) {
	if p.Dst.IsSingleIP() && s.routes.local[p.Dst.Addr()] {
		return nil, thirdparty.No
	}
	return againstExempt(p, v)
}

// ask asks about packets from some sources. What enforceExempt binds is asked about by itself.
func (s *survey) ask(search *thirdparty.Search, sources policy.Ranges, to []hop) {
	for _, h := range to {
		if *s.steps <= 0 {
			return
		}
		destinations := policy.RangesOf(h.dst)
		p := thirdparty.Packet{SrcLocal: thirdparty.No, Out: h.out, OutIndex: s.routes.index[h.out]}
		search.Binds = notBound
		if !s.bindsPods() {
			s.askFrom(search, sources, destinations, p)
			continue
		}
		inScope := sources.Intersect(s.guard.Scope.Sources)
		s.askFrom(search, sources.Without(s.guard.Scope.Sources), destinations, p)
		s.askFrom(search, inScope, destinations.Without(s.guard.Bound), p)
		search.Binds = boundByGuard
		s.askFrom(search, inScope, destinations.Intersect(s.guard.Bound), p)
	}
}

// askFrom asks about a packet from each of the sources to each of the destinations.
func (s *survey) askFrom(
	search *thirdparty.Search, sources, destinations policy.Ranges, p thirdparty.Packet,
) {
	for _, destination := range prefixesOf(destinations) {
		for _, source := range prefixesOf(sources) {
			if *s.steps <= 0 {
				return
			}
			p.Src, p.Dst = source, destination
			search.About(s.rulesFor(part{p.Src, p.Dst}), p)
		}
	}
}

// boundByGuard tells that the tables of the guard decide.
func boundByGuard(p thirdparty.Place) thirdparty.Answer {
	return thirdparty.AnswerOf(p.Backend == policy.NFTables && p.Table == netfilter.GuardTable)
}

// note adds a rule that translates exempt packets. What is certain replaces what is doubtful.
func (s *survey) note(r *thirdparty.Rule, exempt, doubt string) {
	at, isKnown := s.indexOf[r]
	if !isKnown {
		s.indexOf[r] = len(s.found)
		v := violation{rule: r, chain: s.policy.Chain, exempt: []string{exempt}, doubt: doubt}
		s.found = append(s.found, v)
		return
	}
	v := &s.found[at]
	isCertain, wasCertain := doubt == "", v.doubt == ""
	if isCertain && !wasCertain {
		v.exempt, v.doubt = []string{exempt}, ""
		return
	}
	if isCertain == wasCertain {
		v.exempt = append(v.exempt, exempt)
	}
}

// partOf returns the part of ranges that is in a prefix. It looks at no others, as there can be 10,000.
func partOf(ranges policy.Ranges, p netip.Prefix) policy.Ranges {
	whole := netipx.RangeOfPrefix(p)
	lastOf := func(r netipx.IPRange, a netip.Addr) int { return r.To().Compare(a) }
	first, _ := slices.BinarySearchFunc(ranges, whole.From(), lastOf)
	end := first
	for end < len(ranges) && ranges[end].From().Compare(whole.To()) <= 0 {
		end++
	}
	return ranges[first:end].Intersect(policy.RangesOf(p))
}

// prefixesOf returns the prefixes that make up ranges.
func prefixesOf(ranges policy.Ranges) []netip.Prefix {
	var all []netip.Prefix
	for _, r := range ranges {
		all = r.AppendPrefixes(all)
	}
	return all
}

// routingTable is the routes of a family, of all routing tables.
type routingTable struct {
	routes []route
	local  map[netip.Addr]bool // addresses of the node
	index  map[string]int      // of interfaces
}

type route struct {
	dst   netip.Prefix
	table int
	outs  []string
}

// hop is an interface, and destinations that a route has behind it.
type hop struct {
	dst netip.Prefix
	out string
}

// readRoutes reads the routes. What cannot be read is noted: the answers are for any interface then.
func (e *examination) readRoutes(f policy.Family) *routingTable {
	t := &routingTable{local: map[netip.Addr]bool{}, index: map[string]int{}}
	names := map[int]string{}
	links, err := net.Interfaces()
	e.noteAs("list the interfaces", err)
	for _, link := range links {
		t.index[link.Name], names[link.Index] = link.Index, link.Name
	}
	ofAnyTable := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
	all, err := netlink.RouteListFiltered(int(netfilter.LinkOf(f)), ofAnyTable, netlink.RT_FILTER_TABLE)
	e.noteAs("list the routes", err)
	for _, r := range all {
		dst := f.All()
		if r.Dst != nil {
			dst, _ = netipx.FromStdIPNet(r.Dst)
		}
		if r.Type == unix.RTN_LOCAL && dst.IsSingleIP() {
			t.local[dst.Addr()] = true
		}
		if r.Type == unix.RTN_UNICAST {
			t.routes = append(t.routes, route{dst: dst, table: r.Table, outs: outsOf(r, names)})
		}
	}
	return t
}

// outsOf returns the names of the interfaces of a route's next hops.
func outsOf(r netlink.Route, names map[int]string) (outs []string) {
	links := []int{r.LinkIndex} // 0 if the route has several next hops
	for _, next := range r.MultiPath {
		links = append(links, next.LinkIndex)
	}
	for _, link := range links {
		name, isKnown := names[link]
		if isKnown {
			outs = append(outs, name)
		}
	}
	return outs
}

// hops returns the interfaces that routes of a prefix use, each with the widest part of the prefix that is
// behind it. Without a route it is any interface: "".
func (t *routingTable) hops(to netip.Prefix) []hop {
	widest := widestParts{}
	covering := map[int]route{} // of each table, the longest that has all of the prefix
	for _, r := range t.routes {
		if !r.dst.Overlaps(to) {
			continue
		}
		if r.dst.Bits() > to.Bits() {
			widest.add(r.dst, r.outs)
			continue
		}
		longest := covering[r.table]
		if longest.outs == nil || r.dst.Bits() > longest.dst.Bits() {
			covering[r.table] = r
		}
	}
	for _, r := range covering {
		widest.add(to, r.outs)
	}
	if len(widest) == 0 {
		return []hop{{to, ""}}
	}
	var hops []hop
	for _, out := range slices.Sorted(maps.Keys(widest)) {
		hops = append(hops, hop{widest[out], out})
	}
	return hops
}

// widestParts is the widest part of a prefix behind each interface.
type widestParts map[string]netip.Prefix

func (w widestParts) add(dst netip.Prefix, outs []string) {
	for _, out := range outs {
		known, isKnown := w[out]
		if !isKnown || dst.Bits() < known.Bits() {
			w[out] = dst
		}
	}
}
