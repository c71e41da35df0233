// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// machine runs the expressions of a rule as nf_tables does, with registers of which some bits are unknown. A
// condition that depends on these is perhaps, and so is an expression that this package does not know: never
// no.
type machine struct {
	family    policy.Family
	packet    Packet
	addresses bits // the source, and behind it the destination, as in the header
	isWritten bool // a rule may have written the addresses, which are not known then
	splits    Addresses
	steps     int // rules that were evaluated, and elements of sets that were compared

	registers
	mark    mark
	matches Answer // whether the packet meets the conditions so far
	ended   bool   // no further expression is evaluated
	changes bool   // the rule may change the packet, also where a later condition is not met
	passage passage
}

// passage is what a rule does with a packet.
type passage struct {
	ends     []effect // that are possible
	at       way      // to these
	past     way      // the rule
	untracks bool     // the rule may keep the packet from connection tracking
	rewrites bool     // the rule may write another address into the packet
}

// effect is an end that the evaluation of a rule can have.
type effect struct {
	code  nfnetlink.Statement
	chain string       // of DoJump and DoGoto
	to    netip.Prefix // of DoSNAT, as in Outcome
}

func newMachine(f policy.Family, p Packet) *machine {
	source, destination := addressBits(f, p.Src), addressBits(f, p.Dst)
	return &machine{family: f, packet: p, addresses: source.followedBy(destination)}
}

// run evaluates a rule for a packet with a mark.
func (m *machine) run(r *Rule, at mark) passage {
	m.steps++
	m.registers = registers{}
	m.mark = at
	m.matches = Yes
	m.ended, m.changes = false, false
	m.passage = passage{}
	for _, e := range r.Exprs {
		m.expression(r, e)
		if m.matches == No || m.ended {
			return m.passage
		}
	}
	m.passage.past.join(way{true, m.mark})
	return m.passage
}

// and adds a condition of the rule. If it is not met for certain, the packet may continue behind the rule,
// with the mark that it has so far.
func (m *machine) and(a Answer) {
	m.matches = min(m.matches, a)
	if a != Yes {
		m.passage.past.join(way{true, m.mark})
	}
}

// mayEnd notes an end that the rule can have here.
func (m *machine) mayEnd(e effect) {
	m.passage.ends = append(m.passage.ends, e)
	m.passage.at.join(way{true, m.mark})
}

// end ends the rule.
func (m *machine) end(e effect) {
	m.mayEnd(e)
	m.ended = true
}

// mayDoAnything evaluates what is not known at all. A translation to an unknown address stands for all that
// change the source, and the packet may continue or come to another chain, so no verdict is certain then.
func (m *machine) mayDoAnything() {
	m.setMark(mark{})
	m.forgetAddresses()
	m.registers = registers{}
	m.and(Perhaps)
	for _, code := range []nfnetlink.Statement{nfnetlink.DoAccept, nfnetlink.DoReturn, nfnetlink.DoSNAT} {
		m.mayEnd(effect{code: code})
	}
}

func (m *machine) setMark(to mark) { m.mark, m.changes = to, true }

func (m *machine) untrack() { m.passage.untracks, m.changes = true, true }

// expression evaluates an expression.
func (m *machine) expression(r *Rule, e nfnetlink.Expr) {
	switch e := e.(type) {
	case nfnetlink.Payload:
		m.payload(e)
	case nfnetlink.SetPayload:
		m.setPayload(e)
	case nfnetlink.Meta:
		m.meta(e)
	case nfnetlink.SetMeta:
		if e.Key == unix.NFT_META_MARK {
			b, _ := m.register(e.Sreg, 4)
			m.setMark(mark{binary.NativeEndian.Uint32(b.value), binary.NativeEndian.Uint32(b.known)})
		}
	case nfnetlink.CT:
		m.ct(e)
	case nfnetlink.FIB:
		m.fib(e)
	case nfnetlink.Bitwise:
		m.bitwise(e)
	case nfnetlink.Byteorder:
		m.byteorder(e)
	case nfnetlink.Numgen:
		m.forget(e.Dreg, 4)
	case nfnetlink.Immediate:
		m.load(e.Dreg, knownBits(e.Data), 0)
	case nfnetlink.Cmp:
		m.compare(e)
	case nfnetlink.Range:
		b, from := m.register(e.Sreg, len(e.From))
		m.condition(b.within(e.From, e.To), e.Op == nfnetlink.NotEqual, from)
	case nfnetlink.Lookup:
		m.lookup(r, e)
	case nfnetlink.MapLookup:
		m.mapLookup(r, e)
	case nfnetlink.Dynset:
		m.and(Perhaps) // it ends the rule if the set is full
	case nfnetlink.Match:
		m.and(m.match(e))
	case nfnetlink.Target:
		m.target(e)
	case nfnetlink.Verdict:
		m.ended = m.verdict(e)
	case nfnetlink.Masq:
		m.end(effect{code: nfnetlink.DoMasq})
	case nfnetlink.NAT:
		m.nat(e)
	case nfnetlink.Counter:
	case nfnetlink.Unknown:
		m.unknown(e)
	default:
		m.mayDoAnything()
	}
}

