// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// iptablesPrinter writes the expressions of a rule as iptables-save does. What iptables has no option for is
// written as nft does.
type iptablesPrinter struct {
	nftPrinter
	options  []option
	protocol string // that -p states
}

// option is one that iptables-save prints before matches and target, in the order of ranks.
type option struct {
	rank int
	text string
}

func (p *iptablesPrinter) text() string {
	for _, e := range p.rule.Exprs {
		p.expression(e)
	}
	slices.SortStableFunc(p.options, func(a, b option) int { return cmp.Compare(a.rank, b.rank) })
	words := []string{"-A", plain(p.rule.Chain)}
	for _, o := range p.options {
		words = append(words, o.text)
	}
	return strings.Join(slices.Concat(words, p.words), " ")
}

func (p *iptablesPrinter) expression(e nfnetlink.Expr) {
	switch e := e.(type) {
	case nfnetlink.Cmp:
		p.compare(e)
	case nfnetlink.Range: // of ports
		held := p.held[slot(e.Sreg)]
		if !p.option(held, e.Op, held.valueText(e.From)+":"+held.valueText(e.To)) {
			p.nftPrinter.expression(e)
		}
	case nfnetlink.Match:
		p.match(e)
	case nfnetlink.Target:
		p.target(e)
	case nfnetlink.Masq:
		p.add("-j MASQUERADE")
		ports := p.between(e.ProtoMin, e.ProtoMax)
		if ports != "" {
			p.add("--to-ports", ports)
		}
		p.natFlags(e.Flags)
	case nfnetlink.Verdict:
		p.add(iptablesVerdict(e))
	default:
		p.nftPrinter.expression(e)
	}
}

// optionFor returns the option that compares an operand, "" if there is none, and its rank.
func optionFor(name string) (word string, rank int) {
	switch name {
	case "ip saddr", "ip6 saddr":
		return "-s", 0
	case "ip daddr", "ip6 daddr":
		return "-d", 1
	case "iifname":
		return "-i", 2
	case "oifname":
		return "-o", 3
	case "meta l4proto", "ip protocol":
		return "-p", 4
	case "th sport":
		return "--sport", 6
	case "th dport":
		return "--dport", 7
	}
	return "", 0
}

// matchRank is the rank of the match that has the ports.
const matchRank = 5

func (p *iptablesPrinter) compare(e nfnetlink.Cmp) {
	held := p.held[slot(e.Sreg)]
	isEquality := e.Op == nfnetlink.Equal || e.Op == nfnetlink.NotEqual
	switch {
	case !isEquality:
		p.nftPrinter.compare(e)
	case held.name == "meta mark" && len(e.Data) == 4 && e.Op == nfnetlink.NotEqual:
		p.add("-m mark ! --mark", markText(e.Data, held.mask))
	case held.name == "meta mark" && len(e.Data) == 4:
		p.add("-m mark --mark", markText(e.Data, held.mask))
	case !p.option(held, e.Op, p.optionValue(held, e.Data)):
		p.nftPrinter.compare(e)
	}
}

// option writes the option that compares an operand, and reports whether there is one.
func (p *iptablesPrinter) option(held operand, op nfnetlink.CmpOp, value string) bool {
	word, rank := optionFor(held.name)
	if word == "" {
		return false
	}
	if word == "-p" {
		p.protocol = value
	}
	match := option{matchRank, "-m " + p.protocol}
	if rank > matchRank && p.protocol != "" && !slices.Contains(p.options, match) {
		p.options = append(p.options, match)
	}
	text := word + " " + value
	if op == nfnetlink.NotEqual {
		text = "! " + text
	}
	p.options = append(p.options, option{rank, text})
	return true
}

func (p *iptablesPrinter) optionValue(held operand, data []byte) string {
	switch {
	case strings.HasSuffix(held.name, "ifname"):
		return plain(interfaceText(data, "+"))
	case held.isAddress():
		return addressText(data, held.mask, addressSize(p.family))
	}
	return held.valueText(data)
}

// addressText writes an address with the length of its prefix, or with a mask that is not that of a prefix.
func addressText(data, mask []byte, size int) string {
	text, isPrefix := prefixText(data, mask, size)
	switch {
	case !isPrefix:
		return operand{}.valueText(data) + "/" + operand{}.valueText(mask)
	case !strings.Contains(text, "/"):
		return fmt.Sprintf("%s/%d", text, 8*size)
	}
	return text
}

