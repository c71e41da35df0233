// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Family is an address family.
type Family string

// The address families, by the names that documents and messages use.
const (
	IPv4 Family = "ipv4"
	IPv6 Family = "ipv6"
)

// Families returns every family, in the order in which rules are written.
func Families() []Family { return []Family{IPv4, IPv6} }

// FamilyOf returns the family of an address.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// All returns the prefix that covers every address of the family.
func (f Family) All() netip.Prefix {
	if f == IPv4 {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// LinkLocal returns the family's link-local prefix (RFC 3927, RFC 4291 2.5.6).
func (f Family) LinkLocal() netip.Prefix {
	if f == IPv4 {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{169, 254}), 16)
	}
	return netip.PrefixFrom(netip.AddrFrom16([16]byte{0xfe, 0x80}), 10)
}

// Multicast returns the family's multicast prefix (RFC 5771, RFC 4291 2.7) and the limited broadcast address
// (RFC 919).
func (f Family) Multicast() []netip.Prefix {
	if f == IPv6 {
		return []netip.Prefix{netip.PrefixFrom(netip.AddrFrom16([16]byte{0xff}), 8)}
	}
	broadcast := netip.AddrFrom4([4]byte{255, 255, 255, 255})
	return []netip.Prefix{
		netip.PrefixFrom(netip.AddrFrom4([4]byte{224}), 4),
		netip.PrefixFrom(broadcast, broadcast.BitLen()),
	}
}

func ofFamily(prefixes []netip.Prefix, f Family) []netip.Prefix {
	if len(prefixes) == 0 {
		return nil
	}
	found := make([]netip.Prefix, 0, len(prefixes)) // at once: each ADD merges policies
	for _, p := range prefixes {
		if FamilyOf(p.Addr()) == f {
			found = append(found, p)
		}
	}
	return found
}

// ParsePrefix reads a CIDR (RFC 4632, RFC 4291 2.3) and accepts only its one
// proper spelling. The error says what to write instead where that is clear.
func ParsePrefix(s string) (netip.Prefix, error) {
	if strings.TrimSpace(s) == "" {
		return netip.Prefix{}, errors.New("is empty; write a CIDR such as 10.0.0.0/8, or drop the item")
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, noPrefix(s)
	}
	if p.Addr().Is4In6() {
		return netip.Prefix{}, mappedPrefix(p)
	}
	if m := p.Masked(); m != p {
		return netip.Prefix{}, fmt.Errorf("has host bits set; did you mean %s?", m)
	}
	return p, nil
}

// noPrefix returns what to write in place of a text that is no CIDR.
func noPrefix(s string) error {
	trimmed := strings.TrimSpace(s)
	if trimmed != s {
		return fmt.Errorf("has white space around it; write %s", Quote(trimmed))
	}
	a, err := netip.ParseAddr(s)
	if err != nil || a.Zone() != "" {
		return errors.New("is not a CIDR; write address/length, such as 10.0.0.0/8 or fd00::/8")
	}
	a = a.Unmap()
	return fmt.Errorf("is an address, not a CIDR; did you mean %s?", netip.PrefixFrom(a, a.BitLen()))
}

// mappedPrefix returns what to write in place of an IPv4 prefix written as IPv6.
func mappedPrefix(p netip.Prefix) error {
	if p.Bits() < 96 {
		return errors.New("mixes an IPv4 address with an IPv6 prefix length; write the IPv4 prefix itself")
	}
	v4 := netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96).Masked()
	return fmt.Errorf("is an IPv4 prefix written as IPv6; did you mean %s?", v4)
}

// AddressItems are the items of outputAddresses, without duplicates. That of a single address has all bits.
type AddressItems []netip.Prefix

// ParseAddressItem reads a CIDR or an address.
func ParseAddressItem(s string) (netip.Prefix, error) {
	a, err := netip.ParseAddr(s)
	switch {
	case err != nil || a.Zone() != "":
		return ParsePrefix(s)
	case a.Is4In6():
		return netip.Prefix{}, fmt.Errorf("is an IPv4 address written as IPv6; did you mean %s?", a.Unmap())
	}
	return netip.PrefixFrom(a, a.BitLen()), nil
}

// PortRange is a range of transport ports, both ends included. The zero value
// means that no range was chosen.
type PortRange struct{ First, Last uint16 }

// Size returns how many ports the range holds.
func (r PortRange) Size() int { return int(r.Last) - int(r.First) + 1 }

// IsZero reports whether no range was chosen. (Port 0 cannot be.)
func (r PortRange) IsZero() bool { return r == PortRange{} }

// String writes the range as iptables does: "1024-29999", "7" for one port.
func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Ports is the value of toPorts: source ranges in the written order.
// None at all leaves the choice of ports to the kernel.
type Ports []PortRange

// ParsePorts reads "1024-29999,32768-65535". Empty text means no ranges.
func ParsePorts(s string) (Ports, error) {
	if s == "" {
		return Ports{}, nil
	}
	if n := 1 + strings.Count(s, ","); n > MaxPortRanges {
		return nil, fmt.Errorf("has %d ranges, more than the %d possible; write fewer that are wider", n, MaxPortRanges)
	}
	var ports Ports
	for part := range strings.SplitSeq(s, ",") {
		r, err := parsePortRange(part)
		if err != nil && part != s { // the message names the whole
			err = fmt.Errorf("holds %s, which %w", Quote(part), err)
		}
		if err != nil {
			return nil, err
		}
		ports = append(ports, r)
	}
	inOrder := ports.sorted()
	for i := 1; i < len(inOrder); i++ {
		if a, b := inOrder[i-1], inOrder[i]; b.First <= a.Last {
			return nil, fmt.Errorf("has overlapping ranges %s and %s; write each port once", a, b)
		}
	}
	return ports, nil
}

