// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestValidate(t *testing.T) {
	all := policy.SourcePolicy{
		Chain: "MY-CHAIN", Backend: policy.NFTables, EnableIPv6: ptr(true),
		NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "fd00::/8", "10.0.0.0/8"), MasqueradeCIDRs: cidrs("10.1.0.0/16", "169.254.0.0/16"),
		SourceCIDRs: cidrs("10.244.0.0/16"), NonMasqueradeSourceCIDRs: cidrs("10.244.7.0/24"),
		OutputInterfaces: []string{"eth0", "wg+", "br-0123456789ab", "a.b@c", "x"}, ToPorts: ports(t, "1-2"),
	}
	atBounds := policy.SourcePolicy{
		Chain: policy.DefaultChain, SourceCIDRs: many(64), OutputInterfaces: names(64), NonMasqueradeSourceCIDRs: many(4096), PodCIDRs: many(4096),
	}
	for _, s := range []policy.SourcePolicy{all, atBounds, {Chain: policy.DefaultChain}} {
		if err := s.Validate(policy.DefaultCIDRLimit); err != nil {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

// many returns prefixes, and names those of interfaces.
func many(n int) (list []netip.Prefix) {
	for i := range n {
		list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(11 + i>>16), byte(i >> 8), byte(i), 0}), 24))
	}
	return list
}

func names(n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprint("if", i))
	}
	return list
}

