// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestLeftovers kills an ADD between its two nftables transactions. The record then lists the
// chain, the network has no document yet, and no rule references the sets. The test checks that
// DEL, once and cleanup remove what that ADD left in the ip-masq tables.
func TestLeftovers(t *testing.T) {
	t.Parallel()
	del := func(t *testing.T, n *node) {
		t.Helper()
		n.invoke(t, invocation{verb: "DEL", conf: n.conf(t, "podnet", dualStack(nil))}).want(t, 0).noWarnings(t)
	}
	const unhook = "flush table FAM ip-masq; delete chain FAM ip-masq postrouting; delete chain FAM ip-masq masq-IP-MASQ-AGENT"
	for name, c := range map[string]struct {
		nft    string
		remove func(*testing.T, *node)
	}{
		"DEL":                  {unhook, del},
		"DEL, an empty table":  {unhook + "; delete set FAM ip-masq exempt-IP-MASQ-AGENT", del},
		"once":                 {unhook, func(t *testing.T, n *node) { n.reconcileOnce(t) }},
		"once, an empty table": {unhook + "; delete set FAM ip-masq exempt-IP-MASQ-AGENT", func(t *testing.T, n *node) { n.reconcileOnce(t) }},
		"cleanup":              {unhook, func(t *testing.T, n *node) { n.cleanup(t) }},
		"cleanup without a record": {unhook, func(t *testing.T, n *node) {
			must(t, os.RemoveAll(n.dataDir))
			n.cleanup(t)
		}},
		"ADD of another network": {unhook, func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "othernet", object{"masqChain": "OTHER"}))
			n.cleanup(t)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			before := n.ruleset(t)
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			must(t, os.Remove(n.document(t, "podnet")))
			for _, family := range families() {
				n.feed(t, strings.ReplaceAll(c.nft, "FAM", family[1])+"\n", "nft", "-f", "-")
			}
			c.remove(t, n)
			wantSame(t, "rules", n.ruleset(t), before)
		})
	}
}

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
	onBackends(t, backends()[1:], func(t *testing.T, n *node) {
		n.addThirdPartyRules(t)
		first := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
		second := n.conf(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"172.16.0.0/12", "fd00::/8"}})
		program := n.path
		n.failRuleWrites(t, "ip6tables-restore", "ip6tables-"+n.backend.variant+"-restore")
		n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 100, "ipv6", "missing kernel module", "xt_addrtype")
		n.addAndCheck(t, first)
		before := n.ruleset(t)
		n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 100, "ipv6", "missing kernel module")
		wantSame(t, "rules", n.ruleset(t), before)
		n.invoke(t, invocation{verb: "CHECK", conf: first}).want(t, 0)
		n.addAndCheck(t, first).noWarnings(t)
		n.path = n.linkBothVariants(t, n.backend.variant)
		n.addAndCheck(t, second)
		n.path = program
		n.invoke(t, invocation{verb: "ADD", conf: second}).want(t, 0).noWarnings(t)
	})
}
