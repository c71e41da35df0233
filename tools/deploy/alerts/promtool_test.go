// SPDX-License-Identifier: Apache-2.0

//go:build promtool

package alerts

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"sigs.k8s.io/yaml"
)

// TestPromtool lets promtool check the rules. TestBrokenNodes evaluates them.
func TestPromtool(t *testing.T) {
	text := must(yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "ip-masq", "rules": alerts(t)}}}))(t)
	rules := filepath.Join(t.TempDir(), "rules.yaml")
	if err := os.WriteFile(rules, text, 0o600); err != nil {
		t.Fatal(err)
	}
	promtool := exec.Command(filepath.Join(os.Getenv("IPMASQ_PROMTOOL_DIR"), "promtool"), "check", "rules", "--lint=all", "--lint-fatal", rules)
	if out, err := promtool.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", promtool, err, out)
	}
}
