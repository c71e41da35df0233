// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// nftStatement is a match or a statement of a rule, in nft syntax and as the kernel's expressions.
type nftStatement struct {
	nft   string
	exprs []nfnetlink.Expr
}

func statement(nft string, exprs ...nfnetlink.Expr) nftStatement { return nftStatement{nft, exprs} }

// statements writes a rule. The named set has its addresses, if it matches any; a jump leads to target.
func statements(f policy.Family, r policy.Rule, set, target string) (out []nftStatement) {
	link := netfilter.LinkOf(f)
	if r.From != nil {
		out = append(out, inSet(link, "saddr", set, false))
	}
	if r.To != nil {
		out = append(out, inSet(link, "daddr", set, false))
	}
	out = append(out, matchStatements(r.Match)...)
	switch r.Verdict {
	case policy.Jump:
		return append(out, jump(target))
	case policy.Return:
		return append(out, statement("counter return", nfnetlink.Counter{}, nfnetlink.Verdict{Code: nfnetlink.Return}))
	case policy.Masquerade:
		return append(out, masquerade(link, r))
	}
	return []nftStatement{statement("# omitted, not owned: " + policy.Quote(r.Text))}
}

// matchStatements writes what a rule matches beside addresses.
func matchStatements(m policy.Match) (out []nftStatement) {
	const reg = nfnetlink.Reg1
	add := func(nft string, exprs ...nfnetlink.Expr) { out = append(out, statement(nft, exprs...)) }
	if m.Out != "" {
		out = append(out, outputInterface(m.Out))
	}
	if m.NotFromLocal {
		out = append(out, addressType("saddr", "!= local"))
	}
	if m.NotToLocal {
		out = append(out, addressType("daddr", "!= local"))
	}
	if m.Protocol != "" {
		number := map[policy.Protocol]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}[m.Protocol]
		add("meta l4proto "+string(m.Protocol),
			nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Dreg: reg}, compare(nfnetlink.Equal, number))
	}
	if m.Probability != 0 {
		add(fmt.Sprintf("numgen random mod %d < %d", policy.ProbabilityScale, m.Probability),
			nfnetlink.Numgen{Random: true, Modulus: policy.ProbabilityScale, Dreg: reg},
			nfnetlink.Byteorder{Sreg: reg, Dreg: reg, Op: unix.NFT_BYTEORDER_HTON, Len: 4, Size: 4},
			compare(nfnetlink.Less, binary.BigEndian.AppendUint32(nil, m.Probability)...))
	}
	return out
}

// outputInterface is the match `oifname "eth*"`. A whole name is compared with its NULs.
func outputInterface(pattern string) nftStatement {
	name, data := pattern, make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	if prefix, wild := strings.CutSuffix(pattern, "+"); wild {
		name, data = prefix+"*", []byte(prefix)
	}
	return statement(`oifname "`+name+`"`,
		nfnetlink.Meta{Key: unix.NFT_META_OIFNAME, Dreg: nfnetlink.Reg1}, compare(nfnetlink.Equal, data...))
}

func load(f nfnetlink.Family, field string, to nfnetlink.Register) nfnetlink.Expr {
	return nfnetlink.LoadAddress(f, map[string]nfnetlink.Field{"saddr": nfnetlink.Source, "daddr": nfnetlink.Destination}[field], to)
}

// compare compares the first register, which has the size of the data.
func compare(op nfnetlink.CmpOp, data ...byte) nfnetlink.Expr {
	return nfnetlink.Cmp{Op: op, Sreg: nfnetlink.Reg1, Data: data}
}

// inSet is the match `ip saddr @set` or `ip saddr != @set`.
func inSet(f nfnetlink.Family, field, set string, not bool) nftStatement {
	operator := " @"
	if not {
		operator = " != @"
	}
	return statement(f.String()+" "+field+operator+set, load(f, field, nfnetlink.Reg1), nfnetlink.Lookup{Set: set, Sreg: nfnetlink.Reg1, Not: not})
}

// addressType is the match `fib daddr type != local`, with the part after type as its condition.
func addressType(field, condition string) nftStatement {
	flag := map[string]uint32{"saddr": unix.NFTA_FIB_F_SADDR, "daddr": unix.NFTA_FIB_F_DADDR}[field]
	op, name := nfnetlink.Equal, condition
	if rest, negated := strings.CutPrefix(condition, "!= "); negated {
		op, name = nfnetlink.NotEqual, rest
	}
	typ := map[string]uint32{
		"local": unix.RTN_LOCAL, "broadcast": unix.RTN_BROADCAST, "multicast": unix.RTN_MULTICAST, "anycast": unix.RTN_ANYCAST,
	}[name]
	return statement("fib "+field+" type "+condition, nfnetlink.FIB{Flags: flag, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: nfnetlink.Reg1},
		compare(op, binary.NativeEndian.AppendUint32(nil, typ)...))
}

