// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
)

// The lengths of mixed prefixes.
const widest, narrowest = 8, 32

// Prefixes returns n IPv4 prefixes of lengths from 8 to 32 that are neither nested nor adjacent, so
// that none are merged, in a shuffled order. The result depends only on n. All are below
// 127.0.0.0/8, which is not forwarded.
func Prefixes(n int) []netip.Prefix {
	all := make([]netip.Prefix, 0, n)
	next := uint32(16) << 24
	for bits, count := range lengths(n) {
		// The widest come first, so next is always aligned to the size.
		size := uint32(1) << (32 - bits)
		for range count {
			all = append(all, netip.PrefixFrom(fromUint32(next), bits))
			next += 2 * size // with a gap
		}
	}
	shuffle(all)
	return all
}

// lengths returns how many of n prefixes have each length: the same number of each, as far as there
// is room; few are spread over the lengths.
func lengths(n int) (counts [narrowest + 1]int) {
	for i := 0; n > 0; i++ {
		if bits := widest + i*8%(narrowest-widest+1); counts[bits] < room(bits) {
			counts[bits]++
			n--
		}
	}
	return counts
}

// room returns the number of prefixes of a length that fit: with gaps they take four /8.
func room(bits int) int { return 1 << (bits - 7) }

// DualStack returns n prefixes, half of them IPv6.
func DualStack(n int) []netip.Prefix {
	all := Prefixes(n - n/2)
	for i := range n / 2 {
		all = append(all, netip.MustParsePrefix(fmt.Sprintf("2600:%x:%x::/48", i>>12, i&0xfff*2)))
	}
	shuffle(all)
	return all
}

// Elsewhere returns an address outside all prefixes.
func Elsewhere() netip.Addr { return netip.MustParseAddr("198.18.0.1") }

func shuffle(all []netip.Prefix) {
	random := rand.New(rand.NewPCG(3, uint64(len(all))))
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
}

func fromUint32(v uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], v)
	return netip.AddrFrom4(b)
}
