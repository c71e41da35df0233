// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/thirdparty"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// Question is about a packet, whose source and output interface may be unknown (zero).
type Question struct {
	policy.Packet
	// Hops are the interfaces of the next hops in the routing table, where no interface is asked for.
	Hops     []string
	RouteErr error       // why there are none
	Mark     policy.Mark // of the packet
	// ThirdParty reads third-party rules (thirdparty.ReadPostrouting). If it is nil, there are none.
	ThirdParty func(f policy.Family, owned func(thirdparty.Place) bool) (Rules, error)
	// BeforeConntrack reads those that packets come in by (thirdparty.ReadBeforeConntrack). It may be nil,
	// too.
	BeforeConntrack func(f policy.Family) (Rules, error)
	OutIndex        func(out string) int // the number of an interface, 0 if it does not exist
	Pod             *Pod                 // that holds the source, as far as it is known
	// NoHook is the main plugin behind which packets of the source usually pass no hook (NoHookPlugin).
	NoHook     string
	Incomplete error // why some of the documents that rules are made from cannot be read
}

// Rules is third-party rules, which judge packets (thirdparty.Ruleset).
type Rules interface {
	Judge(p thirdparty.Packet, binds func(thirdparty.Place) thirdparty.Answer) thirdparty.Verdict
}

// Pod is the names of a pod, "" for one that the runtime did not give.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// HolderOf returns the pod that holds an address, that of the latest ADD, or nil if none has names.
func HolderOf(a netip.Addr, pods []store.Pod) *Pod {
	holder, _ := latestHolder(a, pods)
	if holder.Namespace == "" && holder.Name == "" {
		return nil
	}
	return &Pod{holder.Namespace, holder.Name}
}

// latestHolder returns the record with an address, that of the latest ADD, and whether there is one.
func latestHolder(a netip.Addr, pods []store.Pod) (holder store.Pod, isHeld bool) {
	for _, p := range pods {
		if !slices.Contains(p.Addresses, a) {
			continue
		}
		// At may be negative: that of a cached pod is by the wall clock, which may be set.
		if !isHeld || p.At >= holder.At {
			holder, isHeld = p, true
		}
	}
	return holder, isHeld
}

func (p Pod) String() string {
	return cmp.Or(p.Namespace, "unknown") + "/" + cmp.Or(p.Name, "unknown")
}

// Explanation is what happens to the packets of a question. Its JSON is an interface: every key is always
// there.
type Explanation struct {
	Destination netip.Addr `json:"destination"`
	Source      netip.Addr `json:"source"`
	Interface   string     `json:"interface"` // asked for, or of the route; "" if there is none
	Pod         *Pod       `json:"pod"`       // that holds the source; null if none is known

	Chain   string        `json:"chain"` // "" if nothing is managed
	Family  policy.Family `json:"family"`
	Verdict policy.Action `json:"verdict"`
	Prefix  *netip.Prefix `json:"prefix"` // the destination or source that decides; null if none does
	// Origin is that of the prefix, or of the key that puts the traffic out of scope: the first one of equal
	// ones.
	Origin *Origin `json:"origin"`
	Reason string  `json:"reason"`

	// Address is the one in force of outputAddresses that a pod's traffic leaves with, AddressInterface the
	// interface that it is for, null if it is for every one without an address of its own.
	Address          netip.Addr    `json:"address"`
	AddressInterface string        `json:"addressInterface"`
	AddressItem      *netip.Prefix `json:"addressItem"`
	AddressOrigin    *Origin       `json:"addressOrigin"`

	// Kernel reports whether packets get this verdict, given the rules of all chains and of third parties. It
	// is null if that depends on what is not known, and false if the rules of a chain could not be read.
	// OverriddenBy is the third-party rules that decide otherwise, or may: a line each.
	Kernel       thirdparty.Answer `json:"kernel"`
	OverriddenBy string            `json:"overridden_by"`
	Backend      string            `json:"backend"` // "iptables (nft)"
	Rule         string            `json:"rule"`    // in the kernel, that decides; "" if none matches
	// Guard is what the guard does with such a packet if no rule translates it.
	Guard   policy.GuardMode `json:"guard"`
	Problem string           `json:"problem"` // why the kernel's verdict is unknown
	Drift   []string         `json:"drift"`   // differences of the chain

	// Chains are the other chains, each by itself.
	Chains []Explanation `json:"chains"`
	// NextHops are the interfaces of the route's other next hops, which are not explained.
	NextHops []string `json:"nextHops"`
	// Reconciler is the reconciler whose settings apply. Only the outermost explanation has it.
	Reconciler any `json:"reconciler,omitempty"`

	routed       bool        // Interface is that of the route
	routeErr     error       // why there is no route
	known        bool        // it is known which rule of the chain decides
	masquerades  bool        // that rule masquerades the packets
	nftables     bool        // the chain is kept in nftables
	mark         policy.Mark // as in the question
	judged       bool        // third-party rules were asked
	isOverridden bool        // OverriddenBy decides for certain
	noHook       string      // as in the question
}

