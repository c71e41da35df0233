// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Translation holds the parameters of a masquerade or snat statement.
type Translation struct {
	Flags   uint32     // NF_NAT_RANGE_*, without NF_NAT_RANGE_MAP_IPS
	Address netip.Addr // of snat to one address
	// Source ports, both included, if Flags has NF_NAT_RANGE_PROTO_SPECIFIED.
	PortMin, PortMax uint16
}

func (d *decoder) match(m Match) {
	switch {
	case m.Xt == "comment" && m.hasForm(0, 256): // struct xt_comment_info
		d.Comment = string(untilNUL(m.Info))
	case m.Xt == "addrtype" && m.hasForm(1, 8): // struct xt_addrtype_info_v1
		d.addressTypes(m.Info)
	case m.Xt == "statistic" && m.hasForm(0, 24) && native32(m.Info) == 0:
		// struct xt_statistic_info: at random, not inverted
		d.probability(native32(m.Info[4:]))
	case m.Xt == "mark" && m.hasForm(1, 12): // struct xt_mark_mtinfo1
		value, mask := native32(m.Info), native32(m.Info[4:])
		d.add(Condition{Field: Mark, Not: m.Info[8] != 0, Value: value, Mask: mask})
	case m.Xt == "tcp" || m.Xt == "udp" || m.Xt == "sctp" || m.Xt == "multiport":
		d.refuse(transportHeader)
	default:
		d.refuse("match " + m.Xt)
	}
}

// hasForm reports whether a match is of a known form: the revision, and the size in bytes, which xtables
// rounds up.
func (e Match) hasForm(revision uint32, size int) bool {
	const alignment = 8
	return e.Rev == revision && len(e.Info) >= size && len(e.Info) <= (size+alignment-1)&^(alignment-1)
}

func native16(b []byte) uint16 { return binary.NativeEndian.Uint16(b) }

func native32(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

// addressTypes decodes the type LOCAL of the source and of the destination.
func (d *decoder) addressTypes(info []byte) {
	const invertSource, invertDestination = 1, 2
	flags := native32(info[4:])
	if flags&^(invertSource|invertDestination) != 0 {
		d.refuse("match addrtype of another kind")
	}
	for _, side := range []struct {
		field Field
		types uint16
		not   bool
	}{
		{SourceLocal, native16(info), flags&invertSource != 0},
		{DestinationLocal, native16(info[2:]), flags&invertDestination != 0},
	} {
		switch side.types {
		case 0: // any type
		case 1 << unix.RTN_LOCAL:
			d.add(Condition{Field: side.field, Not: side.not})
		default:
			d.refuse("match addrtype of another kind")
		}
	}
}

// target decodes targets that change the source. At postrouting the others let packets continue.
func (d *decoder) target(t Target) {
	switch t.Xt {
	case "MASQUERADE":
		d.Statement = DoMasq
		to, _, ok := d.translation(t, 0)
		if !ok {
			d.refuse("target " + t.Xt)
		}
		d.To = to
	case "SNAT": // one of another form may be to several addresses
		d.Statement = DoSNAT
		revision := uint32(0)
		if d.family == IPv6 {
			revision = 1 // revision 0 has the form of IPv4
		}
		to, last, ok := d.translation(t, revision)
		if ok && to.Address == last && to.Flags&unix.NF_NAT_RANGE_MAP_IPS != 0 {
			to.Flags &^= unix.NF_NAT_RANGE_MAP_IPS
			d.To = to
		}
	case "NETMAP":
		d.Statement = DoSNAT
	default:
		name := t.Xt
		if t.IsNoTrack() {
			name = NoTrack
		}
		d.Other = append(d.Other, name)
	}
}

// IsNoTrack reports whether a target keeps its packets from connection tracking.
func (e Target) IsNoTrack() bool {
	const noTrack = 1 // in struct xt_ct_target_info, and _v1
	if e.Xt == "CT" && len(e.Info) >= 2 {
		return native16(e.Info)&noTrack != 0
	}
	return e.Xt == "NOTRACK"
}

// translation decodes a struct nf_nat_ipv4_multi_range_compat or, of IPv6, nf_nat_range.
func (d *decoder) translation(t Target, revision uint32) (to Translation, last netip.Addr, ok bool) {
	const (
		size4, flags4, addresses4, ports4 = 20, 4, 8, 16
		size6, flags6, addresses6, ports6 = 40, 0, 4, 36
		// nf_nat_range2 has a base port at its end, which is not used here.
		size6Range2 = 44
	)
	size, flags, addresses, ports := size4, flags4, addresses4, ports4
	if d.family == IPv6 {
		size, flags, addresses, ports = size6, flags6, addresses6, ports6
		if len(t.Info) > size6 {
			size = size6Range2
		}
	}
	if !Match(t).hasForm(revision, size) {
		return to, last, false
	}
	hasOneRange := d.family == IPv6 || native32(t.Info) == 1
	if !hasOneRange {
		return to, last, false
	}
	to.Flags = native32(t.Info[flags:])
	if to.Flags&unix.NF_NAT_RANGE_PROTO_SPECIFIED != 0 {
		to.PortMin = binary.BigEndian.Uint16(t.Info[ports:])
		to.PortMax = binary.BigEndian.Uint16(t.Info[ports+2:])
	}
	if to.Flags&unix.NF_NAT_RANGE_MAP_IPS != 0 {
		end := addresses + d.addressSize()
		to.Address, _ = netip.AddrFromSlice(t.Info[addresses:end])
		last, _ = netip.AddrFromSlice(t.Info[end : end+d.addressSize()])
	}
	return to, last, true
}