func markText(value, mask []byte) string {
	text := fmt.Sprintf("0x%x", binary.NativeEndian.Uint32(value))
	if len(mask) == 4 && binary.NativeEndian.Uint32(mask) != math.MaxUint32 {
		text += fmt.Sprintf("/0x%x", binary.NativeEndian.Uint32(mask))
	}
	return text
}

func (p *iptablesPrinter) match(e nfnetlink.Match) {
	p.add("-m", plain(e.Xt))
	switch {
	case (e.Xt == "tcp" || e.Xt == "udp") && len(e.Info) >= 8:
		// struct xt_tcp, xt_udp: the first and the last port of both sides.
		p.ports("--sport", e.Info[:4])
		p.ports("--dport", e.Info[4:8])
	case e.Xt == "comment":
		text, _, _ := strings.Cut(string(e.Info), "\x00")
		p.add("--comment", policy.Quote(text))
	case e.Xt == "mark" && len(e.Info) >= 9:
		if e.Info[8] != 0 {
			p.add("!")
		}
		p.add("--mark", markText(e.Info[:4], e.Info[4:8]))
	case e.Xt == "addrtype" && len(e.Info) >= 8:
		flags := binary.NativeEndian.Uint32(e.Info[4:])
		p.addressType("--src-type", binary.NativeEndian.Uint16(e.Info), flags&1 != 0)
		p.addressType("--dst-type", binary.NativeEndian.Uint16(e.Info[2:]), flags&2 != 0)
		if flags&4 != 0 {
			p.add("--limit-iface-in")
		}
		if flags&8 != 0 {
			p.add("--limit-iface-out")
		}
	default:
		p.add(unprinted)
	}
}

func (p *iptablesPrinter) ports(option string, info []byte) {
	first, last := binary.NativeEndian.Uint16(info), binary.NativeEndian.Uint16(info[2:])
	switch {
	case first == 0 && last == math.MaxUint16:
	case first == last:
		p.add(option, fmt.Sprint(first))
	default:
		p.add(option, fmt.Sprintf("%d:%d", first, last))
	}
}

func (p *iptablesPrinter) addressType(option string, types uint16, inverted bool) {
	if types == 0 {
		return
	}
	if inverted {
		p.add("!")
	}
	// RTN_*
	names := []string{"UNSPEC", "UNICAST", "LOCAL", "BROADCAST", "ANYCAST", "MULTICAST", "BLACKHOLE"}
	p.add(option, strings.Join(bitNames(uint32(types), names...), ","))
}

func (p *iptablesPrinter) target(e nfnetlink.Target) {
	p.add("-j", plain(e.Xt))
	switch {
	case e.Xt == "CT" && e.IsNoTrack():
		p.add("--notrack")
	case e.Xt == "MARK" && e.Rev == 2 && len(e.Info) >= 8:
		p.add("--set-xmark", markText(e.Info[:4], e.Info[4:8]))
	case e.Xt == "MASQUERADE" || e.Xt == "SNAT":
		p.translateTo(e)
	case !areAll(e.Info, 0):
		p.add(unprinted)
	}
}

// translateTo writes the options of a target that translates.
func (p *iptablesPrinter) translateTo(e nfnetlink.Target) {
	to := nfnetlink.Decode(p.family, nfnetlink.Rule{Exprs: []nfnetlink.Expr{e}}, nil).To
	switch {
	case to.Address.IsValid():
		p.add("--to-source", to.Address.String())
	case e.Xt == "SNAT": // to several
		p.add(unprinted)
	}
	if to.PortMin != 0 && e.Xt == "MASQUERADE" {
		p.add("--to-ports", fmt.Sprintf("%d-%d", to.PortMin, to.PortMax))
	}
	p.natFlags(to.Flags)
}

func (p *iptablesPrinter) natFlags(flags uint32) {
	switch {
	case flags&unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY != 0:
		p.add("--random-fully")
	case flags&unix.NF_NAT_RANGE_PROTO_RANDOM != 0:
		p.add("--random")
	}
	if flags&unix.NF_NAT_RANGE_PERSISTENT != 0 {
		p.add("--persistent")
	}
}

func iptablesVerdict(e nfnetlink.Verdict) string {
	switch e.Code {
	case nfnetlink.Jump:
		return "-j " + plain(e.Chain)
	case nfnetlink.Goto:
		return "-g " + plain(e.Chain)
	}
	return "-j " + strings.ToUpper(verdictText(e))
}
