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
	exemptPods   = "exemptpods" // with exemptto: sources with the destinations to which they are bound
	exemptTo     = "exemptto"
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
	h := headerOf(g.Family)
	pods, exempt, bound := podsSet+"-"+g.Chain, exemptSet+"-"+g.Chain, boundSet+"-"+g.Chain
	returns := nftStatement{"return", []nfnetlink.Expr{nfnetlink.Verdict{Code: nfnetlink.Return}}}
	counter := nftStatement{"counter", []nfnetlink.Expr{nfnetlink.Counter{}}}
	t.addSet(pods, g.Scope.Sources)
	if g.Mode == policy.GuardCount || g.Mode == policy.GuardDrop {
		target := guardChain + "-" + g.Chain
		t.addSet(exempt, g.Exempt)
		for _, m := range g.Scope.Matches() {
			t.add(guardChain, "", append(matchStatements(m),
				h.inSet("saddr", pods, false), h.inSet("daddr", exempt, true), jump(target))...)
		}
		t.add(target, "", isReply(), returns)
		if g.Family == policy.IPv6 {
			for typ := byte(133); typ <= 137; typ++ { // neighbour discovery, which conntrack does not track
				t.add(target, "", icmpv6Type(typ), returns)
			}
		}
		t.add(target, "", addressType("saddr", "local"), returns)
		// Not `!= unicast`: table ip6 looks up the route of a packet without interface and mark, so a destination
		// that only a policy route reaches has the type unreachable.
		for _, typ := range []string{"local", "broadcast", "multicast", "anycast"} {
			t.add(target, "", addressType("daddr", typ), returns)
		}
		last := []nftStatement{counter}
		if g.Mode == policy.GuardDrop {
			last = append(last, nftStatement{"drop", []nfnetlink.Expr{nfnetlink.Verdict{Code: nfnetlink.Drop}}})
		}
		t.add(target, g.Owner.Comment(), last...)
	}
	if g.Bound != nil {
		target := enforceChain + "-" + g.Chain
		t.addSet(bound, g.Bound)
		t.addSet(selfSet, policy.Ranges{})
		for _, m := range g.Scope.Matches() {
			t.add(enforceChain, "", append(matchStatements(m), withoutMark(g.BypassMark),
				h.inSet("saddr", pods, false), h.inSet("daddr", bound, false), jump(target))...)
		}
		for i, b := range g.ExemptPods {
			sources, destinations := exemptPodsSets(i, g.Chain)
			t.addSet(sources, b.Sources)
			match := []nftStatement{withoutMark(g.BypassMark), h.inSet("saddr", sources, false)}
			if b.Destinations != nil {
				t.addSet(destinations, b.Destinations)
				match = append(match, h.inSet("daddr", destinations, false))
			}
			for _, m := range g.Scope.Matches() {
				t.add(enforceChain, "", slices.Concat(matchStatements(m), match, []nftStatement{jump(target)})...)
			}
		}
		// A connection of a pod to itself, by a Service. Its status does not tell: IPVS sets no `ct status dnat`.
		t.add(target, "", h.pairInSelf("saddr", true))
		t.add(target, "", h.pairInSelf("daddr", false), returns)
		t.add(target, g.Owner.Comment(), counter, h.keepSource())
	}
}

// exemptPodsSets returns the names of the sets for one of Guard.ExemptPods: exemptpods-X, exemptpods2-X, ...
func exemptPodsSets(i int, chain string) (sources, destinations string) {
	number := ""
	if i > 0 {
		number = strconv.Itoa(i + 1)
	}
	return exemptPods + number + "-" + chain, exemptTo + number + "-" + chain
}

// isReply is the match `ct direction reply`.
func isReply() nftStatement {
	const reply = 1 // IP_CT_DIR_REPLY
	return nftStatement{"ct direction reply", []nfnetlink.Expr{
		nfnetlink.CT{Key: unix.NFT_CT_DIRECTION, Dreg: nfnetlink.Reg1}, compare(nfnetlink.Equal, reply),
	}}
}

// withoutMark is the match `meta mark & 0x6000 == 0`, empty without a mask.
func withoutMark(mask policy.Mark) nftStatement {
	if mask == 0 {
		return nftStatement{}
	}
	zero := make([]byte, 4)
	return nftStatement{"meta mark & " + mask.String() + " == 0", []nfnetlink.Expr{
		nfnetlink.Meta{Key: unix.NFT_META_MARK, Reg: nfnetlink.Reg1},
		nfnetlink.Bitwise{Sreg: nfnetlink.Reg1, Dreg: nfnetlink.Reg1, Len: uint32(len(zero)),
			Mask: binary.NativeEndian.AppendUint32(nil, uint32(mask)), Xor: zero},
		compare(nfnetlink.Equal, zero...),
	}}
}

// icmpv6Type is the match `icmpv6 type 133`.
func icmpv6Type(typ byte) nftStatement {
	return nftStatement{fmt.Sprintf("icmpv6 type %d", typ), []nfnetlink.Expr{
		nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Reg: nfnetlink.Reg1}, compare(nfnetlink.Equal, unix.IPPROTO_ICMPV6),
		nfnetlink.Payload{Base: unix.NFT_PAYLOAD_TRANSPORT_HEADER, Len: 1, Dreg: nfnetlink.Reg1}, compare(nfnetlink.Equal, typ),
	}}
}

// pairInSelf is the statement `update @self { ip saddr . ip saddr }` or the match `ip saddr . ip daddr @self`.
func (h header) pairInSelf(second string, update bool) nftStatement {
	next := nfnetlink.Register(unix.NFT_REG32_01) // an address of IPv4 takes a register of 4 bytes
	if h.link == nfnetlink.IPv6 {
		next = nfnetlink.Reg2
	}
	pair := fmt.Sprintf("%s saddr . %s %s", h.link, h.link, second)
	exprs := []nfnetlink.Expr{h.load("saddr", nfnetlink.Reg1), h.load(second, next)}
	if update {
		return nftStatement{"update @" + selfSet + " { " + pair + " }",
			append(exprs, nfnetlink.Dynset{Set: selfSet, Op: unix.NFT_DYNSET_OP_UPDATE, Key: nfnetlink.Reg1})}
	}
	return nftStatement{pair + " @" + selfSet, append(exprs, nfnetlink.Lookup{Set: selfSet, Sreg: nfnetlink.Reg1})}
}

// keepSource is the statement `snat to ip saddr`, after which no other NAT rule changes the source.
func (h header) keepSource() nftStatement {
	reg := nfnetlink.Reg1
	return nftStatement{"snat to " + h.link.String() + " saddr", []nfnetlink.Expr{h.load("saddr", reg),
		nfnetlink.NAT{Type: unix.NFT_NAT_SNAT, Family: uint32(h.link), AddrMin: reg, AddrMax: reg}}}
}