func parsePortRange(s string) (PortRange, error) {
	first, last, ranged := strings.Cut(s, "-")
	if !ranged {
		last = first
	}
	lo, _ := strconv.ParseUint(first, 10, 16)
	hi, _ := strconv.ParseUint(last, 10, 16)
	switch {
	case lo == 0 || hi == 0 || first != strconv.FormatUint(lo, 10) || last != strconv.FormatUint(hi, 10):
		return PortRange{}, errors.New("is not a range of ports; write FIRST-LAST within 1-65535")
	case lo > hi:
		return PortRange{}, fmt.Errorf("ends before it begins; did you mean %d-%d?", hi, lo)
	}
	return PortRange{First: uint16(lo), Last: uint16(hi)}, nil
}

// String writes the ranges as they are configured.
func (p Ports) String() string {
	parts := make([]string, len(p))
	for i, r := range p {
		parts[i] = r.String()
	}
	return strings.Join(parts, ",")
}

// MarshalText implements encoding.TextMarshaler.
func (p Ports) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with ParsePorts.
func (p *Ports) UnmarshalText(text []byte) (err error) {
	if *p, err = ParsePorts(string(text)); err != nil {
		return fmt.Errorf("%s %w", Quote(string(text)), err)
	}
	return nil
}

func (p Ports) sorted() Ports {
	return slices.SortedFunc(slices.Values(p), func(a, b PortRange) int { return int(a.First) - int(b.First) })
}

// sameSet reports whether both have the same ranges: their order does not matter.
func (p Ports) sameSet(q Ports) bool { return slices.Equal(p.sorted(), q.sorted()) }

// MaxChainName is the longest name of a chain. iptables ends at 28 characters.
const MaxChainName = 24

// ValidateChainName tells why a name cannot be that of a masquerade chain.
// It has to be possible in either backend, whichever the node ends up with.
func ValidateChainName(name string) error {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	const others = "0123456789_.-"
	switch {
	case name == "":
		return errors.New("is empty; leave the key out for " + DefaultChain)
	case strings.Trim(name, letters+others) != "":
		return errors.New("may hold only letters, digits, '_', '.' and '-'")
	case len(name) > MaxChainName:
		return fmt.Errorf("has %d characters; at most %d are possible", len(name), MaxChainName)
	case strings.ContainsAny(name[:1], "_.-"):
		return errors.New("must begin with a letter or a digit")
	}
	upper := strings.ToUpper(name)
	if slices.Contains(reservedChainNames(), upper) {
		return fmt.Errorf("is the name of a built-in chain or target; choose one of your own, such as %s", DefaultChain)
	}
	for _, prefix := range []string{"KUBE-", "CNI-"} {
		if strings.HasPrefix(upper, prefix) {
			return fmt.Errorf("begins with %s, a prefix of chains of other programs; choose another", prefix)
		}
	}
	return nil
}

// reservedChainNames lists the built-in chains and the targets that iptables
// (extensions(8) included) gives a meaning of their own: `-j NAME` would reach
// the target, never the chain.
func reservedChainNames() []string {
	return []string{
		"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING",
		"ACCEPT", "DROP", "QUEUE", "RETURN", "JUMP", "GOTO", "ALL",
		"MASQUERADE", "SNAT", "DNAT", "REDIRECT", "NETMAP", "SAME", "NAT",
		"AUDIT", "CHECKSUM", "CLASSIFY", "CLUSTERIP", "CONNMARK", "CONNSECMARK", "CT",
		"DNPT", "DSCP", "ECN", "HL", "HMARK", "IDLETIMER", "LED", "LOG", "MARK", "MIRROR",
		"NFLOG", "NFQUEUE", "NOTRACK", "RATEEST", "REJECT", "SECMARK", "SET", "SNPT",
		"SYNPROXY", "TCPMSS", "TCPOPTSTRIP", "TEE", "TOS", "TPROXY", "TRACE", "TTL", "ULOG",
		"DELUDE", "TARPIT", "CHAOS", "STEAL", "SYSRQ", "ERROR", "STANDARD",
	}
}

// ValidateInterface holds names to what the kernel accepts (IFNAMSIZ: 15 bytes
// and none of '/', ':' and white space) and to what both backends can write.
func ValidateInterface(name string) error {
	err := checkInterface(name)
	if err == nil || !strings.HasSuffix(name, "*") {
		return err
	}
	wildcard := strings.TrimRight(name, "*+") + "+"
	if checkInterface(wildcard) != nil {
		return err
	}
	return fmt.Errorf("is not the name of an interface; did you mean %s?", wildcard)
}

func checkInterface(name string) error {
	outside := func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`/:"\!*`, r) }
	switch bare := strings.TrimSuffix(name, "+"); {
	case name == "":
		return errors.New("is empty; name an interface, or drop the item")
	case bare == "" || bare == "*":
		return errors.New("would match every interface; leave outputInterfaces out instead")
	case len(name) > 15:
		return errors.New("is longer than the 15 bytes of an interface's name")
	case bare == "." || bare == ".." || strings.ContainsFunc(name, outside):
		return errors.New("is not the name of an interface; " +
			"use visible ASCII without '/', ':', '\"', '\\', '!' and '*'")
	}
	return nil
}
