// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The chains and sets of a guard table. The name of one for a masquerade chain X has -X at its end.
const (
	guardChain   = "guard"   // base chain with the jumps to the chains guard-X
	enforceChain = "enforce" // base chain with the jumps to the chains enforce-X
	podsSet      = "pods"
	boundSet     = "bound"
	selfSet      = "self" // each source of a new connection, twice
)

// guardHook returns the hook of a base chain of the guard tables. The chain guard is behind all NAT, and
// the chain enforce before the NAT of other programs, as the first NAT rule of a hook that binds a connection decides.
func guardHook(chain string) nfnetlink.Base {
	if chain == enforceChain {
		return postrouting("nat", 99)
	}
	return postrouting("filter", 200)
}

// guardTable is the table ip-masq-guard of a family, as it is to be or as it was read. It is compared by the
// expressions of its rules.
type guardTable struct {
	tableObjects
	chains map[string]*guardRules
}

// guardRules is a chain of a guard table.
type guardRules struct {
	base  *nfnetlink.Base // nil for a chain that is not a base chain, or not known to be one
	rules []guardRule
}

type guardRule struct {
	exprs   []nfnetlink.Expr // with counters at 0
	packets uint64           // the counter
	comment string
	text    string // in nft syntax; of a rule that was read the names of its expressions
}

// guardTablesOf returns the tables with the guards. A family without a guard has no table.
func guardTablesOf(guards []policy.Guard) map[policy.Family]*guardTable {
	tables := map[policy.Family]*guardTable{}
	byChain := func(a, b policy.Guard) int { return cmp.Compare(a.Chain, b.Chain) }
	for _, g := range slices.SortedFunc(slices.Values(guards), byChain) {
		t := tables[g.Family]
		if t == nil {
			t = &guardTable{tableObjects{exists: true, sets: map[string]policy.Ranges{}}, map[string]*guardRules{}}
			tables[g.Family] = t
		}
		t.add(g)
	}
	return tables
}

func (t *guardTable) add(g policy.Guard) {
	h := headerOf(g.Family)
	pods, exempt, bound := podsSet+"-"+g.Chain, exemptSet+"-"+g.Chain, boundSet+"-"+g.Chain
	returns := nftStatement{"return", []nfnetlink.Expr{nfnetlink.Verdict{Code: nfnetlink.Return}}}
	counter := nftStatement{"counter", []nfnetlink.Expr{nfnetlink.Counter{}}}
	t.sets[pods] = g.Scope.Sources
	if g.Mode == policy.GuardCount || g.Mode == policy.GuardDrop {
		target := guardChain + "-" + g.Chain
		t.sets[exempt] = g.Exempt
		for _, m := range g.Scope.Matches() {
			t.rule(guardChain, "", append(matchStatements(m),
				h.inSet("saddr", pods, false), h.inSet("daddr", exempt, true), jump(target))...)
		}
		t.rule(target, "", isReply(), returns)
		if g.Family == policy.IPv6 {
			t.rule(target, "", neighbourDiscovery(), returns) // conntrack does not track it
		}
		t.rule(target, "", addressType("saddr", "local"), returns)
		// Not `!= unicast`: table ip6 looks up the route of a packet without interface and mark, so a destination
		// that only a policy route reaches has the type unreachable.
		for _, typ := range []string{"local", "broadcast", "multicast", "anycast"} {
			t.rule(target, "", addressType("daddr", typ), returns)
		}
		last := []nftStatement{counter}
		if g.Mode == policy.GuardDrop {
			last = append(last, nftStatement{"drop", []nfnetlink.Expr{nfnetlink.Verdict{Code: nfnetlink.Drop}}})
		}
		t.rule(target, g.Owner.Comment(), last...)
	}
	if g.Bound != nil {
		target := enforceChain + "-" + g.Chain
		t.sets[bound], t.sets[selfSet] = g.Bound, policy.Ranges{}
		for _, m := range g.Scope.Matches() {
			t.rule(enforceChain, "", append(matchStatements(m), withoutMark(g.BypassMark),
				h.inSet("saddr", pods, false), h.inSet("daddr", bound, false), jump(target))...)
		}
		// A connection of a pod to itself, by a Service. Its status does not tell: IPVS sets no `ct status dnat`.
		t.rule(target, "", h.pairInSelf("saddr", true))
		t.rule(target, "", h.pairInSelf("daddr", false), returns)
		t.rule(target, g.Owner.Comment(), h.keepSource())
	}
}

// rule appends a rule to a chain, without the statements that are empty.
func (t *guardTable) rule(chain, comment string, statements ...nftStatement) {
	c := t.chains[chain]
	if c == nil {
		c = &guardRules{}
		if chain == guardChain || chain == enforceChain {
			base := guardHook(chain)
			c.base = &base
		}
		t.chains[chain] = c
	}
	statements = slices.DeleteFunc(statements, func(s nftStatement) bool { return s.nft == "" })
	c.rules = append(c.rules, guardRule{
		exprs: exprsOf(statements), comment: comment, text: textOf(statements, comment),
	})
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

// neighbourDiscovery is the match `icmpv6 type 133-137`.
func neighbourDiscovery() nftStatement {
	return nftStatement{"icmpv6 type 133-137", []nfnetlink.Expr{
		nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Reg: nfnetlink.Reg1}, compare(nfnetlink.Equal, unix.IPPROTO_ICMPV6),
		nfnetlink.Payload{Base: unix.NFT_PAYLOAD_TRANSPORT_HEADER, Len: 1, Dreg: nfnetlink.Reg1},
		compare(nfnetlink.GreaterOrEqual, 133), compare(nfnetlink.LessOrEqual, 137),
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

// guardSet returns the form of a set of a guard table.
func (h header) guardSet(name string) nfnetlink.Set {
	if name == selfSet {
		// An element is needed for two rules of one packet. The shorter it lives, the more sources a pod must forge
		// to fill the set.
		const size = 65535
		return nfnetlink.AddressPairs(h.link, name, size, time.Second)
	}
	return nfnetlink.AddressRanges(h.link, name)
}

func (t *guardTable) render(f policy.Family) string {
	var text strings.Builder
	for _, name := range sorted(t.sets, nil) {
		text.WriteString(renderSet(f, headerOf(f).guardSet(name), t.sets[name]))
	}
	for _, name := range sorted(t.chains, nil) {
		rules := ""
		for _, r := range t.chains[name].rules {
			rules += "\t\t" + r.text + "\n"
		}
		text.WriteString(renderChain(name, t.chains[name].base, rules))
	}
	return text.String()
}
