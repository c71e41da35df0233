// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// masqChainOfGuard returns the masquerade chain that a set or chain of a guard table belongs to, or "".
func masqChainOfGuard(name string) string {
	kind, chain, _ := strings.Cut(name, "-")
	switch strings.TrimRight(kind, "0123456789") {
	case guardChain, enforceChain, podsSet, exemptSet, boundSet, boundPods, boundTo:
		return chain
	}
	return ""
}

// guards returns the masquerade chain that a rule of a chain of a guard table belongs to, or "".
func (r rule) guards(chain string) string { return masqChainOfGuard(cmp.Or(r.target(), chain)) }

// guardDiff collects how a table ip-masq-guard differs from the desired one. The tables are compared as
// expressions and not decoded: their rules are fixed, and policy.Rule would need five more matches.
type guardDiff struct {
	family  policy.Family
	changes policy.Diff
}

func (d *guardDiff) missing(chain, text string) { d.add(policy.GuardChange, chain, false, text) }

func (d *guardDiff) unexpected(chain, text string) { d.add(policy.GuardChange, chain, true, text) }

func (d *guardDiff) add(kind policy.ChangeKind, chain string, unexpected bool, text string) {
	d.changes = append(d.changes, policy.Change{
		Kind: kind, Family: d.family, Chain: chain, Unexpected: unexpected, Text: policy.Printable(text),
	})
}

// compare returns how the table differs from the desired one. Nil means that no table is desired.
func (t *table) compare(f policy.Family, want *table) policy.Diff {
	d := guardDiff{family: f}
	if want != nil && !t.exists { // one change for each masquerade chain
		for _, name := range namesIn(want.sets, nil) {
			kind, chain, _ := strings.Cut(name, "-")
			if kind == podsSet {
				d.missing(chain, "table "+netfilter.GuardTable)
			}
		}
		return d.changes
	}
	if want == nil {
		want = newTable(netfilter.GuardTable)
		if t.exists {
			d.unexpected("", "table "+netfilter.GuardTable)
		}
	}
	for _, text := range t.unrecognized {
		d.unexpected("", text)
	}
	for _, name := range namesIn(want.sets, t.sets) {
		d.compareSet(name, want, t)
	}
	for _, name := range namesIn(want.chains, t.chains) {
		d.compareChain(name, want.chains[name], t.chains[name])
	}
	return d.changes
}

// compareSet compares a set of the desired table with that in the kernel.
func (d *guardDiff) compareSet(name string, want, have *table) {
	wanted, isWanted := want.sets[name]
	held, exists := have.sets[name]
	isOfAnotherForm := exists && held == nil
	if isOfAnotherForm { // which the table reports
		return
	}
	if !exists {
		d.missing(masqChainOfGuard(name), "set "+name)
		return
	}
	if !isWanted {
		d.unexpected(masqChainOfGuard(name), "set "+name)
		return
	}
	d.addElements(name, wanted.ElementsNotIn(held), false)
	d.addElements(name, held.ElementsNotIn(wanted), true)
}

func (d *guardDiff) addElements(set string, elements policy.Ranges, unexpected bool) {
	kind, _, _ := strings.Cut(set, "-")
	for _, r := range elements {
		text := kind + " " + policy.Ranges{r}.String() + " (guard)"
		d.add(policy.ElementChange, masqChainOfGuard(set), unexpected, text)
	}
}

// compareChain compares a chain of the desired table with that in the kernel; nil is none.
func (d *guardDiff) compareChain(name string, wanted, held *chain) {
	of, where := masqChainOfGuard(name), "chain "+name
	if wanted == nil {
		d.unexpected(of, where)
		return
	}
	if held == nil {
		d.missing(of, where)
		// The rules of a chain that is no base chain are not listed: they belong to this masquerade chain alone.
		if wanted.base != nil {
			d.compareRules(name, wanted.rules, nil)
		}
		return
	}
	if held.owner().Differs(wanted.owner()) {
		d.unexpected(of, where+" of "+held.owner().DataDir)
	}
	d.compareRules(name, wanted.rules, held.rules)
}

// compareRules compares the rules of a chain, each with one that is the same.
func (d *guardDiff) compareRules(chain string, wanted, held []rule) {
	where := "chain " + chain + ": "
	surplus, areAllThere := slices.Clone(held), true
	for _, r := range wanted {
		at := slices.IndexFunc(surplus, r.sameExprs)
		if at < 0 {
			d.missing(r.guards(chain), where+r.String())
			areAllThere = false
			continue
		}
		surplus = slices.Delete(surplus, at, at+1)
	}
	for _, r := range surplus {
		d.unexpected(r.guards(chain), where+r.String())
	}
	isInOrder := slices.EqualFunc(wanted, held, rule.sameExprs)
	if areAllThere && len(surplus) == 0 && !isInOrder {
		d.unexpected(masqChainOfGuard(chain), where+"rules out of order")
	}
}

// ObserveGuards implements netfilter.GuardTables.
func (d *Driver) ObserveGuards(context.Context) (netfilter.GuardObservation, error) {
	s, err := d.read(netfilter.GuardTable)
	if err != nil {
		return netfilter.GuardObservation{}, err
	}
	o := netfilter.GuardObservation{
		Packets: map[policy.ChainFamily]uint64{}, Bound: map[policy.ChainFamily]uint64{},
		Generation: s.generation, State: s,
	}
	for _, f := range policy.Families() {
		t := s.tables[f]
		o.Exists = o.Exists || t.exists
		for _, chain := range t.guardedChains() {
			o.Guards = append(o.Guards, t.readGuard(policy.ChainFamily{Chain: chain, Family: f}, &o))
		}
	}
	d.hadGuards = d.hadGuards || len(o.Guards) > 0
	return o, nil
}

// guardedChains returns the masquerade chains that have a guard, in order.
func (t *table) guardedChains() []string {
	var chains []string
	for name := range t.chains {
		kind, chain, belongsToOne := strings.Cut(name, "-")
		if belongsToOne && (kind == guardChain || kind == enforceChain) {
			chains = append(chains, chain)
		}
	}
	slices.Sort(chains)
	return slices.Compact(chains)
}

// readGuard returns the guard of a masquerade chain, and adds its counters to an observation.
func (t *table) readGuard(of policy.ChainFamily, o *netfilter.GuardObservation) policy.Guard {
	g := policy.Guard{
		Chain:  of.Chain,
		Family: of.Family,
		Scope:  policy.Scope{Sources: t.sets[podsSet+"-"+of.Chain]},
		Mode:   policy.GuardOff,
		Exempt: t.sets[exemptSet+"-"+of.Chain],
		Bound:  t.sets[boundSet+"-"+of.Chain],
	}
	if c := t.chains[enforceChain+"-"+of.Chain]; c != nil {
		g.Owner = c.owner()
		o.Bound[of] = c.packets()
	}
	if c := t.chains[guardChain+"-"+of.Chain]; c != nil {
		g.Owner = cmp.Or(c.owner(), g.Owner)
		o.Packets[of] = c.packets()
		g.Mode = policy.GuardCount
		for _, r := range c.rules {
			if slices.Contains(r.exprs, nfnetlink.Expr(nfnetlink.Verdict{Code: nfnetlink.Drop})) {
				g.Mode = policy.GuardDrop
			}
		}
	}
	t.readJumps(&g)
	return g
}

func (c *chain) packets() (n uint64) {
	for _, r := range c.rules {
		n += r.packets
	}
	return n
}

// readJumps sets what the jumps to the chains of a guard match: [oifname X] [meta mark & 0x6000 ==
// 0] and ip saddr @boundpods-X [ip daddr @boundto-X].
func (t *table) readJumps(g *policy.Guard) {
	for {
		sources, destinations := boundPodsSets(len(g.MoreBindings), g.Chain)
		if len(t.sets[sources]) == 0 {
			break
		}
		b := policy.Binding{Sources: t.sets[sources], Destinations: t.sets[destinations]}
		g.MoreBindings = append(g.MoreBindings, b)
	}
	for _, base := range []string{guardChain, enforceChain} {
		for _, r := range cmp.Or(t.chains[base], &chain{}).rules {
			if r.guards(base) == g.Chain {
				r.readJump(g)
			}
		}
	}
}

