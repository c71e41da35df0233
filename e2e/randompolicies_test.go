// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
)

// oraclePolicy is the merged policy of its sources, in the oracle's terms.
type oraclePolicy struct {
	exempt, masquerade []netip.Prefix
	// defaults apply where no source sets nonMasqueradeCIDRs.
	defaults, reserved, linkLocal4, linkLocal6, ipv6 bool

	sources, exemptSources []netip.Prefix
	interfaces             []string
}

// masquerades is the oracle. It follows the wording of the specification and checks every prefix
// for every packet.
func (p oraclePolicy) masquerades(src, dst netip.Addr, out string) bool {
	if dst.Is6() && !p.ipv6 {
		return false
	}
	contains := func(list []netip.Prefix, a netip.Addr) bool {
		return slices.ContainsFunc(list, func(x netip.Prefix) bool { return x.Contains(a) })
	}
	if len(p.sources) > 0 && !contains(p.sources, src) {
		return false
	}
	if len(p.interfaces) > 0 && !slices.ContainsFunc(p.interfaces, func(pattern string) bool {
		beginning, wild := strings.CutSuffix(pattern, "+")
		return pattern == out || wild && strings.HasPrefix(out, beginning)
	}) {
		return false
	}
	if contains(p.exemptSources, src) {
		return false
	}
	longest, masquerade := -1, true
	// For equal prefixes the later one wins: configured prefixes override built-in ones.
	for _, list := range []struct {
		prefixes   []netip.Prefix
		masquerade bool
	}{{p.builtIn(), false}, {p.exempt, false}, {p.masquerade, true}} {
		for _, x := range list.prefixes {
			if x.Contains(dst) && x.Bits() >= longest {
				longest, masquerade = x.Bits(), list.masquerade
			}
		}
	}
	return masquerade
}

func parsePrefixes(texts ...string) []netip.Prefix {
	var all []netip.Prefix
	for _, text := range texts {
		all = append(all, netip.MustParsePrefix(text))
	}
	return all
}

func (p oraclePolicy) builtIn() []netip.Prefix {
	var all []netip.Prefix
	if !p.linkLocal4 {
		all = append(all, parsePrefixes("169.254.0.0/16")...)
	}
	if !p.linkLocal6 {
		all = append(all, parsePrefixes("fe80::/10")...)
	}
	if p.defaults {
		all = append(all, parsePrefixes("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")...)
	}
	if p.defaults && p.reserved {
		all = append(all, parsePrefixes("100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24",
			"198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4")...)
	}
	return all
}

// prefixes returns the prefixes whose boundaries are tested, always of both families.
func (p oraclePolicy) prefixes() []netip.Prefix {
	return slices.Concat(p.exempt, p.masquerade, p.builtIn(),
		parsePrefixes("169.254.0.0/16", "10.0.0.0/8", "fd00::/8", "2001:db8::/32"))
}

// randomPolicy returns prefixes that are nested, adjacent or disjoint.
func randomPolicy(r *rand.Rand) oraclePolicy {
	p := oraclePolicy{
		defaults: r.IntN(3) == 0, reserved: r.IntN(3) == 0,
		linkLocal4: r.IntN(3) == 0, linkLocal6: r.IntN(3) == 0, ipv6: r.IntN(4) > 0,
	}
	count := r.IntN(16)
	if r.IntN(10) == 0 {
		count = 40
	}
	known := basePrefixes(p.ipv6)
	taken := map[netip.Prefix]bool{}
	for range count {
		x := nearbyPrefix(r, known[r.IntN(len(known))])
		if taken[x] {
			continue
		}
		taken[x] = true
		known = append(known, x)
		if p.defaults || r.IntN(2) == 0 {
			p.masquerade = append(p.masquerade, x)
		} else {
			p.exempt = append(p.exempt, x)
		}
	}
	choose := func(oneIn int, texts ...string) []string {
		var chosen []string
		if r.IntN(oneIn) == 0 {
			for range 1 + r.IntN(2) {
				chosen = append(chosen, texts[r.IntN(len(texts))])
			}
		}
		slices.Sort(chosen)
		return slices.Compact(chosen)
	}
	p.interfaces = choose(5, "lan", "outside", "l+", "out+", "outsid", "o+", "eth0")
	of := func(texts ...string) []string { // prefixes that an entry may list
		return slices.DeleteFunc(texts, func(text string) bool { return strings.Contains(text, ":") && !p.ipv6 })
	}
	p.sources = parsePrefixes(choose(4, of("172.20.0.0/16", "172.20.0.5/32", "100.64.0.0/10", "0.0.0.0/0", "fd00:77::/64", "2001:db8:77::7/128", "::/0")...)...)
	p.exemptSources = parsePrefixes(choose(5, of("172.20.0.0/24", "172.20.0.4/31", "100.64.7.7/32", "172.20.0.6/32", "fd00:77::5/128", "2001:db8::/32")...)...)
	return p
}

