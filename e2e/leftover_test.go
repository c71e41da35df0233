// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
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
