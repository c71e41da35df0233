// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// cleanup removes all that is ours on the node, and returns what it said.
func (n *node) cleanup(t *testing.T) string {
	t.Helper()
	stdout, stderr, code := n.reconciler(t, "cleanup")
	if code != 0 || stderr != "" {
		t.Fatalf("cleanup: exit code %d\n%s%s", code, stdout, stderr)
	}
	return stdout
}

// pass makes one, and fails the test unless all is right then.
func (n *node) reconcileOnce(t *testing.T) {
	t.Helper()
	if stdout, stderr, code := n.reconciler(t, "once"); code != 0 {
		t.Fatalf("once: exit code %d\n%s%s\n%s", code, stdout, stderr, n.ruleset(t))
	}
}

// dualStack is an entry for both families, as ours are in most of what follows.
func dualStack(keys object) object {
	all := object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"10.0.0.0/8", "fd00::/8"}}
	for key, value := range keys {
		all[key] = value
	}
	return all
}

// live is an ordinary life: pods, agent files, tampering, passes.
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

// TestCleanup: whatever happened since we came, cleanup leaves the node as it was
// before.
func TestCleanup(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before func(*testing.T, *node) // what there is when we come
		life   func(*testing.T, *node)
	}{
		"a life":             {life: typicalUse},
		"a life with others": {addThirdPartyChains, typicalUse},
		"one family": {life: func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "podnet", nil))
			n.reconcileOnce(t)
		}},
		"a family that was given up": {life: func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			n.conflist(t, "podnet", object{"enableIPv6": false})
			n.reconcileOnce(t)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
		}},
		"two chains": {life: func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			n.addAndCheck(t, n.conf(t, "storage", dualStack(object{
				"masqChain": "STORAGE", "sourceCIDRs": []string{"10.2.0.0/16", "fd00:2::/64"}, "outputInterfaces": []string{"eth+", "wg0"},
			})))
			n.reconcileOnce(t)
			n.wantJumps(t, "STORAGE", 2, 2)
		}},
		"another name": {life: func(t *testing.T, n *node) {
			n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
			n.conflist(t, "podnet", dualStack(object{"masqChain": "RENAMED"}))
			n.reconcileOnce(t)
			n.wantJumps(t, "IP-MASQ-AGENT", 0, 0)
		}},
		"another backend": {life: changeBackend},
		"tampering that nobody repaired": {life: func(t *testing.T, n *node) {
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
		"a reconciler that ran": {addThirdPartyChains, func(t *testing.T, n *node) {
			n.conflist(t, "podnet", dualStack(nil))
			n.startReconciler(t).untilReady(t).stop(t)
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			onEveryBackend(t, func(t *testing.T, n *node) {
				if c.before != nil {
					c.before(t, n)
				}
				before := n.snapshot(t)
				c.life(t, n)
				if said := n.cleanup(t); !strings.Contains(said, "removed chain ") || !strings.Contains(said, n.dataDir) {
					t.Errorf("says only:\n%s", said)
				}
				n.wantRestored(t, before)
				n.cleanup(t)
				n.wantRestored(t, before)
				// A pod that ends has nothing to bring back.
				n.invoke(t, invocation{verb: "DEL", conf: n.conf(t, "podnet", dualStack(nil))}).want(t, 0)
				n.wantRestored(t, before)
			})
		})
	}
}

// TestCheckWritesNothing: where the dataDir is empty, as cleanup leaves one that is
// mounted by itself, CHECK reports the drift and makes no file.
func TestCheckWritesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	must(t, os.Mkdir(n.dataDir, 0o700))
	conf := n.conf(t, "podnet", nil)
	n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 101)
	if files, err := os.ReadDir(n.dataDir); err != nil || len(files) > 0 {
		t.Errorf("%s has %v, %v", n.dataDir, files, err)
	}
}

// someLife is what a node has where others are.
func addThirdPartyChains(t *testing.T, n *node) {
	t.Helper()
	n.addThirdPartyRules(t)
	n.feed(t, "*nat\n:IP-MASQ - [0:0]\n:IP-MASQ-AGENTS - [0:0]\n-A POSTROUTING -j IP-MASQ-AGENTS\n-A IP-MASQ-AGENTS -j IP-MASQ\nCOMMIT\n",
		"iptables-nft-restore", "--noflush") // names like ours
}

// asBefore fails the test unless rules and state are as they were. iptables and the
// kernel make table nat for the first rule and keep it: an empty one does not count.
func (n *node) wantRestored(t *testing.T, before snapshot) {
	t.Helper()
	after := n.snapshot(t)
	emptyNAT := regexp.MustCompile(`\*nat\n(:[A-Z]+ ACCEPT\n)*COMMIT\n|table ip6? nat \{\n(\tchain [A-Z]+ \{\n\t\ttype nat .*\n\t\}\n+)*\}\n`)
	after.rules, before.rules = emptyNAT.ReplaceAllString(after.rules, ""), emptyNAT.ReplaceAllString(before.rules, "")
	if d := cmp.Diff(strings.Split(before.rules, "\n"), strings.Split(after.rules, "\n")); d != "" {
		t.Errorf("rules are not as before:\n%s", d)
	}
	if d := cmp.Diff(before.state, after.state); d != "" {
		t.Errorf("state is not as before:\n%s", d)
	}
	if _, err := os.Lstat(n.dataDir); !os.IsNotExist(err) {
		t.Errorf("%s: %v", n.dataDir, err)
	}
}

// changeBackend has the chain go to the other backend and come back.
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
		stdout, stderr, code := n.reconciler(t, "once", "--backend", backend)
		if code != 0 {
			t.Fatalf("once: exit code %d\n%s%s", code, stdout, stderr)
		}
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
	}
}