func jump(target string) nftStatement {
	return statement("jump "+target, nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: target})
}

// masquerade writes `counter masquerade to :1024-2047 fully-random` or `counter snat to 192.0.2.1`.
func masquerade(f nfnetlink.Family, r policy.Rule) nftStatement {
	nft, to := "counter masquerade", ""
	if r.Address.IsValid() {
		nft, to = "counter snat", r.Address.String()
		if f == nfnetlink.IPv6 && !r.Ports.IsZero() {
			to = "[" + to + "]"
		}
	}
	exprs := []nfnetlink.Expr{nfnetlink.Counter{}}
	var m nfnetlink.Masq
	if !r.Ports.IsZero() {
		to += ":" + r.Ports.String()
		m = nfnetlink.Masq{Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED, ProtoMin: nfnetlink.Reg1, ProtoMax: nfnetlink.Reg1}
		exprs = append(exprs, nfnetlink.Immediate{Dreg: m.ProtoMin, Data: binary.BigEndian.AppendUint16(nil, r.Ports.First)})
		if r.Ports.Last != r.Ports.First {
			m.ProtoMax = nfnetlink.Reg2
			exprs = append(exprs, nfnetlink.Immediate{Dreg: m.ProtoMax, Data: binary.BigEndian.AppendUint16(nil, r.Ports.Last)})
		}
	}
	if to != "" {
		nft += " to " + to
	}
	if r.RandomFully {
		nft += " fully-random"
		m.Flags |= unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY
	}
	if !r.Address.IsValid() {
		return statement(nft, append(exprs, m)...)
	}
	const address = nfnetlink.Reg3
	return statement(nft, append(exprs, nfnetlink.Immediate{Dreg: address, Data: r.Address.AsSlice()}, nfnetlink.NAT{
		Type: unix.NFT_NAT_SNAT, Family: uint32(f), Flags: m.Flags,
		AddrMin: address, AddrMax: address, ProtoMin: m.ProtoMin, ProtoMax: m.ProtoMax,
	})...)
}

// Render returns the tables of the families as input for `nft -f`. Loading it has the result of
// Apply, regardless of the previous content of the tables. A family without a chain loses its
// table.
func Render(rs policy.Ruleset, families []policy.Family) []byte {
	return renderTables("# Load with: nft -f FILE\n"+
		"# It recreates the tables. A connection that begins meanwhile may be treated wrongly;\n"+
		"# ip-masq-reconciler once changes only what differs, and avoids that.\n",
		tableName, families, func(f policy.Family) *table {
			return masqTable(f, netfilter.ChainsOf(rs, f), newTable(tableName))
		})
}

// renderTables writes the tables of a name. A family without one loses it.
func renderTables(text, name string, families []policy.Family, tableOf func(policy.Family) *table) []byte {
	for _, f := range families {
		name := netfilter.LinkOf(f).String() + " " + name
		text += fmt.Sprintf("\nadd table %s\ndelete table %s\n", name, name) // one that does not exist cannot be deleted
		if t := tableOf(f); t != nil {
			text += fmt.Sprintf("table %s {\n%s}\n", name, t.render(f))
		}
	}
	return []byte(text)
}

// renderSet writes a set, with its elements unless rules fill it.
func renderSet(f policy.Family, form nfnetlink.Set, ranges policy.Ranges) string {
	key := map[policy.Family]string{policy.IPv4: "ipv4_addr", policy.IPv6: "ipv6_addr"}[f]
	if form.Timeout != 0 {
		return fmt.Sprintf("\tset %s {\n\t\ttype %s . %s\n\t\tsize %d\n\t\tflags dynamic,timeout\n\t\ttimeout %s\n\t}\n",
			form.Name, key, key, form.Size, form.Timeout)
	}
	var elements strings.Builder
	for _, r := range ranges {
		fmt.Fprintf(&elements, "\t\t\t%s,\n", policy.Ranges{r})
	}
	text := fmt.Sprintf("\tset %s {\n\t\ttype %s\n\t\tflags interval\n", form.Name, key)
	if len(ranges) > 0 { // nft does not accept empty braces
		text += "\t\telements = {\n" + elements.String() + "\t\t}\n"
	}
	return text + "\t}\n"
}
