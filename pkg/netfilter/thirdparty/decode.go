// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// effect is what a rule does with the packets that it is about.
type effect int

const (
	nothing effect = iota // that ends the way of a packet through the chain
	masquerades
	accepts // no rule of the base chain sees the packet any more
	drops
	returns
	jumps
	goes
)

// decoded is a rule as far as it could be read.
type decoded struct {
	condition
	effect effect
	snat   bool
	target string // the chain that it leads to
}

// lookups are what a rule refers to by name or number.
type lookups interface {
	set(name string) (policy.Ranges, error)
	device(index uint32) (string, error)
}

// decode reads a rule as packets of the family meet it.
func decode(f policy.Family, rule nfnetlink.Rule, l lookups) decoded {
	d := decoder{family: f, lookups: l}
	d.comment = rule.Comment
	for _, e := range rule.Exprs {
		d.expression(e)
	}
	return d.decoded
}

type decoder struct {
	decoded
	lookups
	family policy.Family
	held   register
}

func (d *decoder) expression(e nfnetlink.Expr) {
	switch e := e.(type) {
	case nfnetlink.Payload:
		d.held = d.payload(e)
	case nfnetlink.Meta:
		if !e.Set {
			d.held = meta(e)
		}
	case nfnetlink.FIB:
		d.held = fib(e)
	case nfnetlink.Numgen:
		d.held = register{number: e.Dreg, what: other, name: "numgen", size: 4}
		if e.Random && e.Offset == 0 && e.Modulus == policy.ShareUnit {
			d.held.what = random
		}
	case nfnetlink.Byteorder:
		if e.Sreg == d.held.number && d.held.what == random {
			d.held.number = e.Dreg
		} else {
			d.held = register{number: e.Dreg, name: "byteorder"}
		}
	case nfnetlink.CT:
		d.held = ct(e)
	case nfnetlink.Bitwise:
		d.bitwise(e)
	case nfnetlink.Cmp:
		d.compare(e)
	case nfnetlink.CmpRange:
		d.between(e)
	case nfnetlink.Lookup:
		d.lookup(e)
	case nfnetlink.Match:
		d.match(e)
	case nfnetlink.Target:
		d.xtTarget(e)
	case nfnetlink.Masq:
		d.effect = masquerades
	case nfnetlink.Verdict:
		d.verdict(e)
	case nfnetlink.Immediate:
		d.held = register{number: e.Dreg, name: e.Name()}
	case nfnetlink.Unknown:
		d.unknown(e)
	}
}

// unknown knows some by name: source NAT, the only NAT that there is at this
// hook, and a statement that never ends a rule.
func (d *decoder) unknown(e nfnetlink.Unknown) {
	switch e.Kind {
	case "nat":
		d.effect, d.snat = masquerades, true
	case "log":
	default:
		d.refuse(e.Kind)
		d.held = register{name: e.Kind} // whatever it may have loaded
	}
}

// compare reads a comparison of what is held.
func (d *decoder) compare(e nfnetlink.Cmp) {
	h := d.held
	equal, unequal := e.Op == nfnetlink.Equal, e.Op == nfnetlink.NotEqual
	local := len(e.Data) == 4 && binary.NativeEndian.Uint32(e.Data) == unix.RTN_LOCAL
	switch {
	case e.Sreg != h.number || len(e.Data) == 0 || h.size > 0 && len(e.Data) > h.size:
		d.refuse(h.mismatched())
	case h.what == source || h.what == destination:
		d.address(h, e)
	case h.what == mark && len(e.Data) == 4 && (equal || unequal):
		// A packet without a mark has zero there, whatever the mask.
		zero := !slices.ContainsFunc(e.Data, func(b byte) bool { return b != 0 })
		d.marked(zero == equal)
	case h.what == state && len(e.Data) == 4 && (equal || unequal):
		has := uint32(newConnection)
		if h.mask != nil {
			has &= binary.NativeEndian.Uint32(h.mask)
		}
		d.never = d.never || (has == binary.NativeEndian.Uint32(e.Data)) != equal
	case h.mask != nil:
		d.refuse(h.name + " under a mask")
	case h.what == outputName && (equal || unequal):
		d.output(e.Data, unequal)
	case h.what == outputIndex && len(e.Data) == 4 && (equal || unequal):
		d.index(binary.NativeEndian.Uint32(e.Data), unequal)
	case h.what == transport && equal:
		d.number(e.Data[0])
	case h.what == network && (equal || unequal):
		protocol := map[policy.Family]byte{policy.IPv4: unix.NFPROTO_IPV4, policy.IPv6: unix.NFPROTO_IPV6}[d.family]
		d.never = d.never || (e.Data[0] == protocol) != equal
	case h.what == sourceType && local && (equal || unequal):
		d.local(equal)
	case h.what == destinationType && local && (equal || unequal):
		d.toLocal(equal)
	case h.what == random && len(e.Data) == 4 && e.Op == nfnetlink.Less:
		d.share(binary.BigEndian.Uint32(e.Data))
	default:
		d.refuse(h.name)
	}
}

