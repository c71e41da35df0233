// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// nftPrinter writes the expressions of a rule as nft does. What a register holds, it keeps in words.
type nftPrinter struct {
	rule   *Rule
	family nfnetlink.Family
	words  []string
	held   [slots]operand
	// implied is a condition on the protocol. nft does not print it before one that implies it, such as tcp
	// dport.
	implied operand
	value   []byte // of implied
}

// operand is what a register holds.
type operand struct {
	name      string // as nft has it: ip saddr
	size      int    // in bytes
	mask, xor []byte // of Bitwise
	isSwapped bool   // by Byteorder
	constant  []byte // of Immediate, which has no name
}

func (p *nftPrinter) text() string {
	for _, e := range p.rule.Exprs {
		p.expression(e)
	}
	p.flush()
	if p.rule.Comment != "" {
		p.add("comment", policy.Quote(p.rule.Comment))
	}
	return strings.Join(p.words, " ")
}

func (p *nftPrinter) add(words ...string) {
	p.flush()
	p.words = append(p.words, words...)
}

// flush writes the condition that no later one has implied.
func (p *nftPrinter) flush() {
	if p.implied.name != "" {
		p.words = append(p.words, p.implied.name, p.implied.valueText(p.value))
		p.implied = operand{}
	}
}

func (p *nftPrinter) expression(e nfnetlink.Expr) {
	if p.load(e) {
		return
	}
	switch e := e.(type) {
	case nfnetlink.Cmp:
		p.compare(e)
	case nfnetlink.Range:
		held := p.held[slot(e.Sreg)]
		p.condition(held.text(), e.Op == nfnetlink.NotEqual, held.valueText(e.From)+"-"+held.valueText(e.To))
	case nfnetlink.Lookup:
		keys := p.keys(e.Set, e.Sreg)
		p.condition(namesOf(keys), e.Not, p.setText(e.Set, keys))
	case nfnetlink.MapLookup: // a verdict map
		keys := p.keys(e.Set, e.Sreg)
		p.add(namesOf(keys), "vmap", p.setText(e.Set, keys))
	case nfnetlink.Dynset:
		verb := "add"
		if e.Op == unix.NFT_DYNSET_OP_UPDATE {
			verb = "update"
		}
		p.add(verb, "@"+plain(e.Set), "{ "+namesOf(p.keys(e.Set, e.Key))+" }")
	case nfnetlink.SetMeta:
		p.set(metaOperand(e.Key), e.Sreg)
	case nfnetlink.SetPayload:
		p.set(p.payload(nfnetlink.Payload{Base: e.Base, Offset: e.Offset, Len: e.Len}), e.Sreg)
	case nfnetlink.Verdict:
		p.add(verdictText(e))
	case nfnetlink.Masq:
		p.add("masquerade")
		p.translation(0, 0, e.ProtoMin, e.ProtoMax, e.Flags)
	case nfnetlink.NAT:
		p.add("snat")
		p.translation(e.AddrMin, e.AddrMax, e.ProtoMin, e.ProtoMax, e.Flags)
	case nfnetlink.Match:
		p.add("xt match", plain(e.Xt))
	case nfnetlink.Target:
		p.add("xt target", plain(e.Xt))
	case nfnetlink.Unknown:
		p.add(e.Kind)
		if e.Kind != nfnetlink.NoTrack {
			p.add(unprinted)
		}
	}
}

// load keeps the name of what an expression loads, and reports whether it loads something.
func (p *nftPrinter) load(e nfnetlink.Expr) bool {
	switch e := e.(type) {
	case nfnetlink.Payload:
		p.held[slot(e.Dreg)] = p.payload(e)
	case nfnetlink.Meta:
		p.held[slot(e.Dreg)] = metaOperand(e.Key)
	case nfnetlink.CT:
		p.held[slot(e.Dreg)] = operand{name: connectionName(e.Key), size: 4}
	case nfnetlink.FIB:
		p.held[slot(e.Dreg)] = operand{name: fibName(e), size: 4}
	case nfnetlink.Numgen:
		kind := "inc"
		if e.Random {
			kind = "random"
		}
		p.held[slot(e.Dreg)] = operand{name: fmt.Sprintf("numgen %s mod %d", kind, e.Modulus), size: 4}
	case nfnetlink.Immediate:
		p.held[slot(e.Dreg)] = operand{constant: e.Data, size: len(e.Data)}
	case nfnetlink.Bitwise:
		held := p.held[slot(e.Sreg)]
		held.mask, held.xor = e.Mask, e.Xor
		p.held[slot(e.Dreg)] = held
	case nfnetlink.Byteorder:
		held := p.held[slot(e.Sreg)]
		held.isSwapped = !held.isSwapped
		p.held[slot(e.Dreg)] = held
	case nfnetlink.MapLookup:
		if e.Dreg == nfnetlink.VerdictRegister {
			return false
		}
		keys := p.keys(e.Set, e.Sreg)
		p.held[slot(e.Dreg)] = operand{name: namesOf(keys) + " map " + p.setText(e.Set, keys)}
	case nfnetlink.Counter:
	default:
		return false
	}
	return true
}