func TestValidateSaysWhatToWrite(t *testing.T) {
	const noIPv6 = ` is an IPv6 prefix, but IPv6 is not enabled; set enableIPv6 to true, or remove it`
	const badName = ` is not the name of an interface; use visible ASCII without '/', ':', '"', '\', '!' and '*'`
	const long = " is longer than the 15 bytes of an interface's name"
	const notPrefix = `"invalid Prefix" is not a CIDR; write address/length, such as 10.0.0.0/8 or fd00::/8`
	for _, tt := range []struct {
		name   string
		policy policy.SourcePolicy
		most   int
		want   []string
	}{
		{"chain", policy.SourcePolicy{Chain: "no no"}, 1, []string{`masqChain: "no no" may hold only letters, digits, '_', '.' and '-'`}},
		{"chain of others", policy.SourcePolicy{Chain: "KUBE-X"}, 1, []string{"masqChain: KUBE-X begins with KUBE-, a prefix of chains of other programs; choose another"}},
		{
			"limit", policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.0.0.0/9"), MasqueradeCIDRs: cidrs("10.0.0.0/10")}, 2,
			[]string{"cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have 3 entries together, more than the 2 allowed; remove some or raise cidrLimit"},
		},
		{
			"in both lists",
			policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("192.168.0.0/16", "10.0.0.0/8"), MasqueradeCIDRs: cidrs("10.1.0.0/16", "10.0.0.0/8")}, 4,
			[]string{"masqueradeCIDRs[1]: 10.0.0.0/8 is in nonMasqueradeCIDRs too; remove one of the two"},
		},
		{
			"IPv6 in every list", policy.SourcePolicy{
				NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "fd00::/8"), MasqueradeCIDRs: cidrs("fd01::/16"),
				SourceCIDRs: cidrs("fd02::/16"), NonMasqueradeSourceCIDRs: cidrs("fd03::/16"), PodCIDRs: cidrs("10.0.0.0/8", "fd04::/16"),
			}, 9,
			[]string{
				"nonMasqueradeCIDRs[1]: fd00::/8" + noIPv6, "masqueradeCIDRs[0]: fd01::/16" + noIPv6,
				"sourceCIDRs[0]: fd02::/16" + noIPv6, "nonMasqueradeSourceCIDRs[0]: fd03::/16" + noIPv6,
				"podCIDRs[1]: fd04::/16" + noIPv6,
			},
		},
		{
			"IPv6 said to be off", policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("::/0"), EnableIPv6: ptr(false)}, 9,
			[]string{"nonMasqueradeCIDRs[0]: ::/0" + noIPv6},
		},
		{
			"interfaces", policy.SourcePolicy{OutputInterfaces: []string{
				"", "+", "eth0", "sixteen-bytes-xx", "fifteen-bytes-x+", ".", "..", ".+", "a/b", "a:b", "a b", "eth*", `a"b`, "a\n", "é", "!eth0",
			}}, 9,
			[]string{
				"outputInterfaces[0]: is empty; name an interface, or drop the item",
				"outputInterfaces[1]: + would match every interface; leave outputInterfaces out instead",
				"outputInterfaces[3]: sixteen-bytes-xx" + long,
				"outputInterfaces[4]: fifteen-bytes-x+" + long,
				"outputInterfaces[5]: ." + badName,
				"outputInterfaces[6]: .." + badName,
				"outputInterfaces[7]: .+" + badName,
				"outputInterfaces[8]: a/b" + badName,
				"outputInterfaces[9]: a:b" + badName,
				`outputInterfaces[10]: "a b"` + badName,
				"outputInterfaces[11]: eth*" + badName,
				`outputInterfaces[12]: "a\"b"` + badName,
				`outputInterfaces[13]: "a\n"` + badName,
				`outputInterfaces[14]: "é"` + badName,
				"outputInterfaces[15]: !eth0" + badName,
			},
		},
		{
			"what only a damaged document can hold", policy.SourcePolicy{
				EnableIPv6:         ptr(true),
				NonMasqueradeCIDRs: []netip.Prefix{{}, netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.0.1.24/24")},
				SourceCIDRs:        cidrs("::ffff:10.0.0.0/104"), PodCIDRs: []netip.Prefix{netip.MustParsePrefix("fd00::1/64")},
			}, 9,
			[]string{
				"nonMasqueradeCIDRs[0]: " + notPrefix,
				"nonMasqueradeCIDRs[2]: 10.0.1.24/24 has host bits set; did you mean 10.0.1.0/24?",
				"sourceCIDRs[0]: ::ffff:10.0.0.0/104 is an IPv4 prefix written as IPv6; did you mean 10.0.0.0/8?",
				"podCIDRs[0]: fd00::1/64 has host bits set; did you mean fd00::/64?",
			},
		},
		{
			"bounds of both lists", policy.SourcePolicy{SourceCIDRs: many(4097), NonMasqueradeSourceCIDRs: many(4097), PodCIDRs: many(4097)}, 9,
			[]string{
				"sourceCIDRs: has 4097 entries, which with the 0 of outputInterfaces make 4097 pairs, more than the 4096 possible; remove some",
				"nonMasqueradeSourceCIDRs: has 4097 entries, more than the 4096 possible; remove some, or write wider prefixes",
				"podCIDRs: has 4097 entries, more than the 4096 possible; remove some, or write wider prefixes",
			},
		},
		{
			"a bound of interfaces", policy.SourcePolicy{OutputInterfaces: names(4097)}, 9,
			[]string{"sourceCIDRs: has 0 entries, which with the 4097 of outputInterfaces make 4097 pairs, more than the 4096 possible; remove some"},
		},
		{
			"a bound of pairs", policy.SourcePolicy{SourceCIDRs: many(241), OutputInterfaces: names(17)}, 9,
			[]string{"sourceCIDRs: has 241 entries, which with the 17 of outputInterfaces make 4097 pairs, more than the 4096 possible; remove some"},
		},
		{
			"all at once", policy.SourcePolicy{Chain: "-x", NonMasqueradeCIDRs: cidrs("::/0"), OutputInterfaces: []string{"+"}}, 0,
			[]string{
				"masqChain: -x must begin with a letter or a digit",
				"cidrLimit: nonMasqueradeCIDRs and masqueradeCIDRs have 1 entries together, more than the 0 allowed; remove some or raise cidrLimit",
				"nonMasqueradeCIDRs[0]: ::/0" + noIPv6,
				"outputInterfaces[0]: + would match every interface; leave outputInterfaces out instead",
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := onDefaultChain(tt.policy).Validate(tt.most)
			got := ""
			if err != nil {
				got = err.Error()
			}
			wantEqual(t, "Validate", strings.Split(got, "\n"), tt.want)
		})
	}
}
