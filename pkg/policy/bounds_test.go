// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"errors"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The number of rules that is judged is the number that would be made.
func TestCheckBounds(t *testing.T) {
	const together = "; remove some, set backend to nftables, or give a network another masqChain"
	ports := ports(t, "1,3,5,7")
	for _, tt := range []struct {
		name    string
		sources []policy.Source
		rules   int // without the one more
		more    policy.Source
		want    string
	}{{
		name:    "exempt prefixes",
		sources: []policy.Source{network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: many(policy.MaxRules - 2)})},
		rules:   policy.MaxRules,
		more:    network("b", 2, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs("10.0.0.0/8")}),
		want: "chain IP-MASQ-AGENT: 0 nonMasqueradeSourceCIDRs, 65536 nonMasqueradeCIDRs and 0 masqueradeCIDRs with 0 ranges of toPorts make 65537 ipv4 rules in iptables, " +
			`more than the 65536 possible, stated by network "a", network "b"` + together,
	}, {
		name: "ports of one and prefixes of another", // 13 rules each, and for all else
		sources: []policy.Source{
			network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), NonMasqueradeSourceCIDRs: many(1), ToPorts: ports}),
			agentFiles(policy.SourcePolicy{MasqueradeCIDRs: many(5039)}),
		},
		rules: 13*5040 + 2,
		more:  network("b", 2, policy.SourcePolicy{MasqueradeCIDRs: many(5041)}),
		want: "chain IP-MASQ-AGENT: 1 nonMasqueradeSourceCIDRs, 1 nonMasqueradeCIDRs and 5041 masqueradeCIDRs with 4 ranges of toPorts make 65548 ipv4 rules in iptables, " +
			`more than the 65536 possible, stated by network "a", network "b", the agent files` + together,
	}, {
		name:    "exempt sources",
		sources: []policy.Source{network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: cidrs(), NonMasqueradeSourceCIDRs: many(4096)})},
		rules:   4096 + 2,
		more:    agentFiles(policy.SourcePolicy{NonMasqueradeSourceCIDRs: cidrs("10.0.0.0/8")}),
		want: "chain IP-MASQ-AGENT: nonMasqueradeSourceCIDRs has 4097 entries, more than the 4096 possible, " +
			`stated by network "a", the agent files; remove some, write wider prefixes, or give a network another masqChain`,
	}} {
		t.Run(tt.name, func(t *testing.T) {
			p := policy.Merge(tt.sources)[0]
			if err := p.CheckBounds(policy.Layout{}); err != nil {
				t.Error(err)
			}
			rules := len(policy.Desired([]policy.Policy{p}, policy.Layout{}, policy.Owner{}).Chains[0].Rules)
			wantEqual(t, "rules", rules, tt.rules)
			err := policy.Merge(append(tt.sources, tt.more))[0].CheckBounds(policy.Layout{})
			wantError(t, "one more", err, tt.want)
			var bound *policy.BoundError
			if !errors.As(err, &bound) {
				t.Errorf("%T is no BoundError", err)
			}
		})
	}
	sets := policy.Merge([]policy.Source{network("a", 1, policy.SourcePolicy{NonMasqueradeCIDRs: many(policy.MaxRules), ToPorts: ports})})[0]
	if err := sets.CheckBounds(policy.Layout{Sets: true}); err != nil {
		t.Errorf("with sets: %v", err)
	}
}
