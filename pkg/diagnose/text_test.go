// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"fmt"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
)

func TestText(t *testing.T) {
	long := Finding{ID: "slow-list", Severity: SeverityNotice, Cause: "Long.", Remedy: "Shorten it."}
	for i := range 14 {
		long.Details = append(long.Details, fmt.Sprintf("chain %d", i))
	}
	for name, findings := range map[string][]Finding{
		"none": nil,
		"some": {
			{ID: "forwarding-off", Severity: SeverityProblem, Cause: "The kernel does not forward.", Details: []string{"net.ipv4.ip_forward is 0", "one cause\nanother one"}, Remedy: "Set it to 1."},
			{ID: "saved-ruleset", Severity: SeverityNotice, Cause: "A ruleset is saved.", Details: []string{}, Remedy: "Remove it."},
			long,
		},
	} {
		t.Run(name, func(t *testing.T) {
			golden.Check(t, "testdata/"+name+".txt", Text(findings))
		})
	}
}