// MarshalJSON writes null for strings that do not apply.
func (e Explanation) MarshalJSON() ([]byte, error) {
	type plain Explanation
	text, err := json.Marshal(plain(e))
	// Within a string, a quote follows a backslash. So :"" is an empty string, also in what is nested.
	return bytes.ReplaceAll(text, []byte(`:""`), []byte(`:null`)), err
}

// Explain answers a question from one reading of the sources and the kernel.
//
// An unknown source or interface is replaced by one in scope (policy.Decide). Of several chains the first
// that masquerades decides, as the first NAT rule that matches binds a connection, else one that exempts.
// Without an interface in the question, that of the route's first next hop decides.
func Explain(q Question, state *enforce.State, sources []policy.Source, finder OriginFinder) Explanation {
	q.Dst, q.Src = q.Dst.Unmap().WithZone(""), q.Src.Unmap().WithZone("")
	blank := Explanation{
		Destination: q.Dst, Source: q.Src, Pod: q.Pod,
		Family: policy.FamilyOf(q.Dst), Verdict: policy.ActionOutOfScope,
		Drift: []string{}, Chains: []Explanation{}, NextHops: []string{},
	}
	if q.Out == "" && !q.DstLocal && len(q.Hops) > 0 {
		q.Out, blank.NextHops, blank.routed = q.Hops[0], q.Hops[1:], true
	}
	blank.Interface = q.Out
	if q.Out == "" && !q.DstLocal {
		blank.routeErr = q.RouteErr
	}
	var all []Explanation
	for _, p := range state.Policies() {
		e := blank
		e.decide(p, q, sources, finder)
		e.observe(p, q.Packet, state)
		e.guarded(q, state)
		all = append(all, e)
	}
	if len(all) == 0 {
		blank.Kernel, blank.Reason = thirdparty.Yes, "nothing is managed: there is no source of policy"
		if q.Incomplete != nil {
			blank.Reason = "no document that can be read asks for a chain"
		}
		all = append(all, blank)
	}
	top := decidingOf(all)
	if !q.DstLocal && q.ThirdParty != nil { // packets to the node itself do not leave it
		top.override(q, state)
	}
	if q.Incomplete != nil {
		top.addProblem("%v", q.Incomplete)
	}
	if q.NoHook != "" {
		top.passesNoHook(q.NoHook)
	}
	return top
}

// decidingOf returns the explanation of the chain that decides, with those of the others.
func decidingOf(all []Explanation) Explanation {
	slices.SortStableFunc(all, func(a, b Explanation) int { return a.order() - b.order() })
	top := all[0]
	top.Chains = all[1:]
	slices.SortStableFunc(top.Chains, func(a, b Explanation) int { return strings.Compare(a.Chain, b.Chain) })
	for _, other := range top.Chains {
		top.Kernel = min(top.Kernel, other.Kernel)
		if other.Kernel == thirdparty.No {
			const form = "the rules of chain %s do not do what its policy says, or cannot be verified"
			top.addProblem(form, other.Chain)
		}
	}
	return top
}

// decide sets what the policy says about the packet, and why.
func (e *Explanation) decide(p policy.Policy, q Question, sources []policy.Source, finder OriginFinder) {
	d := p.Decide(q.Packet)
	e.Chain, e.Verdict, e.Reason = p.Chain, d.Action, d.Reason
	if d.PrefixAction != nil {
		e.Prefix = &d.PrefixAction.Prefix
	}
	if len(d.Origins) > 0 {
		e.Origin = new(finder.origin(d.Origins[0], sources))
	}
	e.leavesWith(p, q, sources, finder)
}

// passesNoHook takes back what rules do with packets that usually pass no hook of the node.
func (e *Explanation) passesNoHook(plugin string) {
	e.noHook, e.Guard, e.Kernel = plugin, "", min(e.Kernel, thirdparty.Perhaps)
	for i := range e.Chains {
		e.Chains[i].passesNoHook(plugin)
	}
}