// readJump sets what a jump matches.
func (r rule) readJump(g *policy.Guard) {
	jump := nfnetlink.Decode(netfilter.LinkOf(g.Family), nfnetlink.Rule{Exprs: r.exprs}, nil)
	for _, c := range jump.Conditions {
		if c.Field == nfnetlink.Mark {
			g.BypassMark = policy.Mark(c.Mask)
		}
		// Another version wrote != for some of MoreBindings.
		isInterface := c.Field == nfnetlink.OutputName && !c.Not
		if isInterface && !slices.Contains(g.Scope.Interfaces, c.Name) {
			g.Scope.Interfaces = append(g.Scope.Interfaces, c.Name)
		}
	}
}

// CompareGuards implements netfilter.GuardTables.
func (*Driver) CompareGuards(desired []policy.Guard, observed netfilter.GuardObservation) (d policy.Diff) {
	want, have := guardTablesOf(desired), guardTablesRead(observed)
	for _, f := range policy.Families() {
		d = append(d, cmp.Or(have[f], newTable(netfilter.GuardTable)).compare(f, want[f])...)
	}
	return d
}

// guardTablesRead returns the tables of an observation. One without State stands for tables with its Guards.
func guardTablesRead(observed netfilter.GuardObservation) map[policy.Family]*table {
	s, _ := observed.State.(*state)
	if s == nil {
		return guardTablesOf(observed.Guards)
	}
	return s.tables
}

// ApplyGuards implements netfilter.GuardTables.
func (d *Driver) ApplyGuards(
	_ context.Context, desired []policy.Guard, from netfilter.GuardObservation,
) error {
	err := d.writeGuards(desired, from, false)
	d.hadGuards = d.hadGuards && !errors.Is(err, netfilter.ErrUnusable)
	return err
}

// CheckGuards implements netfilter.GuardTables. A batch with all guards takes as long as a repair.
func (d *Driver) CheckGuards(
	_ context.Context, desired []policy.Guard, from netfilter.GuardObservation,
) error {
	if d.hadGuards && from.State != nil && !from.Exists {
		return nil
	}
	return d.writeGuards(desired, from, true)
}

func (d *Driver) writeGuards(desired []policy.Guard, from netfilter.GuardObservation, dryRun bool) error {
	want := guardTablesOf(desired)
	change := func(w *tableWriter) { w.update(want[w.family]) }
	// New sets that a failed second batch left need no removal here: to the next reading the table differs from
	// any desired one that does not use them, and is written.
	err := d.write(from.State, netfilter.GuardTable, dryRun, change)
	const options = "CONFIG_NFT_FIB_IPV4, CONFIG_NFT_FIB_IPV6, CONFIG_NFT_NAT and CONFIG_NFT_CT for the guard"
	return lacking(err, options, "nft_fib_ipv4 nft_fib_ipv6 nft_chain_nat nft_ct nft_nat", "")
}

// RenderGuards returns the tables as input for `nft -f`. A family without a guard loses its table.
func RenderGuards(desired []policy.Guard, families []policy.Family) []byte {
	tables := guardTablesOf(desired)
	return renderTables("", netfilter.GuardTable, families, func(f policy.Family) *table { return tables[f] })
}

// The chains and sets of a guard table. The name of one for a masquerade chain X has -X at its end. Guards
// have tables of their own, for chains of every backend: a program that flushes table nat, or deletes table
// ip-masq, must not remove them.
const (
	guardChain   = "guard"   // base chain with the jumps to the chains guard-X
	enforceChain = "enforce" // base chain with the jumps to the chains enforce-X
	podsSet      = "pods"
	boundSet     = "bound"
	boundPods    = "boundpods" // with boundto: sources with the destinations to which they are bound
	boundTo      = "boundto"
	selfSet      = "self" // each source of a new connection, twice
)

// guardTablesOf returns the tables with the guards. A family without a guard has no table.
func guardTablesOf(guards []policy.Guard) map[policy.Family]*table {
	tables := map[policy.Family]*table{}
	byChain := func(a, b policy.Guard) int { return cmp.Compare(a.Chain, b.Chain) }
	for _, g := range slices.SortedFunc(slices.Values(guards), byChain) {
		t := tables[g.Family]
		if t == nil {
			t = newTable(netfilter.GuardTable)
			t.exists, tables[g.Family] = true, t
		}
		t.addSet(podsSet+"-"+g.Chain, g.Scope.Sources)
		if g.Mode == policy.GuardCount || g.Mode == policy.GuardDrop {
			t.addCounting(g)
		}
		if g.Bound != nil {
			t.addBinding(g)
		}
		slices.Sort(t.order)
	}
	return tables
}

// addJumps adds the jumps of packets in scope to the chain of a guard.
func (t *table) addJumps(base string, g policy.Guard, match ...nftStatement) {
	for _, m := range g.Scope.InterfaceMatches() {
		statements := slices.Concat(matchStatements(m), match)
		t.add(base, "", append(statements, jump(base+"-"+g.Chain))...)
	}
}

func returns() nftStatement { return statement("return", nfnetlink.Verdict{Code: nfnetlink.Return}) }

func counter() nftStatement { return statement("counter", nfnetlink.Counter{}) }

// addCounting adds the rules that count, or drop, what was not masqueraded.
func (t *table) addCounting(g policy.Guard) {
	link, target := netfilter.LinkOf(g.Family), guardChain+"-"+g.Chain
	pods, exempt := podsSet+"-"+g.Chain, exemptSet+"-"+g.Chain
	t.addSet(exempt, g.Exempt)
	t.addJumps(guardChain, g, inSet(link, "saddr", pods, false), inSet(link, "daddr", exempt, true))
	// The first test: most packets that reach this chain are replies of servers in pods, and it needs no
	// lookup in the routing tables.
	t.add(target, "", isReply(), returns())
	if g.Family == policy.IPv6 {
		for typ := byte(133); typ <= 137; typ++ { // neighbour discovery, which conntrack does not track
			t.add(target, "", isICMPv6(typ), returns())
		}
	}
	t.add(target, "", addressType("saddr", false, unix.RTN_LOCAL), returns())
	// Not `!= unicast`: table ip6 looks up the route of a packet without interface and mark, so a destination
	// that only a policy route reaches has the type unreachable.
	exceptions := []uint32{unix.RTN_LOCAL, unix.RTN_BROADCAST, unix.RTN_MULTICAST, unix.RTN_ANYCAST}
	for _, typ := range exceptions {
		t.add(target, "", addressType("daddr", false, typ), returns())
	}
	var drop nftStatement
	if g.Mode == policy.GuardDrop {
		drop = statement("drop", nfnetlink.Verdict{Code: nfnetlink.Drop})
	}
	t.add(target, g.Owner.Comment(), counter(), drop)
}

// isReply is the match `ct direction reply`.
func isReply() nftStatement {
	const reply = 1 // IP_CT_DIR_REPLY
	return statement("ct direction reply",
		nfnetlink.CT{Key: unix.NFT_CT_DIRECTION, Dreg: nfnetlink.Reg1}, compare(nfnetlink.Equal, reply))
}

// isICMPv6 is the match `icmpv6 type N`.
func isICMPv6(typ byte) nftStatement {
	return statement(fmt.Sprintf("icmpv6 type %d", typ),
		loadProtocol(), compare(nfnetlink.Equal, unix.IPPROTO_ICMPV6),
		nfnetlink.Payload{Base: unix.NFT_PAYLOAD_TRANSPORT_HEADER, Len: 1, Dreg: nfnetlink.Reg1},
		compare(nfnetlink.Equal, typ))
}