// payload returns the name of a field. If that implies the condition before it, the condition is not printed.
func (p *nftPrinter) payload(e nfnetlink.Payload) operand {
	field := operand{size: int(e.Len)}
	switch e.Base {
	case unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		field.name = p.transportField(e)
	case unix.NFT_PAYLOAD_NETWORK_HEADER:
		field.name = p.networkField(e)
	default:
		field.name = fmt.Sprintf("@ll,%d,%d", 8*e.Offset, 8*e.Len)
	}
	return field
}

func (p *nftPrinter) networkField(e nfnetlink.Payload) string {
	header := "ip"
	if p.family == nfnetlink.IPv6 {
		header = "ip6"
	}
	source := nfnetlink.LoadAddress(p.family, nfnetlink.Source, 0)
	var field string
	switch {
	case e.Offset == source.Offset && e.Len <= source.Len:
		field = "saddr"
	case e.Offset == source.Offset+source.Len && e.Len <= source.Len:
		field = "daddr"
	case header == "ip" && e.Offset == 9 && e.Len == 1: // RFC 791
		field = "protocol"
	default:
		return fmt.Sprintf("@nh,%d,%d", 8*e.Offset, 8*e.Len)
	}
	if p.implied.name == "meta nfproto" {
		p.implied = operand{}
	}
	return header + " " + field
}

func (p *nftPrinter) transportField(e nfnetlink.Payload) string {
	isPort := e.Len == 2 && (e.Offset == 0 || e.Offset == 2)
	if !isPort {
		return fmt.Sprintf("@th,%d,%d", 8*e.Offset, 8*e.Len)
	}
	protocol := "th"
	if p.implied.name == "meta l4proto" {
		protocol = protocolName(p.value[0])
		p.implied = operand{}
	}
	if e.Offset == 0 {
		return protocol + " sport"
	}
	return protocol + " dport"
}

func metaOperand(key uint32) operand {
	switch key {
	case unix.NFT_META_OIFNAME:
		return operand{name: "oifname", size: unix.IFNAMSIZ}
	case unix.NFT_META_IIFNAME:
		return operand{name: "iifname", size: unix.IFNAMSIZ}
	case unix.NFT_META_OIF:
		return operand{name: "oif", size: 4}
	case unix.NFT_META_IIF:
		return operand{name: "iif", size: 4}
	case unix.NFT_META_MARK:
		return operand{name: "meta mark", size: 4}
	case unix.NFT_META_L4PROTO:
		return operand{name: "meta l4proto", size: 1}
	case unix.NFT_META_NFPROTO:
		return operand{name: "meta nfproto", size: 1}
	case unix.NFT_META_SKUID:
		return operand{name: "meta skuid", size: 4}
	}
	return operand{name: fmt.Sprintf("meta key %d", key), size: 4}
}

func connectionName(key uint32) string {
	switch key {
	case unix.NFT_CT_STATE:
		return "ct state"
	case unix.NFT_CT_STATUS:
		return "ct status"
	case unix.NFT_CT_MARK:
		return "ct mark"
	case unix.NFT_CT_DIRECTION:
		return "ct direction"
	}
	return fmt.Sprintf("ct key %d", key)
}

func fibName(e nfnetlink.FIB) string {
	keys := bitNames(e.Flags, "saddr", "daddr", "mark", "iif", "oif") // NFTA_FIB_F_*
	result := "type"
	switch e.Result {
	case unix.NFT_FIB_RESULT_OIF:
		result = "oif"
	case unix.NFT_FIB_RESULT_OIFNAME:
		result = "oifname"
	}
	return "fib " + strings.Join(keys, " . ") + " " + result
}

