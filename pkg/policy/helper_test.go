// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	"go4.org/netipx"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// equatable lets cmp look at the address types as the values that they are.
var equatable = cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{}, netipx.IPRange{})

func ptr[T any](v T) *T { return &v }

var cidrs = policytest.Prefixes

func ranges(list ...string) policy.Ranges { return policy.RangesOf(cidrs(list...)...) }

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func ports(t testing.TB, s string) *policy.Ports {
	t.Helper()
	p, err := policy.ParsePorts(s)
	if err != nil {
		t.Fatalf("ParsePorts(%q): %v", s, err)
	}
	return &p
}

func network(name string, order int64, s policy.SourcePolicy) policy.Source {
	return policy.Source{ID: policy.SourceID{Kind: policy.Network, Name: name}, Policy: onDefaultChain(s), Order: order}
}

func agentFiles(s policy.SourcePolicy) policy.Source {
	return policy.Source{ID: policy.SourceID{Kind: policy.AgentFiles}, Policy: onDefaultChain(s)}
}

func onDefaultChain(s policy.SourcePolicy) policy.SourcePolicy {
	if s.Chain == "" {
		s.Chain = policy.DefaultChain
	}
	return s
}

// originsOf names the origins of an entry, with the indexes of list items.
func originsOf(e policy.PrefixAction) (out []string) {
	for _, o := range e.Origins {
		switch {
		case o.Key == "":
			out = append(out, o.String())
		case o.Index < 0:
			out = append(out, fmt.Sprintf("%s (%s)", o.Key, o.Source))
		default:
			out = append(out, fmt.Sprintf("%s[%d] of %s", o.Key, o.Index, o.Source))
		}
	}
	return out
}

// mergeOne merges sources that are all to one chain.
func mergeOne(t testing.TB, sources ...policy.Source) policy.Policy {
	t.Helper()
	merged := policy.Merge(sources)
	if len(merged) != 1 {
		t.Fatalf("Merge made %d policies, want 1", len(merged))
	}
	return merged[0]
}

// merge merges sources on a node that runs exemptPods.
func merge(sources []policy.Source) []policy.Policy {
	merged := policy.Merge(sources)
	for i := range merged {
		merged[i].SetExemptPods(exemptPods())
	}
	return merged
}

// exemptPods are in the namespaces that policytest draws, and in another one.
func exemptPods() (pods []policy.ExemptPod) {
	for _, f := range policy.Families() {
		for n, namespace := range map[int]string{1: "kube-system", 3: "prod", 6: "other"} {
			pods = append(pods, policy.ExemptPod{Address: lowAddress(f, n), Namespace: namespace})
		}
	}
	return pods
}

func wantError(t testing.TB, what string, err error, want string) {
	t.Helper()
	got := ""
	if err != nil {
		got = err.Error()
	}
	assert.Equal(t, what+": error", got, want)
}

// The generators draw from so few addresses that prefixes often lie within one
// another, are equal, or are named by two sources.

func defaultLayouts() []policy.Layout {
	return []policy.Layout{{}, {Sets: true}}
}

// wideAndBuiltIn are prefixes with a part in the policy of their own, and some
// that lie around or within those.
func wideAndBuiltIn(f policy.Family) []netip.Prefix {
	if f == policy.IPv4 {
		return cidrs("0.0.0.0/0", "128.0.0.0/1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "192.168.7.0/24",
			"169.254.0.0/16", "169.254.0.0/15", "169.254.169.254/32", "255.255.255.255/32", "240.0.0.0/4",
			"224.0.0.0/3", "224.0.0.0/4", "239.1.0.0/16")
	}
	return cidrs("::/0", "8000::/1", "fc00::/7", "fd00::/8", "fe80::/10", "fe80::/64", "fe00::/8",
		"fe00::/7", "ff00::/8", "ff02::/16", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128")
}

// genPrefix draws a prefix: two out of three times one of the 31 that are
// possible among the 16 addresses 10.0.0.0-15 or fd00::-fd00::f.
func genPrefix(f policy.Family) *rapid.Generator[netip.Prefix] {
	return rapid.Custom(func(t *rapid.T) netip.Prefix {
		if rapid.IntRange(0, 2).Draw(t, "special") == 0 {
			return rapid.SampledFrom(wideAndBuiltIn(f)).Draw(t, "prefix")
		}
		low := lowAddress(f, rapid.IntRange(0, 15).Draw(t, "low"))
		return netip.PrefixFrom(low, low.BitLen()-rapid.IntRange(0, 4).Draw(t, "free bits")).Masked()
	})
}

func lowAddress(f policy.Family, n int) netip.Addr {
	if f == policy.IPv4 {
		return netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(n)})
}

