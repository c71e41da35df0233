// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"fmt"
	"strconv"
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

// statements writes a rule. The named set has its addresses, if it matches any: sources or destinations, never
// both (setOf). A jump leads to target.
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
		verdict := nfnetlink.Verdict{Code: nfnetlink.Return}
		return append(out, statement("counter return", nfnetlink.Counter{}, verdict))
	case policy.Masquerade:
		return append(out, masquerade(link, r))
	}
	return []nftStatement{statement("# omitted, not owned: " + policy.Quote(r.Text))}
}

// matchStatements writes what a rule matches beside addresses.
func matchStatements(m policy.Match) (out []nftStatement) {
	if m.Out != "" {
		out = append(out, outputInterface(m.Out))
	}
	if m.NotFromLocal {
		out = append(out, addressType("saddr", true, unix.RTN_LOCAL))
	}
	if m.NotToLocal {
		out = append(out, addressType("daddr", true, unix.RTN_LOCAL))
	}
	if m.Protocol != "" {
		out = append(out, transportProtocol(m.Protocol))
	}
	if m.Probability != 0 {
		out = append(out, atRandom(m.Probability))
	}
	return out
}

// transportProtocol is the match `meta l4proto tcp`.
func transportProtocol(p policy.Protocol) nftStatement {
	var number byte
	switch p {
	case "tcp":
		number = unix.IPPROTO_TCP
	case "udp":
		number = unix.IPPROTO_UDP
	case "sctp":
		number = unix.IPPROTO_SCTP
	}
	return statement("meta l4proto "+string(p), loadProtocol(), compare(nfnetlink.Equal, number))
}

func loadProtocol() nfnetlink.Expr {
	return nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Dreg: nfnetlink.Reg1}
}

// atRandom is the match `numgen random mod 2147483648 < N`.
func atRandom(n uint32) nftStatement {
	const reg = nfnetlink.Reg1
	return statement(fmt.Sprintf("numgen random mod %d < %d", policy.ProbabilityScale, n),
		nfnetlink.Numgen{Random: true, Modulus: policy.ProbabilityScale, Dreg: reg},
		nfnetlink.Byteorder{Sreg: reg, Dreg: reg, Op: unix.NFT_BYTEORDER_HTON, Len: 4, Size: 4},
		compare(nfnetlink.Less, binary.BigEndian.AppendUint32(nil, n)...))
}

// outputInterface is the match `oifname "eth*"`. A whole name is compared with its NULs.
func outputInterface(pattern string) nftStatement {
	name, data := pattern, make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	prefix, isWildcard := strings.CutSuffix(pattern, "+")
	if isWildcard {
		name, data = prefix+"*", []byte(prefix)
	}
	return statement(`oifname "`+name+`"`,
		nfnetlink.Meta{Key: unix.NFT_META_OIFNAME, Dreg: nfnetlink.Reg1}, compare(nfnetlink.Equal, data...))
}

// load loads the address in the field saddr or daddr.
func load(f nfnetlink.Family, field string, to nfnetlink.Register) nfnetlink.Expr {
	if field == "saddr" {
		return nfnetlink.LoadAddress(f, nfnetlink.Source, to)
	}
	return nfnetlink.LoadAddress(f, nfnetlink.Destination, to)
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
	return statement(f.String()+" "+field+operator+set, load(f, field, nfnetlink.Reg1),
		nfnetlink.Lookup{Set: set, Sreg: nfnetlink.Reg1, Not: not})
}

// addressType is the match `fib daddr type local` or, negated, `fib daddr type != local`. The type is RTN_*.
func addressType(field string, isNegated bool, typ uint32) nftStatement {
	flag := uint32(unix.NFTA_FIB_F_DADDR)
	if field == "saddr" {
		flag = unix.NFTA_FIB_F_SADDR
	}
	op, operator := nfnetlink.Equal, ""
	if isNegated {
		op, operator = nfnetlink.NotEqual, "!= "
	}
	return statement("fib "+field+" type "+operator+addressTypeName(typ),
		nfnetlink.FIB{Flags: flag, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: nfnetlink.Reg1},
		compare(op, binary.NativeEndian.AppendUint32(nil, typ)...))
}

// addressTypeName returns the name that nft has for a type of addresses.
func addressTypeName(typ uint32) string {
	switch typ {
	case unix.RTN_LOCAL:
		return "local"
	case unix.RTN_BROADCAST:
		return "broadcast"
	case unix.RTN_MULTICAST:
		return "multicast"
	case unix.RTN_ANYCAST:
		return "anycast"
	}
	return strconv.FormatUint(uint64(typ), 10)
}

