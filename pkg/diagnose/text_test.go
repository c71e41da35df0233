// SPDX-License-Identifier: Apache-2.0

package diagnose

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write golden files")

func TestWriteText(t *testing.T) {
	long := Finding{ID: "slow-list", Severity: SeverityNotice, Summary: "Long.", Remedy: "Shorten it."}
	for i := range 14 {
		long.Detail = append(long.Detail, fmt.Sprintf("chain %d", i))
	}
	for name, findings := range map[string][]Finding{
		"none": nil,
		"some": {
			{ID: "forwarding-off", Severity: SeverityProblem, Summary: "The kernel does not forward.", Detail: []string{"net.ipv4.ip_forward is 0", "one cause\nanother one"}, Remedy: "Set it to 1."},
			{ID: "ufw-enabled", Severity: SeverityNotice, Summary: "ufw is enabled.", Detail: []string{}, Remedy: "Allow."},
			long,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got bytes.Buffer
			if err := WriteFindings(&got, findings); err != nil {
				t.Fatal(err)
			}
			golden := "testdata/" + name + ".txt"
			if *update {
				if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got.String()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if err := WriteFindings(full{}, findings); err == nil {
				t.Error("a write that failed is not told")
			}
		})
	}
}

// full is a writer that takes nothing.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }
