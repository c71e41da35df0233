// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The chains and sets of a guard table. The name of one for a masquerade chain X has -X at its end.
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
		t.addGuard(g)
		slices.Sort(t.order)
	}
	return tables
}

func (t *table) addGuard(g policy.Guard) {
	t.addSet(podsSet+"-"+g.Chain, g.Scope.Sources)
	if g.Mode == policy.GuardCount || g.Mode == policy.GuardDrop {
		t.addCounting(g)
	}
	if g.Bound != nil {
		t.addBinding(g)
	}
}

// addJumps adds the jumps of packets in scope to the chain of a guard.
func (t *table) addJumps(base string, g policy.Guard, match ...nftStatement) {
	for _, m := range g.Scope.Matches() {
		t.add(base, "", slices.Concat(matchStatements(m), match, []nftStatement{jump(base + "-" + g.Chain)})...)
	}
}

func returns() nftStatement { return statement("return", nfnetlink.Verdict{Code: nfnetlink.Return}) }

func counter() nftStatement { return statement("counter", nfnetlink.Counter{}) }

// addCounting adds the rules that count, or drop, what was not masqueraded.
func (t *table) addCounting(g policy.Guard) {
	link, target, exempt := netfilter.LinkOf(g.Family), guardChain+"-"+g.Chain, exemptSet+"-"+g.Chain
	t.addSet(exempt, g.Exempt)
	t.addJumps(guardChain, g, inSet(link, "saddr", podsSet+"-"+g.Chain, false), inSet(link, "daddr", exempt, true))
	t.add(target, "", isReply(), returns())
	if g.Family == policy.IPv6 {
		for typ := byte(133); typ <= 137; typ++ { // neighbour discovery, which conntrack does not track
			t.add(target, "", icmpv6Type(typ), returns())
		}
	}
	t.add(target, "", addressType("saddr", "local"), returns())
	// Not `!= unicast`: table ip6 looks up the route of a packet without interface and mark, so a destination
	// that only a policy route reaches has the type unreachable.
	for _, typ := range []string{"local", "broadcast", "multicast", "anycast"} {
		t.add(target, "", addressType("daddr", typ), returns())
	}
	var drop nftStatement
	if g.Mode == policy.GuardDrop {
		drop = statement("drop", nfnetlink.Verdict{Code: nfnetlink.Drop})
	}
	t.add(target, g.Owner.Comment(), counter(), drop)
}

// addBinding adds the rules that keep the source of exempt traffic.
func (t *table) addBinding(g policy.Guard) {
	link, target, bound := netfilter.LinkOf(g.Family), enforceChain+"-"+g.Chain, boundSet+"-"+g.Chain
	mark := withoutMark(g.BypassMark)
	t.addSet(bound, g.Bound)
	t.addSet(selfSet, policy.Ranges{})
	t.addJumps(enforceChain, g, mark, inSet(link, "saddr", podsSet+"-"+g.Chain, false), inSet(link, "daddr", bound, false))
	for i, b := range g.Bindings {
		sources, destinations := boundPodsSets(i, g.Chain)
		t.addSet(sources, b.Sources)
		match := []nftStatement{mark, inSet(link, "saddr", sources, false)}
		if b.Destinations != nil {
			t.addSet(destinations, b.Destinations)
			match = append(match, inSet(link, "daddr", destinations, false))
		}
		for _, name := range b.NotOut {
			match = append(match, outputInterface(name, true))
		}
		t.addJumps(enforceChain, g, match...)
	}
	// A connection of a pod to itself, by a Service. Its status does not tell: IPVS sets no `ct status dnat`.
	t.add(target, "", pairInSelf(link, "saddr", true))
	t.add(target, "", pairInSelf(link, "daddr", false), returns())
	t.add(target, g.Owner.Comment(), counter(), keepSource(link))
}

// boundPodsSets returns the names of the sets for one of Guard.Bindings: boundpods-X, boundpods2-X, ...
func boundPodsSets(i int, chain string) (sources, destinations string) {
	number := ""
	if i > 0 {
		number = strconv.Itoa(i + 1)
	}
	return boundPods + number + "-" + chain, boundTo + number + "-" + chain
}

// isReply is the match `ct direction reply`.
func isReply() nftStatement {
	const reply = 1 // IP_CT_DIR_REPLY
	return statement("ct direction reply", nfnetlink.CT{Key: unix.NFT_CT_DIRECTION, Dreg: nfnetlink.Reg1}, compare(nfnetlink.Equal, reply))
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

// icmpv6Type is the match `icmpv6 type 133`.
func icmpv6Type(typ byte) nftStatement {
	return statement(fmt.Sprintf("icmpv6 type %d", typ),
		nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Dreg: nfnetlink.Reg1}, compare(nfnetlink.Equal, unix.IPPROTO_ICMPV6),
		nfnetlink.Payload{Base: unix.NFT_PAYLOAD_TRANSPORT_HEADER, Len: 1, Dreg: nfnetlink.Reg1}, compare(nfnetlink.Equal, typ))
}

// pairInSelf is the statement `update @self { ip saddr . ip saddr }` or the match `ip saddr . ip daddr @self`.
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

// keepSource is the statement `snat to ip saddr`, after which no other NAT rule changes the source.
func keepSource(f nfnetlink.Family) nftStatement {
	const reg = nfnetlink.Reg1
	return statement("snat to "+f.String()+" saddr", load(f, "saddr", reg),
		nfnetlink.NAT{Type: unix.NFT_NAT_SNAT, Family: uint32(f), AddrMin: reg, AddrMax: reg})
}