// order is the position among the chains that could decide: those in nftables have a later priority.
func (e *Explanation) order() int {
	switch {
	case e.Verdict == policy.ActionMasquerade && !e.nftables:
		return 0
	case e.Verdict == policy.ActionMasquerade:
		return 1
	case e.Verdict == policy.ActionExempt:
		return 2
	}
	return 3
}

func (e *Explanation) addProblem(format string, args ...any) {
	if e.Problem != "" {
		e.Problem += "\n"
	}
	e.Problem += fmt.Sprintf(format, args...)
}

func (e *Explanation) leavesWith(p policy.Policy, q Question, sources []policy.Source, finder OriginFinder) {
	o := policy.OutputAddressFor(p.Outputs, e.Family, q.Out)
	if e.Verdict != policy.ActionMasquerade || q.SrcLocal || o == nil {
		return
	}
	from := p.OutputAddresses.Origins[0]
	from.Index = slices.Index(p.OutputAddresses.Value, o.Item)
	e.Address, e.AddressInterface, e.AddressItem = o.Address, o.Interface, &o.Item
	e.AddressOrigin = new(finder.origin(from, sources))
}

func (e *Explanation) observe(p policy.Policy, asked policy.Packet, state *enforce.State) {
	chain := state.Find(p.Chain)
	chosen := chain.Choice != netfilter.Choice{}
	if chosen {
		e.Backend, e.nftables = chain.Choice.String(), chain.Choice.Backend == policy.NFTables
	}
	e.addDrift(state.ChainDiff(chain))
	if chain.Err != nil {
		e.Problem = chain.Err.Error()
		return
	}
	if !chosen {
		e.Problem = "the rules of the chain were not read"
		return
	}
	e.known = true
	r := decidingRule(chain.Observed.Find(e.Family, e.Chain), p.Representative(asked))
	if r != nil {
		e.Rule, e.masquerades = r.String(), r.Verdict == policy.Masquerade
		e.known = r.Verdict != policy.Unrecognized
	}
	e.Kernel = thirdparty.AnswerOf(e.agrees())
	if !e.known {
		e.addProblem("an unrecognized rule comes before the one that decides")
	}
	for _, u := range chain.Observed.Unrecognized {
		if u.Family == e.Family {
			e.Kernel, e.known = thirdparty.No, false
			e.addProblem("an unrecognized object in the table may decide before the owned rules do")
			break
		}
	}
}

// decidingRule returns the rule of a chain that decides about a packet, nil if there is none.
func decidingRule(c *policy.Chain, p policy.Packet) *policy.Rule {
	if c == nil {
		return nil
	}
	return c.Walk(p)
}

func (e *Explanation) addDrift(d policy.Diff) {
	for _, c := range d {
		if c.Family == e.Family && (c.Chain == e.Chain || c.Chain == "") {
			e.Drift = append(e.Drift, c.String())
		}
	}
}

// guarded sets what the guard of the chain does with the packet if it is not translated.
func (e *Explanation) guarded(q Question, state *enforce.State) {
	e.addDrift(state.Guard.Diff)
	g := state.Guard.Of(policy.ChainFamily{Chain: e.Chain, Family: e.Family})
	if g == nil {
		return
	}
	inScope := g.Scope.Contains(g.Scope.Representative(q.Packet)) && !q.Dst.IsMulticast()
	if inScope && g.Mode != policy.GuardOff && e.Verdict == policy.ActionMasquerade {
		e.Guard = g.Mode
	}
	if g.Bound == nil || e.Verdict != policy.ActionExempt {
		return
	}
	for _, u := range policy.UnboundTraffic(state.Policies()) {
		if u.Chain == e.Chain && u.Family == e.Family && u.Has(q.Packet) {
			e.addProblem("%v", u)
		}
	}
}

// boundSources returns the sources of traffic that enforceExempt binds to its own addresses; nil if there is
// none.
func (q Question) boundSources(state *enforce.State) policy.Ranges {
	f := policy.FamilyOf(q.Dst)
	for _, p := range state.Policies() {
		g := state.Guard.Of(policy.ChainFamily{Chain: p.Chain, Family: f})
		if g == nil || q.Mark&g.BypassMark != 0 {
			continue
		}
		packet := g.Scope.Representative(q.Packet)
		if g.Binds(packet) {
			return g.BoundSources(q.Dst)
		}
	}
	return nil
}

func (e *Explanation) agrees() bool {
	return e.known && e.masquerades == (e.Verdict == policy.ActionMasquerade)
}

