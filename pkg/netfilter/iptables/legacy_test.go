// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"encoding/binary"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"strings"
	"testing"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The structures of the kernel (linux/netfilter_ipv4/ip_tables.h and
// netfilter_ipv6/ip6_tables.h), laid out by the compiler.
type (
	iptEntry struct {
		Src, Dst, Smsk, Dmsk     [4]byte
		Iniface, Outiface        [16]byte
		InifaceMask, OutMask     [16]byte
		Proto                    uint16
		Flags, Invflags          uint8
		Nfcache                  uint32
		TargetOffset, NextOffset uint16
		Comefrom                 uint32
		Packets, Bytes           uint64
	}
	ip6tEntry struct {
		Src, Dst, Smsk, Dmsk     [16]byte
		Iniface, Outiface        [16]byte
		InifaceMask, OutMask     [16]byte
		Proto                    uint16
		Tos, Flags, Invflags     uint8
		_                        [3]byte
		Nfcache                  uint32
		TargetOffset, NextOffset uint16
		Comefrom                 uint32
		Packets, Bytes           uint64
	}
	getinfo struct {
		Name                 [32]byte
		ValidHooks           uint32
		HookEntry, Underflow [5]uint32
		NumEntries, Size     uint32
	}
	entriesRequest struct {
		Name    [32]byte
		Size    uint32
		Entries [0]iptEntry
		_       uint64 // what the Entries are aligned to
	}
)

func TestLayout(t *testing.T) {
	var v4 iptEntry
	var v6 ip6tEntry
	want4 := layout{address: 4, interfaces: int(unsafe.Offsetof(v4.Iniface)), protocol: int(unsafe.Offsetof(v4.Proto)),
		flags: int(unsafe.Offsetof(v4.Flags)), gotoFlag: 2, plainFlags: 2,
		targetAt:  int(unsafe.Offsetof(v4.TargetOffset)),
		packetsAt: int(unsafe.Offsetof(v4.Packets)), size: int(unsafe.Sizeof(v4))}
	want6 := layout{address: 16, interfaces: int(unsafe.Offsetof(v6.Iniface)), protocol: int(unsafe.Offsetof(v6.Proto)),
		flags: int(unsafe.Offsetof(v6.Flags)), gotoFlag: 4, plainFlags: 5, protoFlag: 1,
		targetAt:  int(unsafe.Offsetof(v6.TargetOffset)),
		packetsAt: int(unsafe.Offsetof(v6.Packets)), size: int(unsafe.Sizeof(v6))}
	if got := layoutOf(policy.IPv4); got != want4 {
		t.Errorf("IPv4: %+v, not %+v", got, want4)
	}
	if got := layoutOf(policy.IPv6); got != want6 {
		t.Errorf("IPv6: %+v, not %+v", got, want6)
	}
	if unsafe.Offsetof(v4.Invflags) != unsafe.Offsetof(v4.Flags)+1 || unsafe.Offsetof(v6.Invflags) != unsafe.Offsetof(v6.Flags)+1 ||
		unsafe.Offsetof(v4.NextOffset) != unsafe.Offsetof(v4.TargetOffset)+2 || unsafe.Offsetof(v6.NextOffset) != unsafe.Offsetof(v6.TargetOffset)+2 {
		t.Error("inversions do not follow flags, or the size of the entry the target's offset")
	}
	var info getinfo
	if unsafe.Sizeof(info) != infoSize || unsafe.Offsetof(info.HookEntry) != infoHooks || unsafe.Offsetof(info.Size) != infoEntriesSize {
		t.Error("struct ipt_getinfo is laid out otherwise")
	}
	if unsafe.Offsetof(entriesRequest{}.Entries) != entriesHead {
		t.Error("struct ipt_get_entries is laid out otherwise")
	}
}

// The layouts are those of 64-bit machines.
func TestLegacyDoesNotCompileFor32Bit(t *testing.T) {
	for arch, want := range map[string]bool{"amd64": false, "arm64": false, "386": true, "arm": true} {
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, "legacy.go", nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		overflows := false
		c := types.Config{Sizes: types.SizesFor("gc", arch), Error: func(err error) { // imports are not resolved
			overflows = overflows || strings.Contains(err.Error(), "overflows")
		}}
		_, _ = c.Check("iptables", files, []*ast.File{file}, nil)
		if overflows != want {
			t.Errorf("%s: a constant overflows: %v", arch, overflows)
		}
	}
}

// xtExtension is a match or a target.
type xtExtension struct {
	name     string
	revision uint32
	info     []byte
}

// builder makes a table as iptables-legacy would, of rules that it may not make.
type builder struct {
	family  policy.Family
	layout  layout
	entries []byte
}

func (b *builder) add(head []byte, matches []xtExtension, target xtExtension) int {
	at := len(b.entries)
	e := bytes.Clone(head)
	for _, m := range matches {
		e = append(e, encodeExtension(m)...)
	}
	binary.NativeEndian.PutUint16(e[b.layout.targetAt:], uint16(len(e)))
	e = append(e, encodeExtension(target)...)
	binary.NativeEndian.PutUint16(e[b.layout.targetAt+2:], uint16(len(e)))
	b.entries = append(b.entries, e...)
	return at
}

func encodeExtension(x xtExtension) []byte {
	b := make([]byte, extensionHead)
	copy(b[nameAt:revisionAt], x.name)
	b[revisionAt] = byte(x.revision)
	b = append(b, x.info...)
	for len(b)%8 != 0 {
		b = append(b, 0)
	}
	binary.NativeEndian.PutUint16(b, uint16(len(b)))
	return b
}

func standard(verdict int32) xtExtension {
	return xtExtension{info: binary.NativeEndian.AppendUint32(nil, uint32(verdict))}
}

func errorTarget(name string) xtExtension {
	info := make([]byte, 32)
	copy(info, name)
	return xtExtension{name: "ERROR", info: info}
}

// legacyTableOf makes a table: POSTROUTING with a jump to X, and X with one rule.
func legacyTableOf(f policy.Family, head []byte, matches []xtExtension, target xtExtension) (info, entries []byte) {
	b := builder{family: f, layout: layoutOf(f)}
	empty := make([]byte, b.layout.size)
	size := len(empty) + extensionHead + 8 // of an entry with a verdict
	chain := 2*size + len(empty) + extensionHead + 32
	hook := b.add(empty, nil, standard(int32(chain)))
	end := b.add(empty, nil, standard(-2))
	b.add(empty, nil, errorTarget("X"))
	b.add(head, matches, target)
	b.add(empty, nil, standard(-5))
	b.add(empty, nil, errorTarget("ERROR"))
	const hooks, postroutingHook = 5, 4
	info = make([]byte, infoSize)
	for i := range hooks { // the other hooks have no chain of their own: beyond the end
		for _, at := range []int{infoHooks + 4*i, infoHooks + 4*(hooks+i)} {
			binary.NativeEndian.PutUint32(info[at:], uint32(len(b.entries)))
		}
	}
	binary.NativeEndian.PutUint32(info[infoHooks+4*postroutingHook:], uint32(hook))
	binary.NativeEndian.PutUint32(info[infoHooks+4*(hooks+postroutingHook):], uint32(end))
	return info, b.entries
}

// accepts decides as ip_packet_match and ip6_packet_match do.
func accepts(f policy.Family, head []byte, p policy.Packet) bool {
	l := layoutOf(f)
	field := func(i int) []byte { return head[i*l.address : (i+1)*l.address] }
	name := func(i int) []byte { return head[l.interfaces+16*i:][:16] }
	equal := func(have, want, mask []byte) bool {
		for i := range want {
			if (have[i]^want[i])&mask[i] != 0 {
				return false
			}
		}
		return true
	}
	inverted := func(bit byte) bool { return head[l.flags+1]&bit != 0 }
	device := make([]byte, 16)
	copy(device, p.Out)
	protocol := binary.NativeEndian.Uint16(head[l.protocol:])
	protocolMatters := protocol != 0
	if f == policy.IPv6 {
		protocolMatters = head[l.flags]&1 != 0
	}
	switch {
	case equal(p.Src.AsSlice(), field(0), field(2)) == inverted(0x08): // IPT_INV_SRCIP
	case equal(p.Dst.AsSlice(), field(1), field(3)) == inverted(0x10): // IPT_INV_DSTIP
	case equal(make([]byte, 16), name(0), name(2)) == inverted(0x01): // IPT_INV_VIA_IN
	case equal(device, name(1), name(3)) == inverted(0x02): // IPT_INV_VIA_OUT
	case protocolMatters && (protocol == uint16(protocolByte(p.Protocol))) == inverted(0x40): // XT_INV_PROTO
	case head[l.flags]&^l.plainFlags != 0: // fragments, type of service: not in a policy.Packet
	default:
		return true
	}
	return false
}

// legacyProperty draws a rule and packets, and holds what is read of the rule to
// what the kernel does with the packets.
func legacyProperty(t *rapid.T) {
	f := rapid.SampledFrom(policy.Families()).Draw(t, "family")
	l := layoutOf(f)
	head := make([]byte, l.size)
	for i, kind := range []string{"source", "destination"} {
		if rapid.Bool().Draw(t, kind) {
			mask := head[(i+2)*l.address:][:l.address]
			n := rapid.IntRange(0, 8*l.address).Draw(t, "length")
			for j := range n {
				mask[j/8] |= 0x80 >> (j % 8)
			}
			if rapid.IntRange(0, 9).Draw(t, "odd mask") == 0 {
				mask[rapid.IntRange(0, l.address-1).Draw(t, "at")] ^= 1
			}
			for j := range mask {
				head[i*l.address+j] = rapid.SampledFrom([]byte{0, 1, 10, 128, 255}).Draw(t, "byte")
				if rapid.IntRange(0, 9).Draw(t, "host bits") > 0 {
					head[i*l.address+j] &= mask[j]
				}
			}
		}
	}
	if rapid.Bool().Draw(t, "interface") {
		name := rapid.SampledFrom([]string{"eth0", "eth", "lo", "a234567890bcdef", "eth0\x00x"}).Draw(t, "name")
		copy(head[l.interfaces+16:][:16], name)
		for i := range rapid.IntRange(0, min(16, len(name)+2)).Draw(t, "compared") {
			head[l.interfaces+48+i] = rapid.SampledFrom([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe}).Draw(t, "interface mask")
		}
	}
	binary.NativeEndian.PutUint16(head[l.protocol:], rapid.SampledFrom([]uint16{0, 0, 6, 17, 132, 1}).Draw(t, "protocol"))
	head[l.flags] = rapid.SampledFrom([]byte{0, 0, 1, 1, 2, 4}).Draw(t, "flags")
	head[l.flags+1] = rapid.SampledFrom([]byte{0, 0, 0, 1, 2, 8, 0x10, 0x40}).Draw(t, "inversions")
	info, entries := legacyTableOf(f, head, nil, standard(-5))
	x, err := chainX(f, info, entries)
	if err != nil || x == nil || len(x.Rules) != 1 || len(x.Jumps) != 1 {
		t.Fatalf("read as %+v, %v", x, err)
	}
	r := x.Rules[0]
	if r.Verdict == policy.Unrecognized {
		return
	}
	for range 8 {
		p := near(t, r, packetGen(f).Draw(t, "packet"))
		if got, want := r.Matches(p), accepts(f, head, p); got != want {
			t.Fatalf("%x\nwas read as %v, which says %v of %+v; the kernel says %v", head, r, got, p, want)
		}
	}
}

// chainX parses a table and returns its chain X.
func chainX(f policy.Family, info, entries []byte) (*policy.Chain, error) {
	s, err := parseLegacy(f, info, entries)
	if err != nil {
		return nil, err
	}
	t, err := s.table([]string{"X"})
	return t.chain("X"), err
}

func TestLegacyRules(t *testing.T) {
	for range 50 { // a rule takes microseconds
		rapid.Check(t, legacyProperty)
	}
}

func TestLegacyTargets(t *testing.T) {
	range4 := func(flags uint32, first, last uint16) xtExtension {
		info := binary.NativeEndian.AppendUint32(nil, 1)
		info = binary.NativeEndian.AppendUint32(info, flags)
		info = append(info, make([]byte, 8)...)
		info = binary.BigEndian.AppendUint16(info, first)
		return xtExtension{name: "MASQUERADE", info: binary.BigEndian.AppendUint16(info, last)}
	}
	comment := func(text string) xtExtension {
		info := make([]byte, 256)
		copy(info, text)
		return xtExtension{name: "comment", info: info}
	}
	head := make([]byte, layoutOf(policy.IPv4).size)
	next := int32(2*(len(head)+extensionHead+8) + len(head) + extensionHead + 32 + len(head) + extensionHead + 8)
	for _, tc := range []struct {
		name    string
		matches []xtExtension
		target  xtExtension
		want    string
	}{
		{name: "return", target: standard(-5), want: "return"},
		{name: "masquerade", target: range4(0, 0, 0), want: "masquerade"},
		{name: "fully random", target: range4(16, 0, 0), want: "masquerade random-fully"},
		{name: "ports", target: range4(2|16, 1024, 2000), want: "masquerade to ports 1024-2000 random-fully"},
		{name: "commented", matches: []xtExtension{comment("a"), comment("b")}, target: standard(-5), want: "return"},
		{name: "random", target: range4(4, 0, 0), want: "masquerade with masquerade of another kind"},
		{name: "no target", target: standard(next), want: "rule with no verdict"},
		{name: "drop", target: standard(-1), want: "rule with drop"},
		{name: "jump into the middle", target: standard(8), want: "rule with another verdict, no verdict"},
		{name: "short verdict", target: xtExtension{}, want: "rule with damaged verdict, no verdict"},
		{name: "newer masquerade", target: xtExtension{name: "MASQUERADE", revision: 1, info: make([]byte, 40)}, want: "masquerade with target MASQUERADE: revision 1, not 0"},
		{name: "newer masquerade and more", matches: []xtExtension{{name: "mark"}}, target: xtExtension{name: "MASQUERADE", revision: 1, info: make([]byte, 40)},
			want: "masquerade with match mark, target MASQUERADE: revision 1, not 0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			info, entries := legacyTableOf(policy.IPv4, head, tc.matches, tc.target)
			x, err := chainX(policy.IPv4, info, entries)
			if err != nil || x == nil || len(x.Rules) != 1 {
				t.Fatalf("%+v, %v", x, err)
			}
			if got := x.Rules[0].String(); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// FuzzLegacy damages the table of a kernel.
func FuzzLegacy(f *testing.F) {
	for _, family := range policy.Families() {
		head := make([]byte, layoutOf(family).size)
		info, entries := legacyTableOf(family, head, []xtExtension{{name: "comment", info: make([]byte, 256)}}, standard(-5))
		f.Add(family == policy.IPv6, info, entries)
	}
	f.Fuzz(func(t *testing.T, v6 bool, info, entries []byte) {
		family := policy.IPv4
		if v6 {
			family = policy.IPv6
		}
		s, err := parseLegacy(family, info, entries)
		if err != nil {
			return
		}
		for c := range s.chains() {
			for i := c.first; i < c.end; i++ {
				_ = s.expressions(nil, i)
			}
		}
		table, err := s.table([]string{"X"})
		if err != nil {
			t.Fatal(err)
		}
		x := table.chain("X")
		if x == nil {
			return
		}
		for _, r := range append(x.Rules, x.Jumps...) {
			if r.Verdict == policy.Unrecognized && strings.TrimSpace(r.Text) == "" {
				t.Fatal("an unrecognized rule without a text")
			}
			for _, side := range []policy.Ranges{r.From, r.To} {
				if len(side) > 0 && side[0].From().Is4() == v6 {
					t.Fatalf("%v in a table of %s", r, family)
				}
			}
		}
	})
}
