// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"testing"
)

// keyCase is an entry with the expected verdicts: destinations by sender.
type keyCase struct {
	Name                string
	Keys                object
	Exempt, Masqueraded flows
}

type (
	object = map[string]any
	flows  = map[string]string
)

// TestKeys checks which packets each key exempts or masquerades, at the boundaries of its prefixes,
// for both families, UDP and TCP.
func TestKeys(t *testing.T) {
	t.Parallel()
	var cases []keyCase
	file := json.NewDecoder(bytes.NewReader(readFile(t, "testdata/keys.json")))
	file.DisallowUnknownFields()
	must(t, file.Decode(&cases))
	for _, f := range backends() {
		t.Run(f.name, func(t *testing.T) {
			for _, c := range cases {
				t.Run(c.Name, func(t *testing.T) {
					t.Parallel()
					n := newNode(t, f)
					n.conflist(t, "podnet", c.Keys)
					all := newSenders(t, n, n.pod(t, "podnet"))
					all.verdicts(t, n, false, c.Exempt)
					all.verdicts(t, n, true, c.Masqueraded)
					if t.Failed() {
						t.Log(n.rules(t))
					}
				})
			}
		})
	}
}
