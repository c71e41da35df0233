// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// Field is the property of a packet that a condition compares.
type Field uint8

// The fields that Decode knows. A new one is loaded by an expression (meta, payload) and compared by
// another (compare), or is in a match of xtables (match in xt.go).
const (
	Source           Field = iota + 1 // ip saddr, ip6 saddr
	Destination                       // ip daddr, ip6 daddr
	OutputName                        // meta oifname
	OutputIndex                       // meta oif
	Protocol                          // meta l4proto
	NFProto                           // meta nfproto
	Mark                              // meta mark
	ConnState                         // ct state
	SourceLocal                       // fib saddr type local
	DestinationLocal                  // fib daddr type local
	Probability                       // numgen random mod 2147483648 < Value
)

// String returns the name that messages have for the field.
func (f Field) String() string {
	names := [...]string{
		Source: "source", Destination: "destination", OutputName: "oifname", OutputIndex: "oif",
		Protocol: "l4proto", NFProto: "nfproto", Mark: "mark", ConnState: "ct state",
		SourceLocal: "local source", DestinationLocal: "local destination", Probability: "numgen",
	}
	return names[f]
}

// Condition is one comparison in a rule. A rule applies to the packets that meet all of its conditions.
type Condition struct {
	Field Field
	Not   bool
	Range netipx.IPRange // of Source and Destination; the zero value holds no address
	Set   string         // of Source and Destination, instead of Range
	Name  string         // of OutputName; a trailing + is a wildcard, as in iptables
	Value uint32         // of OutputIndex, Protocol, NFProto, Mark, ConnState and Probability
	Mask  uint32         // of Mark and ConnState: meta mark & Mask == Value
}

// String returns the condition as nft writes it, nearly.
func (c Condition) String() string {
	text := c.Field.String()
	if c.Not {
		text += " !="
	}
	prefix, isPrefix := c.Range.Prefix()
	switch {
	case c.Set != "":
		return text + " @" + c.Set
	case isPrefix:
		return text + " " + prefix.String()
	case c.Range.IsValid():
		return text + " " + c.Range.String()
	case c.Mask != 0:
		return fmt.Sprintf("%s %#x/%#x", text, c.Value, c.Mask)
	case c.Value != 0:
		return fmt.Sprintf("%s %d", text, c.Value)
	}
	return strings.TrimSpace(text + " " + c.Name)
}

// Statement is what a rule does with the packets that meet its conditions.
type Statement string

// The statements that end the evaluation of a rule. A rule with NoStatement only counts, logs or marks.
const (
	NoStatement Statement = ""
	DoAccept    Statement = "accept"
	DoDrop      Statement = "drop"
	DoReturn    Statement = "return"
	DoJump      Statement = "jump"
	DoGoto      Statement = "goto"
	DoMasq      Statement = "masquerade"
	DoSNAT      Statement = "snat"
)

// Decoded is a rule in the terms of nft(8). A rule with anything Unrecognized may apply to fewer packets than
// its conditions say, never to more: a part of it that cannot be decoded makes it unrecognized as a whole.
type Decoded struct {
	Conditions []Condition
	Statement  Statement
	Chain      string      // of DoJump and DoGoto
	To         Translation // of DoMasq and DoSNAT; zero of DoSNAT to other addresses, or to several
	Packets    uint64      // of the counter
	Comment    string

	// Other are statements that affect neither the conditions nor the verdict: log, meta mark set, most
	// targets of xtables.
	Other        []string
	Unrecognized []string
}

// Decode decodes a rule for packets of IPv4 or IPv6. Its conditions use the array of buffer.
func Decode(f Family, r Rule, buffer []Condition) Decoded {
	d := decoder{family: f}
	d.Comment, d.Conditions = r.Comment, buffer[:0]
	for _, e := range r.Exprs {
		if d.Statement != NoStatement {
			// The kernel never gets here. ip-masq writes no such rule, so it is another program's.
			d.refuse(e.Name() + " after " + string(d.Statement))
			break
		}
		d.expression(e)
	}
	d.flush()
	d.Unrecognized = append(d.Unrecognized, d.unread...)
	return d.Decoded
}

