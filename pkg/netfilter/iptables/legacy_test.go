// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// xtExtension is a match or a target.
type xtExtension struct {
	name     string
	revision uint32
	info     []byte
}

// builder makes a table as iptables-legacy would, of rules that it may not make.
type builder struct {
	family  policy.Family
	layout  entryLayout
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
	b := builder{family: f, layout: entryLayoutOf(f)}
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
	l := entryLayoutOf(f)
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
	l := entryLayoutOf(f)
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
	var t table
	err = t.read(f, []string{"X"}, s.rules)
	return t.Find(f, "X"), err
}

func TestLegacyRules(t *testing.T) {
	for range 50 { // a rule takes microseconds
		rapid.Check(t, legacyProperty)
	}
}

// FuzzLegacy damages the table of a kernel.
func FuzzLegacy(f *testing.F) {
	for _, family := range policy.Families() {
		head := make([]byte, entryLayoutOf(family).size)
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
		for name := range s.chains {
			_, _ = s.rules(name)
		}
		var read table
		assert.NoError(t, read.read(family, []string{"X"}, s.rules))
		x := read.Find(family, "X")
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
