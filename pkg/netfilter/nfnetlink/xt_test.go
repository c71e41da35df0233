// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// native returns numbers as this machine has them in memory, each as wide as
// its type says.
func native(t testing.TB, numbers ...any) []byte {
	t.Helper()
	var b []byte
	for _, n := range numbers {
		b = assert.Must(binary.Append(b, binary.NativeEndian, n))(t)
	}
	return b
}

func padded(b []byte, size int) []byte { return append(b, make([]byte, size-len(b))...) }

// Masquerade structures as the kernel gives them out on 64 bits.
func masquerade4(t testing.TB, flags uint32, ports ...byte) []byte {
	b := native(t, uint32(1), flags, uint32(0), uint32(0))
	return padded(append(b, ports...), 24)
}

func masquerade6(t testing.TB, flags uint32, ports ...byte) []byte {
	b := padded(native(t, flags), 36)
	return padded(append(b, ports...), 40)
}

// TestMark: meta mark and 0x0000c000 == 0x4000
func TestMark(t *testing.T) {
	for _, op := range []CmpOp{Equal, NotEqual} {
		d := Decode(IPv4, Rule{Exprs: []Expr{
			Meta{Key: unix.NFT_META_MARK, Dreg: Reg1},
			Bitwise{Sreg: Reg1, Dreg: Reg1, Len: 4, Mask: native(t, uint32(0xc000)), Xor: make([]byte, 4)},
			Cmp{Op: op, Sreg: Reg1, Data: native(t, uint32(0x4000))},
		}}, nil)
		assert.Equal(t, "decoded", d, Decoded{Conditions: []Condition{{Field: Mark, Not: op == NotEqual, Value: 0x4000, Mask: 0xc000}}})
	}
}

// TestEndOfRule: the kernel does not evaluate what follows the statement that ends a rule.
func TestEndOfRule(t *testing.T) {
	for _, code := range []VerdictCode{Continue, Return} {
		d := Decode(IPv4, Rule{Exprs: []Expr{Masq{}, Verdict{Code: code}, Unknown{"log"}}}, nil)
		assert.Equal(t, "decoded", d, Decoded{Statement: DoMasq, Unrecognized: []string{Verdict{}.Name() + " after masquerade"}})
	}
}