// decoder holds the value that was loaded last. Rules that load a second register before they compare the
// first one are not recognized.
type decoder struct {
	Decoded
	family    Family
	held      register
	unread    []string    // what was loaded before that and not compared
	constants []Immediate // for masq and nat
}

type register struct {
	number        Register
	what          Field  // 0: unknown
	name          string // for messages; "": nothing was loaded
	size          int    // in bytes
	mask          []byte // nil: none
	used          bool   // a comparison has read it
	hostByteOrder bool   // a number in this machine's byte order
}

func (d *decoder) refuse(part string) { d.Unrecognized = append(d.Unrecognized, part) }

func (d *decoder) add(c Condition) { d.Conditions = append(d.Conditions, c) }

// load replaces the held value.
func (d *decoder) load(r register) {
	d.flush()
	d.held, d.constants = r, nil
}

// flush removes the held value. One that no comparison has read is not recognized: loading it may end the
// rule, and without it the rule would look wider than it is. The exception is the name of the output
// interface: iptables-nft writes -o + as oifname without comparison.
func (d *decoder) flush() {
	isRead := d.held.used || d.held.name == ""
	what, name := d.held.what, d.held.name
	d.held = register{}
	if isRead {
		return
	}
	if what == OutputName {
		d.add(Condition{Field: OutputName, Name: "+"})
		return
	}
	d.unread = append(d.unread, name)
}

func (d *decoder) expression(e Expr) {
	switch e := e.(type) {
	case Payload:
		d.load(d.payload(e))
	case Meta:
		d.load(meta(e))
	case SetMeta:
		d.held.used = true
		d.Other = append(d.Other, "meta set")
	case FIB:
		d.load(fib(e))
	case CT:
		d.load(ct(e))
	case Numgen:
		d.load(numgen(e))
	case Byteorder:
		d.byteorder(e)
	case Bitwise:
		d.bitwise(e)
	case Cmp:
		d.compare(e)
	case Lookup:
		d.lookup(e)
	case Immediate:
		d.immediate(e)
	case Match:
		d.match(e)
	case Target:
		d.target(e)
	case Masq:
		d.masq(e)
	case Verdict:
		d.verdict(e)
	case NAT:
		d.nat(e)
	case Dynset, Range, MapLookup:
		d.load(register{name: e.Name()}) // it may end the rule
	case SetPayload:
		d.load(register{name: e.Name()}) // it may change what later rules match
	case Counter:
		d.Packets = e.Packets
	case Unknown:
		switch e.Kind {
		case "nat": // source NAT, the only one at the hook postrouting
			d.Statement = DoSNAT
		case "log", NoTrack:
			d.Other = append(d.Other, e.Kind)
		default:
			d.load(register{name: e.Kind}) // it may load any register
		}
	}
}

// NoTrack is in Other of a rule that keeps its packets from connection tracking.
const NoTrack = "notrack"

// payload decodes a load. iptables loads only the bytes of an address that a prefix reaches.
func (d *decoder) payload(e Payload) register {
	const protocolAt = 9 // in the header of IPv4 (RFC 791)
	r := register{number: e.Dreg, name: "payload", size: int(e.Len)}
	if e.Base == unix.NFT_PAYLOAD_TRANSPORT_HEADER {
		r.name = transportHeader
		return r
	}
	mayBeAddress := e.Len > 0 && int(e.Len) <= d.addressSize()
	if e.Base != unix.NFT_PAYLOAD_NETWORK_HEADER || !mayBeAddress {
		return r
	}
	switch {
	case e.Offset == LoadAddress(d.family, Source, e.Dreg).Offset:
		r.what, r.name = Source, "source"
	case e.Offset == LoadAddress(d.family, Destination, e.Dreg).Offset:
		r.what, r.name = Destination, "destination"
	case d.family == IPv4 && e.Offset == protocolAt && e.Len == 1:
		r.what, r.name = Protocol, "l4proto"
	}
	return r
}

