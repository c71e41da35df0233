// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// machine runs the expressions of a rule as the kernel does, as far as they
// look at what a policy.Packet has.
type machine struct {
	family    policy.Family
	packet    policy.Packet
	registers [16][]byte
	verdict   string // "" while none
	matches   bool
	unknown   bool // something was met that it cannot run
}

func (m *machine) run(exprs []nfnetlink.Expr) {
	m.matches = true
	for _, e := range exprs {
		m.step(e)
		if !m.matches || m.unknown || m.verdict != "" {
			return
		}
	}
}

func (m *machine) step(e nfnetlink.Expr) {
	switch e := e.(type) {
	case nfnetlink.Payload:
		h := m.header()
		if e.Base != unix.NFT_PAYLOAD_NETWORK_HEADER || int(e.Offset+e.Len) > len(h) {
			m.unknown = true
			return
		}
		m.load(e.Dreg, h[e.Offset:e.Offset+e.Len])
	case nfnetlink.Meta:
		name := make([]byte, 16)
		copy(name, m.packet.Out)
		switch e.Key {
		case unix.NFT_META_OIFNAME:
			m.load(e.Dreg, name)
		case unix.NFT_META_L4PROTO:
			m.load(e.Dreg, []byte{protocolByte(m.packet.Protocol)})
		default:
			m.unknown = true
		}
	case nfnetlink.FIB:
		local := map[bool]uint32{true: unix.RTN_LOCAL, false: unix.RTN_UNICAST}
		switch {
		case e.Result != unix.NFT_FIB_RESULT_ADDRTYPE:
			m.unknown = true
		case e.Flags == unix.NFTA_FIB_F_SADDR:
			m.load(e.Dreg, binary.NativeEndian.AppendUint32(nil, local[m.packet.SrcLocal]))
		case e.Flags == unix.NFTA_FIB_F_DADDR:
			m.load(e.Dreg, binary.NativeEndian.AppendUint32(nil, local[m.packet.DstLocal]))
		default:
			m.unknown = true
		}
	case nfnetlink.Bitwise:
		from := m.registers[e.Sreg]
		if len(from) < int(e.Len) || len(e.Mask) < int(e.Len) || len(e.Xor) < int(e.Len) {
			m.unknown = true
			return
		}
		out := make([]byte, e.Len)
		for i := range out {
			out[i] = from[i]&e.Mask[i] ^ e.Xor[i]
		}
		m.load(e.Dreg, out)
	case nfnetlink.Cmp:
		have := m.registers[e.Sreg]
		if len(have) < len(e.Data) {
			m.unknown = true
			return
		}
		c := bytes.Compare(have[:len(e.Data)], e.Data)
		m.matches = e.Op == nfnetlink.Equal && c == 0 || e.Op == nfnetlink.NotEqual && c != 0 || e.Op == nfnetlink.Less && c < 0
	case nfnetlink.Match:
		m.match(e)
	case nfnetlink.Target:
		m.verdict = "masquerade"
	case nfnetlink.Masq:
		m.verdict = "masquerade"
	case nfnetlink.Counter:
	case nfnetlink.Verdict:
		m.verdict = map[nfnetlink.VerdictCode]string{nfnetlink.Return: "return", nfnetlink.Jump: "jump"}[e.Code]
		m.unknown = m.verdict == ""
	}
}

func (m *machine) match(e nfnetlink.Match) {
	if e.Xt != "addrtype" || e.Rev != 1 {
		return // comments match; what else there is, rules are compared without
	}
	bits := func(local bool) uint16 {
		if local {
			return 1 << unix.RTN_LOCAL
		}
		return 1 << unix.RTN_UNICAST
	}
	source, dest := binary.NativeEndian.Uint16(e.Info), binary.NativeEndian.Uint16(e.Info[2:])
	flags := binary.NativeEndian.Uint32(e.Info[4:])
	if source != 0 {
		m.matches = m.matches && (source&bits(m.packet.SrcLocal) != 0) != (flags&1 != 0)
	}
	if dest != 0 {
		m.matches = m.matches && (dest&bits(m.packet.DstLocal) != 0) != (flags&2 != 0)
	}
}

