// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// LegacyChain is a chain of a table of iptables-legacy.
type LegacyChain struct {
	Name    string
	BuiltIn bool
	// Rules are in the form in which iptables-nft writes them, or Unknown in
	// parts where it has none. The policy of a built-in chain is not among them.
	Rules []nfnetlink.Rule
}

// Legacy returns all chains of a table of iptables-legacy, whoever wrote them,
// and none where the table is not in use: it makes no table and runs no program.
// Reading takes no lock, for the kernel replaces tables whole.
func Legacy(f policy.Family, tableName string) ([]LegacyChain, error) {
	used, err := legacyInUse(f, tableName)
	if err != nil || !used {
		return nil, err
	}
	b, err := readBlob(f, tableName)
	if err != nil {
		return nil, err
	}
	p, err := b.parts()
	if err != nil {
		return nil, err
	}
	var chains []LegacyChain
	for s := range p.sections() {
		c := LegacyChain{Name: string(s.chain), BuiltIn: s.builtIn}
		for r := range p.rules(s) {
			c.Rules = append(c.Rules, nfnetlink.Rule{Chain: c.Name, Exprs: r.expressions(p)})
		}
		chains = append(chains, c)
	}
	return chains, nil
}

// Bits of the inversions (IPT_INV_*, XT_INV_PROTO), the same for both families.
const (
	invertIn          byte = 0x01
	invertOut         byte = 0x02
	invertSource      byte = 0x08
	invertDestination byte = 0x10
	invertProtocol    byte = 0x40
)

// expressions returns the rule as iptables-nft would write it.
func (r record) expressions(p parts) []nfnetlink.Expr {
	l := p.layout
	sourceAt, destinationAt := uint32(12), uint32(16)
	if p.family == policy.IPv6 {
		sourceAt, destinationAt = 8, 24
	}
	invert := r.head[l.inversions]
	address := func(i int) []byte { return r.head[i*l.address : (i+1)*l.address] }
	name := func(i int) []byte { return r.head[l.interfaces+i*unix.IFNAMSIZ : l.interfaces+(i+1)*unix.IFNAMSIZ] }

	out := addressExpressions(nil, sourceAt, address(0), address(2), invert&invertSource != 0)
	out = addressExpressions(out, destinationAt, address(1), address(3), invert&invertDestination != 0)
	out = interfaceExpressions(out, unix.NFT_META_IIFNAME, name(0), name(2), invert&invertIn != 0)
	out = interfaceExpressions(out, unix.NFT_META_OIFNAME, name(1), name(3), invert&invertOut != 0)
	flags := r.head[l.flags]
	if number := binary.NativeEndian.Uint16(r.head[l.protocol:]); number != 0 && (l.protoFlag == 0 || flags&l.protoFlag != 0) {
		out = append(out, nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Reg: nfnetlink.Reg1},
			nfnetlink.Cmp{Op: operator(invert&invertProtocol != 0), Sreg: nfnetlink.Reg1, Data: []byte{byte(number)}})
	}
	if flags&^l.plainFlags != 0 {
		out = append(out, nfnetlink.Unknown{Kind: "fragment or type of service"})
	}
	for rest := r.middle; len(rest) > 0; {
		m, size, err := parseExtension(rest)
		if err != nil {
			return append(out, nfnetlink.Unknown{Kind: "damaged match"})
		}
		out = append(out, nfnetlink.Match{Xt: m.name, Rev: m.revision, Info: m.info})
		rest = rest[size:]
	}
	out = append(out, nfnetlink.Counter{Packets: binary.NativeEndian.Uint64(r.head[l.packetsAt:])})
	return r.targetExpressions(out, p, flags&l.gotoFlag != 0)
}

func operator(inverted bool) nfnetlink.CmpOp {
	if inverted {
		return nfnetlink.NotEqual
	}
	return nfnetlink.Equal
}

func addressExpressions(out []nfnetlink.Expr, at uint32, address, mask []byte, inverted bool) []nfnetlink.Expr {
	if !inverted && !slices.ContainsFunc(mask, notZero) {
		return out
	}
	size := uint32(len(address))
	return append(out,
		nfnetlink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: at, Len: size, Dreg: nfnetlink.Reg1},
		nfnetlink.Bitwise{Sreg: nfnetlink.Reg1, Dreg: nfnetlink.Reg1, Len: size, Mask: mask, Xor: make([]byte, size)},
		nfnetlink.Cmp{Op: operator(inverted), Sreg: nfnetlink.Reg1, Data: address})
}

func interfaceExpressions(out []nfnetlink.Expr, key uint32, name, mask []byte, inverted bool) []nfnetlink.Expr {
	length, contiguous := maskLength(mask)
	switch {
	case !contiguous || length%8 != 0:
		return append(out, nfnetlink.Unknown{Kind: "interface under an odd mask"})
	case length == 0 && !inverted:
		return out
	}
	return append(out, nfnetlink.Meta{Key: key, Reg: nfnetlink.Reg1},
		nfnetlink.Cmp{Op: operator(inverted), Sreg: nfnetlink.Reg1, Data: name[:length/8]})
}

func notZero(b byte) bool { return b != 0 }

// targetExpressions adds what the rule does. A rule without a target adds
// nothing.
func (r record) targetExpressions(out []nfnetlink.Expr, p parts, goes bool) []nfnetlink.Expr {
	if r.target.name != "" {
		return append(out, nfnetlink.Target{Xt: r.target.name, Rev: r.target.revision, Info: r.target.info})
	}
	verdict, ok := r.verdict()
	chain, leads := p.chainAt(verdict)
	switch {
	case !ok:
		return append(out, nfnetlink.Unknown{Kind: "damaged verdict"})
	case verdict == verdictReturn:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Return})
	case verdict == verdictAccept:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Accept})
	case verdict == verdictDrop:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Drop})
	case verdict == r.next:
		return out
	case leads && goes:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Goto, Chain: chain})
	case leads:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: chain})
	}
	return append(out, nfnetlink.Unknown{Kind: "another verdict"})
}