// LoadAddress loads the address in the field Source or Destination.
func LoadAddress(f Family, field Field, to Register) Payload {
	p := Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 12, Len: net4, Dreg: to} // RFC 791
	if f == IPv6 {
		p.Offset, p.Len = 8, net6 // RFC 8200
	}
	if field == Destination {
		p.Offset += p.Len
	}
	return p
}

const transportHeader = "the transport header"

func meta(e Meta) register {
	switch e.Key {
	case unix.NFT_META_OIFNAME:
		return register{number: e.Dreg, what: OutputName, name: "oifname", size: unix.IFNAMSIZ}
	case unix.NFT_META_IIFNAME:
		return register{number: e.Dreg, name: "iifname"}
	case unix.NFT_META_OIF:
		return register{number: e.Dreg, what: OutputIndex, name: "oif", size: 4}
	case unix.NFT_META_L4PROTO:
		return register{number: e.Dreg, what: Protocol, name: "l4proto", size: 1}
	case unix.NFT_META_NFPROTO:
		return register{number: e.Dreg, what: NFProto, name: "nfproto", size: 1}
	case unix.NFT_META_MARK:
		return register{number: e.Dreg, what: Mark, name: "mark", size: 4}
	}
	return register{number: e.Dreg, name: "meta"}
}

func fib(e FIB) register {
	r := register{number: e.Dreg, name: "fib", size: 4}
	if e.Result != unix.NFT_FIB_RESULT_ADDRTYPE {
		return r
	}
	switch e.Flags {
	case unix.NFTA_FIB_F_SADDR:
		r.what = SourceLocal
	case unix.NFTA_FIB_F_DADDR:
		r.what = DestinationLocal
	}
	return r
}

func ct(e CT) register {
	if e.Key == unix.NFT_CT_STATE {
		return register{number: e.Dreg, what: ConnState, name: "ct state", size: 4}
	}
	return register{number: e.Dreg, name: "ct", size: 4}
}

func numgen(e Numgen) register {
	r := register{number: e.Dreg, name: "numgen", size: 4, hostByteOrder: true}
	if e.Random && e.Modulus == probabilityUnit && e.Offset == 0 {
		r.what = Probability
	}
	return r
}

// byteorder converts the number that is held to network order. Other conversions are not known.
func (d *decoder) byteorder(e Byteorder) {
	isOfHeld := e.Sreg == d.held.number && d.held.hostByteOrder
	isWhole := e.Op == unix.NFT_BYTEORDER_HTON && e.Len == 4 && e.Size == 4
	if !isOfHeld || !isWhole {
		d.load(register{number: e.Dreg, name: "byteorder"})
		return
	}
	d.held.number, d.held.hostByteOrder = e.Dreg, false
}

// immediate notes a constant for masq or nat.
func (d *decoder) immediate(e Immediate) {
	d.flush()
	for _, earlier := range d.constants {
		if earlier.Dreg == e.Dreg {
			d.refuse("immediate")
		}
	}
	d.constants = slices.Concat(d.constants, []Immediate{e})
}

func (d *decoder) bitwise(e Bitwise) {
	h := &d.held
	mayHaveMask := h.what == Source || h.what == Destination || h.what == Mark || h.what == ConnState
	isOfHeld := e.Sreg == h.number && h.mask == nil && int(e.Len) == h.size && len(e.Mask) == h.size
	if !mayHaveMask || !isOfHeld || !zero(e.Xor) {
		name := cmp.Or(h.name, "bitwise")
		h.used = true // its name is in that of the masked value
		d.load(register{number: e.Dreg, name: name + " under a mask"})
		return
	}
	h.number, h.mask = e.Dreg, e.Mask
}

func (d *decoder) compare(e Cmp) {
	h := &d.held
	if h.what == 0 && h.name != "" && !h.used {
		h.used = true
		d.refuse(h.name)
		return
	}
	isOfHeld := e.Sreg == h.number && h.what != 0 && !h.hostByteOrder
	fits := len(e.Data) > 0 && len(e.Data) <= h.size
	if !isOfHeld || !fits {
		d.concatenated("several fields at once")
		return
	}
	h.used = true
	isEquality := e.Op == Equal || e.Op == NotEqual
	switch {
	case h.what == Source || h.what == Destination:
		d.address(e)
	case h.what == OutputName && isEquality:
		d.outputName(e.Data, e.Op == NotEqual)
	case h.what == Probability && e.Op == Less && len(e.Data) == h.size:
		d.probability(binary.BigEndian.Uint32(e.Data))
	case isEquality && len(e.Data) == h.size:
		d.equals(e)
	default:
		d.refuse(h.name)
	}
}

