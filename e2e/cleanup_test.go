// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// cleanup runs the command cleanup, which must succeed, and returns its output.
func (n *node) cleanup(t *testing.T) string {
	t.Helper()
	stdout, stderr, code := n.reconciler(t, "cleanup")
	if code != 0 || stderr != "" {
		t.Fatalf("cleanup: exit code %d\n%s%s", code, stdout, stderr)
	}
	return stdout
}

// reconcileOnce runs the command once, which must succeed.
func (n *node) reconcileOnce(t *testing.T) {
	t.Helper()
	n.wantSays(t, 0, nil, "once")
}

// dualStack returns an entry with IPv6 and exempt prefixes of both families, and the given keys.
func dualStack(keys object) object {
	all := object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"10.0.0.0/8", "fd00::/8"}}
	for key, value := range keys {
		all[key] = value
	}
	return all
}

// typicalUse runs pods, agent files, tampering and repairs on the node.
func typicalUse(t *testing.T, n *node) {
	t.Helper()
	n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [192.0.2.0/24]\nenableIPv6: true\n")
	conf := n.conf(t, "podnet", dualStack(nil))
	n.addAndCheck(t, conf)
	n.reconcileOnce(t)
	n.invoke(t, invocation{verb: "ADD", conf: conf, id: "second"}).want(t, 0)
	n.alter(t, "-F IP-MASQ-AGENT", "delete table ip ip-masq")
	n.reconcileOnce(t)
	n.invoke(t, invocation{verb: "DEL", conf: conf, id: "second"}).want(t, 0)
	n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
}

// TestCleanup checks that cleanup leaves the node as it was before ip-masq, after different kinds
// of use.
func TestCleanup(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before func(*testing.T, *node) // creates third-party rules; may be nil
		use    func(*testing.T, *node)
	}{
		"typical use":                       {use: typicalUse},
		"typical use and third-party rules": {addThirdPartyChains, typicalUse},
		"one family": {use: func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "podnet", nil))
			n.reconcileOnce(t)
		}},
		"disabled family": {use: func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			n.conflist(t, "podnet", object{"enableIPv6": false})
			n.reconcileOnce(t)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
		}},
		"two chains": {use: func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			n.addAndCheck(t, n.conf(t, "storage", dualStack(object{
				"masqChain": "STORAGE", "sourceCIDRs": []string{"10.2.0.0/16", "fd00:2::/64"}, "outputInterfaces": []string{"eth+", "wg0"},
			})))
			n.reconcileOnce(t)
			n.wantJumps(t, "STORAGE", 2, 2)
		}},
		"changed chain name": {use: func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			n.conflist(t, "podnet", dualStack(object{"masqChain": "RENAMED"}))
			n.reconcileOnce(t)
			n.wantJumps(t, "IP-MASQ-AGENT", 0, 0)
		}},
		"changed backend": {use: changeBackend},
		"unrepaired tampering": {use: func(t *testing.T, n *node) {
			typicalUse(t, n)
			n.alter(t, "-I IP-MASQ-AGENT -s 10.9.0.0/16 -j LOG\n-A POSTROUTING -j IP-MASQ-AGENT\n-D IP-MASQ-AGENT 2",
				"add chain ip ip-masq theirs\nadd rule ip ip-masq theirs counter accept\nadd rule ip ip-masq postrouting jump theirs\n"+
					"add set ip ip-masq addresses { type ipv4_addr; }")
		}},
		"flushed": {addThirdPartyChains, func(t *testing.T, n *node) {
			typicalUse(t, n)
			for _, f := range families() {
				n.alterFamily(t, f, "-F IP-MASQ-AGENT", "flush chain "+f[1]+" ip-masq masq-IP-MASQ-AGENT")
			}
		}},
		"stopped reconciler": {addThirdPartyChains, func(t *testing.T, n *node) {
			n.conflist(t, "podnet", dualStack(nil))
			n.startReconciler(t).untilReady(t).stop(t)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
		}},
		"agent's chain": {addThirdPartyChains, func(t *testing.T, n *node) {
			variant := n.backend.variant
			if variant == "" {
				variant = "nft"
				n.path = n.linkBothVariants(t, variant)
			}
			agents()[1].resync(t, n, variant)
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			n.reconcileOnce(t)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			onEveryBackend(t, func(t *testing.T, n *node) {
				if c.before != nil {
					c.before(t, n)
				}
				before := n.snapshot(t)
				c.use(t, n)
				wantText(t, "cleanup", n.cleanup(t), "removed chain ", n.dataDir)
				n.wantRestored(t, before)
				n.cleanup(t)
				n.wantRestored(t, before)
				// DEL of a pod recreates nothing.
				n.invoke(t, invocation{verb: "DEL", conf: n.conf(t, "podnet", dualStack(nil))}).want(t, 0)
				n.wantRestored(t, before)
			})
		})
	}
}