// alterFamily is alter for one family.
func (n *node) alterFamily(t *testing.T, family [2]string, iptables, nft string) {
	t.Helper()
	if n.backend.variant == "" {
		n.feed(t, nft, "nft", "-f", "-")
		return
	}
	n.tool(t, family[0], append([]string{"-t", "nat"}, strings.Fields(iptables)...)...)
}

// TestCleanupOfAgentChain: an agent's chain that became ours goes, and only that.
func TestCleanupOfAgentChain(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		addThirdPartyChains(t, n)
		before := n.snapshot(t)
		variant := n.backend.variant
		if variant == "" {
			variant = "nft"
			n.path = n.linkBothVariants(t, variant)
		}
		agents()[1].resync(t, n, variant)
		n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
		n.reconcileOnce(t)
		n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
		n.cleanup(t)
		n.wantRestored(t, before)
	})
}

// TestCleanupWithoutState: a dataDir that somebody removed does not keep what is
// ours from being found, not even a chain whose conflist is gone too.
func TestCleanupWithoutState(t *testing.T) {
	t.Parallel()
	storage := dualStack(object{"masqChain": "STORAGE", "sourceCIDRs": []string{"10.2.0.0/16", "fd00:2::/64"}})
	for name, remember := range map[string]func(*testing.T, *node){
		"a conflist names it": func(t *testing.T, n *node) { n.conflist(t, "storage", storage) },
		"nothing names it":    func(*testing.T, *node) {},
	} {
		t.Run(name, func(t *testing.T) {
			onEveryBackend(t, func(t *testing.T, n *node) {
				addThirdPartyChains(t, n)
				before := n.snapshot(t)
				typicalUse(t, n)
				n.addAndCheck(t, n.conf(t, "storage", storage))
				remember(t, n)
				if err := os.RemoveAll(n.dataDir); err != nil {
					t.Fatal(err)
				}
				n.cleanup(t)
				n.wantRestored(t, before)
			})
		})
	}
}

// TestCleanupWithoutOwnedChains: on a node that never met us, and where an agent's chain
// and another dataDir's stand, nothing goes.
func TestCleanupWithoutOwnedChains(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		before := n.snapshot(t)
		n.cleanup(t)
		n.unchanged(t, before)

		addThirdPartyChains(t, n)
		for _, variant := range []string{"nft", "legacy"} {
			agents()[0].resync(t, n, variant)
		}
		before = n.snapshot(t)
		stdout, stderr, code := n.reconciler(t, "cleanup")
		if code != 0 || strings.Contains(stdout, "removed chain") {
			t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
		}
		n.unchanged(t, before)
	})
}

// TestCleanupWithAnotherDataDir: chains that keep their state in another dataDir are not
// ours.
func TestCleanupWithAnotherDataDir(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.addAndCheck(t, n.conf(t, "podnet", dualStack(nil)))
		before := n.snapshot(t)
		stdout, stderr, code := n.reconciler(t, "cleanup", "--data-dir", n.dataDir+"-other")
		if code != 0 || strings.Contains(stdout, "removed chain") || !strings.Contains(stderr, "chain IP-MASQ-AGENT (ipv4)") || !strings.Contains(stderr, n.dataDir) {
			t.Errorf("exit code %d, and it does not say whose chain stays:\n%s%s", code, stdout, stderr)
		}
		n.unchanged(t, before)
	})
}

// TestCleanupOfReferencedChain: a chain that somebody else's rule jumps to cannot go. It says
// so, and the state stays until it can.
func TestCleanupOfReferencedChain(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			n := newNode(t, f)
			addThirdPartyChains(t, n)
			before := n.snapshot(t)
			typicalUse(t, n)
			n.tool(t, "iptables", "-t", "nat", "-A", "KUBE-POSTROUTING", "-j", "IP-MASQ-AGENT")
			stdout, stderr, code := n.reconciler(t, "cleanup")
			if code != 1 || !strings.Contains(stderr, "IP-MASQ-AGENT") {
				t.Fatalf("exit code %d, want 1\n%s%s", code, stdout, stderr)
			}
			if strings.Contains(stdout, "IP-MASQ-AGENT (ipv4)") || strings.Contains(stdout, "removed the state") {
				t.Errorf("says that it removed what stands:\n%s", stdout)
			}
			if documents := n.load(t).Sources; len(documents) != 2 {
				t.Errorf("documents left: %+v", documents)
			}
			n.tool(t, "iptables", "-t", "nat", "-D", "KUBE-POSTROUTING", "-j", "IP-MASQ-AGENT")
			n.cleanup(t)
			n.wantRestored(t, before)
		})
	}
}

// TestCleanupDuringRun: a reconciler that runs would bring all of it back, so it
// is refused, and nothing changes.
func TestCleanupDuringRun(t *testing.T) {
	t.Parallel()
	onEveryBackend(t, func(t *testing.T, n *node) {
		before := n.snapshot(t)
		n.conflist(t, "podnet", dualStack(nil))
		d := n.startReconciler(t).untilReady(t)
		running := n.snapshot(t)
		stdout, stderr, code := n.reconciler(t, "cleanup")
		if code != 1 || stdout != "" || !strings.Contains(stderr, "stop it first") {
			t.Errorf("exit code %d, want 1\n%s%s", code, stdout, stderr)
		}
		if d := cmp.Diff(running, n.snapshot(t), cmp.AllowUnexported(snapshot{})); d != "" {
			t.Errorf("changed:\n%s", d)
		}
		d.stop(t)
		n.cleanup(t)
		n.wantRestored(t, before)
	})
}