func genPrefixes(families []policy.Family, most int) *rapid.Generator[[]netip.Prefix] {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) netip.Prefix {
		return genPrefix(rapid.SampledFrom(families).Draw(t, "family")).Draw(t, "item")
	}), 0, most)
}

func genFamily() *rapid.Generator[policy.Family] { return rapid.SampledFrom(policy.Families()) }

// genSourcePolicy draws a source policy that is valid by itself.
func genSourcePolicy() *rapid.Generator[policy.SourcePolicy] {
	ports := rapid.SampledFrom([]string{"", "1024-65535", "1024-29999,32768-65535", "32768-65535,1024-29999", "1-2,7,65535"})
	from := policytest.Generators{
		Chain: rapid.Just(policy.DefaultChain), Prefix: genPrefix, Interface: rapid.SampledFrom([]string{"eth0", "eth1", "eth+", "e+", "wg0"}),
		Ports: rapid.Map(ports, func(s string) policy.Ports {
			p, _ := policy.ParsePorts(s)
			return p
		}),
	}
	return rapid.Custom(func(t *rapid.T) policy.SourcePolicy {
		s := from.SourcePolicy(t)
		if rapid.IntRange(0, 2).Draw(t, "scoped") > 0 {
			s.SourceCIDRs, s.OutputInterfaces = nil, nil
		}
		if err := s.Validate(policy.DefaultCIDRLimit); err != nil {
			t.Fatalf("the generator made a bad policy: %v", err)
		}
		return s
	})
}

// genSources draws up to three networks, with or without agent files.
func genSources() *rapid.Generator[[]policy.Source] {
	return rapid.Custom(func(t *rapid.T) []policy.Source {
		var out []policy.Source
		for i := range rapid.IntRange(0, 3).Draw(t, "networks") {
			c := network(fmt.Sprintf("net%d", i), rapid.Int64Range(1, 3).Draw(t, "order"), genSourcePolicy().Draw(t, "policy"))
			c.Superseded = rapid.IntRange(0, 3).Draw(t, "superseded") == 0
			c.PodSubnets = genPrefixes(policy.Families(), 2).Draw(t, "podSubnets")
			out = append(out, c)
		}
		if len(out) == 0 || rapid.Bool().Draw(t, "agent files") {
			out = append(out, agentFiles(genSourcePolicy().Draw(t, "agent policy")))
		}
		return out
	})
}

// genPacket draws a packet whose addresses often lie at the edge of a prefix
// that the sources name.
func genPacket(sources []policy.Source) *rapid.Generator[policy.Packet] {
	return rapid.Custom(func(t *rapid.T) policy.Packet {
		f := genFamily().Draw(t, "family")
		return policy.Packet{
			Src:      rapid.SampledFrom(edges(sourcesOf(sources), f)).Draw(t, "src"),
			Dst:      rapid.SampledFrom(edges(destinationsOf(sources), f)).Draw(t, "dst"),
			Out:      rapid.SampledFrom([]string{"eth0", "eth1", "eth", "wg0", "lo", "e", ""}).Draw(t, "out"),
			SrcLocal: rapid.IntRange(0, 3).Draw(t, "src local") == 0,
			DstLocal: rapid.IntRange(0, 9).Draw(t, "dst local") == 0,
			Protocol: rapid.SampledFrom([]policy.Protocol{"tcp", "udp", "sctp", "icmp"}).Draw(t, "protocol"),
		}
	})
}