func basePrefixes(ipv6 bool) []netip.Prefix {
	all := parsePrefixes("0.0.0.0/0", "128.0.0.0/1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "1.2.3.0/24", "255.255.255.254/32")
	if ipv6 {
		all = append(all, parsePrefixes("::/0", "8000::/1", "fd00::/8", "2001:db8::/32", "2001:db8:5::/48", "fe80::/10", "2001:db8:5::1/128")...)
	}
	return all
}

// nearbyPrefix returns a prefix near another one: the same, its neighbour, a wider or a narrower
// one.
func nearbyPrefix(r *rand.Rand, x netip.Prefix) netip.Prefix {
	bits, most := x.Bits(), x.Addr().BitLen()
	a := x.Addr().AsSlice()
	flip := func(bit int) { a[bit/8] ^= 0x80 >> (bit % 8) }
	switch kind := r.IntN(10); {
	case kind == 0:
	case kind == 1 && bits > 0:
		flip(bits - 1)
	case kind == 2:
		bits -= min(bits, 1+r.IntN(3))
	default:
		from := bits
		bits = min(most, bits+1+r.IntN(most/3))
		// The narrower prefix is at an end of the wider one in half of the cases.
		end := r.IntN(4)
		for bit := from; bit < bits; bit++ {
			if end == 1 || end > 1 && r.IntN(2) == 0 {
				flip(bit)
			}
		}
	}
	address, _ := netip.AddrFromSlice(a)
	return netip.PrefixFrom(address, bits).Masked()
}

// entries returns the policy as the entries of one or two networks.
func (p oraclePolicy) entries(r *rand.Rand) []object {
	common := object{"enableIPv6": p.ipv6, "sourceCIDRs": p.sources, "outputInterfaces": p.interfaces}
	maps.DeleteFunc(common, func(key string, _ any) bool {
		return key == "sourceCIDRs" && p.sources == nil || key == "outputInterfaces" && p.interfaces == nil
	})
	entries := make([]object, 1+r.IntN(2))
	for i := range entries {
		entries[i] = object{"cniVersion": "1.0.0", "type": "ip-masq", "name": string(rune('a' + i))}
		maps.Copy(entries[i], common)
	}
	one := func() object { return entries[r.IntN(len(entries))] }
	for key, value := range map[string]bool{
		"masqLinkLocal": p.linkLocal4, "masqLinkLocalIPv6": p.linkLocal6, "nomasqAllReservedRanges": p.reserved,
	} {
		if value {
			entries[0][key] = true
		}
	}
	for _, list := range []struct {
		key      string
		prefixes []netip.Prefix
	}{{"nonMasqueradeCIDRs", p.exempt}, {"masqueradeCIDRs", p.masquerade}, {"nonMasqueradeSourceCIDRs", p.exemptSources}} {
		if list.key == "nonMasqueradeCIDRs" && !p.defaults {
			one()[list.key] = []netip.Prefix{}
		}
		for _, x := range list.prefixes {
			entry := one()
			have, _ := entry[list.key].([]netip.Prefix)
			entry[list.key] = append(have, x)
		}
	}
	return entries
}
