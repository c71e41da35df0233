// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestLookup(t *testing.T) {
	p := mergeOne(t, network("n", 1, policy.SourcePolicy{
		EnableIPv6: ptr(true), NonMasqueradeCIDRs: cidrs("10.0.0.0/8", "10.1.2.0/24", "fd00::/8"), MasqueradeCIDRs: cidrs("10.1.0.0/16"),
	}))
	for dst, want := range map[string]string{
		"10.9.9.9": "10.0.0.0/8", "10.1.9.9": "10.1.0.0/16", "10.1.2.9": "10.1.2.0/24", "169.254.1.1": "169.254.0.0/16",
		"fd00::1": "fd00::/8", "fe80::1": "fe80::/10", "8.8.8.8": "", "2001:db8::1": "",
	} {
		got := ""
		if e := p.Lookup(addr(dst)); e != nil {
			got = e.Prefix.String()
		}
		if got != want {
			t.Errorf("%s is decided by %q, want %q", dst, got, want)
		}
	}
}

// The entry that is said to decide is the one by which the rules do.
func TestLookupAgreesWithTheOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		contributions := genContributions().Draw(t, "contributions")
		p := policy.Merge(contributions)[0]
		stated := newOracle(contributions).destinations()
		for _, f := range p.Families() {
			for _, dst := range edges(destinationsOf(contributions), f) {
				longest, want := -1, masqueraded
				for prefix, v := range stated {
					if prefix.Contains(dst) && prefix.Bits() > longest {
						longest, want = prefix.Bits(), v
					}
				}
				got, bits := masqueraded, -1
				if e := p.Lookup(dst); e != nil {
					bits = e.Prefix.Bits()
					if e.Action == policy.Exempt {
						got = leftAlone
					}
				}
				if got != want || bits != longest {
					t.Fatalf("%s is %s by a /%d, want %s by a /%d", dst, got, bits, want, longest)
				}
			}
		}
	})
}
