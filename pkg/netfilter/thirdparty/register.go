// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// register is the one that was loaded last. Who loads two before looking at one
// compares several fields at once, which is not read.
type register struct {
	number nfnetlink.Register
	what   quantity
	name   string // for people
	size   int    // in bytes
	mask   []byte // nil: all of them
}

// mismatched tells what is compared that is not held.
func (r register) mismatched() string {
	if r.number == 0 && r.name != "" {
		return r.name // an unknown expression has loaded it
	}
	return "several fields at once"
}

type quantity int

const (
	other quantity = iota
	source
	destination
	sourceType
	destinationType
	transport
	network
	outputName
	outputIndex
	mark
	state // of the connection
	random
)

func (d *decoder) payload(e nfnetlink.Payload) register {
	size, sourceAt, destinationAt := uint32(4), uint32(12), uint32(16)
	const protocolAt = 9
	if d.family == policy.IPv6 {
		size, sourceAt, destinationAt = 16, 8, 24
	}
	r := register{number: e.Dreg, what: other, name: "payload", size: int(e.Len)}
	switch {
	case e.Base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		r.name = transportHeader
	case e.Base != unix.NFT_PAYLOAD_NETWORK_HEADER || e.Len == 0 || e.Len > size:
	case e.Offset == sourceAt:
		r.what, r.name = source, "source"
	case e.Offset == destinationAt:
		r.what, r.name = destination, "destination"
	case d.family == policy.IPv4 && e.Offset == protocolAt && e.Len == 1:
		r.what = transport
	}
	return r
}

func meta(e nfnetlink.Meta) register {
	switch e.Key {
	case unix.NFT_META_OIFNAME:
		return register{e.Reg, outputName, "oifname", unix.IFNAMSIZ, nil}
	case unix.NFT_META_OIF:
		return register{e.Reg, outputIndex, "oif", 4, nil}
	case unix.NFT_META_L4PROTO:
		return register{e.Reg, transport, "l4proto", 1, nil}
	case unix.NFT_META_NFPROTO:
		return register{e.Reg, network, "nfproto", 1, nil}
	case unix.NFT_META_MARK:
		return register{e.Reg, mark, "mark", 4, nil}
	}
	return register{e.Reg, other, fmt.Sprintf("meta %d", e.Key), 0, nil}
}

// newConnection is the state of a connection whose first packet is at hand, as nft
// and xt_conntrack number it. A base chain of type nat sees no other packets.
const newConnection = 8

func ct(e nfnetlink.CT) register {
	if e.Key == unix.NFT_CT_STATE {
		return register{e.Dreg, state, "ct state", 4, nil}
	}
	return register{e.Dreg, other, "ct", 0, nil}
}

func fib(e nfnetlink.FIB) register {
	r := register{number: e.Dreg, what: other, name: "fib", size: 4}
	if e.Result == unix.NFT_FIB_RESULT_ADDRTYPE {
		switch e.Flags {
		case unix.NFTA_FIB_F_SADDR:
			r.what = sourceType
		case unix.NFTA_FIB_F_DADDR:
			r.what = destinationType
		}
	}
	return r
}

func (d *decoder) bitwise(e nfnetlink.Bitwise) {
	flips := slices.ContainsFunc(e.Xor, func(b byte) bool { return b != 0 })
	if e.Sreg != d.held.number || flips || d.held.mask != nil || int(e.Len) != d.held.size || len(e.Mask) != d.held.size {
		d.held = register{number: e.Dreg, name: d.held.name}
		return
	}
	d.held.number, d.held.mask = e.Dreg, e.Mask
}