// equals decodes a comparison of a whole number in this machine's byte order.
func (d *decoder) equals(e Cmp) {
	h := &d.held
	c := Condition{Field: h.what, Not: e.Op == NotEqual}
	number := nativeNumber(e.Data)
	switch h.what {
	case Protocol, NFProto, OutputIndex:
		c.Value = number
	case Mark, ConnState:
		c.Value, c.Mask = number, math.MaxUint32
		if h.mask != nil {
			c.Mask = nativeNumber(h.mask)
		}
	case SourceLocal, DestinationLocal:
		if number != unix.RTN_LOCAL {
			d.refuse(h.name)
			return
		}
	default:
		d.refuse(h.name)
		return
	}
	d.add(c)
}

// nativeNumber decodes a number of 4 bytes or of one.
func nativeNumber(data []byte) uint32 {
	if len(data) == 4 {
		return binary.NativeEndian.Uint32(data)
	}
	return uint32(data[0])
}

// concatenated refuses a comparison of more registers than the one that is held.
func (d *decoder) concatenated(part string) {
	d.held.used, d.unread = true, nil
	d.refuse(part)
}

// NewConnection is the bit of a new connection in the Value of ConnState.
const NewConnection = 8

// probabilityUnit is the modulus of Probability: xt_statistic counts in units of 2^-31.
const probabilityUnit = 1 << 31

func (d *decoder) probability(n uint32) {
	if n == 0 || n > probabilityUnit {
		d.refuse("numgen")
		return
	}
	d.add(Condition{Field: Probability, Value: n})
}

func (d *decoder) addressSize() int {
	if d.family == IPv6 {
		return net6
	}
	return net4
}

// Sizes of addresses in bytes.
const net4, net6 = 4, 16

// address decodes a comparison of an address or of its first bytes.
func (d *decoder) address(e Cmp) {
	h, size := d.held, d.addressSize()
	bits := 8 * len(e.Data)
	if h.mask != nil {
		ones, length := net.IPMask(h.mask[:len(e.Data)]).Size()
		if length == 0 {
			d.refuse(h.name + " under a mask that is no prefix's")
			return
		}
		bits = ones
	}
	var data [net6]byte
	copy(data[:], e.Data)
	isWhole := h.mask == nil && len(e.Data) == size
	c := Condition{Field: h.what, Not: e.Op == NotEqual}
	switch {
	case e.Op == Equal || e.Op == NotEqual:
		a, _ := netip.AddrFromSlice(data[:size])
		c.Range = prefixRange(netip.PrefixFrom(a, bits))
	case isWhole && e.Op == GreaterOrEqual:
		c.Range = ipRange(data[:size], bytes.Repeat([]byte{0xff}, size))
	case isWhole && e.Op == LessOrEqual:
		c.Range = ipRange(make([]byte, size), data[:size])
	default:
		d.refuse(h.name + " of another comparison")
		return
	}
	d.add(c)
}

// prefixRange returns the addresses of a prefix: none if it has host bits set, as no address under its mask
// equals it.
func prefixRange(p netip.Prefix) netipx.IPRange {
	if p.Masked() != p {
		return netipx.IPRange{}
	}
	return netipx.RangeOfPrefix(p)
}

func ipRange(first, last []byte) netipx.IPRange {
	a, _ := netip.AddrFromSlice(first)
	b, _ := netip.AddrFromSlice(last)
	return netipx.IPRangeFrom(a, b)
}

// useAddress marks a whole address that is held in the register as read, and reports whether there is one.
func (d *decoder) useAddress(r Register) bool {
	h := &d.held
	isAddress := h.what == Source || h.what == Destination
	isWhole := h.mask == nil && h.size == d.addressSize()
	if r != h.number || !isAddress || !isWhole {
		return false
	}
	h.used = true
	return true
}

