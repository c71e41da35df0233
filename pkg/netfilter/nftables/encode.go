// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nflink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Flags of NAT (include/uapi/linux/netfilter/nf_nat.h).
const (
	natPorts       = 1 << 1 // NF_NAT_RANGE_PROTO_SPECIFIED
	natRandomFully = 1 << 4 // NF_NAT_RANGE_PROTO_RANDOM_FULLY
)

// header is where the addresses are in the header of a family.
type header struct {
	link     nflink.Family
	src, dst uint32 // offsets in bytes
	size     uint32
}

func headerOf(f policy.Family) header {
	if f == policy.IPv4 {
		return header{nflink.IPv4, 12, 16, 4} // RFC 791
	}
	return header{nflink.IPv6, 8, 24, 16} // RFC 8200
}

func protocolNumber(p policy.Protocol) byte {
	return map[policy.Protocol]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}[p]
}

// encode writes a rule as expressions. Its addresses, if it matches any, are in
// the named set; a jump leads to target.
func encode(f policy.Family, r policy.Rule, set, target string) []nflink.Expr {
	h := headerOf(f)
	var out []nflink.Expr
	add := func(e ...nflink.Expr) { out = append(out, e...) }
	if r.From != nil {
		add(nflink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: h.src, Len: h.size, Dreg: nflink.Reg1},
			nflink.Lookup{Set: set, Sreg: nflink.Reg1})
	}
	if r.To != nil {
		add(nflink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: h.dst, Len: h.size, Dreg: nflink.Reg1},
			nflink.Lookup{Set: set, Sreg: nflink.Reg1})
	}
	if r.Out != "" {
		add(nflink.Meta{Key: unix.NFT_META_OIFNAME, Reg: nflink.Reg1},
			nflink.Cmp{Op: nflink.Equal, Sreg: nflink.Reg1, Data: interfaceData(r.Out)})
	}
	for _, local := range []struct {
		not  bool
		flag uint32
	}{{r.NotFromLocal, unix.NFTA_FIB_F_SADDR}, {r.NotToLocal, unix.NFTA_FIB_F_DADDR}} {
		if local.not {
			add(nflink.FIB{Flags: local.flag, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: nflink.Reg1},
				nflink.Cmp{Op: nflink.NotEqual, Sreg: nflink.Reg1, Data: hostUint32(unix.RTN_LOCAL)})
		}
	}
	if r.Protocol != "" {
		add(nflink.Meta{Key: unix.NFT_META_L4PROTO, Reg: nflink.Reg1},
			nflink.Cmp{Op: nflink.Equal, Sreg: nflink.Reg1, Data: []byte{protocolNumber(r.Protocol)}})
	}
	if r.Share != 0 {
		add(nflink.Numgen{Random: true, Modulus: policy.ShareUnit, Dreg: nflink.Reg1},
			nflink.Byteorder{Sreg: nflink.Reg1, Dreg: nflink.Reg1, Op: unix.NFT_BYTEORDER_HTON, Len: 4, Size: 4},
			nflink.Cmp{Op: nflink.Less, Sreg: nflink.Reg1, Data: binary.BigEndian.AppendUint32(nil, r.Share)})
	}
	if r.Verdict != policy.Jump {
		add(nflink.Counter{})
	}
	switch r.Verdict {
	case policy.Jump:
		add(nflink.Verdict{Code: nflink.Jump, Chain: target})
	case policy.Return:
		add(nflink.Verdict{Code: nflink.Return})
	case policy.Masquerade:
		add(masquerade(r)...)
	}
	return out
}

func masquerade(r policy.Rule) []nflink.Expr {
	m := nflink.Masq{}
	if r.RandomFully {
		m.Flags |= natRandomFully
	}
	if r.Ports.IsZero() {
		return []nflink.Expr{m}
	}
	m.Flags |= natPorts
	m.ProtoMin, m.ProtoMax = nflink.Reg1, nflink.Reg1
	out := []nflink.Expr{nflink.Immediate{Dreg: nflink.Reg1, Data: binary.BigEndian.AppendUint16(nil, r.Ports.First)}}
	if r.Ports.Last != r.Ports.First {
		m.ProtoMax = nflink.Reg2
		out = append(out, nflink.Immediate{Dreg: nflink.Reg2, Data: binary.BigEndian.AppendUint16(nil, r.Ports.Last)})
	}
	return append(out, m)
}

// interfaceData is a name as the kernel compares it: whole, with its NULs, or
// its beginning where a + at the end makes it a wildcard.
func interfaceData(name string) []byte {
	if prefix, wild := strings.CutSuffix(name, "+"); wild {
		return []byte(prefix)
	}
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	return data
}

func interfaceName(data []byte) string {
	if len(data) == unix.IFNAMSIZ {
		name, _, _ := strings.Cut(string(data), "\x00")
		return name
	}
	return string(data) + "+"
}

func hostUint32(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }
