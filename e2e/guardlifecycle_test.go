// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"
	"strings"
	"testing"
)

// guardTables returns the tables ip-masq-guard, without counters; "" if there are none.
func (n *node) guardTables(t *testing.T) string {
	t.Helper()
	var all string
	for table := range strings.SplitSeq(n.tool(t, "nft", "-s", "list", "ruleset"), "\n}\n") {
		if strings.Contains(table, " ip-masq-guard {\n") {
			all += table + "\n}\n"
		}
	}
	return all
}

// wantGuardTables fails the test unless the guard tables have all of these, or there are none without.
func (n *node) wantGuardTables(t *testing.T, says ...string) {
	t.Helper()
	tables := n.guardTables(t)
	if len(says) == 0 && tables != "" {
		t.Errorf("guard tables:\n%s", tables)
	}
	wantText(t, "the guard tables", tables, says...)
}

// TestGuardTables follows the guard tables from the ADD that creates them to the one that removes them.
func TestGuardTables(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := func(keys object) string { return n.conf(t, "podnet", dualStack(keys)) }
		n.addAndCheck(t, conf(nil)).noWarnings(t)
		n.wantGuardTables(t)
		drop := conf(object{"guard": "drop", "podCIDRs": []string{"10.1.0.0/16", "fd00:1::/64"}, "enforceExempt": true, "staleConnections": "keep"})
		n.invoke(t, invocation{verb: "STATUS", conf: drop}).want(t, 0)
		n.wantGuardTables(t)
		n.addAndCheck(t, drop).noWarnings(t)
		n.wantGuardTables(t, "table ip ip-masq-guard", "table ip6 ip-masq-guard", "10.1.0.0/16", "fd00:1::/64", "drop", "snat to ip saddr")
		rules := func() string { // nft lists objects in the order of their creation
			return strings.Join(slices.Sorted(strings.Lines(n.ruleset(t))), "")
		}
		before := rules()
		n.addAndCheck(t, drop) // writes the verification cache
		wantSame(t, "rules after an ADD with nothing to do", rules(), before)
		for _, script := range []string{
			"delete table ip ip-masq-guard", "flush chain ip6 ip-masq-guard guard-IP-MASQ-AGENT",
			"add element ip ip-masq-guard exempt-IP-MASQ-AGENT { 192.0.2.0/24 }", "add table ip ip-masq-guard { flags dormant; }",
		} {
			n.feed(t, script, "nft", "-f", "-")
			n.invoke(t, invocation{verb: "CHECK", conf: drop}).want(t, 101)
			n.addAndCheck(t, drop).noWarnings(t)
			wantSame(t, "rules repaired after "+script, rules(), before)
			n.feed(t, script, "nft", "-f", "-")
			n.invoke(t, invocation{verb: "DEL", conf: drop, id: "none"}).want(t, 0).noWarnings(t)
			n.invoke(t, invocation{verb: "CHECK", conf: drop}).want(t, 0)
		}
		// The policy changes, and the pods' range.
		n.addAndCheck(t, conf(object{"guard": "drop", "sourceCIDRs": []string{"10.1.0.0/17", "fd00:1::/65"}, "nonMasqueradeCIDRs": []string{"192.0.2.0/24"}, "staleConnections": "keep"})).noWarnings(t)
		n.wantGuardTables(t, "10.1.0.0/17", "192.0.2.0/24", "drop")
		n.addAndCheck(t, conf(object{"guard": "count", "masqChain": "OTHER"})).want(t, 0, "chain OTHER (ipv6)", "podCIDRs")
		n.wantGuardTables(t, "guard-OTHER", "10.1.0.0/16")
		if tables := n.guardTables(t); strings.Contains(tables, "drop") || strings.Contains(tables, "IP-MASQ-AGENT") {
			t.Errorf("guard tables:\n%s", tables)
		}
		n.addAndCheck(t, conf(nil))
		n.wantGuardTables(t)
		// Cleanup, after which nothing returns.
		n.addAndCheck(t, drop)
		if out := n.cleanup(t); !strings.HasPrefix(out, "removed chain guard-IP-MASQ-AGENT (ipv4) from nftables\n") {
			t.Errorf("cleanup does not remove the guard first:\n%s", out)
		}
		n.wantGuardTables(t)
		n.invoke(t, invocation{verb: "DEL", conf: drop}).want(t, 0)
		n.wantGuardTables(t)
	})
}
