// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"net/netip"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestFamilies(t *testing.T) {
	wantEqual(t, "Families", policy.Families(), []policy.Family{policy.IPv4, policy.IPv6})
	for _, tt := range []struct {
		family         policy.Family
		all, linkLocal string
		member         string
	}{
		{policy.IPv4, "0.0.0.0/0", "169.254.0.0/16", "192.0.2.1"},
		{policy.IPv6, "::/0", "fe80::/10", "2001:db8::1"},
	} {
		wantEqual(t, "All", tt.family.All(), netip.MustParsePrefix(tt.all))
		wantEqual(t, "LinkLocal", tt.family.LinkLocal(), netip.MustParsePrefix(tt.linkLocal))
		wantEqual(t, "FamilyOf", policy.FamilyOf(addr(tt.member)), tt.family)
	}
}

func TestDefaultNonMasqueradeCIDRs(t *testing.T) {
	private := cidrs("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
	wantEqual(t, "private", policy.DefaultNonMasqueradeCIDRs(false), private)
	wantEqual(t, "reserved", policy.DefaultNonMasqueradeCIDRs(true), append(private, cidrs(
		"100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15",
		"198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4")...))
}

// A caller that writes into the list it was given does not change the next.
func TestDefaultsAreACopy(t *testing.T) {
	policy.DefaultNonMasqueradeCIDRs(false)[0] = netip.MustParsePrefix("0.0.0.0/0")
	if got := policy.DefaultNonMasqueradeCIDRs(false)[0].String(); got != "10.0.0.0/8" {
		t.Errorf("the first default is now %s", got)
	}
}
