// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// String returns where the rule is, and the rule as iptables-save or nft prints it.
func (r *Rule) String() string {
	choice := netfilter.Choice{Backend: r.Backend, Variant: r.Variant}
	at := fmt.Sprintf("%s, %s, table %s", choice, r.Family, plain(r.Table))
	if r.Backend == policy.IPTables {
		return at + ": " + r.text()
	}
	return at + ", chain " + plain(r.Chain) + ": " + r.text()
}

// text returns the rule; that without expressions is the policy of a base chain.
func (r *Rule) text() string {
	isIPTables := r.Backend == policy.IPTables
	switch {
	case len(r.Exprs) == 0 && isIPTables:
		return "-P " + plain(r.Chain) + " DROP"
	case len(r.Exprs) == 0:
		return "policy drop"
	}
	p := printer{rule: r, family: netfilter.LinkOf(r.Family)}
	for _, e := range r.Exprs {
		if isIPTables {
			p.inIPTables(e)
		} else {
			p.inNFT(e)
		}
	}
	if isIPTables {
		p.words = slices.Concat([]string{"-A", plain(r.Chain)}, slices.Concat(p.options[:]...), p.words)
	}
	p.add()
	if !isIPTables && r.Comment != "" {
		p.add("comment", policy.Quote(r.Comment))
	}
	return policy.Printable(strings.Join(p.words, " "))
}

// plain quotes a name only if it has characters that could mislead.
func plain(name string) string {
	if quoted := policy.Quote(name); quoted != `"`+name+`"` || strings.ContainsAny(name, " ,;:") {
		return quoted
	}
	return name
}

// printer writes the expressions of a rule. What a register holds, it keeps in words.
type printer struct {
	rule   *Rule
	family nfnetlink.Family
	words  []string
	held   [slots]operand
	// implied is a condition that nft does not print before the one that it implies.
	implied string
	options [optionCount][]string // of iptables, which prints them in this order
}

// operand is what a register holds.
type operand struct {
	name string // as nft has it: ip saddr
	mask []byte // of Bitwise
}

func (p *printer) add(words ...string) {
	if p.implied != "" {
		p.words = append(p.words, p.implied)
		p.implied = ""
	}
	p.words = append(p.words, words...)
}

// load keeps the name of what an expression loads, and reports whether it loads something.
func (p *printer) load(e nfnetlink.Expr) bool {
	switch e := e.(type) {
	case nfnetlink.Payload:
		p.held[slot(e.Dreg)] = operand{name: p.payload(e)}
	case nfnetlink.Meta:
		p.held[slot(e.Dreg)] = operand{name: metaName(e.Key)}
	case nfnetlink.CT:
		p.held[slot(e.Dreg)] = operand{name: connectionName(e.Key)}
	case nfnetlink.FIB:
		p.held[slot(e.Dreg)] = operand{name: "fib " + sideOf(e.Flags) + " type"}
	case nfnetlink.Numgen:
		p.held[slot(e.Dreg)] = operand{name: fmt.Sprintf("numgen random mod %d", e.Modulus)}
	case nfnetlink.Immediate:
		p.held[slot(e.Dreg)] = operand{name: p.value("", e.Data)}
	case nfnetlink.Bitwise:
		p.held[slot(e.Dreg)] = operand{name: p.held[slot(e.Sreg)].name, mask: e.Mask}
	case nfnetlink.Byteorder:
		p.held[slot(e.Dreg)] = p.held[slot(e.Sreg)]
	case nfnetlink.Counter:
	default:
		return false
	}
	return true
}

func (p *printer) payload(e nfnetlink.Payload) string {
	header := "ip"
	if p.family == nfnetlink.IPv6 {
		header = "ip6"
	}
	source, size := nfnetlink.LoadAddress(p.family, nfnetlink.Source, e.Dreg), addressSize(p.family)
	protocol := "th"
	isTransport := e.Base == unix.NFT_PAYLOAD_TRANSPORT_HEADER
	if name, is := strings.CutPrefix(p.implied, "meta l4proto "); is && isTransport {
		protocol, p.implied = name, ""
	} else if strings.HasPrefix(p.implied, "meta nfproto ") {
		p.implied = ""
	}
	switch {
	case isTransport && e.Len == 2 && e.Offset == 0:
		return protocol + " sport"
	case isTransport && e.Len == 2 && e.Offset == 2:
		return protocol + " dport"
	case e.Base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		return fmt.Sprintf("@th,%d,%d", 8*e.Offset, 8*e.Len)
	case e.Offset == source.Offset && int(e.Len) <= size:
		return header + " saddr"
	case e.Offset == source.Offset+source.Len && int(e.Len) <= size:
		return header + " daddr"
	case header == "ip" && e.Offset == 9 && e.Len == 1: // RFC 791
		return "ip protocol"
	}
	return fmt.Sprintf("@nh,%d,%d", 8*e.Offset, 8*e.Len)
}

func addressSize(f nfnetlink.Family) int {
	return int(nfnetlink.LoadAddress(f, nfnetlink.Source, 0).Len)
}

func metaName(key uint32) string {
	switch key {
	case unix.NFT_META_OIFNAME:
		return "oifname"
	case unix.NFT_META_IIFNAME:
		return "iifname"
	case unix.NFT_META_OIF:
		return "oif"
	case unix.NFT_META_IIF:
		return "iif"
	case unix.NFT_META_MARK:
		return "meta mark"
	case unix.NFT_META_L4PROTO:
		return "meta l4proto"
	case unix.NFT_META_NFPROTO:
		return "meta nfproto"
	case unix.NFT_META_SKUID:
		return "meta skuid"
	}
	return fmt.Sprintf("meta key %d", key)
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

func sideOf(flags uint32) string {
	if flags&unix.NFTA_FIB_F_SADDR != 0 {
		return "saddr"
	}
	return "daddr"
}

// operand returns what was loaded last into a register, with those behind it that a key of the size has.
func (p *printer) operand(r nfnetlink.Register, size int) string {
	var names []string
	for i := slot(r); i < min(slot(r)+(size+3)/4, slots); i++ {
		if name := p.held[i].name; name != "" {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "a register"
	}
	return strings.Join(names, " . ")
}

// inNFT writes an expression as nft does.
func (p *printer) inNFT(e nfnetlink.Expr) {
	if p.load(e) {
		return
	}
	switch e := e.(type) {
	case nfnetlink.Cmp:
		held := p.held[slot(e.Sreg)]
		if e.Op == nfnetlink.Equal && (held.name == "meta nfproto" || held.name == "meta l4proto") {
			p.add()
			p.implied = held.name + " " + p.value(held.name, e.Data)
			return
		}
		p.add(held.name)
		p.compare(held, e)
	case nfnetlink.Range:
		name := p.held[slot(e.Sreg)].name
		p.add(name)
		if e.Op == nfnetlink.NotEqual {
			p.add("!=")
		}
		p.add(p.value(name, e.From) + "-" + p.value(name, e.To))
	case nfnetlink.Lookup:
		s := p.rule.set(e.Set)
		p.add(p.operand(e.Sreg, int(s.KeyLen)))
		if e.Not {
			p.add("!=")
		}
		p.add(p.set(e.Sreg, s))
	case nfnetlink.MapLookup:
		s := p.rule.set(e.Set)
		text := p.operand(e.Sreg, int(s.KeyLen)) + " map " + p.set(e.Sreg, s)
		if e.Dreg == nfnetlink.VerdictRegister {
			p.add(strings.Replace(text, " map ", " vmap ", 1))
		} else {
			p.held[slot(e.Dreg)] = operand{name: text}
		}
	case nfnetlink.SetMeta:
		p.add(metaName(e.Key), "set", p.operand(e.Sreg, 4))
	case nfnetlink.SetPayload:
		name := p.payload(nfnetlink.Payload{Base: e.Base, Offset: e.Offset, Len: e.Len})
		p.add(name, "set", p.operand(e.Sreg, int(e.Len)))
	case nfnetlink.Verdict:
		p.add(verdictText(e))
	case nfnetlink.Masq:
		p.add("masquerade")
	case nfnetlink.NAT:
		p.add("snat to", p.operand(e.AddrMin, 4))
		if e.AddrMax != 0 && e.AddrMax != e.AddrMin {
			p.words[len(p.words)-1] += "-" + p.operand(e.AddrMax, 4)
		}
	case nfnetlink.Dynset:
		p.add("update @" + e.Set)
	case nfnetlink.Match:
		p.add("xt match " + plain(e.Xt))
	case nfnetlink.Target:
		p.add("xt target " + plain(e.Xt))
	case nfnetlink.Unknown:
		p.add(e.Kind)
	}
}

// compare writes the operator, unless it is ==, and the value.
func (p *printer) compare(held operand, e nfnetlink.Cmp) {
	mask := held.mask
	isPrefix := strings.HasSuffix(held.name, "addr")
	if mask != nil && !isPrefix {
		p.add("&", p.value(held.name, mask))
	}
	operator := [...]string{"", "!=", "<", "<=", ">", ">="}[min(e.Op, 5)]
	switch {
	case operator != "":
		p.add(operator)
	case mask != nil && !isPrefix:
		p.add("==")
	}
	if isPrefix {
		p.add(prefixText(e.Data, mask, addressSize(p.family)))
	} else {
		p.add(p.value(held.name, e.Data))
	}
}

func verdictText(e nfnetlink.Verdict) string {
	switch e.Code {
	case nfnetlink.Accept:
		return "accept"
	case nfnetlink.Drop:
		return "drop"
	case nfnetlink.Return:
		return "return"
	case nfnetlink.Continue:
		return "continue"
	case nfnetlink.Jump:
		return "jump " + plain(e.Chain)
	case nfnetlink.Goto:
		return "goto " + plain(e.Chain)
	}
	return "queue"
}

// prefixText writes an address of which the first bytes, or the bits of a mask, are compared.
func prefixText(data, mask []byte, size int) string {
	whole := make([]byte, size)
	copy(whole, data)
	address, _ := netip.AddrFromSlice(whole)
	ones := 8 * len(data)
	for i := range mask {
		if mask[i] != 0xff {
			for ones = 8 * i; mask[i]&(0x80>>(ones%8)) != 0; ones++ {
			}
			break
		}
	}
	for i := ones; i < 8*len(mask); i++ {
		if mask[i/8]&(0x80>>(i%8)) != 0 {
			return fmt.Sprintf("%s/%x", address, mask)
		}
	}
	if ones == 8*size {
		return address.String()
	}
	return fmt.Sprintf("%s/%d", address, ones)
}

// value writes a constant that is compared with an operand.
func (p *printer) value(name string, data []byte) string {
	if len(data) == 0 {
		return "0x"
	}
	number := uint32(0)
	if len(data) == 4 {
		number = binary.NativeEndian.Uint32(data)
	}
	switch {
	case strings.HasSuffix(name, "ifname"):
		text, _, isExact := strings.Cut(string(data), "\x00")
		if !isExact {
			text += "*"
		}
		return policy.Quote(text)
	case name == "oif" || name == "iif":
		return fmt.Sprint(number)
	case strings.HasSuffix(name, "l4proto") || name == "ip protocol":
		return protocolName(data)
	case name == "meta nfproto":
		return netfilterName(data[0])
	case strings.HasSuffix(name, "port") && len(data) == 2:
		return fmt.Sprint(binary.BigEndian.Uint16(data))
	case strings.HasPrefix(name, "fib ") && number <= unix.RTN_MULTICAST:
		return [...]string{"unspec", "unicast", "local", "broadcast", "anycast", "multicast"}[number]
	case name == "ct state" && number == nfnetlink.NewConnection:
		return "new"
	case strings.HasSuffix(name, "mark") || strings.HasPrefix(name, "ct "):
		return fmt.Sprintf("0x%08x", number)
	}
	if address, ok := netip.AddrFromSlice(data); ok && len(data) == addressSize(p.family) {
		return address.String()
	}
	return fmt.Sprintf("0x%x", data)
}

func netfilterName(family byte) string {
	if family == unix.NFPROTO_IPV6 {
		return "ipv6"
	}
	return "ipv4"
}

func protocolName(data []byte) string {
	switch data[0] {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	}
	return fmt.Sprint(data[0])
}

// set writes the name of a set or, of one without a name, its first elements.
func (p *printer) set(r nfnetlink.Register, s *set) string {
	const most = 4
	if !strings.HasPrefix(s.Name, "__") {
		return "@" + plain(s.Name)
	}
	name := p.held[slot(r)].name
	var elements []string
	for _, e := range s.ranges {
		if len(elements) == most {
			elements = append(elements, "…")
			break
		}
		text := p.value(name, e.first)
		if string(e.first) != string(e.last) {
			text += "-" + p.value(name, e.last)
		}
		if e.element.Verdict != nil {
			text += " : " + verdictText(*e.element.Verdict)
		}
		elements = append(elements, text)
	}
	return "{ " + strings.Join(elements, ", ") + " }"
}
