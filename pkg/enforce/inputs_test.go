// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestInputs: what was verified does not hold for another program, dataDir, boot or plugin.toml, nor without a boot.
func TestInputs(t *testing.T) {
	path := t.TempDir()
	boots := []string{"00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"}
	seen := map[string]string{"": "nothing"}
	for _, c := range []struct{ what, dir, boot, program, file string }{
		{"the first", "/a", boots[0], "v1", ""},
		{"another dataDir", "/b", boots[0], "v1", ""},
		{"another boot", "/a", boots[1], "v1", ""},
		{"another program", "/a", boots[0], "v2", ""},
		{"another plugin.toml", "/a", boots[0], "v1", "cni_conf_dir"},
	} {
		e := enforce.Enforcer{Dir: store.Open(path + c.dir).WithBoot(c.boot)}
		inputs := e.Inputs(&store.Reading{}, c.program, c.file)
		if is, known := seen[inputs]; known {
			t.Errorf("%s has the inputs of %s", c.what, is)
		}
		seen[inputs] = c.what
	}
	for _, e := range []enforce.Enforcer{{Dir: store.Open(path).WithBoot("no boot")}, {Dir: store.Open(path).WithBoot(boots[0])}} {
		assert.Equal(t, "inputs without a program", e.Inputs(&store.Reading{}, "", ""), "")
		if inputs := e.Inputs(&store.Reading{}, "v1", ""); (inputs == "") != (e.Dir.Boot() == "") {
			t.Errorf("boot %q: %s", e.Dir.Boot(), inputs)
		}
	}
}
