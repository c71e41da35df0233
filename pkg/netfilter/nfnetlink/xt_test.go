// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// native returns numbers as this machine has them in memory, each as wide as
// its type says.
func native(t testing.TB, numbers ...any) []byte {
	t.Helper()
	var b []byte
	for _, n := range numbers {
		var err error
		if b, err = binary.Append(b, binary.NativeEndian, n); err != nil {
			t.Fatal(err)
		}
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

func TestXt(t *testing.T) {
	ports := []byte{0x04, 0x00, 0x75, 0x2f} // 1024 to 29999
	for _, tt := range []struct {
		name string
		got  func() (any, error)
		want any
	}{
		{"addrtype", func() (any, error) {
			return DecodeAddrType(1, native(t, uint16(0), AddrTypeLocal, AddrTypeInvertDest))
		}, AddrType{Dest: AddrTypeLocal, Flags: AddrTypeInvertDest}},
		{"comment", func() (any, error) { return DecodeComment(0, padded([]byte("ip-masq"), 256)) }, "ip-masq"},
		{"statistic random", func() (any, error) {
			return DecodeStatistic(0, padded(native(t, uint16(0), uint16(1), uint32(1<<30)), 24))
		}, Statistic{Invert: true, Probability: 1 << 30}},
		{"statistic nth", func() (any, error) {
			return DecodeStatistic(0, padded(native(t, uint16(1), uint16(0), uint32(2), uint32(1)), 24))
		}, Statistic{Mode: StatisticNth, Every: 2, Packet: 1}},
		{"masquerade", func() (any, error) { return DecodeMasquerade(IPv4, 0, masquerade4(t, 0, ports...)) }, Masquerade{}},
		{"masquerade ports", func() (any, error) {
			return DecodeMasquerade(IPv4, 0, masquerade4(t, RangeProtoSpecified|RangeRandomFully, ports...))
		}, Masquerade{RangeProtoSpecified | RangeRandomFully, 1024, 29999}},
		{"masquerade unpadded", func() (any, error) {
			return DecodeMasquerade(IPv4, 0, masquerade4(t, RangeProtoRandom)[:20])
		}, Masquerade{Flags: RangeProtoRandom}},
		{"masquerade ipv6", func() (any, error) {
			return DecodeMasquerade(IPv6, 0, masquerade6(t, RangeProtoSpecified, ports...))
		}, Masquerade{RangeProtoSpecified, 1024, 29999}},
		{"masquerade ipv6, range 2", func() (any, error) {
			return DecodeMasquerade(IPv6, 0, padded(masquerade6(t, RangeProtoSpecified, ports...), 48))
		}, Masquerade{RangeProtoSpecified, 1024, 29999}},
	} {
		got, err := tt.got()
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

func TestXtRefuses(t *testing.T) {
	for _, tt := range []struct {
		want   string
		decode func() error
	}{
		{"decode xtables addrtype: revision 0, not 1",
			func() error { _, err := DecodeAddrType(0, make([]byte, 8)); return err }},
		{"decode xtables addrtype: 12 bytes, not 8",
			func() error { _, err := DecodeAddrType(1, make([]byte, 12)); return err }},
		{"decode xtables comment: 255 bytes, not 256",
			func() error { _, err := DecodeComment(0, make([]byte, 255)); return err }},
		{"decode xtables statistic: mode 2 or flags 0x0 unknown",
			func() error { _, err := DecodeStatistic(0, padded(native(t, uint16(2)), 24)); return err }},
		{"decode xtables statistic: mode 0 or flags 0x2 unknown",
			func() error { _, err := DecodeStatistic(0, padded(native(t, uint16(0), uint16(2)), 24)); return err }},
		{"decode xtables MASQUERADE: 0 ranges",
			func() error { _, err := DecodeMasquerade(IPv4, 0, make([]byte, 24)); return err }},
		{"decode xtables MASQUERADE: 19 bytes, not 20",
			func() error { _, err := DecodeMasquerade(IPv4, 0, make([]byte, 19)); return err }},
		{"decode xtables MASQUERADE: 42 bytes, not 44",
			func() error { _, err := DecodeMasquerade(IPv6, 0, make([]byte, 42)); return err }},
		{"decode xtables MASQUERADE: revision 1, not 0",
			func() error { _, err := DecodeMasquerade(IPv6, 1, make([]byte, 40)); return err }},
	} {
		if err := tt.decode(); err == nil || err.Error() != tt.want {
			t.Errorf("got %v, want %s", err, tt.want)
		}
	}
}