func sourcesOf(sources []policy.Source) []netip.Prefix {
	var out []netip.Prefix
	for _, c := range sources {
		out = slices.Concat(out, c.Policy.SourceCIDRs, c.Policy.NonMasqueradeSourceCIDRs, c.Policy.PodCIDRs, c.PodSubnets)
	}
	return out
}

func destinationsOf(sources []policy.Source) []netip.Prefix {
	var out []netip.Prefix
	for _, c := range sources {
		out = append(append(out, c.Policy.NonMasqueradeCIDRs...), c.Policy.MasqueradeCIDRs...)
	}
	for _, f := range policy.Families() {
		out = append(append(out, f.LinkLocal()), f.Multicast()...)
	}
	return append(out, policy.DefaultNonMasqueradeCIDRs(true)...)
}

// edges returns the first and last addresses of the prefixes and those right
// outside, and some that no prefix is near.
func edges(prefixes []netip.Prefix, f policy.Family) []netip.Addr {
	out := []netip.Addr{addr("8.8.8.8"), lowAddress(policy.IPv4, 3)}
	if f == policy.IPv6 {
		out = []netip.Addr{addr("2001:db8::1"), lowAddress(policy.IPv6, 3)}
	}
	for _, p := range prefixes {
		if policy.FamilyOf(p.Addr()) != f {
			continue
		}
		first, last := p.Addr(), netipx.PrefixLastIP(p)
		for _, a := range []netip.Addr{first, last, first.Prev(), last.Next()} {
			if a.IsValid() {
				out = append(out, a)
			}
		}
	}
	return out
}

// verdict is what becomes of a packet, as the documentation words it.
type verdict string

const (
	notMasqueraded verdict = "not masqueraded"
	masqueraded    verdict = "masqueraded"
	notManaged     verdict = "no policy manages it"
)

// oracle decides about a packet from the words of the sources alone, by trying
// every prefix there is. It shares nothing with what it is held against.
type oracle struct{ strongestFirst []policy.Source }

func newOracle(sources []policy.Source) oracle {
	rest := slices.Clone(sources)
	o := oracle{}
	for len(rest) > 0 {
		best := 0
		for i := range rest {
			if stronger(rest[i], rest[best]) {
				best = i
			}
		}
		next := rest[best]
		loses := func(s policy.Source) bool {
			return s.ID.Kind == policy.Network && next.ID.Kind == policy.Network && conflicting(s.Policy, next.Policy)
		}
		if !slices.ContainsFunc(o.strongestFirst, loses) {
			o.strongestFirst = append(o.strongestFirst, next)
		}
		rest = slices.Delete(rest, best, best+1)
	}
	return o
}

// conflicting: two networks state another scope, another value of a scalar, or another action for a prefix.
func conflicting(a, b policy.SourcePolicy) bool {
	// What a source says about a key, or nothing.
	said := func(k policy.Key) string {
		switch to := k.Field.(type) {
		case **bool:
			if *to != nil {
				return fmt.Sprint(**to)
			}
		case **policy.Mark:
			if *to != nil {
				return (*to).String()
			}
		case **policy.Ports:
			if *to != nil {
				ranges := strings.Split((*to).String(), ",")
				slices.Sort(ranges)
				return fmt.Sprintf("%q", ranges)
			}
		case *policy.AddressItems:
			if *to != nil {
				return fmt.Sprintf("%q", *to)
			}
		case policy.Word:
			return strings.TrimPrefix(to.String(), string(policy.Auto))
		}
		return ""
	}
	others := policy.Keys(&b)
	for i, k := range policy.Keys(&a) {
		if x, y := said(k), said(others[i]); k.Sources == "must agree" && x != "" && y != "" && x != y {
			return true
		}
	}
	both := func(x, y []netip.Prefix) bool {
		return slices.ContainsFunc(x, func(p netip.Prefix) bool { return slices.Contains(y, p) })
	}
	return !sameSet(a.SourceCIDRs, b.SourceCIDRs) || !sameSet(a.OutputInterfaces, b.OutputInterfaces) ||
		both(a.NonMasqueradeCIDRs, b.MasqueradeCIDRs) || both(a.MasqueradeCIDRs, b.NonMasqueradeCIDRs)
}

