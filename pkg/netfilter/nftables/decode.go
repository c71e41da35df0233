// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// decoded is a rule with the names that stand in it.
type decoded struct {
	rule   policy.Rule
	set    string
	target string // of a jump
}

// decode reads a rule that encode could have written. Whatever else it is, in
// part or in whole, it is an alien; so is one with a set that is not ours.
func decode(f policy.Family, exprs []nfnetlink.Expr, sets func(string) (policy.Ranges, error)) (decoded, error) {
	d := decoder{header: headerOf(f), rest: exprs}
	for len(d.rest) > 0 && !d.alien {
		d.alien = !d.step()
	}
	if d.alien || d.out.rule.Verdict == "" {
		return decoded{rule: alienRule(exprs)}, nil
	}
	if d.out.set != "" {
		ranges, err := sets(d.out.set)
		if err != nil {
			return decoded{}, err
		}
		if ranges == nil {
			return decoded{rule: alienRule(exprs), set: d.out.set}, nil
		}
		if d.source {
			d.out.rule.From = ranges
		} else {
			d.out.rule.To = ranges
		}
	}
	return d.out, nil
}

func alienRule(exprs []nfnetlink.Expr) policy.Rule {
	text := "rule of"
	for _, e := range exprs {
		text += " " + e.Name()
	}
	return policy.Rule{Verdict: policy.Unrecognized, Text: text}
}

type decoder struct {
	header header
	rest   []nfnetlink.Expr
	out    decoded
	source bool // the set holds sources
	ports  []nfnetlink.Immediate
	alien  bool
}

// step takes the expressions of one match or statement off the rest, and
// reports whether they are any that encode writes.
func (d *decoder) step() bool {
	r := &d.out.rule
	if r.Verdict != "" {
		return false // something behind the end
	}
	e := d.rest[0]
	d.rest = d.rest[1:]
	switch e := e.(type) {
	case nfnetlink.Payload:
		l, ok := take[nfnetlink.Lookup](d)
		src := e.Offset == d.header.src
		if !ok || l.Not || l.Sreg != e.Dreg || d.out.set != "" || e.Base != unix.NFT_PAYLOAD_NETWORK_HEADER || e.Len != d.header.size ||
			!src && e.Offset != d.header.dst {
			return false
		}
		d.out.set, d.source = l.Set, src
		return true
	case nfnetlink.Meta:
		c, ok := take[nfnetlink.Cmp](d)
		return ok && !e.Set && c.Op == nfnetlink.Equal && c.Sreg == e.Reg && d.meta(e.Key, c.Data)
	case nfnetlink.FIB:
		c, ok := take[nfnetlink.Cmp](d)
		if !ok || c.Op != nfnetlink.NotEqual || c.Sreg != e.Dreg || e.Result != unix.NFT_FIB_RESULT_ADDRTYPE || !slices.Equal(c.Data, hostUint32(unix.RTN_LOCAL)) {
			return false
		}
		switch e.Flags {
		case unix.NFTA_FIB_F_SADDR:
			r.NotFromLocal = true
		case unix.NFTA_FIB_F_DADDR:
			r.NotToLocal = true
		default:
			return false
		}
		return true
	case nfnetlink.Numgen:
		return d.share(e)
	case nfnetlink.Counter:
		r.Connections = e.Packets
		return true
	case nfnetlink.Immediate:
		d.ports = append(d.ports, e)
		return true
	case nfnetlink.Masq:
		return d.masq(e)
	case nfnetlink.Verdict:
		return d.verdict(e)
	}
	return false
}

// take takes the next expression, if it is of the type.
func take[E nfnetlink.Expr](d *decoder) (E, bool) {
	var e E
	if len(d.rest) == 0 {
		return e, false
	}
	e, ok := d.rest[0].(E)
	d.rest = d.rest[1:]
	return e, ok
}

func (d *decoder) meta(key uint32, data []byte) bool {
	r := &d.out.rule
	switch key {
	case unix.NFT_META_OIFNAME:
		again := r.Out != ""
		r.Out = interfaceName(data)
		return !again
	case unix.NFT_META_L4PROTO:
		for _, p := range policy.Protocols() {
			if slices.Equal(data, []byte{protocolNumber(p)}) {
				again := r.Protocol != ""
				r.Protocol = p
				return !again
			}
		}
	}
	return false
}

func (d *decoder) share(n nfnetlink.Numgen) bool {
	b, okOrder := take[nfnetlink.Byteorder](d)
	c, okCmp := take[nfnetlink.Cmp](d)
	if !okOrder || !okCmp || d.out.rule.Share != 0 || !n.Random || n.Modulus != policy.ShareUnit || n.Offset != 0 ||
		b.Op != unix.NFT_BYTEORDER_HTON || c.Op != nfnetlink.Less || len(c.Data) != 4 {
		return false
	}
	d.out.rule.Share = binary.BigEndian.Uint32(c.Data)
	return d.out.rule.Share != 0
}

func (d *decoder) masq(m nfnetlink.Masq) bool {
	r := &d.out.rule
	r.Verdict = policy.Masquerade
	r.RandomFully = m.Flags&natRandomFully != 0
	if m.Flags&^(natRandomFully|natPorts) != 0 {
		return false
	}
	if m.Flags&natPorts == 0 {
		return len(d.ports) == 0 && m.ProtoMin == 0 && m.ProtoMax == 0
	}
	// One port is in one register for both ends, or in two.
	regs := slices.Compact([]nfnetlink.Register{m.ProtoMin, m.ProtoMax})
	if m.ProtoMin != nfnetlink.Reg1 || len(d.ports) != len(regs) || len(regs) == 2 && m.ProtoMax != nfnetlink.Reg2 {
		return false
	}
	for i, p := range d.ports {
		if p.Dreg != regs[i] || len(p.Data) < 2 {
			return false
		}
	}
	port := func(p nfnetlink.Immediate) uint16 { return binary.BigEndian.Uint16(p.Data) }
	r.Ports = policy.PortRange{First: port(d.ports[0]), Last: port(d.ports[len(d.ports)-1])}
	return true
}

func (d *decoder) verdict(v nfnetlink.Verdict) bool {
	switch v.Code {
	case nfnetlink.Jump:
		d.out.rule.Verdict, d.out.target = policy.Jump, v.Chain
	case nfnetlink.Return:
		d.out.rule.Verdict = policy.Return
	default:
		return false
	}
	return true
}
