// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// inIPTables writes an expression as iptables-save does. What iptables has no option for is written as nft
// does.
func (p *printer) inIPTables(e nfnetlink.Expr) {
	if p.load(e) {
		return
	}
	switch e := e.(type) {
	case nfnetlink.Cmp:
		held := p.held[slot(e.Sreg)]
		if held.name == "meta mark" && len(e.Data) == 4 && (held.mask == nil || len(held.mask) == 4) {
			p.markMatch(e, held.mask)
			return
		}
		at := slices.Index(optionNames(), optionFor(held.name))
		isEquality := e.Op == nfnetlink.Equal || e.Op == nfnetlink.NotEqual
		if at < 0 || !isEquality {
			p.inNFT(e)
			return
		}
		if e.Op == nfnetlink.NotEqual {
			p.options[at] = append(p.options[at], "!")
		}
		p.options[at] = append(p.options[at], optionNames()[at], p.optionValue(held, e.Data))
		protocol := p.options[protocolOption]
		if at >= matchOption && len(protocol) > 0 {
			p.options[matchOption] = []string{"-m", protocol[len(protocol)-1]}
		}
	case nfnetlink.Match:
		p.match(e)
	case nfnetlink.Target:
		p.target(e)
	case nfnetlink.Masq:
		p.add("-j MASQUERADE")
	case nfnetlink.Verdict:
		p.add(iptablesVerdict(e))
	default:
		p.inNFT(e)
	}
}

// optionNames are the options in the order in which iptables-save prints them.
func optionNames() []string {
	return []string{"-s", "-d", "-i", "-o", "-p", "-m", "--sport", "--dport"}
}

// Positions among the options: of the protocol, of the match that has its ports, and their number.
const protocolOption, matchOption, optionCount = 4, 5, 8

func optionFor(name string) string {
	switch name {
	case "ip saddr", "ip6 saddr":
		return "-s"
	case "ip daddr", "ip6 daddr":
		return "-d"
	case "oifname":
		return "-o"
	case "iifname":
		return "-i"
	case "meta l4proto", "ip protocol":
		return "-p"
	case "th sport":
		return "--sport"
	case "th dport":
		return "--dport"
	}
	return ""
}

func (p *printer) optionValue(held operand, data []byte) string {
	switch {
	case strings.HasSuffix(held.name, "ifname"):
		name, _, isExact := strings.Cut(string(data), "\x00")
		if !isExact {
			name += "+"
		}
		return plain(name)
	case strings.HasSuffix(held.name, "addr"):
		text := prefixText(data, held.mask, addressSize(p.family))
		if strings.Contains(text, "/") {
			return text
		}
		return fmt.Sprintf("%s/%d", text, 8*addressSize(p.family))
	}
	return p.value(held.name, data)
}

func (p *printer) markMatch(e nfnetlink.Cmp, mask []byte) {
	p.add("-m mark")
	if e.Op == nfnetlink.NotEqual {
		p.add("!")
	}
	text := fmt.Sprintf("0x%x", binary.NativeEndian.Uint32(e.Data))
	if mask != nil {
		text += fmt.Sprintf("/0x%x", binary.NativeEndian.Uint32(mask))
	}
	p.add("--mark", text)
}

func (p *printer) match(e nfnetlink.Match) {
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
		value, mask := binary.NativeEndian.Uint32(e.Info), binary.NativeEndian.Uint32(e.Info[4:])
		p.add("--mark", fmt.Sprintf("0x%x/0x%x", value, mask))
	case e.Xt == "addrtype" && len(e.Info) >= 8:
		flags := binary.NativeEndian.Uint32(e.Info[4:])
		p.addressType("--src-type", binary.NativeEndian.Uint16(e.Info), flags&1 != 0)
		p.addressType("--dst-type", binary.NativeEndian.Uint16(e.Info[2:]), flags&2 != 0)
	default:
		p.add("…") // its options
	}
}

func (p *printer) ports(option string, info []byte) {
	first, last := binary.NativeEndian.Uint16(info), binary.NativeEndian.Uint16(info[2:])
	switch {
	case first == 0 && last == math.MaxUint16:
	case first == last:
		p.add(option, fmt.Sprint(first))
	default:
		p.add(option, fmt.Sprintf("%d:%d", first, last))
	}
}

func (p *printer) addressType(option string, types uint16, inverted bool) {
	if types == 0 {
		return
	}
	if inverted {
		p.add("!")
	}
	name := "LOCAL"
	if types != 1<<unix.RTN_LOCAL {
		name = fmt.Sprintf("0x%x", types)
	}
	p.add(option, name)
}

func (p *printer) target(e nfnetlink.Target) {
	p.add("-j", plain(e.Xt))
	if e.Xt == "CT" && e.IsNoTrack() {
		p.add("--notrack")
	}
	if e.Xt != "SNAT" {
		return
	}
	d := nfnetlink.Decode(p.family, nfnetlink.Rule{Exprs: []nfnetlink.Expr{e}}, nil)
	if d.To.Address != (netip.Addr{}) {
		p.add("--to-source", d.To.Address.String())
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