func jump(target string) nftStatement {
	return statement("jump "+target, nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: target})
}

// masquerade writes `counter masquerade to :1024-2047 fully-random` or `counter snat to 192.0.2.1`. The
// address is a constant. A map by output interface would be one rule, but it would hide the address from `nft
// list ruleset`, and iptables has none.
func masquerade(f nfnetlink.Family, r policy.Rule) nftStatement {
	const address = nfnetlink.Reg3
	var flags uint32
	exprs := []nfnetlink.Expr{nfnetlink.Counter{}}
	first, last, ports := loadPorts(r.Ports)
	exprs = append(exprs, ports...)
	if len(ports) > 0 {
		flags |= unix.NF_NAT_RANGE_PROTO_SPECIFIED
	}
	if r.RandomFully {
		flags |= unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY
	}
	if !r.Address.IsValid() {
		masq := nfnetlink.Masq{Flags: flags, ProtoMin: first, ProtoMax: last}
		return statement(masqueradeText(f, r), append(exprs, masq)...)
	}
	to := nfnetlink.Immediate{Dreg: address, Data: r.Address.AsSlice()}
	snat := nfnetlink.NAT{
		Type: unix.NFT_NAT_SNAT, Family: uint32(f), Flags: flags,
		AddrMin: address, AddrMax: address, ProtoMin: first, ProtoMax: last,
	}
	return statement(masqueradeText(f, r), append(exprs, to, snat)...)
}

// loadPorts loads source ports into the registers first and last, which are 0 if there are none.
func loadPorts(ports policy.PortRange) (first, last nfnetlink.Register, exprs []nfnetlink.Expr) {
	if ports.IsZero() {
		return 0, 0, nil
	}
	first, last = nfnetlink.Reg1, nfnetlink.Reg1
	exprs = append(exprs, loadPort(ports.First, first))
	if ports.Last != ports.First {
		last = nfnetlink.Reg2
		exprs = append(exprs, loadPort(ports.Last, last))
	}
	return first, last, exprs
}

func loadPort(port uint16, to nfnetlink.Register) nfnetlink.Expr {
	return nfnetlink.Immediate{Dreg: to, Data: binary.BigEndian.AppendUint16(nil, port)}
}

// masqueradeText returns the statement of masquerade in nft syntax.
func masqueradeText(f nfnetlink.Family, r policy.Rule) string {
	nft, to := "counter masquerade", ""
	if r.Address.IsValid() {
		nft, to = "counter snat", r.Address.String()
	}
	if !r.Ports.IsZero() {
		if to != "" && f == nfnetlink.IPv6 {
			to = "[" + to + "]"
		}
		to += ":" + r.Ports.String()
	}
	if to != "" {
		nft += " to " + to
	}
	if r.RandomFully {
		nft += " fully-random"
	}
	return nft
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

// renderTables writes the tables of a name behind a text. A family without one loses it.
func renderTables(
	text, name string, families []policy.Family, tableOf func(policy.Family) *table,
) []byte {
	for _, f := range families {
		qualified := netfilter.LinkOf(f).String() + " " + name
		// One that does not exist cannot be deleted.
		text += fmt.Sprintf("\nadd table %s\ndelete table %s\n", qualified, qualified)
		t := tableOf(f)
		if t != nil {
			text += fmt.Sprintf("table %s {\n%s}\n", qualified, t.render(f))
		}
	}
	return []byte(text)
}

// renderSet writes a set, with its elements unless rules fill it.
func renderSet(f policy.Family, form nfnetlink.Set, ranges policy.Ranges) string {
	key := "ipv4_addr"
	if f == policy.IPv6 {
		key = "ipv6_addr"
	}
	if form.Timeout != 0 {
		const set = "\tset %s {\n\t\ttype %s . %s\n\t\tsize %d\n" +
			"\t\tflags dynamic,timeout\n\t\ttimeout %s\n\t}\n"
		return fmt.Sprintf(set, form.Name, key, key, form.Size, form.Timeout)
	}
	text := fmt.Sprintf("\tset %s {\n\t\ttype %s\n\t\tflags interval\n", form.Name, key)
	if len(ranges) == 0 { // nft does not accept empty braces
		return text + "\t}\n"
	}
	var elements strings.Builder
	for _, r := range ranges {
		fmt.Fprintf(&elements, "\t\t\t%s,\n", policy.Ranges{r})
	}
	return text + "\t\telements = {\n" + elements.String() + "\t\t}\n\t}\n"
}
