// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"encoding/binary"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Flags of NAT (include/uapi/linux/netfilter/nf_nat.h).
const (
	natPorts       = 1 << 1 // NF_NAT_RANGE_PROTO_SPECIFIED
	natRandomFully = 1 << 4 // NF_NAT_RANGE_PROTO_RANDOM_FULLY
)

// header is where the addresses are in the header of a family.
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

// encode writes a rule as expressions. Its addresses, if it matches any, are in
// the named set; a jump leads to target.
func encode(f policy.Family, r policy.Rule, set, target string) []nfnetlink.Expr {
	h := headerOf(f)
	var out []nfnetlink.Expr
	add := func(e ...nfnetlink.Expr) { out = append(out, e...) }
	if r.From != nil {
		add(nfnetlink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: h.src, Len: h.size, Dreg: nfnetlink.Reg1},
			nfnetlink.Lookup{Set: set, Sreg: nfnetlink.Reg1})
	}
	if r.To != nil {
		add(nfnetlink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: h.dst, Len: h.size, Dreg: nfnetlink.Reg1},
			nfnetlink.Lookup{Set: set, Sreg: nfnetlink.Reg1})
	}
	if r.Out != "" {
		add(nfnetlink.Meta{Key: unix.NFT_META_OIFNAME, Reg: nfnetlink.Reg1},
			nfnetlink.Cmp{Op: nfnetlink.Equal, Sreg: nfnetlink.Reg1, Data: interfaceData(r.Out)})
	}
	for _, local := range []struct {
		not  bool
		flag uint32
	}{{r.NotFromLocal, unix.NFTA_FIB_F_SADDR}, {r.NotToLocal, unix.NFTA_FIB_F_DADDR}} {
		if local.not {
			add(nfnetlink.FIB{Flags: local.flag, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: nfnetlink.Reg1},
				nfnetlink.Cmp{Op: nfnetlink.NotEqual, Sreg: nfnetlink.Reg1, Data: hostUint32(unix.RTN_LOCAL)})
		}
	}
	if r.Protocol != "" {
		add(nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Reg: nfnetlink.Reg1},
			nfnetlink.Cmp{Op: nfnetlink.Equal, Sreg: nfnetlink.Reg1, Data: []byte{protocolNumber(r.Protocol)}})
	}
	if r.Share != 0 {
		add(nfnetlink.Numgen{Random: true, Modulus: policy.ShareUnit, Dreg: nfnetlink.Reg1},
			nfnetlink.Byteorder{Sreg: nfnetlink.Reg1, Dreg: nfnetlink.Reg1, Op: unix.NFT_BYTEORDER_HTON, Len: 4, Size: 4},
			nfnetlink.Cmp{Op: nfnetlink.Less, Sreg: nfnetlink.Reg1, Data: binary.BigEndian.AppendUint32(nil, r.Share)})
	}
	if r.Verdict != policy.Jump {
		add(nfnetlink.Counter{})
	}
	switch r.Verdict {
	case policy.Jump:
		add(nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: target})
	case policy.Return:
		add(nfnetlink.Verdict{Code: nfnetlink.Return})
	case policy.Masquerade:
		add(masquerade(r)...)
	}
	return out
}

func masquerade(r policy.Rule) []nfnetlink.Expr {
	m := nfnetlink.Masq{}
	if r.RandomFully {
		m.Flags |= natRandomFully
	}
	if r.Ports.IsZero() {
		return []nfnetlink.Expr{m}
	}
	m.Flags |= natPorts
	m.ProtoMin, m.ProtoMax = nfnetlink.Reg1, nfnetlink.Reg1
	out := []nfnetlink.Expr{nfnetlink.Immediate{Dreg: nfnetlink.Reg1, Data: binary.BigEndian.AppendUint16(nil, r.Ports.First)}}
	if r.Ports.Last != r.Ports.First {
		m.ProtoMax = nfnetlink.Reg2
		out = append(out, nfnetlink.Immediate{Dreg: nfnetlink.Reg2, Data: binary.BigEndian.AppendUint16(nil, r.Ports.Last)})
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
