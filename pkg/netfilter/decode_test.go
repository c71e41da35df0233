// SPDX-License-Identifier: Apache-2.0

package netfilter_test

import (
	"net/netip"
	"testing"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// TestUnrecognizedText: the text of a rule does not say what a condition that policy.Rule cannot express denies.
func TestUnrecognizedText(t *testing.T) {
	ten := netipx.RangeOfPrefix(netip.MustParsePrefix("10.0.0.0/8"))
	addresses := func(c nfnetlink.Condition) (policy.Ranges, bool) { return policy.Ranges{c.Range}, c.Set == "" }
	for _, tc := range []struct {
		condition nfnetlink.Condition
		want      string
	}{
		{nfnetlink.Condition{Field: nfnetlink.SourceLocal}, "masquerade with local source"},
		{nfnetlink.Condition{Field: nfnetlink.DestinationLocal}, "masquerade with local destination"},
		{nfnetlink.Condition{Field: nfnetlink.Source, Not: true, Range: ten}, "masquerade with source != 10.0.0.0/8"},
		{nfnetlink.Condition{Field: nfnetlink.Source, Set: "odd"}, "masquerade with source @odd"},
		{nfnetlink.Condition{Field: nfnetlink.OutputName, Not: true, Name: "eth0"}, "masquerade with oifname != eth0"},
		{nfnetlink.Condition{Field: nfnetlink.Protocol, Not: true, Value: unix.IPPROTO_TCP}, "masquerade with l4proto != 6"},
	} {
		d := nfnetlink.Decoded{Conditions: []nfnetlink.Condition{tc.condition}, Statement: nfnetlink.DoMasq}
		r := netfilter.DecodeRule(d, addresses)
		assert.Equal(t, "verdict", r.Verdict, policy.Unrecognized)
		assert.Equal(t, "text", r.Text, tc.want)
	}
}