// address reads a comparison of an address, or of its first bytes.
func (d *decoder) address(h register, e nfnetlink.Cmp) {
	every := policy.RangesOf(d.family.All())
	whole := len(every[0].From().AsSlice())
	low, high := make([]byte, whole), bytes.Repeat([]byte{0xff}, whole)
	copy(low, e.Data)
	for i := range e.Data {
		m := byte(0xff)
		if h.mask != nil {
			m = h.mask[i]
		}
		high[i] = e.Data[i] | ^m
	}
	first, last := addressOf(low), addressOf(high)
	matched := policy.Ranges{}
	if prefix, ok := netipx.IPRangeFrom(first, last).Prefix(); ok && prefix.Bits() == bitsOf(h.mask, len(e.Data)) {
		matched = policy.RangesOf(prefix)
	} else if !contiguous(h.mask) {
		d.refuse(h.name + " under a mask that is no prefix's")
		return
	}
	ordered := h.mask == nil && len(e.Data) == whole
	switch {
	case e.Op == nfnetlink.Equal:
	case e.Op == nfnetlink.NotEqual:
		matched = every.Without(matched)
	case ordered && e.Op == nfnetlink.GreaterOrEqual:
		matched = policy.Ranges{netipx.IPRangeFrom(first, every[0].To())}
	case ordered && e.Op == nfnetlink.LessOrEqual:
		matched = policy.Ranges{netipx.IPRangeFrom(every[0].From(), first)}
	default:
		d.refuse(h.name + " of another comparison")
		return
	}
	d.side(h.what, matched)
}

func (d *decoder) side(what quantity, r policy.Ranges) {
	if what == source {
		d.from(r)
	} else {
		d.to(r)
	}
}

// between reads a comparison with a range of addresses.
func (d *decoder) between(e nfnetlink.CmpRange) {
	h := d.held
	first, last := addressOf(e.From), addressOf(e.To)
	r := netipx.IPRangeFrom(first, last)
	every := policy.RangesOf(d.family.All())
	if e.Sreg != h.number || h.mask != nil || h.what != source && h.what != destination || !r.IsValid() || first.BitLen() != every[0].From().BitLen() {
		d.refuse("a range of " + h.name)
		return
	}
	matched := policy.Ranges{r}
	if e.Not {
		matched = every.Without(matched)
	}
	d.side(h.what, matched)
}

// lookup reads a match of an address against a set.
func (d *decoder) lookup(e nfnetlink.Lookup) {
	h := d.held
	whole := policy.RangesOf(d.family.All())
	if e.Sreg != h.number || h.mask != nil || h.what != source && h.what != destination || h.size != len(whole[0].From().AsSlice()) {
		d.refuse("set " + policy.Quote(e.Set))
		return
	}
	matched, err := d.set(e.Set)
	if err != nil {
		d.refuse("set " + policy.Quote(e.Set))
		return
	}
	if e.Not {
		matched = whole.Without(matched)
	}
	d.side(h.what, matched)
}

func (d *decoder) verdict(e nfnetlink.Verdict) {
	switch e.Code {
	case nfnetlink.Return:
		d.effect = returns
	case nfnetlink.Accept:
		d.effect = accepts
	case nfnetlink.Drop:
		d.effect = drops
	case nfnetlink.Jump:
		d.effect, d.target = jumps, e.Chain
	case nfnetlink.Goto:
		d.effect, d.target = goes, e.Chain
	case nfnetlink.Continue:
	default:
		d.refuse("another verdict")
	}
}

func addressOf(b []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(b)
	return a
}
