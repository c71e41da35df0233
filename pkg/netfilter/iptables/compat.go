// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// compat reads a rule as iptables-nft writes it: a value is loaded into a
// register, cut by a mask if need be, and compared. It also knows the native
// form of what iptables-nft has in xtables' form: a ruleset that nft has saved
// and loaded comes back in it.
type compat struct {
	reading
	family policy.Family
	held   register
}

// register is the one that was loaded last. No other is of interest: nobody
// loads two before comparing one.
type register struct {
	number nfnetlink.Register
	what   quantity
	size   int    // in bytes
	mask   []byte // nil: all of them
}

// quantity is what a register can hold that policy has terms for.
type quantity int

const (
	other quantity = iota
	source
	destination
	transport // number of the protocol
	output    // name of the interface
	sourceType
	destinationType
)

func compatEntry(f policy.Family, rule nfnetlink.Rule) entry {
	r := compat{family: f}
	r.comment(rule.Comment) // where iptables before 1.8.3 has it
	for _, e := range rule.Exprs {
		if r.rule.Verdict != "" {
			r.refuse(e.Name() + " after the verdict")
		}
		r.expression(e)
	}
	return r.done()
}

func (r *compat) expression(e nfnetlink.Expr) {
	switch e := e.(type) {
	case nfnetlink.Payload:
		r.load(e, register{e.Dreg, r.payload(e), int(e.Len), nil})
	case nfnetlink.Meta:
		r.load(e, meta(e))
	case nfnetlink.FIB:
		r.load(e, fib(e))
	case nfnetlink.Bitwise:
		r.bitwise(e)
	case nfnetlink.Cmp:
		r.compare(e)
	case nfnetlink.Counter:
		r.rule.Connections = e.Packets
	case nfnetlink.Match:
		r.match(extension{e.Xt, e.Rev, e.Info})
	case nfnetlink.Target:
		r.targetExtension(r.family, extension{e.Xt, e.Rev, e.Info})
	case nfnetlink.Masq:
		r.masq(e)
	case nfnetlink.Verdict:
		r.immediate(e)
	default:
		r.refuse(e.Name())
	}
}

// payload tells what is loaded from the packet. A load may be shorter than the
// field: iptables leaves out bytes that a prefix does not reach.
func (r *compat) payload(e nfnetlink.Payload) quantity {
	size, sourceAt, destinationAt := uint32(4), uint32(12), uint32(16)
	const protocolAt = 9 // where iptables before 1.8.1 looks for it
	if r.family == policy.IPv6 {
		size, sourceAt, destinationAt = 16, 8, 24
	}
	switch {
	case e.Base != unix.NFT_PAYLOAD_NETWORK_HEADER || e.Len == 0 || e.Len > size:
	case e.Offset == sourceAt:
		return source
	case e.Offset == destinationAt:
		return destination
	case r.family == policy.IPv4 && e.Offset == protocolAt && e.Len == 1:
		return transport
	}
	return other
}

func meta(e nfnetlink.Meta) register {
	const nameSize = 16 // IFNAMSIZ
	switch {
	case e.Set:
	case e.Key == unix.NFT_META_OIFNAME:
		return register{e.Reg, output, nameSize, nil}
	case e.Key == unix.NFT_META_L4PROTO:
		return register{e.Reg, transport, 1, nil}
	}
	return register{}
}

func fib(e nfnetlink.FIB) register {
	const size = 4
	switch {
	case e.Result != unix.NFT_FIB_RESULT_ADDRTYPE:
	case e.Flags == unix.NFTA_FIB_F_SADDR:
		return register{e.Dreg, sourceType, size, nil}
	case e.Flags == unix.NFTA_FIB_F_DADDR:
		return register{e.Dreg, destinationType, size, nil}
	}
	return register{}
}

// load notes what a register holds. A load that nobody looks at is no harm in
// itself, but ends the rule for a packet that does not have what is loaded.
func (r *compat) load(e nfnetlink.Expr, held register) {
	if held.what == other {
		r.refuse(e.Name())
	}
	r.held = held
}

func (r *compat) bitwise(e nfnetlink.Bitwise) {
	flips := slices.ContainsFunc(e.Xor, func(b byte) bool { return b != 0 })
	if e.Sreg != r.held.number || flips || r.held.mask != nil || int(e.Len) != r.held.size || len(e.Mask) != r.held.size ||
		r.held.what != source && r.held.what != destination {
		r.refuse("bitwise")
		r.held = register{}
		return
	}
	r.held.number, r.held.mask = e.Dreg, e.Mask
}

func (r *compat) compare(e nfnetlink.Cmp) {
	const rtnLocal = 2 // RTN_LOCAL, in the machine's byte order
	typed := r.held.what == sourceType || r.held.what == destinationType
	operator := nfnetlink.Equal
	if typed {
		operator = nfnetlink.NotEqual
	}
	if e.Sreg != r.held.number || e.Op != operator || len(e.Data) == 0 || len(e.Data) > r.held.size {
		r.refuse("cmp")
		return
	}
	switch {
	case r.held.what == source:
		r.prefix(&r.rule.From, e.Data, "source")
	case r.held.what == destination:
		r.prefix(&r.rule.To, e.Data, "destination")
	case r.held.what == output:
		r.outBytes(e.Data)
	case r.held.what == transport:
		r.protocol(int(e.Data[0]))
	case typed && len(e.Data) == 4 && binary.NativeEndian.Uint32(e.Data) == rtnLocal:
		r.rule.NotFromLocal = r.rule.NotFromLocal || r.held.what == sourceType
		r.rule.NotToLocal = r.rule.NotToLocal || r.held.what == destinationType
	default:
		r.refuse("cmp")
	}
}

// prefix notes a match of the first bytes of an address.
func (r *compat) prefix(side *policy.Ranges, data []byte, what string) {
	length, contiguous := 8*len(data), true
	if r.held.mask != nil {
		length, contiguous = maskLength(r.held.mask[:len(data)])
	}
	address := make([]byte, 4)
	if r.family == policy.IPv6 {
		address = make([]byte, 16)
	}
	copy(address, data)
	a, ok := netip.AddrFromSlice(address)
	if !ok || !contiguous {
		r.refuse(what + " under a mask that is no prefix's")
		return
	}
	r.address(side, netip.PrefixFrom(a, length), what)
}

func (r *compat) masq(e nfnetlink.Masq) {
	if e.Flags&^nfnetlink.RangeRandomFully != 0 || e.ProtoMin != 0 || e.ProtoMax != 0 {
		r.refuse("masq")
	}
	r.rule.RandomFully = e.Flags != 0
	r.verdict(policy.Masquerade)
}

func (r *compat) immediate(e nfnetlink.Verdict) {
	switch e.Code {
	case nfnetlink.Return:
		r.verdict(policy.Return)
	case nfnetlink.Jump:
		r.jump(e.Chain)
	case nfnetlink.Goto:
		r.refuse("goto")
		r.jump(e.Chain)
	case nfnetlink.Accept:
		r.jump("ACCEPT") // as iptables calls it
	default:
		r.refuse("another verdict")
	}
}