// stronger: a network beats the agent files; among networks the one that does
// not superseded, then the one that came first, then the one whose name does.
func stronger(a, b policy.Source) bool {
	aNet, bNet := a.ID.Kind == policy.Network, b.ID.Kind == policy.Network
	switch {
	case aNet != bNet:
		return aNet
	case a.Superseded != b.Superseded:
		return b.Superseded
	case a.Order != b.Order:
		return a.Order < b.Order
	}
	return a.ID.Name < b.ID.Name
}

func sameSet[T comparable](a, b []T) bool {
	notIn := func(list []T) func(T) bool { return func(x T) bool { return !slices.Contains(list, x) } }
	return !slices.ContainsFunc(a, notIn(b)) && !slices.ContainsFunc(b, notIn(a))
}

// saidFirst returns what the strongest source that states a scalar says.
func saidFirst[T any](o oracle, otherwise T, get func(policy.SourcePolicy) *T) T {
	for _, c := range o.strongestFirst {
		if v := get(c.Policy); v != nil {
			return *v
		}
	}
	return otherwise
}

// scopeOf returns the scope that holds: that of the strongest network, which
// means any if it names none; without networks, that of the agent files.
func scopeOf[T any](o oracle, get func(policy.SourcePolicy) []T) []T {
	return get(o.strongestFirst[0].Policy)
}

func (o oracle) decide(p policy.Packet) verdict {
	switch {
	case !o.manages(p.Dst):
		return notManaged
	case !o.inScope(p):
		return notMasqueraded
	}
	if o.exemptSource(p.Src) {
		return notMasqueraded
	}
	return o.destination(p.Dst)
}

// exemptSource: a source in a list of them, or a pod of a namespace in a list of these.
func (o oracle) exemptSource(a netip.Addr) bool {
	return o.exemptPod(a) || slices.ContainsFunc(o.strongestFirst, func(c policy.Source) bool {
		return anyContains(c.Policy.NonMasqueradeSourceCIDRs, a)
	})
}

func (o oracle) exemptPod(a netip.Addr) bool {
	return slices.ContainsFunc(o.strongestFirst, func(c policy.Source) bool {
		return slices.ContainsFunc(exemptPods(), func(p policy.ExemptPod) bool {
			return p.Address == a && slices.Contains(c.Policy.NonMasqueradeNamespaces, p.Namespace)
		})
	})
}

func (o oracle) inScope(p policy.Packet) bool {
	host := saidFirst(o, true, func(s policy.SourcePolicy) *bool { return s.MasqueradeHost })
	sources := scopeOf(o, func(s policy.SourcePolicy) []netip.Prefix { return s.SourceCIDRs })
	interfaces := scopeOf(o, func(s policy.SourcePolicy) []string { return s.OutputInterfaces })
	return !p.DstLocal && (len(sources) == 0 || anyContains(sources, p.Src)) &&
		(len(interfaces) == 0 || anyNames(interfaces, p.Out)) && (host || !p.SrcLocal)
}

// counts: the guards of other chains take the packet for masqueraded by this one, on whatever interface it leaves.
func (o oracle) counts(p policy.Packet) bool {
	sources := scopeOf(o, func(s policy.SourcePolicy) []netip.Prefix { return s.SourceCIDRs })
	return o.manages(p.Dst) && (len(sources) == 0 || anyContains(sources, p.Src)) && !o.exemptPod(p.Src) &&
		o.destination(p.Dst) == masqueraded
}

func (o oracle) manages(a netip.Addr) bool {
	return a.Is4() || saidFirst(o, false, func(s policy.SourcePolicy) *bool { return s.EnableIPv6 })
}

