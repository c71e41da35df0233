// SPDX-License-Identifier: Apache-2.0

package enforce_test

import (
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/enforce"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestNothingIsVerifiedDuringAWalk: while a walk is on record, right rules are not verified for later ADDs, and what was verified
// before the walk was recorded does not hold.
func TestNothingIsVerifiedDuringAWalk(t *testing.T) {
	f := newFixture(t)
	source := network("podnet", "A", guard(policy.GuardDrop))
	f.mustApply(source)
	verified := func() (cache store.VerificationCache, inputs string) {
		reading := assert.Must(f.enforcer.Dir.Read())(t)
		inputs = f.enforcer.Inputs(reading, "v1", "")
		s := f.observe(source)
		f.mustBeInSync(s)
		return s.Verified(inputs, "generation 7"), inputs
	}
	f.putRecord(func(r *store.Record) { r.Resets = nil })
	before, _ := verified()
	if before.Inputs == "" || before.Generation == "" {
		t.Fatalf("nothing is verified without a walk: %+v", before)
	}
	f.putRecord(func(r *store.Record) { r.Resets = []store.Reset{{At: 1}} })
	during, inputs := verified()
	assert.Equal(t, "what is verified during a walk", during, store.VerificationCache{})
	if inputs == before.Inputs {
		t.Error("what was verified before holds during the walk")
	}
	f.putRecord(func(r *store.Record) { r.Resets = nil })
	if after, _ := verified(); after.Inputs == "" {
		t.Error("nothing is verified after the walk")
	}
}

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
