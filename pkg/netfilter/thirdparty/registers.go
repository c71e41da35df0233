// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// slots is the number of 4-byte parts of the registers of nf_tables.
const slots = 16

// registers are those of nf_tables. Of their bits some are unknown: at first, all are.
type registers struct {
	value, known [4 * slots]byte
	origins      [slots]origin
}

// origin tells more about what a register holds than its bits do.
type origin uint8

const (
	// An answer that depends on unknown bits of these may be another one for a part of the prefix.
	fromSource origin = 1 << iota
	fromDestination
	// Of these all bits are unknown, but some values are excluded.
	outputName // of an unknown interface
	notLocal   // the type of an address that is not LOCAL
)

// slot returns the first slot of a register: 1 to 4 have 16 bytes each, from 8 on 4.
func slot(r nfnetlink.Register) int {
	n := int(r) - unix.NFT_REG32_00
	if r <= unix.NFT_REG_4 {
		n = 4 * (int(r) - 1)
	}
	return min(max(n, 0), slots-1)
}

// register returns the first bytes of a register, and where they come from.
func (rs *registers) register(r nfnetlink.Register, size int) (b bits, from origin) {
	at := 4 * slot(r)
	end := min(at+size, len(rs.value))
	for i := slot(r); 4*i < end; i++ {
		from |= rs.origins[i]
	}
	return bits{rs.value[at:end], rs.known[at:end]}, from
}

// load sets a register and the rest of its last 4 bytes, which are 0.
func (rs *registers) load(r nfnetlink.Register, b bits, from origin) {
	at := 4 * slot(r)
	for i := range (len(b.value) + 3) &^ 3 {
		if at+i == len(rs.value) {
			return
		}
		rs.value[at+i], rs.known[at+i] = 0, 0xff
		if i < len(b.value) {
			rs.value[at+i], rs.known[at+i] = b.value[i]&b.known[i], b.known[i]
		}
		rs.origins[(at+i)/4] = from
	}
}

// forget makes a register unknown.
func (rs *registers) forget(r nfnetlink.Register, size int) {
	rs.load(r, unknownBits(size), 0)
}

// loadNumber loads a number in this machine's byte order, as most keys of meta and ct are.
func (rs *registers) loadNumber(r nfnetlink.Register, n uint32, from origin) {
	rs.load(r, knownBits(binary.NativeEndian.AppendUint32(nil, n)), from)
}