// condition adds a comparison of a register of that origin.
func (m *machine) condition(a Answer, inverted bool, from origin) {
	if a == Perhaps && from&fromSource != 0 {
		m.splits |= Source
	}
	if a == Perhaps && from&fromDestination != 0 {
		m.splits |= Destination
	}
	m.and(a.notIf(inverted))
}

func (m *machine) compare(e nfnetlink.Cmp) {
	b, from := m.register(e.Sreg, len(e.Data))
	if len(b.value) != len(e.Data) {
		m.and(Perhaps)
		return
	}
	lowest, highest := make([]byte, len(e.Data)), allKnown(len(e.Data))
	switch e.Op {
	case nfnetlink.Equal, nfnetlink.NotEqual:
		a := b.equals(e.Data)
		if isExcluded(from, e.Data) {
			a = No
		}
		m.condition(a, e.Op == nfnetlink.NotEqual, from)
	case nfnetlink.GreaterOrEqual:
		m.condition(b.within(e.Data, highest), false, from)
	case nfnetlink.Less:
		m.condition(b.within(e.Data, highest), true, from)
	case nfnetlink.LessOrEqual:
		m.condition(b.within(lowest, e.Data), false, from)
	case greater:
		m.condition(b.within(lowest, e.Data), true, from)
	default:
		m.and(Perhaps)
	}
}

// greater is NFT_CMP_GT.
const greater nfnetlink.CmpOp = unix.NFT_CMP_GT

// isExcluded reports whether a register is known not to have the value although none of its bits is known.
// No packet leaves through lo for an address that is not local, and the type of such an address is not LOCAL.
func isExcluded(from origin, value []byte) bool {
	switch from {
	case outputName:
		return bytes.HasPrefix(value, []byte("lo\x00"))
	case notLocal:
		return len(value) == 4 && binary.NativeEndian.Uint32(value) == unix.RTN_LOCAL
	}
	return false
}

// addressesFrom returns the offset of the addresses in the header: that of the source, which comes first.
func (m *machine) addressesFrom() uint32 {
	return nfnetlink.LoadAddress(netfilter.LinkOf(m.family), nfnetlink.Source, 0).Offset
}

// payload loads bytes of the packet's header: only the addresses are known.
func (m *machine) payload(e nfnetlink.Payload) {
	first, size := m.addressesFrom(), uint32(len(m.addresses.value))
	isWithin := e.Offset >= first && e.Offset+e.Len <= first+size
	if e.Base != unix.NFT_PAYLOAD_NETWORK_HEADER || !isWithin {
		m.forget(e.Dreg, int(min(e.Len, 4*slots)))
		return
	}
	start, end := e.Offset-first, e.Offset-first+e.Len
	var from origin
	if start < size/2 {
		from |= fromSource
	}
	if end > size/2 {
		from |= fromDestination
	}
	m.load(e.Dreg, bits{m.addresses.value[start:end], m.addresses.known[start:end]}, from)
}

// setPayload writes to the packet. What is written to an address is not followed.
func (m *machine) setPayload(e nfnetlink.SetPayload) {
	first, size := m.addressesFrom(), uint32(len(m.addresses.value))
	if e.Base != unix.NFT_PAYLOAD_NETWORK_HEADER || e.Offset+e.Len <= first || e.Offset >= first+size {
		return
	}
	m.passage.rewrites, m.changes = true, true
	m.forgetAddresses()
}

func (m *machine) forgetAddresses() {
	m.packet.Src, m.packet.Dst = netip.Prefix{}, netip.Prefix{}
	m.addresses, m.isWritten = unknownBits(len(m.addresses.value)), true
}

func (m *machine) meta(e nfnetlink.Meta) {
	const ipv4, ipv6 = 0x0800, 0x86dd // ETH_P_IP, ETH_P_IPV6
	out := m.packet.Out
	switch {
	case e.Key == unix.NFT_META_OIFNAME && out != "":
		name := make([]byte, unix.IFNAMSIZ)
		copy(name, out)
		m.load(e.Dreg, knownBits(name), 0)
	case e.Key == unix.NFT_META_OIFNAME:
		m.load(e.Dreg, unknownBits(unix.IFNAMSIZ), outputName)
	case e.Key == unix.NFT_META_OIF && m.packet.OutIndex != 0:
		m.loadNumber(e.Dreg, uint32(m.packet.OutIndex), 0)
	case e.Key == unix.NFT_META_MARK:
		value := binary.NativeEndian.AppendUint32(nil, m.mark.value)
		m.load(e.Dreg, bits{value, binary.NativeEndian.AppendUint32(nil, m.mark.known)}, 0)
	case e.Key == unix.NFT_META_NFPROTO:
		m.load(e.Dreg, knownBits([]byte{byte(netfilter.LinkOf(m.family))}), 0)
	case e.Key == unix.NFT_META_PROTOCOL && m.family == policy.IPv6:
		m.load(e.Dreg, knownBits(binary.BigEndian.AppendUint16(nil, ipv6)), 0)
	case e.Key == unix.NFT_META_PROTOCOL:
		m.load(e.Dreg, knownBits(binary.BigEndian.AppendUint16(nil, ipv4)), 0)
	default:
		m.forget(e.Dreg, unix.IFNAMSIZ)
	}
}

