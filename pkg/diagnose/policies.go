// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// overlappingChains looks for chains that are about the same traffic: what one
// leaves alone the other gets to see, and masquerades.
func overlappingChains(e *examination) ([]Finding, error) {
	f := Finding{ID: "two-unscoped-chains", Severity: SeverityProblem,
		Summary: "Two chains of ours look at the same traffic, and one masquerades what the other leaves alone.",
		Remedy:  "Name the same masqChain for both, so that they are merged, or give each of them sourceCIDRs or outputInterfaces of its own."}
	all := e.policies()
	for i, p := range all {
		for _, q := range all[i+1:] {
			for _, family := range policy.Families() {
				if !overlap(p, q, family) {
					continue
				}
				every := policy.RangesOf(family.All())
				exemptP, exemptQ := exemptAddresses(p, family), exemptAddresses(q, family)
				for _, side := range []struct {
					exempts, masquerades policy.Policy
					what                 policy.Ranges
				}{
					{p, q, exemptP.Intersect(every.Without(exemptQ))},
					{q, p, exemptQ.Intersect(every.Without(exemptP))},
				} {
					if len(side.what) > 0 {
						f.Detail = append(f.Detail, fmt.Sprintf("%s exempts %s, which %s masquerades", side.exempts.Chain, side.what, side.masquerades.Chain))
					}
				}
			}
		}
	}
	return []Finding{f}, nil
}

// overlap reports whether a packet of the family can be in the scope of both.
func overlap(p, q policy.Policy, f policy.Family) bool {
	from, managed := scope(p, f)
	other, managedToo := scope(q, f)
	return managed && managedToo && from.Overlaps(other) && sameInterface(p.Interfaces.Value, q.Interfaces.Value)
}

func policyConflicts(e *examination) ([]Finding, error) {
	f := Finding{ID: "policy-conflict", Severity: SeverityProblem,
		Summary: "Sources contradict each other, and one of them has yielded.",
		Remedy: "Make the sources agree, or give one of them another masqChain and a scope of its own. " +
			"If agent files are not used any more, ip-masq-reconciler cleanup removes what they said."}
	for _, p := range e.policies() {
		for _, c := range p.Conflicts.Summary() {
			f.Detail = append(f.Detail, c.Error())
		}
	}
	return []Finding{f}, nil
}

func failedChains(e *examination) ([]Finding, error) {
	f := Finding{ID: "chain-not-kept", Severity: SeverityProblem,
		Summary: "The rules of a chain cannot be vouched for.",
		Remedy:  "See the message; until then nothing repairs these rules."}
	if e.Rules != nil {
		for _, chain := range slices.Sorted(maps.Keys(e.Rules.Failed)) {
			f.Detail = append(f.Detail, chain+": "+strings.ReplaceAll(e.Rules.Failed[chain].Error(), "\n", "; "))
		}
	}
	return []Finding{f}, nil
}

func slowLists(e *examination) ([]Finding, error) {
	f := Finding{ID: "slow-list", Severity: SeverityNotice,
		Summary: "Each new connection walks through a long list of rules: iptables has no sets.",
		Remedy:  `Set backend to "nftables", whose cost does not grow with the list.`}
	if e.Rules != nil {
		slow := e.Rules.LinearChains()
		for _, chain := range slices.Sorted(maps.Keys(slow)) {
			f.Detail = append(f.Detail, fmt.Sprintf("%s: %d prefixes", chain, slow[chain]))
		}
	}
	return []Finding{f}, nil
}

// documents looks for documents that hold something nobody here can know.
func documents(e *examination) ([]Finding, error) {
	damaged := Finding{ID: "damaged-document", Severity: SeverityProblem,
		Summary: "Documents of the dataDir cannot be believed.",
		Remedy:  "They are moved aside and written again by their sources: a conflist or agent file that says what they held, or the next ADD of their network."}
	for _, d := range e.State.Damaged {
		damaged.Detail = append(damaged.Detail, d.Err.Error())
	}
	newer := Finding{ID: "newer-document", Severity: SeverityProblem,
		Summary: "Documents of the dataDir were written by a newer version: what the policy is cannot be known here, and the rules are left as they are.",
		Remedy:  "Install the newer version again, of the plugin and the reconciler."}
	for _, n := range e.State.Newer {
		newer.Detail = append(newer.Detail, fmt.Sprintf("%s: schema %d", n.File, n.Schema))
	}
	return []Finding{damaged, newer}, nil
}
