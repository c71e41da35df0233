// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// bits is a value of which only the bits of a mask are known. Unknown bits are 0 in the value.
type bits struct{ value, known []byte }

func (b bits) isKnown() bool {
	return !slices.ContainsFunc(b.known, func(m byte) bool { return m != 0xff })
}

// equals compares with a value of the same length.
func (b bits) equals(other []byte) Answer {
	known := true
	for i := range other {
		if (b.value[i]^other[i])&b.known[i] != 0 {
			return No
		}
		known = known && b.known[i] == 0xff
	}
	if known {
		return Yes
	}
	return Perhaps
}

// highest returns the value with all unknown bits set. The lowest one is that with none.
func (b bits) highest() []byte {
	highest := bytes.Clone(b.value)
	for i, known := range b.known {
		highest[i] |= ^known
	}
	return highest
}

// within reports whether the value is between two others, both included, as memcmp orders them.
func (b bits) within(first, last []byte) Answer {
	highest := b.highest()
	switch {
	case bytes.Compare(highest, first) < 0 || bytes.Compare(b.value, last) > 0:
		return No
	case bytes.Compare(b.value, first) >= 0 && bytes.Compare(highest, last) <= 0:
		return Yes
	}
	return Perhaps
}

// mark is the mark of a packet.
type mark struct{ value, known uint32 }

// join returns what is known of a mark that is one of two.
func (m mark) join(other mark) mark {
	known := m.known & other.known &^ (m.value ^ other.value)
	return mark{m.value & known, known}
}

// slots is the number of 4-byte parts of the registers of nf_tables.
const slots = 16

// origin says what a register holds that is compared in a way of its own.
type origin uint8

const (
	fromSource origin = 1 << iota
	fromDestination
	outputName
	notLocal // the type of an address that is not LOCAL
)

// machine runs the expressions of a rule as nf_tables does, with registers of which some bits are unknown. A
// condition that depends on these is perhaps, and so is an expression that this package does not know: never
// no.
type machine struct {
	family              policy.Family
	packet              Packet
	source, destination bits
	mark                mark

	value, known [4 * slots]byte
	origins      [slots]origin

	matches Answer // whether the packet meets the conditions so far
	past    way    // out of the rule, by a condition that is not met
	splits  Addresses
}

// effect is an end that the evaluation of a rule can have.
type effect struct {
	code  nfnetlink.Statement
	chain string       // of DoJump and DoGoto
	to    netip.Prefix // of DoSNAT, as in Outcome
}

func newMachine(f policy.Family, p Packet) *machine {
	return &machine{
		family: f, packet: p,
		source: addressBits(f, p.Src), destination: addressBits(f, p.Dst),
	}
}

// run evaluates a rule for a packet with a mark. It returns the ends that are possible, with m.mark as the
// mark then, and the way past the rule. untracks tells that the rule may keep the packet from connection
// tracking.
func (m *machine) run(r *Rule, at mark) (effects []effect, past way, untracks bool) {
	m.mark, m.matches, m.past = at, Yes, way{}
	for _, e := range r.Exprs {
		if d, is := e.(nfnetlink.MapLookup); is && d.Dreg == nfnetlink.VerdictRegister {
			effects = m.verdicts(r, d)
		} else if end := m.expression(r, e); end != (effect{}) {
			effects = []effect{end}
		}
		if m.matches == No {
			return nil, m.past, untracks
		}
		untracks = untracks || isUntracking(e)
		if len(effects) > 0 {
			return effects, m.past, untracks
		}
	}
	m.past.join(way{true, m.mark})
	return nil, m.past, untracks
}

// and adds a condition of the rule. If it is not met for certain, the packet may continue behind the rule,
// with the mark that it has so far.
func (m *machine) and(a Answer) {
	m.matches = min(m.matches, a)
	if a != Yes {
		m.past.join(way{true, m.mark})
	}
}

// slot returns the first slot of a register: 1 to 4 have 16 bytes each, from 8 on 4.
func slot(r nfnetlink.Register) int {
	n := int(r) - unix.NFT_REG32_00
	if r <= unix.NFT_REG_4 {
		n = 4 * (int(r) - 1)
	}
	return min(max(n, 0), slots-1)
}

// register returns the first bytes of a register, and notes that an answer may depend on them.
func (m *machine) register(r nfnetlink.Register, size int) (b bits, from origin) {
	at := 4 * slot(r)
	end := min(at+size, len(m.value))
	for i := slot(r); 4*i < end; i++ {
		from |= m.origins[i]
	}
	return bits{m.value[at:end], m.known[at:end]}, from
}