func (d *decoder) lookup(e Lookup) {
	if !d.useAddress(e.Sreg) {
		d.concatenated("set " + strconv.Quote(e.Set))
		return
	}
	d.add(Condition{Field: d.held.what, Not: e.Not, Set: e.Set})
}

// outputName decodes a comparison of the first bytes of the output interface's name: with the NUL that
// ends a name it is exact, else a wildcard.
func (d *decoder) outputName(data []byte, not bool) {
	name, padding, exact := bytes.Cut(data, []byte{0})
	pattern := string(name)
	switch {
	case len(name) == unix.IFNAMSIZ || exact && len(name) == 0 || !zero(padding):
		d.refuse("oifname that is no name")
		return
	case exact && name[len(name)-1] == '+':
		d.refuse("oifname that ends in +") // which stands for a wildcard here
		return
	case !exact:
		pattern += "+"
	}
	d.add(Condition{Field: OutputName, Not: not, Name: pattern})
}

func (d *decoder) masq(e Masq) {
	d.Statement = DoMasq
	from := registers{portMin: e.ProtoMin, portMax: e.ProtoMax}
	to, isDecoded := d.registerTranslation(e.Flags, from)
	if !isDecoded {
		d.refuse("masq")
	}
	d.To = to
}

// nat decodes source NAT, the only one at the hook postrouting, to any address.
func (d *decoder) nat(e NAT) {
	d.useAddress(e.AddrMin) // `snat to ip saddr`: the loaded address is the new one, not a condition
	d.Statement = DoSNAT
	from := registers{e.AddrMin, e.AddrMax, e.ProtoMin, e.ProtoMax}
	to, isDecoded := d.registerTranslation(e.Flags, from)
	if isDecoded && e.Family == uint32(d.family) {
		d.To = to
	}
}

// registers are those from which masq or nat takes addresses and ports; 0 is none.
type registers struct{ addrMin, addrMax, portMin, portMax Register }

// registerTranslation returns the translation that the constants in the registers make. It is not decoded if
// one of the registers holds no such constant, or if there is a constant in another register.
func (d *decoder) registerTranslation(flags uint32, from registers) (to Translation, isDecoded bool) {
	to.Flags = flags
	decoded := map[Register]bool{}
	hasOneAddress := from.addrMin != 0 && (from.addrMax == 0 || from.addrMax == from.addrMin)
	if hasOneAddress {
		address, isHeld := d.constant(from.addrMin, d.addressSize())
		if !isHeld {
			return Translation{}, false
		}
		to.Address, _ = netip.AddrFromSlice(address)
		decoded[from.addrMin] = true
	}
	hasPorts := flags&unix.NF_NAT_RANGE_PROTO_SPECIFIED != 0
	if hasPorts {
		first, isFirstHeld := d.constant(from.portMin, 2)
		last, isLastHeld := d.constant(from.portMax, 2)
		isRange := from.portMin != 0 && from.portMax != 0
		if !isRange || !isFirstHeld || !isLastHeld {
			return Translation{}, false
		}
		to.PortMin = binary.BigEndian.Uint16(first)
		to.PortMax = binary.BigEndian.Uint16(last)
		decoded[from.portMin] = true
		decoded[from.portMax] = true
	}
	for _, r := range []Register{from.addrMin, from.addrMax, from.portMin, from.portMax} {
		if r != 0 && !decoded[r] {
			return Translation{}, false
		}
	}
	return to, len(decoded) == len(d.constants)
}

// constant returns the first bytes of the constant in a register, if it holds one.
func (d *decoder) constant(r Register, size int) (data []byte, isHeld bool) {
	for _, c := range d.constants {
		if c.Dreg == r && len(c.Data) >= size {
			return c.Data[:size], true
		}
	}
	return nil, false
}

func (d *decoder) verdict(e Verdict) {
	statement, isKnown := e.Statement()
	if !isKnown {
		d.refuse("another verdict")
	}
	d.Chain = e.Chain
	if statement != NoStatement {
		d.Statement = statement
	}
}
