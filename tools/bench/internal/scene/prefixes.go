// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
)

// Prefixes returns n IPv4 prefixes, at most 28,000, of lengths from 19 to 32 in a shuffled order. Each is the
// beginning of a /18 of its own, so that none are nested or adjacent and none are merged. The result depends
// only on n.
func Prefixes(n int) []netip.Prefix {
	var all []netip.Prefix
	for i := range n {
		all = append(all, netip.PrefixFrom(fromUint32(16<<24+uint32(i)<<14), 19+i%14))
	}
	random := rand.New(rand.NewPCG(3, uint64(n)))
	random.Shuffle(n, func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// Elsewhere returns an address outside all prefixes.
func Elsewhere() netip.Addr { return netip.MustParseAddr("198.18.0.1") }

func fromUint32(v uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], v)
	return netip.AddrFrom4(b)
}