// load sets a register and the rest of its last 4 bytes, which are 0.
func (m *machine) load(r nfnetlink.Register, b bits, from origin) {
	at := 4 * slot(r)
	for i := range (len(b.value) + 3) &^ 3 {
		if at+i == len(m.value) {
			return
		}
		m.value[at+i], m.known[at+i] = 0, 0xff
		if i < len(b.value) {
			m.value[at+i], m.known[at+i] = b.value[i]&b.known[i], b.known[i]
		}
		m.origins[(at+i)/4] = from
	}
}

// forget makes a register unknown.
func (m *machine) forget(r nfnetlink.Register, size int) {
	m.load(r, bits{make([]byte, size), make([]byte, size)}, 0)
}

// loadNumber loads a number in this machine's byte order, as most keys of meta and ct are.
func (m *machine) loadNumber(r nfnetlink.Register, n uint32, from origin) {
	b := binary.NativeEndian.AppendUint32(nil, n)
	m.load(r, bits{b, allKnown(4)}, from)
}

func allKnown(size int) []byte { return bytes.Repeat([]byte{0xff}, size) }

// expression evaluates an expression, and returns the end of the rule if it is one.
func (m *machine) expression(r *Rule, e nfnetlink.Expr) (end effect) {
	switch e := e.(type) {
	case nfnetlink.Payload:
		m.payload(e)
	case nfnetlink.Meta:
		m.meta(e)
	case nfnetlink.SetMeta:
		if e.Key == unix.NFT_META_MARK {
			b, _ := m.register(e.Sreg, 4)
			m.mark = mark{binary.NativeEndian.Uint32(b.value), binary.NativeEndian.Uint32(b.known)}
		}
	case nfnetlink.CT:
		m.connection(e)
	case nfnetlink.FIB:
		m.route(e)
	case nfnetlink.Bitwise:
		m.bitwise(e)
	case nfnetlink.Byteorder:
		m.byteorder(e)
	case nfnetlink.Numgen:
		m.forget(e.Dreg, 4)
	case nfnetlink.Immediate:
		m.load(e.Dreg, bits{e.Data, allKnown(len(e.Data))}, 0)
	case nfnetlink.Cmp:
		m.compare(e)
	case nfnetlink.Range:
		b, from := m.register(e.Sreg, len(e.From))
		m.condition(b.within(e.From, e.To), e.Op == nfnetlink.NotEqual, from)
	case nfnetlink.Lookup:
		m.lookup(r, e)
	case nfnetlink.MapLookup:
		m.translate(r, e)
	case nfnetlink.Dynset:
		m.and(Perhaps) // it ends the rule if the set is full
	case nfnetlink.Match:
		m.and(m.match(e))
	case nfnetlink.Target:
		return m.target(e)
	case nfnetlink.Verdict:
		return m.verdict(e)
	case nfnetlink.Masq:
		return effect{code: nfnetlink.DoMasq}
	case nfnetlink.NAT:
		return m.nat(e)
	case nfnetlink.Unknown:
		return m.unknown(e)
	}
	return effect{}
}

// condition adds a comparison of a register of that origin.
func (m *machine) condition(a Answer, inverted bool, from origin) {
	if a == Perhaps && from&fromSource != 0 {
		m.splits |= Source
	}
	if a == Perhaps && from&fromDestination != 0 {
		m.splits |= Destination
	}
	if inverted {
		a = a.not()
	}
	m.and(a)
}

func (m *machine) compare(e nfnetlink.Cmp) {
	b, from := m.register(e.Sreg, len(e.Data))
	if len(b.value) != len(e.Data) {
		m.and(Perhaps)
		return
	}
	lowest, highest := make([]byte, len(e.Data)), allKnown(len(e.Data))
	var a Answer
	switch e.Op {
	case nfnetlink.Equal, nfnetlink.NotEqual:
		a = b.equals(e.Data)
	case nfnetlink.Less, nfnetlink.GreaterOrEqual:
		a = b.within(e.Data, highest)
	default:
		a = b.within(lowest, e.Data)
	}
	if a == Perhaps && excluded(from, e.Data) {
		a = No
	}
	m.condition(a, e.Op == nfnetlink.NotEqual || e.Op == nfnetlink.Less || e.Op == greater, from)
}

