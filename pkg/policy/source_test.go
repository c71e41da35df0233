// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
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

// TestValidateSaysWhatToWrite writes the errors of each case into testdata/validate.txt.
func TestValidateSaysWhatToWrite(t *testing.T) {
	var got strings.Builder
	for _, tt := range []struct {
		name   string
		most   int
		policy policy.SourcePolicy
	}{
		{"chain", 1, policy.SourcePolicy{Chain: "no no"}},
		{"chain of others", 1, policy.SourcePolicy{Chain: "KUBE-X"}},
		{"limit", 2, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.0.0.0/9"), MasqueradeCIDRs: cidrs("10.0.0.0/10")}},
		{"in both lists", 4, policy.SourcePolicy{
			NonMasqueradeCIDRs: cidrs("192.168.0.0/16", "10.0.0.0/8"), MasqueradeCIDRs: cidrs("10.1.0.0/16", "10.0.0.0/8"),
		}},
		{"IPv6 in every list", 9, policy.SourcePolicy{
			NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "fd00::/8"), MasqueradeCIDRs: cidrs("fd01::/16"),
			SourceCIDRs: cidrs("fd02::/16"), NonMasqueradeSourceCIDRs: cidrs("fd03::/16"), PodCIDRs: cidrs("10.0.0.0/8", "fd04::/16"),
		}},
		{"IPv6 said to be off", 9, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("::/0"), EnableIPv6: ptr(false)}},
		{"interfaces", 9, policy.SourcePolicy{OutputInterfaces: []string{
			"", "+", "eth0", "sixteen-bytes-xx", "fifteen-bytes-x+", ".", "..", ".+", "a/b", "a:b", "a b", "eth*", "*", "et*0", `a"b`, "a\n", "é", "!eth0",
		}}},
		{"what only a damaged document can hold", 9, policy.SourcePolicy{
			EnableIPv6:         ptr(true),
			NonMasqueradeCIDRs: []netip.Prefix{{}, netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.0.1.24/24")},
			SourceCIDRs:        cidrs("::ffff:10.0.0.0/104"), PodCIDRs: []netip.Prefix{netip.MustParsePrefix("fd00::1/64")},
		}},
		{"bounds of both lists", 9, policy.SourcePolicy{SourceCIDRs: many(4097), NonMasqueradeSourceCIDRs: many(4097), PodCIDRs: many(4097)}},
		{"a bound of interfaces", 9, policy.SourcePolicy{OutputInterfaces: names(4097)}},
		{"a bound of pairs", 9, policy.SourcePolicy{SourceCIDRs: many(241), OutputInterfaces: names(17)}},
		{"all at once", 0, policy.SourcePolicy{Chain: "-x", NonMasqueradeCIDRs: cidrs("::/0"), OutputInterfaces: []string{"+"}}},
	} {
		fmt.Fprintf(&got, "%s:\n%v\n\n", tt.name, onDefaultChain(tt.policy).Validate(tt.most))
	}
	golden.Check(t, "testdata/validate.txt", got.String())
}
