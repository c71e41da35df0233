// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// match evaluates a match of xtables.
func (m *machine) match(e nfnetlink.Match) Answer {
	u16 := func(at int) uint16 { return binary.NativeEndian.Uint16(e.Info[at:]) }
	u32 := func(at int) uint32 { return binary.NativeEndian.Uint32(e.Info[at:]) }
	switch {
	case e.Xt == "comment":
		return Yes
	case e.Xt == "mark" && e.Rev == 1 && len(e.Info) >= 9: // struct xt_mark_mtinfo1: mark, mask, invert
		return m.markEquals(u32(0), u32(4)).notIf(e.Info[8] != 0)
	case e.Xt == "addrtype" && e.Rev == 1 && len(e.Info) >= 8:
		// struct xt_addrtype_info_v1: types of the source and of the destination, flags.
		const invertSource, invertDestination, limits = 1, 2, 4 | 8
		flags := u32(4)
		ofAnyInterface := flags&limits == 0
		from := hasType(u16(0), m.packet.SrcLocal, ofAnyInterface, flags&invertSource != 0)
		to := hasType(u16(2), No, ofAnyInterface, flags&invertDestination != 0)
		return min(from, to)
	case e.Xt == "conntrack" && e.Rev == 3 && len(e.Info) >= 152: // struct xt_conntrack_mtinfo3
		return isNew(u16(146), u16(148), u16(150))
	}
	return Perhaps
}

func (m *machine) markEquals(value, mask uint32) Answer {
	differs := (m.mark.value^value)&m.mark.known&mask != 0
	isImpossible := value&^mask != 0
	switch {
	case differs || isImpossible:
		return No
	case m.mark.known&mask != mask:
		return Perhaps
	}
	return Yes
}

// hasType reports whether an address is of one of the types; 0 is any. It is known only whether it is LOCAL.
func hasType(types uint16, isLocal Answer, ofAnyInterface, inverted bool) Answer {
	const local = 1 << unix.RTN_LOCAL
	switch {
	case types == 0:
		return Yes
	case types == local && (ofAnyInterface || isLocal == No):
		return isLocal.notIf(inverted)
	case types&local == 0 && isLocal == Yes && ofAnyInterface:
		return No.notIf(inverted)
	}
	return Perhaps
}

// isNew evaluates a condition on the state of a new connection. It may have been translated before.
func isNew(flags, inverts, states uint16) Answer {
	const onState = 1         // XT_CONNTRACK_STATE
	const translated = 3 << 6 // XT_CONNTRACK_STATE_SNAT, XT_CONNTRACK_STATE_DNAT
	if flags != onState {
		return Perhaps
	}
	isInverted := inverts&onState != 0
	switch {
	case states&nfnetlink.NewConnection != 0:
		return Yes.notIf(isInverted)
	case states&translated != 0:
		return Perhaps
	}
	return No.notIf(isInverted)
}

// passing are targets after which a packet continues with the next rule, and which leave its mark and its
// addresses alone.
func passing() []string {
	return []string{
		"LOG", "NFLOG", "ULOG", "TRACE", "AUDIT", "TCPMSS", "TCPOPTSTRIP", "DSCP", "TOS", "TTL", "HL", "ECN",
		"CLASSIFY", "CHECKSUM", "SECMARK", "CONNSECMARK", "TEE", "RATEEST", "LED", "IDLETIMER",
	}
}

// translationOf returns a prefix that has the address to which SNAT or NETMAP translates, or the zero Prefix.
func translationOf(f policy.Family, e nfnetlink.Target) netip.Prefix {
	// struct nf_nat_ipv4_multi_range_compat: the number of ranges, flags, the first and the last address.
	// struct nf_nat_range, of IPv6: the same without the number.
	flagsAt, addressesAt, size := 4, 8, 4
	if f == policy.IPv6 {
		flagsAt, addressesAt, size = 0, 4, 16
	}
	end := addressesAt + 2*size
	isOtherForm := f == policy.IPv6 && e.Xt == "SNAT" && e.Rev == 0 // that of IPv4
	if len(e.Info) < end || isOtherForm {
		return netip.Prefix{}
	}
	isOneRange := f == policy.IPv6 || binary.NativeEndian.Uint32(e.Info) == 1
	hasAddresses := binary.NativeEndian.Uint32(e.Info[flagsAt:])&unix.NF_NAT_RANGE_MAP_IPS != 0
	if !isOneRange || !hasAddresses {
		return netip.Prefix{}
	}
	first, _ := netip.AddrFromSlice(e.Info[addressesAt : addressesAt+size])
	last, _ := netip.AddrFromSlice(e.Info[addressesAt+size : end])
	return prefixAround(first, last)
}

// target evaluates a target of xtables.
func (m *machine) target(e nfnetlink.Target) {
	switch {
	case e.Xt == "MASQUERADE":
		m.end(effect{code: nfnetlink.DoMasq})
	case e.Xt == "NETMAP" || e.Xt == "SNAT":
		m.end(effect{code: nfnetlink.DoSNAT, to: translationOf(m.family, e)})
	case e.Xt == "MARK" && e.Rev == 2 && len(e.Info) >= 8: // struct xt_mark_tginfo2: mark, mask
		value, mask := binary.NativeEndian.Uint32(e.Info), binary.NativeEndian.Uint32(e.Info[4:])
		known := m.mark.known | mask
		m.setMark(mark{(m.mark.value&^mask ^ value) & known, known})
	case e.Xt == "MARK" || e.Xt == "CONNMARK" || e.Xt == "HMARK" || e.Xt == "SET":
		m.setMark(mark{}) // SET may take it from the ipset
	case e.Xt == "CT" || e.Xt == "NOTRACK":
		if e.IsNoTrack() {
			m.untrack()
		}
	case slices.Contains(passing(), e.Xt):
	case e.Xt == "NFQUEUE" || e.Xt == "REJECT" || e.Xt == "SYNPROXY" || e.Xt == "TPROXY":
		m.unknown(nfnetlink.Unknown{Kind: "queue"})
	default: // such as SNPT, which translates without conntrack
		m.mayDoAnything()
	}
}
