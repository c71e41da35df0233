// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// TestChainedPlugins runs ADD, CHECK and DEL between two reference plugins, with each cniVersion
// that runtimes use.
func TestChainedPlugins(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		t.Run(version, func(t *testing.T) {
			list, err := json.Marshal(object{"cniVersion": version, "name": "podnet", "plugins": []object{
				n.bridge("podnet"), n.entry(nil), {"type": "portmap", "capabilities": object{"portMappings": true}},
			}})
			must(t, err)
			must(t, n.cni.Write("10-podnet.conflist", string(list)))
			p := n.newPod(t)
			stdout, stderr, code := n.add(t, "podnet", p)
			if code != 0 || len(p.addrs) != 2 || !strings.Contains(stdout, `"cniVersion": "`+version+`"`) {
				t.Fatalf("ADD: exit code %d, %d addresses\n%s%s", code, len(p.addrs), stdout, stderr)
			}
			if stdout, stderr, code := n.check(t, "podnet", p); version != "0.3.1" && code != 0 { // 0.3.1 has no CHECK
				t.Errorf("CHECK: exit code %d\n%s%s", code, stdout, stderr)
			}
			n.wantJumps(t, "IP-MASQ-AGENT", 1, 0)
			succeeds(t, "DEL")(n.del(t, "podnet", p))
			n.wantAttachments(t, "podnet", 0)
		})
	}
}

// TestDel checks that DEL succeeds whatever happened to the pod, its entry or the node: a runtime
// repeats a failed DEL, and the pod never ends.
func TestDel(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8", "172.16.0.0/12"}})
		n.addAndCheck(t, conf)
		rules := n.ruleset(t)
		succeeds := func(t *testing.T, r invocation, msgs ...string) result {
			t.Helper()
			r.verb = "DEL"
			a := n.invoke(t, r).want(t, 0, msgs...)
			wantSame(t, "stdout", a.stdout, "")
			return a
		}
		t.Run("twice", func(t *testing.T) {
			for want := range 2 {
				n.invoke(t, invocation{verb: "ADD", conf: conf, id: "pod1"}).want(t, 0)
				n.invoke(t, invocation{verb: "ADD", conf: conf, id: "pod2"}).want(t, 0)
				n.wantAttachments(t, "podnet", 3)
				for _, id := range []string{"pod1", "pod1", "pod2", "pod2"}[:4-want] {
					succeeds(t, invocation{conf: conf, id: id}).noWarnings(t)
				}
				n.wantAttachments(t, "podnet", 1)
			}
		})
		t.Run("after a failed ADD", func(t *testing.T) { // no namespace, no prevResult, no attachment
			r := invocation{conf: n.conf(t, "podnet", object{"prevResult": nil}), id: "never", noNetns: true}
			succeeds(t, r).noWarnings(t)
		})
		t.Run("unknown network", func(t *testing.T) {
			succeeds(t, invocation{conf: n.conf(t, "othernet", nil)}).noWarnings(t)
		})
		t.Run("with a stale entry", func(t *testing.T) {
			for _, keys := range []object{
				{"nonMasqueradeCIDRs": []string{}}, {"masqChain": "OLD"}, {"enableIPv6": true},
			} {
				succeeds(t, invocation{conf: n.conf(t, "podnet", keys)}).noWarnings(t)
			}
		})
		if after := n.ruleset(t); after != rules {
			t.Fatalf("rules changed:\n%s\nwere:\n%s", after, rules)
		}
		for name, keys := range map[string]object{
			"with a bad CIDR":          {"nonMasqueradeCIDRs": []string{"10.0.0.1/8"}},
			"with an unknown key":      {"nonmasqueradecidrs": 1},
			"with keys of wrong types": {"enableIPv6": "yes", "cidrLimit": -1, "backend": "ebpf"},
		} {
			t.Run(name, func(t *testing.T) { // DEL repairs the rules nevertheless
				n.flush(t)
				succeeds(t, invocation{conf: n.conf(t, "podnet", keys)}).noWarnings(t)
				n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
			})
		}
		t.Run("with a broken backend", func(t *testing.T) {
			n.flush(t)
			before := n.ruleset(t)
			succeeds(t, invocation{conf: conf, unprivileged: true}, "warning: ")
			wantSame(t, "rules", n.ruleset(t), before)
			a := succeeds(t, invocation{conf: conf, path: "/nonexistent"})
			if n.backend.variant == "" { // nftables needs no program
				n.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 0)
			} else if !strings.Contains(a.stderr, `PATH "/nonexistent"`) || !strings.Contains(a.stderr, "install iptables") {
				t.Errorf("stderr: %s", a.stderr)
			}
		})
		t.Run("with no state", func(t *testing.T) {
			n.addAndCheck(t, conf)
			for _, clean := range []bool{false, true} { // with and without rules
				if clean {
					n.flush(t)
				}
				must(t, os.RemoveAll(n.dataDir))
				before := n.snapshot(t)
				succeeds(t, invocation{conf: conf}).noWarnings(t)
				n.unchanged(t, before)
				if _, err := os.Lstat(n.dataDir); !os.IsNotExist(err) {
					t.Errorf("DEL created the dataDir: %v", err)
				}
			}
		})
	})
}