// ct loads what is known of a connection that begins.
func (m *machine) ct(e nfnetlink.CT) {
	switch e.Key {
	case unix.NFT_CT_STATE:
		m.loadNumber(e.Dreg, nfnetlink.NewConnection, 0)
	case unix.NFT_CT_DIRECTION:
		m.load(e.Dreg, knownBits([]byte{0}), 0)
	default:
		m.forget(e.Dreg, 2*unix.IFNAMSIZ)
	}
}

// fib loads the type of an address.
func (m *machine) fib(e nfnetlink.FIB) {
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
		m.load(e.Dreg, unknownBits(4), notLocal)
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
	isLittleEndian := binary.NativeEndian.Uint16([]byte{1, 0}) == 1
	size := int(e.Size)
	if isLittleEndian && size > 0 {
		for at := 0; at+size <= len(out.value); at += size {
			slices.Reverse(out.value[at : at+size])
			slices.Reverse(out.known[at : at+size])
		}
	}
	m.load(e.Dreg, out, from&(fromSource|fromDestination))
}

// verdict notes the end that a verdict is, and reports whether it is one for certain.
func (m *machine) verdict(v nfnetlink.Verdict) bool {
	code, isKnown := v.Statement()
	if !isKnown {
		m.mayDoAnything()
		return false
	}
	if code == nfnetlink.NoStatement { // it continues with the next expression
		return false
	}
	m.mayEnd(effect{code: code, chain: v.Chain})
	return true
}

// nat translates the source, the only address that is translated at the hook postrouting.
func (m *machine) nat(e nfnetlink.NAT) {
	isOtherFamily := e.Family != unix.NFPROTO_INET && e.Family != uint32(netfilter.LinkOf(m.family))
	if isOtherFamily {
		return // it does nothing in a table of both families
	}
	m.end(effect{code: nfnetlink.DoSNAT, to: m.translation(e)})
}

// translation returns a prefix that has the new address, or the zero Prefix.
func (m *machine) translation(e nfnetlink.NAT) netip.Prefix {
	if e.AddrMin == 0 {
		return netip.Prefix{} // of ports alone
	}
	first, from := m.register(e.AddrMin, len(m.addresses.value)/2)
	last, _ := m.register(cmp.Or(e.AddrMax, e.AddrMin), len(m.addresses.value)/2)
	a, _ := netip.AddrFromSlice(first.value)
	b, _ := netip.AddrFromSlice(last.value)
	isRange := e.AddrMax != 0 && e.AddrMax != e.AddrMin
	switch {
	case first.isKnown() && last.isKnown():
		return prefixAround(a, b)
	case from == fromSource && !isRange:
		return m.packet.Src
	}
	return netip.Prefix{}
}

// unknown evaluates an expression that was not decoded.
func (m *machine) unknown(e nfnetlink.Unknown) {
	switch e.Kind {
	case "log", "last", "dup": // the packet continues
		return
	case nfnetlink.NoTrack:
		m.untrack()
		return
	}
	m.and(Perhaps)
	m.registers = registers{}
	switch {
	case slices.Contains(conditions(), e.Kind):
	case e.Kind == "meta":
		m.setMark(mark{})
	case e.Kind == "nat":
		m.mayEnd(effect{code: nfnetlink.DoSNAT})
	case e.Kind == "masq":
		m.mayEnd(effect{code: nfnetlink.DoMasq})
	case e.Kind == "queue" || e.Kind == "reject" || e.Kind == "synproxy" || e.Kind == "tproxy":
		m.setMark(mark{}) // programs that get packets from a queue are taken to leave their addresses alone
		m.mayEnd(effect{code: nfnetlink.DoAccept})
	default:
		m.mayDoAnything()
	}
}

// conditions are expressions that load registers, or end the rule without a verdict.
func conditions() []string {
	return []string{
		"bitwise", "byteorder", "cmp", "connlimit", "counter", "ct", "dynset", "exthdr", "fib", "hash",
		"inner", "limit", "match", "numgen", "objref", "osf", "payload", "quota", "range", "rt", "socket",
		"tunnel", "xfrm",
		// of iptables-legacy
		"fragment or type of service", "interface under an odd mask", "protocol 0",
	}
}
