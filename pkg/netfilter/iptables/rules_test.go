// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestJumpLines(t *testing.T) {
	table := table{Ruleset: policy.Ruleset{Chains: []policy.Chain{{Name: "X"}, {Name: "Y"}}}, targets: []string{"SNAT", "X", "Y", "X"}}
	lines := []string{
		`-A POSTROUTING -m comment --comment " -j X" -j SNAT --to-source 1.2.3.4`,
		"-A POSTROUTING -m addrtype ! --dst-type LOCAL -j X", "-A POSTROUTING -g Y", "-A POSTROUTING -j X",
	}
	want := map[string][]string{"X": {lines[1], lines[3]}, "Y": {lines[2]}}
	if got, err := table.jumpLines(lines); err != nil || !cmp.Equal(want, got) {
		t.Errorf("got %q, %v", got, err)
	}
	// Lines of other rules than those that were read.
	for name, lines := range map[string][]string{
		"a rule more":      append(lines[:4:4], "-A POSTROUTING -j LOG"),
		"a rule less":      lines[:3],
		"another order":    {lines[1], lines[0], lines[2], lines[3]},
		"another chain":    {lines[0], lines[1], "-A POSTROUTING -j Z", lines[3]},
		"one of the names": {"-A POSTROUTING -j Y", lines[1], lines[2], lines[3]},
	} {
		if got, err := table.jumpLines(lines); err == nil {
			t.Errorf("%s: got %q", name, got)
		}
	}
}