// override asks what third-party rules do with the packets of the question.
func (e *Explanation) override(q Question, state *enforce.State) {
	rules, err := q.ThirdParty(e.Family, e.isOwned(state))
	if err != nil {
		e.Kernel = min(e.Kernel, thirdparty.Perhaps)
		e.addProblem("third-party rules may decide, and could not all be read: %v", err)
	}
	e.judged, e.mark = true, q.Mark
	bound := q.boundSources(state)
	packets := e.packets(q, state, bound)
	verdict := judgeAll(rules, packets, e.ownedDecides(bound != nil))
	overriders, overridden := verdict.Against(e.contradictedBy(q))
	untrackers := e.untrackers(q, packets)
	if len(untrackers) > 0 {
		overriders = append(overriders, untrackers...)
		overridden = max(overridden, thirdparty.Perhaps)
	}
	e.Kernel = min(e.Kernel, thirdparty.Yes-overridden)
	e.OverriddenBy = strings.Join(texts(overriders), "\n")
	e.isOverridden = overridden == thirdparty.Yes
	if e.Kernel != thirdparty.Yes || len(verdict.Outcomes) != 1 {
		return
	}
	deciding := verdict.Outcomes[0].Rule
	if deciding != nil { // to the same effect as the owned rule, and earlier
		e.Rule = deciding.String()
	}
}

// judgeAll returns what rules do with one packet or another.
func judgeAll(
	rules Rules, packets []thirdparty.Packet, binds func(thirdparty.Place) thirdparty.Answer,
) (verdict thirdparty.Verdict) {
	for _, p := range packets {
		verdict.Merge(rules.Judge(p, binds))
	}
	return verdict
}

// untrackers returns the rules that may keep packets that come in from connection tracking, without which no
// rule masquerades them.
func (e *Explanation) untrackers(q Question, packets []thirdparty.Packet) []*thirdparty.Rule {
	if e.Verdict != policy.ActionMasquerade || q.SrcLocal || q.BeforeConntrack == nil {
		return nil
	}
	rules, err := q.BeforeConntrack(e.Family)
	if err != nil {
		e.Kernel = min(e.Kernel, thirdparty.Perhaps)
		e.addProblem("rules before connection tracking may decide, and could not all be read: %v", err)
	}
	var incoming []thirdparty.Packet
	for _, p := range packets {
		p.Out, p.OutIndex = "", 0 // which is not chosen yet
		incoming = append(incoming, p)
	}
	return judgeAll(rules, incoming, notBound).Untrackers
}

// packets returns the packets of a question: from its source, else from each prefix of those that are
// assumed. There are not too many to ask about each beside thousands of rules.
func (e *Explanation) packets(
	q Question, state *enforce.State, bound policy.Ranges,
) (packets []thirdparty.Packet) {
	const most = 64
	chain := state.Find(e.Chain)
	outs := []string{q.Out}
	if q.Out == "" && chain != nil {
		outs = exactInterfaces(chain.Policy.Interfaces.Value)
	}
	if len(outs) > most {
		outs = []string{""}
	}
	ranges, areLocal := e.sources(q, chain, bound)
	sources := prefixesOf(ranges)
	if len(sources) == 0 || len(sources)*len(outs) > most {
		sources = []netip.Prefix{e.Family.All()}
	}
	for _, source := range sources {
		for _, out := range outs {
			p := thirdparty.Packet{
				Src: source, Dst: thirdparty.HostPrefix(q.Dst), SrcLocal: areLocal,
				Out: out, Mark: uint32(q.Mark),
			}
			if q.OutIndex != nil {
				p.OutIndex = q.OutIndex(out)
			}
			packets = append(packets, p)
		}
	}
	return packets
}

// sources returns the sources of the packets, nil if they can be any, and whether the node itself has them.
func (e *Explanation) sources(
	q Question, chain *enforce.Chain, bound policy.Ranges,
) (sources policy.Ranges, areLocal thirdparty.Answer) {
	switch {
	case q.Src.IsValid():
		return policy.RangesOf(thirdparty.HostPrefix(q.Src)), thirdparty.AnswerOf(q.SrcLocal)
	case bound != nil: // the question is about pods
		return bound, thirdparty.No
	case chain != nil:
		return chain.Policy.Candidates(e.Family), thirdparty.Perhaps
	}
	return nil, thirdparty.Perhaps
}