// addBinding adds the rules that keep the source of exempt traffic.
func (t *table) addBinding(g policy.Guard) {
	link, target := netfilter.LinkOf(g.Family), enforceChain+"-"+g.Chain
	pods, bound := podsSet+"-"+g.Chain, boundSet+"-"+g.Chain
	mark := withoutMark(g.BypassMark)
	t.addSet(bound, g.Bound)
	t.addSet(selfSet, policy.Ranges{})
	t.addJumps(enforceChain, g, mark, inSet(link, "saddr", pods, false), inSet(link, "daddr", bound, false))
	for i, b := range g.MoreBindings {
		sources, destinations := boundPodsSets(i, g.Chain)
		t.addSet(sources, b.Sources)
		match := []nftStatement{mark, inSet(link, "saddr", sources, false)}
		if b.Destinations != nil {
			t.addSet(destinations, b.Destinations)
			match = append(match, inSet(link, "daddr", destinations, false))
		}
		t.addJumps(enforceChain, g, match...)
	}
	// A connection of a pod to itself, by a Service, has the same address twice, which nftables compares only
	// by a set. Its status does not tell: IPVS sets no `ct status dnat`. `update` in place of `add`: so the
	// element of a pair in use cannot expire between the two rules.
	t.add(target, "", pairInSelf(link, "saddr", true))
	t.add(target, "", pairInSelf(link, "daddr", false), returns())
	// After `snat to ip saddr` no other NAT rule changes the source.
	const reg = nfnetlink.Reg1
	keep := statement("snat to "+link.String()+" saddr", load(link, "saddr", reg),
		nfnetlink.NAT{Type: unix.NFT_NAT_SNAT, Family: uint32(link), AddrMin: reg, AddrMax: reg})
	t.add(target, g.Owner.Comment(), counter(), keep)
}

// boundPodsSets returns the names of the sets for one of Guard.MoreBindings: boundpods-X, boundpods2-X, ...
func boundPodsSets(i int, chain string) (sources, destinations string) {
	number := ""
	if i > 0 {
		number = strconv.Itoa(i + 1)
	}
	return boundPods + number + "-" + chain, boundTo + number + "-" + chain
}

// withoutMark is the match `meta mark & 0x6000 == 0`, empty without a mask.
func withoutMark(mask policy.Mark) nftStatement {
	if mask == 0 {
		return nftStatement{}
	}
	zero := make([]byte, 4)
	return statement("meta mark & "+mask.String()+" == 0",
		nfnetlink.Meta{Key: unix.NFT_META_MARK, Dreg: nfnetlink.Reg1},
		nfnetlink.Bitwise{Sreg: nfnetlink.Reg1, Dreg: nfnetlink.Reg1, Len: uint32(len(zero)),
			Mask: binary.NativeEndian.AppendUint32(nil, uint32(mask)), Xor: zero},
		compare(nfnetlink.Equal, zero...))
}

// pairInSelf is the statement `update @self { ip saddr . ip saddr }` or the match `ip saddr . ip daddr
// @self`.
func pairInSelf(f nfnetlink.Family, second string, update bool) nftStatement {
	next := nfnetlink.Register(unix.NFT_REG32_01) // an address of IPv4 takes a register of 4 bytes
	if f == nfnetlink.IPv6 {
		next = nfnetlink.Reg2
	}
	pair := fmt.Sprintf("%s saddr . %s %s", f, f, second)
	first, last := load(f, "saddr", nfnetlink.Reg1), load(f, second, next)
	if update {
		return statement("update @"+selfSet+" { "+pair+" }", first, last,
			nfnetlink.Dynset{Set: selfSet, Op: unix.NFT_DYNSET_OP_UPDATE, Key: nfnetlink.Reg1})
	}
	return statement(pair+" @"+selfSet, first, last, nfnetlink.Lookup{Set: selfSet, Sreg: nfnetlink.Reg1})
}
