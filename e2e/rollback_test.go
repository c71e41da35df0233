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
		if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
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
			if after := n.ruleset(t); after != before {
				t.Errorf("partly applied:\n%s", after)
			}
			n.invoke(t, invocation{verb: "CHECK", conf: first}).want(t, 0)
			n.addAndCheck(t, first).noWarnings(t)
			n.path = n.linkBothVariants(t, f.variant)
			n.addAndCheck(t, second)
			n.path = program
			n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 0).noWarnings(t)
		})
	}
}

// TestAutoWithoutModules checks that backend auto does not choose an iptables that lists rules but
// cannot write them, as on a kernel without xt modules.
func TestAutoWithoutModules(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			for _, family := range families() {
				n.failRuleWrites(t, family[0]+"-restore", family[0]+"-"+f.variant+"-restore")
			}
			n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", nil)}).want(t, 100, "missing kernel module", "set backend to nftables")
			n.addAndCheck(t, n.conf(t, "podnet", object{"backend": "auto"}))
			if owned := n.ownedChains(t); len(owned) == 0 || owned[0] != "IP-MASQ-AGENT ipv4 nftables" {
				t.Errorf("record: %q", owned)
			}
			n.addAndCheck(t, n.conf(t, "podnet", object{"backend": "auto"})).noWarnings(t)
		})
	}
}

// TestAgentChainStays checks that an agent's chain stays as it is if ADD cannot take it over in both
// families.
func TestAgentChainStays(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			a := agents()[0]
			a.resync(t, n, f.variant)
			before := n.ruleset(t)
			program := n.path
			n.failRuleWrites(t, "ip6tables-restore", "ip6tables-"+f.variant+"-restore")
			conf := n.conf(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"192.0.2.0/24", "fd00::/8"}})
			n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 100, "ipv6", "missing kernel module")
			if after := n.ruleset(t); after != before {
				t.Errorf("the agent's rules changed:\n%s", after)
			}
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
			n.wantOwnedChains(t)
			if added := a.resync(t, n, f.variant); added != 0 {
				t.Errorf("the agent does not recognize its jump: it added %d", added)
			}
			n.path = n.linkBothVariants(t, f.variant)
			n.addAndCheck(t, conf)
			n.path = program
		})
	}
}
