// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// header is where the addresses are in the packet header of a family.
type header struct {
	link     nfnetlink.Family
	src, dst uint32 // offsets in bytes
	size     uint32
}

func headerOf(f policy.Family) header {
	if f == policy.IPv4 {
		return header{nfnetlink.IPv4, 12, 16, 4} // RFC 791
	}
	return header{nfnetlink.IPv6, 8, 24, 16} // RFC 8200
}

func protocolNumber(p policy.Protocol) byte {
	return map[policy.Protocol]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}[p]
}

// nftStatement is a match or a statement of a rule, in nft syntax and as the kernel's expressions.
type nftStatement struct {
	nft   string
	exprs []nfnetlink.Expr
}

// statements writes a rule. The named set has its addresses, if it matches any; a jump leads to target.
func statements(f policy.Family, r policy.Rule, set, target string) []nftStatement {
	const reg = nfnetlink.Reg1
	var out []nftStatement
	local := binary.NativeEndian.AppendUint32(nil, unix.RTN_LOCAL)
	add := func(nft string, exprs ...nfnetlink.Expr) { out = append(out, nftStatement{nft, exprs}) }
	load := func(offset, size uint32) nfnetlink.Expr {
		return nfnetlink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: offset, Len: size, Dreg: reg}
	}
	compare := func(op nfnetlink.CmpOp, data []byte) nfnetlink.Expr {
		return nfnetlink.Cmp{Op: op, Sreg: reg, Data: data}
	}
	addressType := func(flag uint32) nfnetlink.Expr {
		return nfnetlink.FIB{Flags: flag, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: reg}
	}
	h := headerOf(f)
	if r.From != nil {
		add(h.link.String()+" saddr @"+set, load(h.src, h.size), nfnetlink.Lookup{Set: set, Sreg: reg})
	}
	if r.To != nil {
		add(h.link.String()+" daddr @"+set, load(h.dst, h.size), nfnetlink.Lookup{Set: set, Sreg: reg})
	}
	if r.Out != "" {
		name, data := interfaceMatch(r.Out)
		add(`oifname "`+name+`"`, nfnetlink.Meta{Key: unix.NFT_META_OIFNAME, Reg: reg}, compare(nfnetlink.Equal, data))
	}
	if r.NotFromLocal {
		add("fib saddr type != local", addressType(unix.NFTA_FIB_F_SADDR), compare(nfnetlink.NotEqual, local))
	}
	if r.NotToLocal {
		add("fib daddr type != local", addressType(unix.NFTA_FIB_F_DADDR), compare(nfnetlink.NotEqual, local))
	}
	if r.Protocol != "" {
		add("meta l4proto "+string(r.Protocol), nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Reg: reg},
			compare(nfnetlink.Equal, []byte{protocolNumber(r.Protocol)}))
	}
	if r.Probability != 0 {
		add(fmt.Sprintf("numgen random mod %d < %d", policy.ProbabilityScale, r.Probability),
			nfnetlink.Numgen{Random: true, Modulus: policy.ProbabilityScale, Dreg: reg},
			nfnetlink.Byteorder{Sreg: reg, Dreg: reg, Op: unix.NFT_BYTEORDER_HTON, Len: 4, Size: 4},
			compare(nfnetlink.Less, binary.BigEndian.AppendUint32(nil, r.Probability)))
	}
	switch r.Verdict {
	case policy.Jump:
		add("jump "+target, nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: target})
	case policy.Return:
		add("counter return", nfnetlink.Counter{}, nfnetlink.Verdict{Code: nfnetlink.Return})
	case policy.Masquerade:
		nft, exprs := masquerade(r)
		add("counter "+nft, append([]nfnetlink.Expr{nfnetlink.Counter{}}, exprs...)...)
	}
	return out
}

// masquerade writes the statement `masquerade to :1024-2047 fully-random`. A single port is in one
// register for both ends.
func masquerade(r policy.Rule) (nft string, exprs []nfnetlink.Expr) {
	nft = "masquerade"
	var m nfnetlink.Masq
	if !r.Ports.IsZero() {
		nft += " to :" + r.Ports.String()
		m = nfnetlink.Masq{Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED, ProtoMin: nfnetlink.Reg1, ProtoMax: nfnetlink.Reg1}
		exprs = append(exprs, nfnetlink.Immediate{Dreg: m.ProtoMin, Data: binary.BigEndian.AppendUint16(nil, r.Ports.First)})
		if r.Ports.Last != r.Ports.First {
			m.ProtoMax = nfnetlink.Reg2
			exprs = append(exprs, nfnetlink.Immediate{Dreg: m.ProtoMax, Data: binary.BigEndian.AppendUint16(nil, r.Ports.Last)})
		}
	}
	if r.RandomFully {
		nft += " fully-random"
		m.Flags |= unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY
	}
	return nft, append(exprs, m)
}

