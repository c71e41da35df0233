// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"
)

const daemonSet = `apiVersion: apps/v1
kind: DaemonSet
metadata: {name: some}
spec:
  selector: {matchLabels: {app: some}}
  template:
    metadata: {labels: {app: some}}
    spec:
      containers: [{name: one, image: "some:v1"}]
`

func TestMistakes(t *testing.T) {
	for _, c := range []struct{ name, in, old, new, want string }{
		{"none", daemonSet, "DaemonSet", "DaemonSet", "[]"},
		{"nothing", "", "", "", "no object given"},
		{"no such field", daemonSet, "containers:", "container:", `unknown field "container"`},
		{"another type", daemonSet, `"some:v1"`, "[a]", "cannot unmarshal array"},
		{"twice", daemonSet, "kind: DaemonSet", "kind: DaemonSet\nkind: DaemonSet", `already set`},
		{"no such kind", daemonSet, "DaemonSet", "DaemonSets", "is no kind that is known here"},
		{"selector", daemonSet, "matchLabels: {app: some}", "matchLabels: {app: other}", "which its own do not have"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := check(strings.NewReader(strings.Replace(c.in, c.old, c.new, 1)))
			if !strings.Contains(fmt.Sprint(got), c.want) {
				t.Errorf("%v; want %q", got, c.want)
			}
		})
	}
}
