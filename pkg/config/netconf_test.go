// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestPolicyTexts: what tells nothing leaves all as it was, and makes the same
// entry; all else is told.
func TestPolicyTexts(t *testing.T) {
	const base = `{"cniVersion":"1.1.0","name":"podnet","type":"ip-masq","nonMasqueradeCIDRs":["10.0.0.0/8"],"prevResult":{"a":1},"runtimeConfig":{}}`
	told := func(doc string) []string { return ReadNetconf([]byte(doc)).PolicyTexts() }
	with := func(old, replaced string) string {
		if !strings.Contains(base, old) {
			t.Fatalf("%s is not there", old)
		}
		return strings.Replace(base, old, replaced, 1)
	}
	entry, err := ParseEntry([]byte(base))
	if err != nil {
		t.Fatal(err)
	}
	for _, doc := range []string{
		with(`{"a":1}`, `{"cniVersion":"1.0.0","ips":[]}`), with(`"runtimeConfig":{}`, `"runtimeConfig":{"portMappings":[{}]}`),
		with(`"prevResult":{"a":1}`, `"prev\u0052esult" : null`), with(`,"name"`, " ,\n\t\"name\""), " " + base + "\n",
	} {
		if d := cmp.Diff(told(base), told(doc)); d != "" {
			t.Errorf("%s\ntells something else:\n%s", doc, d)
		}
		if same, err := ParseEntry([]byte(doc)); err != nil || !same.Policy.Equal(entry.Policy) {
			t.Errorf("%s\nis another entry: %v", doc, err)
		}
	}
	for _, doc := range []string{
		with(`10.0.0.0/8`, `10.0.0.0/9`), with(`"podnet"`, `"othernet"`), with(`1.1.0`, `1.0.0`), with(`"type"`, `"bogus":1,"type"`),
		with(`"prevResult"`, `"prevResult":1,"prevResult"`), with(`"runtimeConfig":{}`, `"requireAgentConfig":true`), `{}`, `[]`, ``,
	} {
		if cmp.Equal(told(base), told(doc)) {
			t.Errorf("%s\ntells the same", doc)
		}
	}
}
