// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"testing"
)

// failRuleWrites puts programs into the node's PATH that list rules but fail to write them, with
// the messages of a host whose kernel lacks a module.
func (n *node) failRuleWrites(t *testing.T, programs ...string) {
	t.Helper()
	const script = "#!/bin/sh\n" +
		"echo 'Warning: Extension addrtype revision 0 not supported, missing kernel module?' >&2\n" +
		"echo \"$0: line 4: RULE_APPEND failed (No such file or directory)\" >&2\nexit 1\n"
	for _, program := range programs {
		path := filepath.Join(n.path, program)
		if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		must(t, os.WriteFile(path, []byte(script), 0o755))
	}
}

// TestOneFamilyFails checks that ADD fails if one family cannot be written, and that neither
// family's rules nor the document change where rules are in force.
func TestOneFamilyFails(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			n.addThirdPartyRules(t)
			first := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
			second := n.conf(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"172.16.0.0/12", "fd00::/8"}})
			program := n.path
			n.failRuleWrites(t, "ip6tables-restore", "ip6tables-"+f.variant+"-restore")
			n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 100, "ipv6", "missing kernel module", "xt_addrtype")
			n.addAndCheck(t, first)
			before := n.ruleset(t)
			n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 100, "ipv6", "missing kernel module")
			wantSame(t, "rules", n.ruleset(t), before)
			n.invoke(t, invocation{verb: "CHECK", conf: first}).want(t, 0)
			n.addAndCheck(t, first).noWarnings(t)
			n.path = n.linkBothVariants(t, f.variant)
			n.addAndCheck(t, second)
			n.path = program
			n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 0).noWarnings(t)
		})
	}
}