// header is the packet's IP header (RFC 791, RFC 8200).
func (m *machine) header() []byte {
	if m.family == policy.IPv6 {
		h := make([]byte, 40)
		h[6] = protocolByte(m.packet.Protocol)
		copy(h[8:], m.packet.Src.AsSlice())
		copy(h[24:], m.packet.Dst.AsSlice())
		return h
	}
	h := make([]byte, 20)
	h[9] = protocolByte(m.packet.Protocol)
	copy(h[12:], m.packet.Src.AsSlice())
	copy(h[16:], m.packet.Dst.AsSlice())
	return h
}

// load fills a register of 16 bytes with zeros behind the value.
func (m *machine) load(r nfnetlink.Register, b []byte) {
	m.registers[r] = append(bytes.Clone(b), make([]byte, 16)...)[:16]
}

func protocolByte(p policy.Protocol) byte {
	return map[policy.Protocol]byte{"tcp": 6, "udp": 17, "sctp": 132, "icmp": 1}[p]
}

func packetGen(f policy.Family) *rapid.Generator[policy.Packet] {
	return rapid.Custom(func(t *rapid.T) policy.Packet {
		address := func(label string) netip.Addr {
			b := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 10, 128, 255}), 16, 16).Draw(t, label)
			if f == policy.IPv6 {
				return netip.AddrFrom16([16]byte(b))
			}
			return netip.AddrFrom4([4]byte(b))
		}
		return policy.Packet{
			Src: address("source"), Dst: address("destination"),
			Out:      rapid.SampledFrom([]string{"eth0", "eth01", "eth", "e", "lo", "a234567890bcdef"}).Draw(t, "out"),
			SrcLocal: rapid.Bool().Draw(t, "source local"), DstLocal: rapid.Bool().Draw(t, "destination local"),
			Protocol: rapid.SampledFrom([]policy.Protocol{"tcp", "udp", "sctp", "icmp"}).Draw(t, "protocol"),
		}
	})
}

// near makes a packet one that the rule matches, or nearly: few would otherwise.
func near(t *rapid.T, r policy.Rule, p policy.Packet) policy.Packet {
	if len(r.To) > 0 {
		p.Dst = rapid.SampledFrom([]netip.Addr{r.To[0].From(), r.To[0].To()}).Draw(t, "near destination")
	}
	if len(r.From) > 0 {
		p.Src = rapid.SampledFrom([]netip.Addr{r.From[0].From(), r.From[0].To()}).Draw(t, "near source")
	}
	if r.Out != "" {
		p.Out = strings.TrimSuffix(r.Out, "+")
		p.Out = rapid.SampledFrom([]string{p.Out, p.Out + "1", p.Out[:len(p.Out)-1]}).Draw(t, "near interface")
		p.Out = p.Out[:min(len(p.Out), 15)]
	}
	if r.Protocol != "" && rapid.Bool().Draw(t, "same protocol") {
		p.Protocol = r.Protocol
	}
	return p
}