// exactInterfaces returns the names of interfaces, or "", any, if there is none or a pattern.
func exactInterfaces(names []string) []string {
	anyInterface := []string{""}
	for _, name := range names {
		if strings.HasSuffix(name, "+") {
			return anyInterface
		}
	}
	if len(names) == 0 {
		return anyInterface
	}
	return names
}

// contradictedBy returns a function that tells whether an outcome is another than the verdict.
func (e *Explanation) contradictedBy(q Question) func(thirdparty.Outcome) thirdparty.Answer {
	if e.Verdict == policy.ActionMasquerade {
		return e.preventsMasquerade
	}
	p := thirdparty.Packet{Src: thirdparty.HostPrefix(q.Src), SrcLocal: thirdparty.AnswerOf(q.SrcLocal)}
	return func(o thirdparty.Outcome) thirdparty.Answer { return o.TranslatesExempt(p) }
}

// preventsMasquerade judges an outcome of packets that are to leave with an address of the node: the chosen
// one, if there is one.
func (e *Explanation) preventsMasquerade(o thirdparty.Outcome) thirdparty.Answer {
	switch {
	case o.Fate == thirdparty.Untouched:
		return thirdparty.Yes // by what keeps it from the owned chain
	case o.Fate == thirdparty.Owned:
		return thirdparty.No
	case o.Fate == thirdparty.Masqueraded && e.Address.IsValid():
		return thirdparty.Perhaps // the kernel may choose the same one
	case o.Fate == thirdparty.Masqueraded:
		return thirdparty.No
	case o.Fate != thirdparty.Translated:
		return thirdparty.Yes
	case e.Address.IsValid() && o.To == thirdparty.HostPrefix(e.Address):
		return thirdparty.No
	case !o.To.IsValid() || o.To.Contains(e.Address):
		return thirdparty.Perhaps
	}
	return thirdparty.Yes
}

// isOwned returns a function that tells whether a chain is one of those that are explained, or of the guard.
func (e *Explanation) isOwned(state *enforce.State) func(thirdparty.Place) bool {
	return func(p thirdparty.Place) bool {
		if p.Backend == policy.NFTables && p.Table == netfilter.GuardTable {
			return true
		}
		name, masq := masqChainOf(p)
		c := state.Find(name)
		isChoice := masq && c != nil && p.Backend == c.Choice.Backend && p.Variant == c.Choice.Variant
		return isChoice && c.Desired.Find(p.Family, name) != nil
	}
}

// ownedDecides returns a function that tells whether an owned chain decides about the packets: it masquerades
// them, or enforceExempt binds them.
func (e *Explanation) ownedDecides(isBound bool) func(thirdparty.Place) thirdparty.Answer {
	masquerades := map[string]bool{e.Chain: e.masquerades}
	for _, other := range e.Chains {
		masquerades[other.Chain] = other.masquerades
	}
	return func(p thirdparty.Place) thirdparty.Answer {
		if p.Table == netfilter.GuardTable {
			return thirdparty.AnswerOf(isBound)
		}
		name, _ := masqChainOf(p)
		return thirdparty.AnswerOf(masquerades[name])
	}
}

// Origin is the key that sets a value, and the file that has it.
type Origin struct {
	Source string      `json:"source"` // for people: network "podnet", the agent files, built in
	Kind   policy.Kind `json:"kind"`
	Name   string      `json:"name"` // of a network
	Key    string      `json:"key"`
	File   string      `json:"file"`  // "" if no file states the policy in force
	Index  *int        `json:"index"` // of the item in its list
	Since  *time.Time  `json:"since"` // when the source's document was written
}

// OriginFinder finds the file that has a value, and the time when its document was written.
type OriginFinder struct {
	ConfDir config.ConfDir
	Since   func(policy.SourceID) (time.Time, error) // the zero Time if unknown; it may be nil
}

func (p OriginFinder) origin(o policy.Origin, sources []policy.Source) Origin {
	out := Origin{
		Source: o.Source.String(), Kind: o.Source.Kind, Name: o.Source.Name, Key: o.Key, File: o.File,
	}
	list := p.ConfDir.WithEntry(o.Source.Name)
	if o.Source.Kind == policy.Network && list != nil {
		for _, s := range sources {
			if s.ID == o.Source && s.Policy.Equal(list.Entries[0].Entry.Policy) {
				out.File = list.File
			}
		}
	}
	if o.Index >= 0 {
		out.Index = &o.Index
	}
	if p.Since == nil || o.Source.Kind == policy.BuiltIn {
		return out
	}
	since, err := p.Since(o.Source)
	if err == nil && !since.IsZero() {
		out.Since = &since
	}
	return out
}