func TestXtables(t *testing.T) {
	ports := []byte{0x04, 0x00, 0x75, 0x2f} // 1024 to 29999
	match := func(name string, rev uint32, info []byte) Expr { return Match{Xt: name, Rev: rev, Info: info} }
	target := func(rev uint32, info []byte) Expr { return Target{Xt: "MASQUERADE", Rev: rev, Info: info} }
	snat := func(rev uint32, info ...[]byte) Expr {
		return Target{Xt: "SNAT", Rev: rev, Info: slices.Concat(info...)}
	}
	address4, address6 := []byte{192, 0, 2, 1}, append([]byte{0x20, 1}, make([]byte, 14)...)
	masquerade := func(m Translation) Decoded { return Decoded{Statement: DoMasq, To: m} }
	meets := func(c ...Condition) Decoded { return Decoded{Conditions: c} }
	unknown := func(part string) Decoded { return Decoded{Unrecognized: []string{part}} }
	newTarget := func(part string) Decoded {
		return Decoded{Statement: DoMasq, Unrecognized: []string{part}}
	}
	for name, tt := range map[string]struct {
		family Family
		expr   Expr
		want   Decoded
	}{
		"addrtype": {IPv4, match("addrtype", 1, native(t, uint16(0), uint16(1<<2), uint32(2))),
			meets(Condition{Field: DestinationLocal, Not: true})},
		"addrtype of both": {IPv4, match("addrtype", 1, native(t, uint16(1<<2), uint16(1<<2), uint32(1))),
			meets(Condition{Field: SourceLocal, Not: true}, Condition{Field: DestinationLocal})},
		"addrtype of an interface": {IPv4, match("addrtype", 1, native(t, uint16(0), uint16(1<<2), uint32(8))),
			Decoded{Conditions: []Condition{{Field: DestinationLocal}}, Unrecognized: []string{"match addrtype of another kind"}}},
		"addrtype unicast":   {IPv4, match("addrtype", 1, native(t, uint16(2), uint16(0), uint32(0))), unknown("match addrtype of another kind")},
		"comment":            {IPv4, match("comment", 0, padded([]byte("ip-masq"), 256)), Decoded{Comment: "ip-masq"}},
		"mark":               {IPv4, match("mark", 1, native(t, uint32(0x4000), uint32(0x4000), uint32(0))), meets(Condition{Field: Mark, Value: 0x4000, Mask: 0x4000})},
		"no mark":            {IPv4, match("mark", 1, padded(native(t, uint32(0x4000), uint32(0x4000), uint8(1)), 12)), meets(Condition{Field: Mark, Not: true, Value: 0x4000, Mask: 0x4000})},
		"statistic random":   {IPv4, match("statistic", 0, padded(native(t, uint16(0), uint16(0), uint32(1<<30)), 24)), meets(Condition{Field: Probability, Value: 1 << 30})},
		"statistic inverted": {IPv4, match("statistic", 0, padded(native(t, uint16(0), uint16(1), uint32(1<<30)), 24)), unknown("match statistic")},
		"statistic nth":      {IPv4, match("statistic", 0, padded(native(t, uint16(1), uint16(0), uint32(2), uint32(1)), 24)), unknown("match statistic")},
		"statistic mode":     {IPv4, match("statistic", 0, padded(native(t, uint16(2)), 24)), unknown("match statistic")},
		"statistic flags":    {IPv4, match("statistic", 0, padded(native(t, uint16(0), uint16(2)), 24)), unknown("match statistic")},
		"masquerade":         {IPv4, target(0, masquerade4(t, 0, ports...)), masquerade(Translation{})},
		"masquerade ports":   {IPv4, target(0, masquerade4(t, unix.NF_NAT_RANGE_PROTO_SPECIFIED|unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, ports...)), masquerade(Translation{unix.NF_NAT_RANGE_PROTO_SPECIFIED | unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, netip.Addr{}, 1024, 29999})},
		"snat": {IPv4, snat(0, native(t, uint32(1), uint32(unix.NF_NAT_RANGE_MAP_IPS)), address4, address4, make([]byte, 8)),
			Decoded{Statement: DoSNAT, To: Translation{Address: netip.AddrFrom4([4]byte(address4))}}},
		"snat ports": {IPv6, snat(1, native(t, uint32(unix.NF_NAT_RANGE_MAP_IPS|unix.NF_NAT_RANGE_PROTO_SPECIFIED)), address6, address6, ports),
			Decoded{Statement: DoSNAT, To: Translation{unix.NF_NAT_RANGE_PROTO_SPECIFIED, netip.AddrFrom16([16]byte(address6)), 1024, 29999}}},
		"snat to several": {IPv4, snat(0, native(t, uint32(1), uint32(unix.NF_NAT_RANGE_MAP_IPS)), address4, []byte{192, 0, 2, 9}, make([]byte, 8)),
			Decoded{Statement: DoSNAT}},
		"snat of another revision": {IPv6, snat(2, native(t, uint32(unix.NF_NAT_RANGE_MAP_IPS)), address6, address6, ports), Decoded{Statement: DoSNAT}},
		"masquerade unpadded":      {IPv4, target(0, masquerade4(t, unix.NF_NAT_RANGE_PROTO_RANDOM)[:20]), masquerade(Translation{Flags: unix.NF_NAT_RANGE_PROTO_RANDOM})},
		"masquerade ipv6":          {IPv6, target(0, masquerade6(t, unix.NF_NAT_RANGE_PROTO_SPECIFIED, ports...)), masquerade(Translation{unix.NF_NAT_RANGE_PROTO_SPECIFIED, netip.Addr{}, 1024, 29999})},
		"masquerade ipv6, range 2": {IPv6, target(0, padded(masquerade6(t, unix.NF_NAT_RANGE_PROTO_SPECIFIED, ports...), 48)), masquerade(Translation{unix.NF_NAT_RANGE_PROTO_SPECIFIED, netip.Addr{}, 1024, 29999})},

		"addrtype revision":   {IPv4, match("addrtype", 0, make([]byte, 8)), unknown("match addrtype")},
		"addrtype size":       {IPv4, match("addrtype", 1, make([]byte, 12)), unknown("match addrtype")},
		"comment size":        {IPv4, match("comment", 0, make([]byte, 255)), unknown("match comment")},
		"masquerade ranges":   {IPv4, target(0, make([]byte, 24)), newTarget("target MASQUERADE")},
		"masquerade size":     {IPv4, target(0, make([]byte, 19)), newTarget("target MASQUERADE")},
		"masquerade size 6":   {IPv6, target(0, make([]byte, 42)), newTarget("target MASQUERADE")},
		"masquerade revision": {IPv6, target(1, make([]byte, 40)), newTarget("target MASQUERADE")},
	} {
		got := Decode(tt.family, Rule{Exprs: []Expr{tt.expr}}, nil)
		assert.Equal(t, name, got, tt.want, cmpopts.EquateEmpty())
	}
}
