// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// String returns where the rule is, and the rule as iptables-save or nft prints it. An ellipsis stands for
// options of expressions that are not decoded.
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
	p := nftPrinter{rule: r, family: netfilter.LinkOf(r.Family)}
	if isIPTables {
		return policy.Printable((&iptablesPrinter{nftPrinter: p}).text())
	}
	return policy.Printable(p.text())
}

// plain quotes a name only if it has characters that could mislead.
func plain(name string) string {
	if quoted := policy.Quote(name); quoted != `"`+name+`"` || strings.ContainsAny(name, " ,;:") {
		return quoted
	}
	return name
}

// unprinted stands for what is not decoded.
const unprinted = "…"

// prefixText writes an address whose first bytes, or whose bits under a mask, are compared, if these are the
// bits of a prefix.
func prefixText(data, mask []byte, size int) (text string, isPrefix bool) {
	bits := 8 * len(data)
	if mask != nil {
		ones, length := net.IPMask(mask[:min(len(mask), len(data))]).Size()
		if length == 0 {
			return "", false
		}
		bits = ones
	}
	whole := make([]byte, size)
	copy(whole, data)
	address, _ := netip.AddrFromSlice(whole)
	if bits == 8*size {
		return address.String(), true
	}
	return fmt.Sprintf("%s/%d", address, bits), true
}

func addressSize(f nfnetlink.Family) int {
	return int(nfnetlink.LoadAddress(f, nfnetlink.Source, 0).Len)
}

// interfaceText writes the name of an interface; one without an end is that of several.
func interfaceText(data []byte, wildcard string) string {
	name, _, isWhole := strings.Cut(string(data), "\x00")
	if isWhole || len(data) == unix.IFNAMSIZ {
		return name
	}
	return name + wildcard
}

func protocolName(number byte) string {
	switch number {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	}
	return fmt.Sprint(number)
}

// bitNames returns the names of the bits that are set, from the lowest bit on.
func bitNames(bits uint32, names ...string) (set []string) {
	for i, name := range names {
		if bits&(1<<i) != 0 {
			set = append(set, name)
		}
	}
	return set
}
