// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"bytes"
	"net/netip"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// bits is a value of which only the bits of a mask are known. Unknown bits are 0 in the value.
type bits struct{ value, known []byte }

func knownBits(value []byte) bits { return bits{value, allKnown(len(value))} }

func unknownBits(size int) bits { return bits{make([]byte, size), make([]byte, size)} }

func allKnown(size int) []byte { return bytes.Repeat([]byte{0xff}, size) }

func (b bits) isKnown() bool { return areAll(b.known, 0xff) }

// areAll reports whether all bytes are the same one.
func areAll(data []byte, b byte) bool { return bytes.Count(data, []byte{b}) == len(data) }

// followedBy returns both values as one.
func (b bits) followedBy(other bits) bits {
	return bits{slices.Concat(b.value, other.value), slices.Concat(b.known, other.known)}
}

// equals compares with a value of the same length.
func (b bits) equals(other []byte) Answer {
	for i := range other {
		if (b.value[i]^other[i])&b.known[i] != 0 {
			return No
		}
	}
	if b.isKnown() {
		return Yes
	}
	return Perhaps
}

// highest returns the value with all unknown bits set. The lowest one is that with none.
func (b bits) highest() []byte {
	highest := bytes.Clone(b.value)
	for i, known := range b.known {
		highest[i] |= ^known
	}
	return highest
}

// within reports whether the value is between two others, both included, as memcmp orders them.
func (b bits) within(first, last []byte) Answer {
	highest := b.highest()
	switch {
	case bytes.Compare(highest, first) < 0 || bytes.Compare(b.value, last) > 0:
		return No
	case bytes.Compare(b.value, first) >= 0 && bytes.Compare(highest, last) <= 0:
		return Yes
	}
	return Perhaps
}

// mark is the mark of a packet.
type mark struct{ value, known uint32 }

// join returns what is known of a mark that is one of two.
func (m mark) join(other mark) mark {
	known := m.known & other.known &^ (m.value ^ other.value)
	return mark{m.value & known, known}
}

// prefixAround returns the smallest prefix that has two addresses of a family.
func prefixAround(a, b netip.Addr) netip.Prefix {
	p := HostPrefix(a)
	for p.IsValid() && !p.Contains(b) {
		p = netip.PrefixFrom(a, p.Bits()-1).Masked()
	}
	return p
}

// addressBits returns the bits of an address, of which those of a prefix are known.
func addressBits(f policy.Family, p netip.Prefix) bits {
	b := unknownBits(f.All().Addr().BitLen() / 8)
	if p.IsValid() {
		copy(b.value, p.Masked().Addr().AsSlice())
	}
	for i := range max(p.Bits(), 0) {
		b.known[i/8] |= 0x80 >> (i % 8)
	}
	return b
}
