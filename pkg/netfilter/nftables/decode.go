// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// decode returns the rule that was encoded. A rule that encode does not write is unrecognized, as is one with a
// set that differs from nfnetlink.AddressRanges.
func decode(f policy.Family, raw nfnetlink.Rule, sets func(string) (policy.Ranges, error)) (out rule, err error) {
	out.DecodedRule = netfilter.DecodeRule(nfnetlink.Decode(headerOf(f).link, raw, nil),
		func(c nfnetlink.Condition) (ranges policy.Ranges, ok bool) {
			if c.Set == "" || out.set != "" || err != nil {
				return nil, false
			}
			out.set = c.Set
			ranges, err = sets(c.Set)
			return ranges, ranges != nil
		})
	out.handle = raw.Handle
	return out, err
}