// encode writes a rule as expressions.
func encode(f policy.Family, r policy.Rule, set, target string) []nfnetlink.Expr {
	var out []nfnetlink.Expr
	for _, s := range statements(f, r, set, target) {
		out = append(out, s.exprs...)
	}
	return out
}

// interfaceMatch returns a name as nft writes it, and as the kernel compares it: with its NULs or, of a
// wildcard with a trailing +, its prefix.
func interfaceMatch(name string) (nft string, data []byte) {
	if prefix, wild := strings.CutSuffix(name, "+"); wild {
		return prefix + "*", []byte(prefix)
	}
	data = make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	return name, data
}

// Render writes the tables of the families, of all if none is named, as input for `nft -f`. Loading it
// has the result of Apply, whatever the tables held before. A family without a chain loses its table.
//
// It is one transaction, but packets can meet the sets of the new table empty. Apply avoids that.
func Render(rs policy.Ruleset, families ...policy.Family) []byte {
	if len(families) == 0 {
		families = policy.Families()
	}
	var b strings.Builder
	b.WriteString("# Load with: nft -f FILE\n" +
		"# It recreates the tables. A connection that begins meanwhile may be treated wrongly;\n" +
		"# ip-masq-reconciler once changes only what differs, and avoids that.\n")
	for _, f := range families {
		name := headerOf(f).link.String() + " " + tableName
		// A table that does not exist cannot be deleted.
		fmt.Fprintf(&b, "\nadd table %s\ndelete table %s\n", name, name)
		if chains := chainsOf(rs, f); len(chains) > 0 {
			fmt.Fprintf(&b, "table %s {\n%s}\n", name, renderTable(f, chains))
		}
	}
	return []byte(b.String())
}

func renderTable(f policy.Family, desired []policy.Chain) string {
	var sets, jumps, chains strings.Builder
	names := setNames{used: map[string]bool{}, create: func(name string, ranges policy.Ranges) {
		sets.WriteString(renderSet(f, name, ranges))
	}}
	for i := range desired {
		c := &desired[i]
		fmt.Fprintf(&chains, "\tchain %s%s {\n", chainPrefix, c.Name)
		for i, r := range c.Rules {
			chains.WriteString(renderRule(f, r, names.setOf(r, c.Name, sourceSet), "", commentOn(c, i)))
		}
		chains.WriteString("\t}\n")
	}
	for _, c := range desired {
		for _, j := range c.Jumps {
			jumps.WriteString(renderRule(f, j, names.setOf(j, c.Name, scopeSet), chainPrefix+c.Name, ""))
		}
	}
	base := baseHook()
	return sets.String() + fmt.Sprintf("\tchain %s {\n\t\ttype %s hook postrouting priority %d; policy accept;\n%s\t}\n",
		baseChain, base.Type, base.Priority, jumps.String()) + chains.String()
}

func renderSet(f policy.Family, name string, ranges policy.Ranges) string {
	key := "ipv4_addr"
	if f == policy.IPv6 {
		key = "ipv6_addr"
	}
	var elements strings.Builder
	for _, r := range ranges {
		text := r.From().String() + "-" + r.To().String()
		if p, ok := r.Prefix(); ok {
			text = p.String()
		}
		fmt.Fprintf(&elements, "\t\t\t%s,\n", text)
	}
	text := fmt.Sprintf("\tset %s {\n\t\ttype %s\n\t\tflags interval\n", name, key)
	if len(ranges) > 0 { // nft does not accept empty braces
		text += "\t\telements = {\n" + elements.String() + "\t\t}\n"
	}
	return text + "\t}\n"
}

func renderRule(f policy.Family, r policy.Rule, set, target, comment string) string {
	if r.Verdict == policy.Unrecognized {
		return fmt.Sprintf("\t\t# omitted, not owned: %s\n", policy.Quote(r.Text))
	}
	var words []string
	for _, s := range statements(f, r, set, target) {
		words = append(words, s.nft)
	}
	if comment != "" {
		words = append(words, `comment "`+comment+`"`)
	}
	return "\t\t" + strings.Join(words, " ") + "\n"
}
