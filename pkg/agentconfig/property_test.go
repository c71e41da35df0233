// SPDX-License-Identifier: Apache-2.0

package agentconfig

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/policytest"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// A policy that is written to a file and read again is the same.
func TestPolicySurvivesAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ip-masq-agent")
	rapid.Check(t, func(rt *rapid.T) {
		want := policytest.Any().SourcePolicy(rt)
		text := assert.Must(yaml.Marshal(want))(rt)
		assert.NoError(rt, os.WriteFile(path, append(text, "cidrLimit: 1000\n"...), 0o644))
		got, err := Read(filepath.Dir(path), config.DialectV1, config.AgentPolicy{})
		if err != nil {
			rt.Fatalf("%v\n%s", err, text)
		}
		if diff := cmp.Diff(want, got.Source.Policies()[0], comparePrefixes); diff != "" {
			rt.Errorf("(-want +got):\n%s\n%s", diff, text)
		}
	})
}