// compare writes a comparison, unless it is a condition that a later one may imply.
func (p *nftPrinter) compare(e nfnetlink.Cmp) {
	held := p.held[slot(e.Sreg)]
	if e.Op == nfnetlink.Equal && held.isProtocol() && len(e.Data) == 1 {
		p.flush()
		p.implied, p.value = held, e.Data
		return
	}
	isZero := len(e.Data) == 4 && areAll(e.Data, 0)
	if e.Op == nfnetlink.NotEqual && held.isStates() && isZero { // ct state & new != 0
		states := bitNames(held.number(held.mask), "invalid", "established", "related", "new") // NF_CT_STATE_BIT
		p.add(held.name, strings.Join(states, ","))
		return
	}
	left, right := held.text(), held.valueText(e.Data)
	if held.isAddress() {
		prefix, isPrefix := prefixText(e.Data, held.mask, addressSize(p.family))
		if isPrefix {
			left, right = held.name, prefix
		}
	}
	switch {
	case e.Op == nfnetlink.Equal && left == held.name:
		p.add(left, right)
	case e.Op == nfnetlink.LessOrEqual && p.beginsRange(left):
		p.endRange(right)
	default:
		p.add(left, operatorText(e.Op), right)
	}
}

// isProtocol reports whether the operand is a protocol that the fields of its header imply.
func (o operand) isProtocol() bool { return o.name == "meta nfproto" || o.name == "meta l4proto" }

// isStates reports whether the operand is those of some states of connections that a packet has.
func (o operand) isStates() bool { return o.name == "ct state" && len(o.mask) == 4 }

func operatorText(op nfnetlink.CmpOp) string {
	operators := []string{"==", "!=", "<", "<=", ">", ">="} // in the order of NFT_CMP_*
	return operators[min(int(op), len(operators)-1)]
}

// beginsRange reports whether the last words are the beginning of a range: tcp dport >= 80.
func (p *nftPrinter) beginsRange(left string) bool {
	count := len(p.words)
	return count >= 3 && p.words[count-3] == left && p.words[count-2] == ">="
}

// endRange makes a range of such words: tcp dport 80-90.
func (p *nftPrinter) endRange(right string) {
	count := len(p.words)
	first := p.words[count-1]
	p.words = append(p.words[:count-2], first+"-"+right)
}

// set writes a statement that sets a field from a register.
func (p *nftPrinter) set(field operand, from nfnetlink.Register) {
	held := p.held[slot(from)]
	text := held.text()
	if held.constant != nil {
		text = field.valueText(held.constant)
	}
	p.add(field.name, "set", text)
}

func (p *nftPrinter) condition(left string, not bool, right string) {
	if not {
		p.add(left, "!=", right)
		return
	}
	p.add(left, right)
}

// translation writes what is translated to: addresses and ports in registers, and flags.
func (p *nftPrinter) translation(addrMin, addrMax, protoMin, protoMax nfnetlink.Register, flags uint32) {
	to := p.between(addrMin, addrMax)
	ports := p.between(protoMin, protoMax)
	if ports != "" {
		to += ":" + ports
	}
	if to != "" {
		p.add("to", to)
	}
	for _, flag := range []struct {
		bit  uint32
		name string
	}{
		{unix.NF_NAT_RANGE_PROTO_RANDOM, "random"}, {unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, "fully-random"},
		{unix.NF_NAT_RANGE_PERSISTENT, "persistent"},
	} {
		if flags&flag.bit != 0 {
			p.add(flag.name)
		}
	}
}

// between writes the values in two registers, which may be one, or "" if there is none.
func (p *nftPrinter) between(first, last nfnetlink.Register) string {
	if first == 0 {
		return ""
	}
	text := p.held[slot(first)].text()
	if last != 0 && last != first {
		text += "-" + p.held[slot(last)].text()
	}
	return text
}

func verdictText(v nfnetlink.Verdict) string {
	statement, isKnown := v.Statement()
	switch {
	case !isKnown:
		return "queue"
	case statement == nfnetlink.NoStatement:
		return "continue"
	case statement == nfnetlink.DoJump || statement == nfnetlink.DoGoto:
		return string(statement) + " " + plain(v.Chain)
	}
	return string(statement)
}

// keys returns what the registers hold that are looked up in a set, or the first of them if it was not read:
// those are not that are only written.
func (p *nftPrinter) keys(set string, r nfnetlink.Register) (keys []operand) {
	s := p.rule.set(set)
	if s == nil {
		return []operand{p.held[slot(r)]}
	}
	at := slot(r)
	end := min(at+slotsOf(int(s.KeyLen)), slots)
	for at < end {
		held := p.held[at]
		keys = append(keys, held)
		at += max(slotsOf(held.size), 1)
	}
	return keys
}

// slotsOf returns how many slots of registers a value of a size takes.
func slotsOf(size int) int { return (size + 3) / 4 }

func namesOf(keys []operand) string {
	var names []string
	for _, key := range keys {
		names = append(names, key.text())
	}
	return strings.Join(names, " . ")
}

// setText writes the name of a set or, of one without a name, its first elements.
func (p *nftPrinter) setText(name string, keys []operand) string {
	const most = 4
	s := p.rule.set(name)
	if s == nil || !strings.HasPrefix(s.Name, "__") {
		return "@" + plain(name)
	}
	var elements []string
	for _, r := range s.ranges {
		elements = append(elements, elementText(keys, r.first, r.last, r.element))
	}
	for _, e := range s.fields {
		elements = append(elements, elementText(keys, e.Key, e.KeyEnd, e))
	}
	if s.catchAll != nil {
		elements = append(elements, "*"+dataText(s.catchAll))
	}
	if len(elements) > most {
		elements = append(elements[:most], unprinted)
	}
	return "{ " + strings.Join(elements, ", ") + " }"
}

// elementText writes an element: the values of each of its keys, and what a map has for them.
func elementText(keys []operand, first, last []byte, e *nfnetlink.Element) string {
	var parts []string
	for _, key := range keys {
		size := min(key.size, len(first), len(last))
		parts = append(parts, key.rangeText(first[:size], last[:size]))
		next := min(4*slotsOf(size), len(first), len(last))
		first, last = first[next:], last[next:]
	}
	return strings.Join(parts, " . ") + dataText(e)
}

// dataText writes what a map has for a key, if it is a verdict.
func dataText(e *nfnetlink.Element) string {
	switch {
	case e.Verdict != nil:
		return " : " + verdictText(*e.Verdict)
	case e.Data != nil:
		return " : " + operand{size: len(e.Data)}.valueText(e.Data)
	}
	return ""
}

// rangeText writes values of a set, as a prefix if they are one.
func (o operand) rangeText(first, last []byte) string {
	if slices.Equal(first, last) {
		return o.valueText(first)
	}
	from, _ := netip.AddrFromSlice(first)
	to, _ := netip.AddrFromSlice(last)
	prefix, isPrefix := netipx.IPRangeFrom(from, to).Prefix()
	if isPrefix && o.isAddress() {
		return prefix.String()
	}
	return o.valueText(first) + "-" + o.valueText(last)
}

func (o operand) isAddress() bool { return strings.HasSuffix(o.name, "addr") }

// text writes an operand, and what Bitwise does to it.
func (o operand) text() string {
	text := o.name
	switch {
	case o.constant != nil:
		return operand{}.valueText(o.constant)
	case text == "":
		return unprinted
	}
	if !areAll(o.mask, 0xff) {
		text += " & " + o.valueText(o.mask)
	}
	if !areAll(o.xor, 0) {
		text += " ^ " + o.valueText(o.xor)
	}
	return text
}

// valueText writes a constant that is compared with the operand.
func (o operand) valueText(data []byte) string {
	if len(data) == 0 {
		return unprinted
	}
	switch {
	case strings.HasSuffix(o.name, "ifname"):
		return policy.Quote(interfaceText(data, "*"))
	case o.name == "meta l4proto" || o.name == "ip protocol":
		return protocolName(data[0])
	case o.name == "meta nfproto" && data[0] == unix.NFPROTO_IPV6:
		return "ipv6"
	case o.name == "meta nfproto":
		return "ipv4"
	case strings.HasSuffix(o.name, "port") && len(data) == 2:
		return fmt.Sprint(binary.BigEndian.Uint16(data))
	}
	address, isAddress := netip.AddrFromSlice(data)
	isConstant := o.name == "" // which rules translate to
	switch {
	case isAddress && (isConstant || o.isAddress()):
		return address.String()
	case isConstant && len(data) == 2:
		return fmt.Sprint(binary.BigEndian.Uint16(data))
	case len(data) == 4:
		return o.numberText(o.number(data))
	}
	return fmt.Sprintf("0x%x", data)
}

// number decodes a number in this machine's byte order, or in network order behind Byteorder.
func (o operand) number(data []byte) uint32 {
	if o.isSwapped {
		return binary.BigEndian.Uint32(data)
	}
	return binary.NativeEndian.Uint32(data)
}

func (o operand) numberText(n uint32) string {
	types := []string{"unspec", "unicast", "local", "broadcast", "anycast", "multicast"} // RTN_*
	isType := strings.HasPrefix(o.name, "fib ") && strings.HasSuffix(o.name, " type")
	switch {
	case isType && int(n) < len(types):
		return types[n]
	case o.name == "ct state" && n == nfnetlink.NewConnection:
		return "new"
	case strings.HasSuffix(o.name, "mark") || strings.HasPrefix(o.name, "ct "):
		return fmt.Sprintf("0x%08x", n)
	}
	return fmt.Sprint(n)
}
