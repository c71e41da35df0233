// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/bits"
	"net/netip"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// layout is where things are in a struct ipt_entry or ip6t_entry of a 64-bit
// kernel. What begins with an interface's name has the same order in both.
type layout struct {
	address     int // size of an address: source, destination and their masks come first
	interfaces  int // names in and out, masks in and out, 16 bytes each
	protocol    int // uint16
	flags       int // uint8
	inversions  int // uint8
	gotoFlag    byte
	plainFlags  byte // those that take nothing from what the rule matches
	protoFlag   byte // the flag without which the protocol is not looked at; 0: none
	targetAt    int  // uint16: offset of the target in the entry
	nextAt      int  // uint16: size of the entry
	packetsAt   int  // uint64
	size        int
	postrouting int // number of the hook
}

func layoutOf(f policy.Family) layout {
	const nfInetPostRouting = 4
	if f == policy.IPv6 {
		return layout{address: 16, interfaces: 64, protocol: 128, flags: 131, inversions: 132, gotoFlag: 0x04,
			plainFlags: 0x01 | 0x04, protoFlag: 0x01, targetAt: 140, nextAt: 142, packetsAt: 152, size: 168, postrouting: nfInetPostRouting}
	}
	return layout{address: 4, interfaces: 16, protocol: 80, flags: 82, inversions: 83, gotoFlag: 0x02,
		plainFlags: 0x02, targetAt: 88, nextAt: 90, packetsAt: 96, size: 112, postrouting: nfInetPostRouting}
}

// Sizes and places in struct xt_entry_match and xt_entry_target, which agree.
const (
	extensionHead = 32
	nameAt        = 2
	nameEnd       = 31
	revisionAt    = 31
)

var errBlob = errors.New("the kernel's reply does not have the form of a table of iptables-legacy")

// extensionSize returns the size of the one at the beginning of b.
func extensionSize(b []byte) (int, error) {
	if len(b) < extensionHead {
		return 0, errBlob
	}
	size := int(binary.NativeEndian.Uint16(b))
	return size, errBlobUnless(size >= extensionHead && size <= len(b))
}

// parseExtension reads the one at the beginning of b and returns its size.
func parseExtension(b []byte) (extension, int, error) {
	size, err := extensionSize(b)
	if err != nil {
		return extension{}, 0, err
	}
	return extension{cString(b[nameAt:nameEnd]), uint32(b[revisionAt]), b[extensionHead:size]}, size, nil
}

// cString returns the text before the first NUL.
func cString(b []byte) string {
	text, _, _ := bytes.Cut(b, []byte{0})
	return string(text)
}

func errBlobUnless(ok bool) error {
	if ok {
		return nil
	}
	return errBlob
}

// record is one entry of a blob, at its offset.
type record struct {
	at     int
	head   []byte
	middle []byte // the matches
	target extension
	next   int // offset of what follows it
}

// entry reads a rule.
func (r record) entry(p parts) entry {
	l := p.layout
	var out reading
	out.rule.Connections = binary.NativeEndian.Uint64(r.head[l.packetsAt:])
	flags := r.head[l.flags]
	if flags&^l.plainFlags != 0 || r.head[l.inversions] != 0 {
		out.refuse("an inverted match, a fragment or a type of service")
	}
	r.addresses(&out, l)
	r.interfaces(&out, l)
	if p := binary.NativeEndian.Uint16(r.head[l.protocol:]); p != 0 || flags&l.protoFlag != 0 {
		out.protocol(int(p))
		if l.protoFlag != 0 && flags&l.protoFlag == 0 {
			out.refuse("a protocol that is not looked at")
		}
	}
	for rest := r.middle; len(rest) > 0; {
		m, size, err := parseExtension(rest)
		if err != nil {
			out.refuse("a damaged match")
			break
		}
		out.match(m)
		rest = rest[size:]
	}
	if flags&l.gotoFlag != 0 {
		out.refuse("goto")
	}
	if r.target.name == "" {
		r.standardTarget(&out, p)
	} else {
		out.targetExtension(p.family, r.target)
	}
	return out.done("")
}

// Verdicts of a struct xt_standard_target.
const (
	verdictDrop   = -1 // -NF_DROP - 1
	verdictAccept = -2 // -NF_ACCEPT - 1
	verdictReturn = -5 // XT_RETURN, -NF_REPEAT - 1
)

// verdict returns that of a struct xt_standard_target, or the offset of the rule
// to go on with.
func (r record) verdict() (int, bool) {
	if len(r.target.info) < 4 {
		return 0, false
	}
	return int(int32(binary.NativeEndian.Uint32(r.target.info))), true
}

// standardTarget reads a target without a name.
func (r record) standardTarget(out *reading, p parts) {
	verdict, ok := r.verdict()
	chain, leads := p.chainAt(verdict)
	switch {
	case !ok:
		out.refuse("a damaged verdict")
	case verdict == verdictReturn:
		out.verdict(policy.Return)
	case verdict == verdictAccept:
		out.jump("ACCEPT")
	case verdict == r.next: // a rule without a target
	case leads:
		out.jump(chain)
	default:
		out.refuse("another verdict")
	}
}

func (r record) addresses(out *reading, l layout) {
	at := func(i int) []byte { return r.head[i*l.address : (i+1)*l.address] }
	out.masked(&out.rule.From, at(0), at(2), "source")
	out.masked(&out.rule.To, at(1), at(3), "destination")
}

// masked notes a match of an address under a mask.
func (r *reading) masked(side *policy.Ranges, address, mask []byte, what string) {
	length, contiguous := maskLength(mask)
	a, ok := netip.AddrFromSlice(address)
	if !ok || !contiguous {
		r.refuse(what + " under a mask that is no prefix's")
		return
	}
	r.address(side, netip.PrefixFrom(a, length), what)
}

// maskLength returns how many of the mask's bits are set, and whether no other
// one comes after them.
func maskLength(mask []byte) (int, bool) {
	n := 0
	for i, b := range mask {
		ones := bits.LeadingZeros8(^b)
		n += ones
		if ones < 8 {
			rest := mask[i+1:]
			return n, b<<ones == 0 && !slices.ContainsFunc(rest, func(b byte) bool { return b != 0 })
		}
	}
	return n, true
}

func (r record) interfaces(out *reading, l layout) {
	const size = 16 // IFNAMSIZ
	at := func(i int) []byte { return r.head[l.interfaces+i*size : l.interfaces+(i+1)*size] }
	if slices.ContainsFunc(at(2), func(b byte) bool { return b != 0 }) {
		out.refuse("an input interface")
	}
	length, contiguous := maskLength(at(3))
	if !contiguous || length%8 != 0 {
		out.refuse("an output interface under an odd mask")
		return
	}
	out.outBytes(at(1)[:length/8])
}