// greater is NFT_CMP_GT.
const greater nfnetlink.CmpOp = unix.NFT_CMP_GT

// excluded reports whether a register that is not known is known to differ: no packet leaves through lo for
// an address that is not local, and the type of such an address is not LOCAL.
func excluded(from origin, value []byte) bool {
	switch {
	case from&outputName != 0:
		return bytes.HasPrefix(value, []byte("lo\x00"))
	case from&notLocal != 0:
		return len(value) == 4 && binary.NativeEndian.Uint32(value) == unix.RTN_LOCAL
	}
	return false
}

// payload loads bytes of the packet's header: only the addresses are known.
func (m *machine) payload(e nfnetlink.Payload) {
	size := uint32(len(m.source.value))
	at := nfnetlink.LoadAddress(netfilter.LinkOf(m.family), nfnetlink.Source, e.Dreg).Offset
	address, from := m.source, fromSource
	if e.Offset >= at+size {
		address, from, at = m.destination, fromDestination, at+size
	}
	isAddress := e.Base == unix.NFT_PAYLOAD_NETWORK_HEADER && e.Offset >= at && e.Offset+e.Len <= at+size
	if !isAddress {
		m.forget(e.Dreg, int(min(e.Len, 4*slots)))
		return
	}
	start, end := e.Offset-at, e.Offset-at+e.Len
	m.load(e.Dreg, bits{address.value[start:end], address.known[start:end]}, from)
}

// addressBits returns the bits of an address, of which those of a prefix are known.
func addressBits(f policy.Family, p netip.Prefix) bits {
	size := f.All().Addr().BitLen() / 8
	b := bits{make([]byte, size), make([]byte, size)}
	if p.IsValid() {
		copy(b.value, p.Masked().Addr().AsSlice())
	}
	for i := range max(p.Bits(), 0) {
		b.known[i/8] |= 0x80 >> (i % 8)
	}
	return b
}

func (m *machine) meta(e nfnetlink.Meta) {
	const ipv4, ipv6 = 0x0800, 0x86dd // ETH_P_IP, ETH_P_IPV6
	out := m.packet.Out
	switch {
	case e.Key == unix.NFT_META_OIFNAME && out != "":
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, out)
		m.load(e.Dreg, bits{name, allKnown(len(name))}, 0)
	case e.Key == unix.NFT_META_OIFNAME:
		m.load(e.Dreg, bits{make([]byte, unix.IFNAMSIZ), make([]byte, unix.IFNAMSIZ)}, outputName)
	case e.Key == unix.NFT_META_OIF && m.packet.OutIndex != 0:
		m.loadNumber(e.Dreg, uint32(m.packet.OutIndex), 0)
	case e.Key == unix.NFT_META_MARK:
		value := binary.NativeEndian.AppendUint32(nil, m.mark.value)
		m.load(e.Dreg, bits{value, binary.NativeEndian.AppendUint32(nil, m.mark.known)}, 0)
	case e.Key == unix.NFT_META_NFPROTO:
		m.load(e.Dreg, bits{[]byte{byte(netfilter.LinkOf(m.family))}, allKnown(1)}, 0)
	case e.Key == unix.NFT_META_PROTOCOL && m.family == policy.IPv6:
		m.load(e.Dreg, bits{binary.BigEndian.AppendUint16(nil, ipv6), allKnown(2)}, 0)
	case e.Key == unix.NFT_META_PROTOCOL:
		m.load(e.Dreg, bits{binary.BigEndian.AppendUint16(nil, ipv4), allKnown(2)}, 0)
	default:
		m.forget(e.Dreg, unix.IFNAMSIZ)
	}
}

// connection loads what is known of a connection that begins.
func (m *machine) connection(e nfnetlink.CT) {
	switch e.Key {
	case unix.NFT_CT_STATE:
		m.loadNumber(e.Dreg, nfnetlink.NewConnection, 0)
	case unix.NFT_CT_DIRECTION:
		m.load(e.Dreg, bits{[]byte{0}, allKnown(1)}, 0)
	default:
		m.forget(e.Dreg, 2*unix.IFNAMSIZ)
	}
}