// exprGen draws expressions that are nearly those of iptables-nft: the values
// are from those that it uses, and from beside them.
func exprGen() *rapid.Generator[nfnetlink.Expr] {
	reg := rapid.SampledFrom([]nfnetlink.Register{1, 1, 1, 2})
	data := rapid.Custom(func(t *rapid.T) []byte {
		if rapid.Bool().Draw(t, "name") {
			return []byte(rapid.SampledFrom([]string{"eth0\x00", "eth", "eth0\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", "a234567890bcdef\x00",
				"\x02\x00\x00\x00", "\x06", "\x11", "\x01", "e\x00x", "\x00", "eth+\x00"}).Draw(t, "data"))
		}
		return rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 10, 128, 255}), 1, 16).Draw(t, "data")
	})
	mask := func(n int) *rapid.Generator[[]byte] {
		return rapid.Custom(func(t *rapid.T) []byte {
			m := make([]byte, n)
			for i := range m {
				m[i] = rapid.SampledFrom([]byte{255, 255, 255, 254, 128, 0}).Draw(t, "mask")
			}
			return m
		})
	}
	return rapid.Custom(func(t *rapid.T) nfnetlink.Expr {
		switch rapid.IntRange(0, 9).Draw(t, "kind") {
		case 0, 1:
			return nfnetlink.Payload{
				Base:   rapid.SampledFrom([]uint32{unix.NFT_PAYLOAD_NETWORK_HEADER, unix.NFT_PAYLOAD_NETWORK_HEADER, unix.NFT_PAYLOAD_TRANSPORT_HEADER}).Draw(t, "base"),
				Offset: rapid.SampledFrom([]uint32{8, 9, 12, 16, 24}).Draw(t, "offset"),
				Len:    rapid.SampledFrom([]uint32{1, 2, 3, 4, 16}).Draw(t, "length"), Dreg: reg.Draw(t, "register")}
		case 2:
			key := rapid.SampledFrom([]uint32{unix.NFT_META_OIFNAME, unix.NFT_META_L4PROTO, unix.NFT_META_MARK}).Draw(t, "key")
			return nfnetlink.Meta{Key: key, Dreg: reg.Draw(t, "register")}
		case 3:
			n := rapid.SampledFrom([]int{1, 3, 4, 16}).Draw(t, "length")
			xor := make([]byte, n)
			xor[0] = rapid.SampledFrom([]byte{0, 0, 0, 1}).Draw(t, "xor")
			return nfnetlink.Bitwise{Sreg: reg.Draw(t, "from"), Dreg: reg.Draw(t, "to"), Len: uint32(n), Mask: mask(n).Draw(t, "mask"), Xor: xor}
		case 4, 5, 6:
			op := rapid.SampledFrom([]nfnetlink.CmpOp{nfnetlink.Equal, nfnetlink.Equal, nfnetlink.NotEqual, nfnetlink.Less}).Draw(t, "operator")
			return nfnetlink.Cmp{Op: op, Sreg: reg.Draw(t, "register"), Data: data.Draw(t, "data")}
		case 7:
			flags := rapid.SampledFrom([]uint32{unix.NFTA_FIB_F_SADDR, unix.NFTA_FIB_F_DADDR, unix.NFTA_FIB_F_DADDR | unix.NFTA_FIB_F_OIF}).Draw(t, "flags")
			return nfnetlink.FIB{Flags: flags, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: reg.Draw(t, "register")}
		case 8:
			info := binary.NativeEndian.AppendUint16(nil, rapid.SampledFrom([]uint16{0, 4, 2}).Draw(t, "source"))
			info = binary.NativeEndian.AppendUint16(info, rapid.SampledFrom([]uint16{0, 4, 6}).Draw(t, "destination"))
			return nfnetlink.Match{Xt: "addrtype", Rev: 1, Info: binary.NativeEndian.AppendUint32(info, rapid.Uint32Range(0, 4).Draw(t, "flags"))}
		default:
			return rapid.SampledFrom([]nfnetlink.Expr{nfnetlink.Counter{}, nfnetlink.Lookup{Set: "s", Sreg: 1}, nfnetlink.Unknown{Kind: "quota"},
				nfnetlink.Match{Xt: "comment", Info: make([]byte, 256)}, nfnetlink.Masq{}, nfnetlink.Immediate{}}).Draw(t, "other")
		}
	})
}

