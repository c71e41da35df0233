// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const transportHeader = "the transport header"

// match reads a match of xtables.
func (d *decoder) match(m nfnetlink.Match) {
	switch m.Xt {
	case "comment":
		if text, err := nfnetlink.DecodeComment(m.Rev, m.Info); err == nil {
			d.comment = text
		}
	case "addrtype":
		d.addressTypes(m)
	case "mark":
		d.xtMark(m)
	case "conntrack":
		d.xtConntrack(m)
	case "statistic":
		s, err := nfnetlink.DecodeStatistic(m.Rev, m.Info)
		if err != nil || s.Invert || s.Mode == nfnetlink.StatisticNth || s.Probability == 0 {
			d.refuse("match statistic")
			return
		}
		d.share(s.Probability)
	case "tcp", "udp", "sctp", "multiport":
		d.refuse(transportHeader)
	default:
		d.refuse("match " + m.Xt)
	}
}

// addressTypes reads the type LOCAL; it knows of the others only that they narrow.
func (d *decoder) addressTypes(m nfnetlink.Match) {
	const inverted = nfnetlink.AddrTypeInvertSource | nfnetlink.AddrTypeInvertDest
	a, err := nfnetlink.DecodeAddrType(m.Rev, m.Info)
	if err != nil || a.Flags&^inverted != 0 {
		d.refuse("match addrtype of another kind")
		return
	}
	if a.Source != 0 {
		if a.Source == nfnetlink.AddrTypeLocal {
			d.local(a.Flags&nfnetlink.AddrTypeInvertSource == 0)
		} else {
			d.refuse("match addrtype of the source")
		}
	}
	if a.Dest != 0 {
		if a.Dest == nfnetlink.AddrTypeLocal {
			d.toLocal(a.Flags&nfnetlink.AddrTypeInvertDest == 0)
		} else {
			d.refuse("match addrtype of the destination")
		}
	}
}

// local notes whether the source has to be an address of the node, or must not be.
func (d *decoder) local(is bool) {
	d.fromLocal, d.rule.NotFromLocal = d.fromLocal || is, d.rule.NotFromLocal || !is
	d.never = d.never || d.fromLocal && d.rule.NotFromLocal
}

// toLocal notes the same of the destination. Nothing leaves for one of the node.
func (d *decoder) toLocal(is bool) {
	d.rule.NotToLocal, d.never = d.rule.NotToLocal || !is, d.never || is
}

// xtConntrack reads the state of the connection in a struct xt_conntrack_mtinfo3,
// or 2, if that is all that it is about.
func (d *decoder) xtConntrack(m nfnetlink.Match) {
	const (
		flagsAt, invertAt, statesAt, size = 146, 148, 150, 154
		stateFlag, snatState, dnatState   = 1, 1 << 6, 1 << 7
	)
	if m.Rev != 2 && m.Rev != 3 || len(m.Info) < size || binary.NativeEndian.Uint16(m.Info[flagsAt:]) != stateFlag {
		d.refuse("match conntrack")
		return
	}
	states := binary.NativeEndian.Uint16(m.Info[statesAt:])
	if states&(snatState|dnatState) != 0 {
		d.refuse("match conntrack")
		return
	}
	inverted := binary.NativeEndian.Uint16(m.Info[invertAt:])&stateFlag != 0
	d.never = d.never || (states&newConnection != 0) == inverted
}

// xtMark reads a struct xt_mark_mtinfo1: mark and mask, uint32 each, and a byte
// that inverts.
func (d *decoder) xtMark(m nfnetlink.Match) {
	if m.Rev != 1 || len(m.Info) < 9 {
		d.refuse("match mark of another kind")
		return
	}
	zero, inverted := binary.NativeEndian.Uint32(m.Info) == 0, m.Info[8] != 0
	d.marked(zero != inverted)
}

// marked notes a match of the mark, by what it says of a packet without one.
func (d *decoder) marked(absent bool) {
	if absent {
		d.mark = max(d.mark, markAbsent)
	} else {
		d.mark = markNeeded
	}
}

// xtTarget knows those targets that change the source. Others that there can be
// at this hook (MARK, LOG) let packets go on.
func (d *decoder) xtTarget(t nfnetlink.Target) {
	switch t.Xt {
	case "MASQUERADE":
		d.effect = masquerades
	case "SNAT", "NETMAP":
		d.effect, d.snat = masquerades, true
	}
}

// output notes a match of the first bytes of the output interface's name: with
// the NUL that ends a name it is exact, else a wildcard.
func (d *decoder) output(b []byte, inverted bool) {
	name, _, exact := bytes.Cut(b, []byte{0})
	pattern := string(name)
	switch {
	case !exact:
		pattern += "+"
	case len(name) == 0 || name[len(name)-1] == '+':
		d.refuse("oifname")
		return
	}
	d.leaves(pattern, inverted)
}

func (d *decoder) index(index uint32, inverted bool) {
	name, err := d.device(index)
	if err != nil {
		d.refuse(fmt.Sprintf("oif %d", index))
		return
	}
	d.leaves(name, inverted)
}

func (d *decoder) leaves(pattern string, inverted bool) {
	switch {
	case !inverted:
		d.out(pattern)
	case pattern == "+":
		d.never = true
	default:
		d.notOut = append(d.notOut, pattern)
	}
}

// number notes the protocol, by its number.
func (d *decoder) number(n byte) {
	known := map[byte]policy.Protocol{6: "tcp", 17: "udp", 132: "sctp"}
	if p := known[n]; p != "" {
		d.protocol(p)
	} else {
		d.refuse(fmt.Sprintf("protocol %d", n))
	}
}

// bitsOf returns how many bits a mask has over the bytes that are compared.
func bitsOf(mask []byte, compared int) int {
	if mask == nil {
		return 8 * compared
	}
	n := 0
	for _, b := range mask[:compared] {
		n += bits.OnesCount8(b)
	}
	return n
}

// contiguous reports whether the mask is that of a prefix.
func contiguous(mask []byte) bool {
	ended := false
	for _, b := range mask {
		ones := bits.LeadingZeros8(^b)
		if ended && b != 0 || b<<ones != 0 {
			return false
		}
		ended = ended || ones < 8
	}
	return true
}