// route loads the type of an address.
func (m *machine) route(e nfnetlink.FIB) {
	m.forget(e.Dreg, unix.IFNAMSIZ)
	if e.Result != unix.NFT_FIB_RESULT_ADDRTYPE {
		return
	}
	isLocal := No // the destination
	if e.Flags&unix.NFTA_FIB_F_SADDR != 0 {
		isLocal = m.packet.SrcLocal
	}
	ofAnyInterface := e.Flags&(unix.NFTA_FIB_F_IIF|unix.NFTA_FIB_F_OIF) == 0
	switch {
	case isLocal == Yes && ofAnyInterface:
		m.loadNumber(e.Dreg, unix.RTN_LOCAL, 0)
	case isLocal == No:
		m.load(e.Dreg, bits{make([]byte, 4), make([]byte, 4)}, notLocal)
	}
}

func (m *machine) bitwise(e nfnetlink.Bitwise) {
	b, from := m.register(e.Sreg, int(e.Len))
	if len(b.value) != len(e.Mask) {
		m.forget(e.Dreg, len(e.Mask))
		return
	}
	out := bits{bytes.Clone(b.value), bytes.Clone(b.known)}
	for i, mask := range e.Mask {
		out.known[i] |= ^mask
		out.value[i] &= mask
		if i < len(e.Xor) {
			out.value[i] ^= e.Xor[i]
		}
	}
	m.load(e.Dreg, out, from&(fromSource|fromDestination))
}

// byteorder reverses the bytes of each number, unless this machine has network order.
func (m *machine) byteorder(e nfnetlink.Byteorder) {
	b, from := m.register(e.Sreg, int(e.Len))
	out := bits{bytes.Clone(b.value), bytes.Clone(b.known)}
	swaps := binary.NativeEndian.Uint16([]byte{1, 0}) == 1
	for i := 0; swaps && e.Size > 0 && i+int(e.Size) <= len(out.value); i += int(e.Size) {
		slices.Reverse(out.value[i : i+int(e.Size)])
		slices.Reverse(out.known[i : i+int(e.Size)])
	}
	m.load(e.Dreg, out, from)
}

// forgetMark makes the mark unknown.
func (m *machine) forgetMark() { m.mark = mark{} }

func (m *machine) verdict(e nfnetlink.Verdict) effect {
	switch e.Code {
	case nfnetlink.Accept:
		return effect{code: nfnetlink.DoAccept}
	case nfnetlink.Drop:
		return effect{code: nfnetlink.DoDrop}
	case nfnetlink.Return:
		return effect{code: nfnetlink.DoReturn}
	case nfnetlink.Jump:
		return effect{code: nfnetlink.DoJump, chain: e.Chain}
	case nfnetlink.Goto:
		return effect{code: nfnetlink.DoGoto, chain: e.Chain}
	case nfnetlink.Continue:
		return effect{}
	}
	m.and(Perhaps) // a queue, whose program decides
	m.forgetMark()
	return effect{code: nfnetlink.DoAccept}
}

// nat translates the source, the only address that is translated at the hook postrouting.
func (m *machine) nat(e nfnetlink.NAT) effect {
	isOtherFamily := e.Family != unix.NFPROTO_INET && e.Family != uint32(netfilter.LinkOf(m.family))
	if isOtherFamily {
		return effect{} // it does nothing in a table of both families
	}
	end := effect{code: nfnetlink.DoSNAT}
	single := e.AddrMax == 0 || e.AddrMax == e.AddrMin
	if e.AddrMin == 0 || !single {
		return end
	}
	b, from := m.register(e.AddrMin, m.family.All().Addr().BitLen()/8)
	switch address, ok := netip.AddrFromSlice(b.value); {
	case ok && b.isKnown():
		end.to = HostPrefix(address)
	case from == fromSource:
		end.to = m.packet.Src
	}
	return end
}

// unknown evaluates an expression that was not decoded: it may load any register, and end the rule.
func (m *machine) unknown(e nfnetlink.Unknown) effect {
	switch e.Kind {
	case "log", "last", nfnetlink.NoTrack:
		return effect{}
	case "nat":
		return effect{code: nfnetlink.DoSNAT}
	case "masq":
		return effect{code: nfnetlink.DoMasq}
	case "meta": // it may set the mark
		m.forgetMark()
	}
	m.and(Perhaps)
	m.value, m.known, m.origins = [4 * slots]byte{}, [4 * slots]byte{}, [slots]origin{}
	switch e.Kind {
	case "queue", "reject", "synproxy", "tproxy", "immediate", "another verdict":
		return effect{code: nfnetlink.DoAccept}
	}
	return effect{}
}
