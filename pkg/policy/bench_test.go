// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// manyCIDRs states n prefixes, each a /24 apart; every eighth /24 has one for
// masquerading within it, as the policies that need most care do.
func manyCIDRs(n int) policy.SourcePolicy {
	s := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), MasqueradeCIDRs: cidrs()}
	for i := 0; len(s.NonMasqueradeCIDRs)+len(s.MasqueradeCIDRs) < n; i++ {
		a := netip.AddrFrom4([4]byte{byte(11 + i>>15), byte(i >> 7), byte(i<<1 | 1), 0})
		s.NonMasqueradeCIDRs = append(s.NonMasqueradeCIDRs, netip.PrefixFrom(a, 24))
		if i%8 == 0 {
			s.MasqueradeCIDRs = append(s.MasqueradeCIDRs, netip.PrefixFrom(a, 28))
		}
	}
	return s
}

// ofOneLength states n prefixes of one length, exempt and masqueraded by turns.
func ofOneLength(n int) policy.SourcePolicy {
	s := policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), MasqueradeCIDRs: cidrs()}
	for i := range n {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 0}), 24)
		if i%2 == 0 {
			s.NonMasqueradeCIDRs = append(s.NonMasqueradeCIDRs, p)
		} else {
			s.MasqueradeCIDRs = append(s.MasqueradeCIDRs, p)
		}
	}
	return s
}

// BenchmarkQuietSync is what an ADD or a sync costs in this package when all is
// right already.
func BenchmarkQuietSync(b *testing.B) {
	for _, n := range []int{64, 1_000, 10_000} {
		for _, form := range []struct {
			name   string
			layout policy.Layout
		}{{"rules", policy.Layout{}}, {"sets", policy.Layout{Sets: true}}} {
			b.Run(fmt.Sprintf("%s/%d", form.name, n), func(b *testing.B) {
				sources := []policy.Source{network("n", 1, manyCIDRs(n)), agentFiles(policy.SourcePolicy{MasqLinkLocal: ptr(true)})}
				observed := cloned(policy.Desired(policy.Merge(sources), form.layout, policy.OwnedBy("/state")))
				b.ReportAllocs()
				for b.Loop() {
					desired := policy.Desired(policy.Merge(sources), form.layout, policy.OwnedBy("/state"))
					if diff := policy.Compare(desired, observed); len(diff) > 0 {
						b.Fatal(diff)
					}
				}
			})
		}
	}
}

// BenchmarkDesired shows what a list costs whose prefixes alternate.
func BenchmarkDesired(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprintf("alternating/sets/%d", n), func(b *testing.B) {
			merged := policy.Merge([]policy.Source{network("n", 1, ofOneLength(n)), network("m", 2, policy.SourcePolicy{})})
			slices.SortFunc(merged[0].Destinations, func(x, y policy.PrefixAction) int { return x.Prefix.Addr().Compare(y.Prefix.Addr()) })
			for b.Loop() {
				policy.Desired(merged, policy.Layout{Sets: true}, policy.Owner{})
			}
		})
	}
}

// BenchmarkCompareChanged is the cost of naming differences: another order,
// with meaning or not, and another list.
func BenchmarkCompareChanged(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		desired := policy.Desired(policy.Merge([]policy.Source{network("n", 1, manyCIDRs(n))}), policy.Layout{}, policy.Owner{})
		reversed, others := cloned(desired), cloned(desired)
		slices.Reverse(reversed.Chains[0].Rules)
		for i := range others.Chains[0].Rules {
			others.Chains[0].Rules[i].To = policy.RangesOf(netip.PrefixFrom(netip.AddrFrom4([4]byte{99, byte(i >> 8), byte(i), 0}), 24))
		}
		for name, observed := range map[string]policy.Ruleset{"reversed": reversed, "others": others, "missing": {Chains: []policy.Chain{{Family: policy.IPv4, Name: policy.DefaultChain}}}} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				for b.Loop() {
					if len(policy.Compare(desired, observed)) == 0 {
						b.Fatal("no difference")
					}
				}
			})
		}
	}
}