// phraseGen draws a load with what makes sense of it, as iptables-nft writes it.
func phraseGen(f policy.Family) *rapid.Generator[[]nfnetlink.Expr] {
	return rapid.Custom(func(t *rapid.T) []nfnetlink.Expr {
		op := rapid.SampledFrom([]nfnetlink.CmpOp{nfnetlink.Equal, nfnetlink.Equal, nfnetlink.Equal, nfnetlink.NotEqual}).Draw(t, "operator")
		switch rapid.IntRange(0, 3).Draw(t, "phrase") {
		case 0:
			name := rapid.SampledFrom([]string{"eth0\x00", "eth", "lo\x00\x00\x00", "a234567890bcdef\x00", "e\x00x"}).Draw(t, "name")
			return []nfnetlink.Expr{nfnetlink.Meta{Key: unix.NFT_META_OIFNAME, Dreg: 1}, nfnetlink.Cmp{Op: op, Sreg: 1, Data: []byte(name)}}
		case 1:
			p := rapid.SampledFrom([]byte{6, 17, 132, 1}).Draw(t, "protocol")
			return []nfnetlink.Expr{nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Dreg: 1}, nfnetlink.Cmp{Op: op, Sreg: 1, Data: []byte{p}}}
		case 2:
			flags := rapid.SampledFrom([]uint32{unix.NFTA_FIB_F_SADDR, unix.NFTA_FIB_F_DADDR}).Draw(t, "flags")
			local := binary.NativeEndian.AppendUint32(nil, rapid.SampledFrom([]uint32{2, 2, 2, 3}).Draw(t, "type"))
			return []nfnetlink.Expr{nfnetlink.FIB{Flags: flags, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: 1},
				nfnetlink.Cmp{Op: nfnetlink.NotEqual - op, Sreg: 1, Data: local}}
		}
		offsets, size := []uint32{12, 16}, uint32(4)
		if f == policy.IPv6 {
			offsets, size = []uint32{8, 24}, 16
		}
		n := rapid.Uint32Range(1, size).Draw(t, "length")
		mask := make([]byte, n)
		bits := rapid.IntRange(0, int(8*n)).Draw(t, "bits")
		for i := range bits {
			mask[i/8] |= 0x80 >> (i % 8)
		}
		data := rapid.SliceOfN(rapid.SampledFrom([]byte{0, 1, 10, 128, 255}), int(n), int(n)).Draw(t, "address")
		phrase := []nfnetlink.Expr{nfnetlink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: rapid.SampledFrom(offsets).Draw(t, "offset"), Len: n, Dreg: 1}}
		if rapid.Bool().Draw(t, "masked") {
			for i := range data {
				data[i] &= mask[i]
			}
			cut := nfnetlink.Bitwise{Sreg: 1, Dreg: 1, Len: n, Mask: mask, Xor: make([]byte, n)}
			phrase = append(phrase, cut)
			if rapid.IntRange(0, 4).Draw(t, "masked again") == 0 {
				cut.Mask = bytes.Repeat([]byte{255}, int(n))
				phrase = append(phrase, cut)
			}
		}
		return append(phrase, nfnetlink.Cmp{Op: op, Sreg: 1, Data: data})
	})
}

// decodeProperty draws a rule and packets, and holds what is read of the rule to
// what the kernel does with the packets.
func decodeProperty(t *rapid.T) {
	f := rapid.SampledFrom(policy.Families()).Draw(t, "family")
	exprs := slices.Concat(rapid.SliceOfN(phraseGen(f), 0, 3).Draw(t, "phrases")...)
	for _, e := range rapid.SliceOfN(exprGen(), 0, 3).Draw(t, "expressions") {
		exprs = slices.Insert(exprs, rapid.IntRange(0, len(exprs)).Draw(t, "at"), e)
	}
	verdict := rapid.SampledFrom([]nfnetlink.Verdict{{Code: nfnetlink.Return}, {Code: nfnetlink.Jump, Chain: "X"}}).Draw(t, "verdict")
	exprs = append(exprs, verdict)
	e := decode(f, nfnetlink.Rule{Exprs: exprs}, nil)
	if e.Verdict == policy.Unrecognized {
		if e.Text == "" {
			t.Fatal("an unrecognized rule without a text")
		}
		return
	}
	for i := range 8 {
		p := packetGen(f).Draw(t, "packet")
		if i%2 == 0 {
			p = near(t, e.Rule, p)
		}
		m := machine{family: f, packet: p}
		m.run(exprs)
		if m.unknown {
			t.Fatalf("%v was read of %+v, which is more than is known", e.Rule, exprs)
		}
		if m.matches != e.Matches(p) || m.matches && m.verdict != string(e.Verdict) {
			t.Fatalf("%+v\nwas read as %v,\nwhich says %v of %+v; the kernel says %v", exprs, e.Rule, e.Matches(p), p, m.matches)
		}
	}
}

func TestDecode(t *testing.T) {
	for range 50 { // a rule takes microseconds
		rapid.Check(t, decodeProperty)
	}
}

func FuzzDecode(f *testing.F) { f.Fuzz(rapid.MakeFuzz(decodeProperty)) }
