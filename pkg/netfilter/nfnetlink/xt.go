// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// Bits of AddrType.
const (
	// AddrTypeLocal is the bit of addresses of this host, in Source and Dest.
	AddrTypeLocal uint16 = 1 << unix.RTN_LOCAL

	AddrTypeInvertSource uint32 = 1 << 0
	AddrTypeInvertDest   uint32 = 1 << 1
	AddrTypeLimitIn      uint32 = 1 << 2
	AddrTypeLimitOut     uint32 = 1 << 3
)

// AddrType is the match addrtype, revision 1 (struct xt_addrtype_info_v1).
type AddrType struct {
	Source, Dest uint16 // bits 1<<RTN_*; 0 is any
	Flags        uint32
}

// DecodeAddrType decodes the match addrtype.
func DecodeAddrType(rev uint32, info []byte) (AddrType, error) {
	if err := checkXt("addrtype", rev, 1, info, 8); err != nil {
		return AddrType{}, err
	}
	return AddrType{
		Source: binary.NativeEndian.Uint16(info),
		Dest:   binary.NativeEndian.Uint16(info[2:]),
		Flags:  binary.NativeEndian.Uint32(info[4:]),
	}, nil
}

// DecodeComment decodes the match comment, revision 0 (struct xt_comment_info).
func DecodeComment(rev uint32, info []byte) (string, error) {
	if err := checkXt("comment", rev, 0, info, 256); err != nil {
		return "", err
	}
	return string(untilNUL(info)), nil
}

// StatisticNth is a Statistic's Mode in which Every and Packet count; in mode 0
// Probability does.
const StatisticNth uint16 = 1

// Statistic is the match statistic, revision 0 (struct xt_statistic_info).
type Statistic struct {
	Mode   uint16
	Invert bool
	// Probability is in units of 1/2^31.
	Probability uint32
	// Every is one less than iptables is told: 1 is every second packet. Packet
	// is as told, the number of the packet that matches first.
	Every, Packet uint32
}

// DecodeStatistic decodes the match statistic.
func DecodeStatistic(rev uint32, info []byte) (Statistic, error) {
	const invert = 1
	if err := checkXt("statistic", rev, 0, info, 24); err != nil {
		return Statistic{}, err
	}
	s := Statistic{Mode: binary.NativeEndian.Uint16(info)}
	flags := binary.NativeEndian.Uint16(info[2:])
	s.Invert = flags&invert != 0
	switch {
	case flags&^invert != 0 || s.Mode > StatisticNth:
		return Statistic{}, fmt.Errorf("decode xtables statistic: mode %d or flags %#x unknown", s.Mode, flags)
	case s.Mode == StatisticNth:
		s.Every = binary.NativeEndian.Uint32(info[4:])
		s.Packet = binary.NativeEndian.Uint32(info[8:])
	default:
		s.Probability = binary.NativeEndian.Uint32(info[4:])
	}
	return s, nil
}

// Flags of Masquerade and of Masq.
const (
	RangeMapIPs         uint32 = unix.NF_NAT_RANGE_MAP_IPS
	RangeProtoSpecified uint32 = unix.NF_NAT_RANGE_PROTO_SPECIFIED
	RangeProtoRandom    uint32 = unix.NF_NAT_RANGE_PROTO_RANDOM
	RangePersistent     uint32 = unix.NF_NAT_RANGE_PERSISTENT
	RangeRandomFully    uint32 = unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY
)

// Masquerade is the target MASQUERADE, revision 0.
type Masquerade struct {
	Flags uint32 // Range*
	// Source ports, both included, if Flags has RangeProtoSpecified.
	PortMin, PortMax uint16
}

// DecodeMasquerade decodes the target MASQUERADE, whose structure depends on
// the family: nf_nat_ipv4_multi_range_compat or nf_nat_range.
func DecodeMasquerade(family Family, rev uint32, info []byte) (Masquerade, error) {
	const (
		size4, flags4, ports4 = 20, 4, 16
		size6, flags6, ports6 = 40, 0, 36
		// nf_nat_range2 is nf_nat_range with a base port behind, of no meaning here.
		size6Range2 = 44
	)
	size, flags, ports := size4, flags4, ports4
	if family == IPv6 {
		size, flags, ports = size6, flags6, ports6
		if len(info) > size6 {
			size = size6Range2
		}
	}
	if err := checkXt("MASQUERADE", rev, 0, info, size); err != nil {
		return Masquerade{}, err
	}
	if family != IPv6 {
		if n := binary.NativeEndian.Uint32(info); n != 1 {
			return Masquerade{}, fmt.Errorf("decode xtables MASQUERADE: %d ranges", n)
		}
	}
	m := Masquerade{Flags: binary.NativeEndian.Uint32(info[flags:])}
	if m.Flags&RangeProtoSpecified != 0 {
		m.PortMin = binary.BigEndian.Uint16(info[ports:])
		m.PortMax = binary.BigEndian.Uint16(info[ports+2:])
	}
	return m, nil
}

// checkXt makes sure of a structure's revision and of its size in bytes, which
// xtables rounds up to its alignment.
func checkXt(name string, rev, wantRev uint32, info []byte, size int) error {
	const alignment = 8
	if rev != wantRev {
		return fmt.Errorf("decode xtables %s: revision %d, not %d", name, rev, wantRev)
	}
	if rounded := (size + alignment - 1) &^ (alignment - 1); len(info) < size || len(info) > rounded {
		return fmt.Errorf("decode xtables %s: %d bytes, not %d", name, len(info), size)
	}
	return nil
}