// addThirdPartyChains adds third-party rules, and chains with names similar to the owned chain's.
func addThirdPartyChains(t *testing.T, n *node) {
	t.Helper()
	n.addThirdPartyRules(t)
	n.feed(t, "*nat\n:IP-MASQ - [0:0]\n:IP-MASQ-AGENTS - [0:0]\n-A POSTROUTING -j IP-MASQ-AGENTS\n-A IP-MASQ-AGENTS -j IP-MASQ\nCOMMIT\n",
		"iptables-nft-restore", "--noflush")
}

// wantRestored fails the test unless rules and state are as before. It ignores empty nat tables,
// because iptables and the kernel create these for the first rule and never remove them.
func (n *node) wantRestored(t *testing.T, before snapshot) {
	t.Helper()
	after := n.snapshot(t)
	emptyNAT := regexp.MustCompile(`\*nat\n(:[A-Z]+ ACCEPT\n)*COMMIT\n|table ip6? nat \{\n(\tchain [A-Z]+ \{\n\t\ttype nat .*\n\t\}\n+)*\}\n`)
	after.rules, before.rules = emptyNAT.ReplaceAllString(after.rules, ""), emptyNAT.ReplaceAllString(before.rules, "")
	wantSame(t, "rules", after.rules, before.rules)
	wantSame(t, "state", after.state, before.state)
	if _, err := os.Lstat(n.dataDir); !os.IsNotExist(err) {
		t.Errorf("%s: %v", n.dataDir, err)
	}
}

// changeBackend moves the chain to the other backend and back, twice.
func changeBackend(t *testing.T, n *node) {
	t.Helper()
	variant, other := n.backend.variant, "nftables"
	if variant == "" {
		variant, other = "nft", "iptables"
	}
	n.path = n.linkBothVariants(t, variant)
	for _, backend := range []string{n.backend.setting, other, n.backend.setting, other} {
		n.conflist(t, "podnet", dualStack(object{"backend": backend}))
		n.addAndCheck(t, n.conf(t, "podnet", dualStack(object{"backend": backend})))
		n.wantSays(t, 0, nil, "once", "--backend", backend)
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
	}
}

// alterFamily changes the rules of one family as alter does.
func (n *node) alterFamily(t *testing.T, family [2]string, iptables, nft string) {
	t.Helper()
	if n.backend.variant == "" {
		n.feed(t, nft, "nft", "-f", "-")
		return
	}
	n.tool(t, family[0], append([]string{"-t", "nat"}, strings.Fields(iptables)...)...)
}

// TestCleanupWithoutState checks that cleanup finds the owned chains after the dataDir was removed,
// even a chain that no conflist names.
func TestCleanupWithoutState(t *testing.T) {
	t.Parallel()
	storage := dualStack(object{"masqChain": "STORAGE", "sourceCIDRs": []string{"10.2.0.0/16", "fd00:2::/64"}})
	for name, nameChain := range map[string]func(*testing.T, *node){
		"conflist names the chain":    func(t *testing.T, n *node) { n.conflist(t, "storage", storage) },
		"no conflist names the chain": func(*testing.T, *node) {},
	} {
		t.Run(name, func(t *testing.T) {
			onEveryBackend(t, func(t *testing.T, n *node) {
				addThirdPartyChains(t, n)
				before := n.snapshot(t)
				typicalUse(t, n)
				n.addAndCheck(t, n.conf(t, "storage", storage))
				nameChain(t, n)
				must(t, os.RemoveAll(n.dataDir))
				n.cleanup(t)
				n.wantRestored(t, before)
			})
		})
	}
}

// TestCleanupWithoutOwnedChains checks that cleanup removes nothing on a node without owned chains,
// not even the chain of an agent.
func TestCleanupWithoutOwnedChains(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		before := n.snapshot(t)
		n.cleanup(t)
		n.unchanged(t, before)

		addThirdPartyChains(t, n)
		for _, variant := range []string{"nft", "legacy"} {
			agents()[0].resync(t, n, variant)
		}
		before = n.snapshot(t)
		if out := n.wantSays(t, 0, nil, "cleanup"); strings.Contains(out, "removed chain") {
			t.Errorf("cleanup:\n%s", out)
		}
		n.unchanged(t, before)
	})
}

// TestCleanupOfReferencedChain checks that cleanup fails for a chain to which a third-party rule
// jumps, and keeps the state until the chain can be removed.
func TestCleanupOfReferencedChain(t *testing.T) {
	onBackends(t, backends()[1:], func(t *testing.T, n *node) {
		addThirdPartyChains(t, n)
		before := n.snapshot(t)
		typicalUse(t, n)
		n.tool(t, "iptables", "-t", "nat", "-A", "KUBE-POSTROUTING", "-j", "IP-MASQ-AGENT")
		stdout := n.wantSays(t, 1, []string{"IP-MASQ-AGENT"}, "cleanup")
		if strings.Contains(stdout, "IP-MASQ-AGENT (ipv4)") || strings.Contains(stdout, "removed the state") {
			t.Errorf("output reports the removal of an existing chain or state:\n%s", stdout)
		}
		wantSame(t, "documents left", len(n.load(t).Sources), 2)
		n.tool(t, "iptables", "-t", "nat", "-D", "KUBE-POSTROUTING", "-j", "IP-MASQ-AGENT")
		n.cleanup(t)
		n.wantRestored(t, before)
	})
}
