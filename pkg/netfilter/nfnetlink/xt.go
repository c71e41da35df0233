// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Masquerade is what a masquerade statement asks for.
type Masquerade struct {
	Flags uint32 // NF_NAT_RANGE_*
	// Source ports, both included, if Flags has NF_NAT_RANGE_PROTO_SPECIFIED.
	PortMin, PortMax uint16
}

// match decodes a match of xtables.
func (d *decoder) match(m Match) {
	switch m.Xt {
	case "comment": // struct xt_comment_info
		if d.hasForm("match", m, 0, 256) {
			d.Comment = string(untilNUL(m.Info))
		}
	case "addrtype": // struct xt_addrtype_info_v1
		if d.hasForm("match", m, 1, 8) {
			d.addressTypes(m.Info)
		}
	case "statistic": // struct xt_statistic_info
		if !d.hasForm("match", m, 0, 24) {
			return
		}
		const modeRandom, notInverted = 0, 0
		if native16(m.Info) != modeRandom || native16(m.Info[2:]) != notInverted {
			d.refuse("match statistic")
			return
		}
		d.probability(binary.NativeEndian.Uint32(m.Info[4:]))
	case "mark": // struct xt_mark_mtinfo1
		if m.Rev != 1 || len(m.Info) < 12 {
			d.refuse("match mark")
			return
		}
		mark, mask := binary.NativeEndian.Uint32(m.Info), binary.NativeEndian.Uint32(m.Info[4:])
		d.add(Condition{Field: Mark, Not: m.Info[8] != 0, Value: mark, Mask: mask})
	case "conntrack":
		d.connState(m)
	case "tcp", "udp", "sctp", "multiport":
		d.refuse(transportHeader)
	default:
		d.refuse("match " + m.Xt)
	}
}

func native16(b []byte) uint16 { return binary.NativeEndian.Uint16(b) }

// addressTypes decodes the type LOCAL of the source and of the destination.
func (d *decoder) addressTypes(info []byte) {
	const invertSource, invertDestination = 1, 2
	flags := binary.NativeEndian.Uint32(info[4:])
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

// connState decodes a match of the connection's state alone, in a struct xt_conntrack_mtinfo2 or 3.
func (d *decoder) connState(m Match) {
	const (
		flagsAt, invertAt, statesAt, size = 146, 148, 150, 154
		stateFlag, snatState, dnatState   = 1, 1 << 6, 1 << 7
	)
	if m.Rev != 2 && m.Rev != 3 || len(m.Info) < size || native16(m.Info[flagsAt:]) != stateFlag ||
		native16(m.Info[statesAt:])&(snatState|dnatState) != 0 {
		d.refuse("match conntrack")
		return
	}
	inverted := native16(m.Info[invertAt:])&stateFlag != 0
	d.add(Condition{Field: ConnState, Not: !inverted, Mask: uint32(native16(m.Info[statesAt:]))}) // any of the states
}

// target decodes the targets of xtables that change the source. The others at the hook postrouting (MARK,
// LOG) let packets continue.
func (d *decoder) target(t Target) {
	switch t.Xt {
	case "MASQUERADE":
		d.masquerade(t)
	case "SNAT", "NETMAP":
		d.Statement = DoSNAT
	case "CT": // struct xt_ct_target_info, and _v1
		const noTrack = 1
		if len(t.Info) >= 2 && native16(t.Info)&noTrack != 0 {
			d.Other = append(d.Other, NoTrack)
		} else {
			d.Other = append(d.Other, t.Xt)
		}
	case "NOTRACK":
		d.Other = append(d.Other, NoTrack)
	default:
		d.Other = append(d.Other, t.Xt)
	}
}

// masquerade decodes a struct nf_nat_ipv4_multi_range_compat or, of IPv6, nf_nat_range.
func (d *decoder) masquerade(t Target) {
	const (
		size4, flags4, ports4 = 20, 4, 16
		size6, flags6, ports6 = 40, 0, 36
		size6Range2           = 44 // nf_nat_range2 has a base port at its end, which is not used here
	)
	d.Statement = DoMasq
	size, flags, ports := size4, flags4, ports4
	if d.family == IPv6 {
		size, flags, ports = size6, flags6, ports6
		if len(t.Info) > size6 {
			size = size6Range2
		}
	}
	if !d.hasForm("target", Match(t), 0, size) {
		return
	}
	if n := binary.NativeEndian.Uint32(t.Info); d.family != IPv6 && n != 1 {
		d.refuse(fmt.Sprintf("target MASQUERADE: %d ranges", n))
		return
	}
	d.Masq.Flags = binary.NativeEndian.Uint32(t.Info[flags:])
	if d.Masq.Flags&unix.NF_NAT_RANGE_PROTO_SPECIFIED != 0 {
		d.Masq.PortMin = binary.BigEndian.Uint16(t.Info[ports:])
		d.Masq.PortMax = binary.BigEndian.Uint16(t.Info[ports+2:])
	}
}

// hasForm reports whether an extension has the revision and the size in bytes, which xtables rounds up to
// its alignment. If not, the extension is unrecognized.
func (d *decoder) hasForm(kind string, m Match, revision uint32, size int) bool {
	const alignment = 8
	rounded := (size + alignment - 1) &^ (alignment - 1)
	switch {
	case m.Rev != revision:
		d.refuse(fmt.Sprintf("%s %s: revision %d, not %d", kind, m.Xt, m.Rev, revision))
	case len(m.Info) < size || len(m.Info) > rounded:
		d.refuse(fmt.Sprintf("%s %s: %d bytes, not %d", kind, m.Xt, len(m.Info), size))
	default:
		return true
	}
	return false
}