// destination is what the longest prefix says.
func (o oracle) destination(a netip.Addr) verdict {
	longest, decided := -1, masqueraded
	for prefix, v := range o.destinations() {
		if prefix.Contains(a) && prefix.Bits() > longest {
			longest, decided = prefix.Bits(), v
		}
	}
	return decided
}

// isPod: an address in the podCIDRs of a source, else in its sourceCIDRs, else in a subnet that an ADD found, each by
// family. It must be in scope and no exempt source.
func (o oracle) isPod(a netip.Addr) bool {
	scope := scopeOf(o, func(s policy.SourcePolicy) []netip.Prefix { return s.SourceCIDRs })
	if len(scope) > 0 && !anyContains(scope, a) || o.exemptSource(a) {
		return false
	}
	found := false
	for _, c := range o.strongestFirst {
		sources := scope
		if c.ID.Kind != policy.Network && !sameSet(c.Policy.SourceCIDRs, scope) {
			sources = nil // superseded, or left out
		}
		for _, list := range [][]netip.Prefix{c.Policy.PodCIDRs, sources, c.PodSubnets} {
			if slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Addr().Is4() == a.Is4() }) {
				found = found || anyContains(list, a)
				break
			}
		}
	}
	return found
}

// destinations returns what each prefix does: first what is built in, then over
// it what the sources state, the strongest last.
func (o oracle) destinations() map[netip.Prefix]verdict {
	out := map[netip.Prefix]verdict{}
	listNamed := false
	linkLocal := map[string]bool{"169.254.0.0/16": false, "fe80::/10": false}
	for _, c := range o.strongestFirst {
		s := c.Policy
		if c.ID.Kind == policy.Network {
			for _, prefix := range []string{"224.0.0.0/4", "255.255.255.255/32", "ff00::/8"} {
				out[netip.MustParsePrefix(prefix)] = notMasqueraded
			}
		}
		listNamed = listNamed || s.NonMasqueradeCIDRs != nil
		linkLocal["169.254.0.0/16"] = linkLocal["169.254.0.0/16"] || s.MasqLinkLocal != nil && *s.MasqLinkLocal
		linkLocal["fe80::/10"] = linkLocal["fe80::/10"] || s.MasqLinkLocalIPv6 != nil && *s.MasqLinkLocalIPv6
	}
	for prefix, masquerade := range linkLocal {
		if !masquerade {
			out[netip.MustParsePrefix(prefix)] = notMasqueraded
		}
	}
	if !listNamed {
		builtIn := "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16"
		if saidFirst(o, false, func(s policy.SourcePolicy) *bool { return s.NomasqAllReservedRanges }) {
			builtIn += " 100.64.0.0/10 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 198.18.0.0/15" +
				" 198.51.100.0/24 203.0.113.0/24 240.0.0.0/4"
		}
		for prefix := range strings.FieldsSeq(builtIn) {
			out[netip.MustParsePrefix(prefix)] = notMasqueraded
		}
	}
	for _, c := range slices.Backward(o.strongestFirst) {
		for _, prefix := range c.Policy.NonMasqueradeCIDRs {
			out[prefix] = notMasqueraded
		}
		for _, prefix := range c.Policy.MasqueradeCIDRs {
			out[prefix] = masqueraded
		}
	}
	return out
}

func anyContains(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func anyNames(list []string, name string) bool {
	for _, pattern := range list {
		if pattern == name || pattern[len(pattern)-1] == '+' && strings.HasPrefix(name, pattern[:len(pattern)-1]) {
			return true
		}
	}
	return false
}

// decided is what the chains of a ruleset do with a packet.
func decided(rs policy.Ruleset, chain string, p policy.Packet) (verdict, *policy.Rule) {
	c := rs.Find(policy.FamilyOf(p.Dst), chain)
	if c == nil {
		return notManaged, nil
	}
	r := c.Walk(p)
	if r != nil && r.Verdict == policy.Masquerade {
		return masqueraded, r
	}
	return notMasqueraded, r
}
