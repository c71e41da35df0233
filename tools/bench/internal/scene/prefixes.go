// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
)

// Prefixes returns n IPv4 prefixes of lengths from 8 to 32 that do not touch each
// other, so that none is merged with another, in an order without a meaning. The
// same n gives the same ones.
func Prefixes(n int) []netip.Prefix {
	// How many of a hundred are of which length; of the widest there are few in
	// all, for more would not leave room.
	shares := []struct{ bits, percent, most int }{
		{8, 25, 2}, {12, 20, 8}, {16, 15, 100}, {18, 5, 200}, {20, 5, 1000}, {22, 5, 4000},
		{24, 35, n}, {26, 5, n}, {28, 10, n}, {30, 10, n},
	}
	var all []netip.Prefix
	next := uint32(16) << 24
	take := func(bits, count int) {
		size := uint32(1) << (32 - bits)
		for range count {
			next = (next + size - 1) / size * size
			all = append(all, netip.PrefixFrom(fromUint32(next), bits))
			next += 2 * size // and a gap
		}
	}
	for _, s := range shares {
		take(s.bits, min(s.most, n*s.percent/200, n-len(all)))
	}
	take(32, n-len(all))
	shuffle(all)
	return all
}

// PrefixesOf returns n prefixes of one length.
func PrefixesOf(n, bits int) []netip.Prefix {
	all := make([]netip.Prefix, n)
	size := uint32(1) << (32 - bits)
	for i := range all {
		all[i] = netip.PrefixFrom(fromUint32(16<<24+uint32(i)*2*size), bits)
	}
	shuffle(all)
	return all
}

// DualStack returns n prefixes, half of them IPv6.
func DualStack(n int) []netip.Prefix {
	all := Prefixes(n - n/2)
	for i := range n / 2 {
		all = append(all, netip.MustParsePrefix(fmt.Sprintf("2600:%x:%x::/48", i>>12, i&0xfff*2)))
	}
	shuffle(all)
	return all
}

// Elsewhere is in none of the prefixes.
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
