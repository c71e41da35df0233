// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/golden"
)

func TestWriteText(t *testing.T) {
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
			var got bytes.Buffer
			if err := WriteFindings(&got, findings); err != nil {
				t.Fatal(err)
			}
			golden.Check(t, "testdata/"+name+".txt", got.Bytes())
			if err := WriteFindings(full{}, findings); err == nil {
				t.Error("a write that failed is not reported")
			}
		})
	}
}

// full is a writer that takes nothing.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }
