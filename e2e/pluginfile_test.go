// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// TestPluginFile checks that with a plugin.toml only the networks in allow_networks set policy,
// and that its data_dir overrides the entry's dataDir.
func TestPluginFile(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	podnet, othernet := n.conf(t, "podnet", nil), n.conf(t, "othernet", nil)
	elsewhere := filepath.Join(n.dir, "elsewhere")
	moved := n.conf(t, "podnet", object{"dataDir": elsewhere})
	file := config.DefaultPluginFile
	n.conflist(t, "podnet", nil)
	n.conflist(t, "othernet", nil)
	guard := func(t *testing.T, text string) {
		t.Helper()
		writeTempFile(t, n.own(file), "data_dir = \""+n.dataDir+"\"\ncni_conf_dir = \""+n.cni.ConfDir+"\"\n"+text)
	}
	refused := func(t *testing.T, conf string, says ...string) {
		t.Helper()
		before := n.snapshot(t)
		n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 7, append(says, file)...)
		n.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, append(says, file)...)
		n.invoke(t, invocation{verb: "DEL", conf: conf, id: "unknown"}).want(t, 0)
		n.invoke(t, invocation{verb: "GC", conf: conf}).want(t, 0)
		n.unchanged(t, before)
	}
	t.Run("allowed", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet"]`)
		n.addAndCheck(t, podnet).noWarnings(t)
		n.addAndCheck(t, moved).noWarnings(t)
		if _, err := os.Lstat(elsewhere); !os.IsNotExist(err) {
			t.Errorf("the entry's dataDir was used: %v", err)
		}
		refused(t, othernet, `network "othernet" may not contribute`, "allow_networks", "add it there")
	})
	t.Run("cleanup of another dataDir", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet"]`)
		before := n.snapshot(t)
		_, stderr, code := n.reconciler(t, "cleanup", "--data-dir", elsewhere)
		if code != 1 || !strings.Contains(stderr, elsewhere) || !strings.Contains(stderr, "cleanup --data-dir \""+n.dataDir+`"`) {
			t.Errorf("exit code %d\n%s", code, stderr)
		}
		n.unchanged(t, before)
	})
	t.Run("DEL of a network that is not allowed repairs", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet"]`)
		n.flush(t)
		n.invoke(t, invocation{verb: "DEL", conf: n.conf(t, "othernet", object{"dataDir": elsewhere})}).want(t, 0)
		n.invoke(t, invocation{verb: "CHECK", conf: podnet}).want(t, 0)
	})
	t.Run("no network allowed", func(t *testing.T) {
		guard(t, `allow_networks = []`)
		n.invoke(t, invocation{verb: "DEL", conf: podnet, id: "unknown"}).want(t, 0)
		if rules := n.ruleset(t); strings.Contains(rules, "masquerade") {
			t.Errorf("a document that is not in force has rules:\n%s", rules)
		}
		refused(t, podnet, `network "podnet" may not contribute`)
	})
	t.Run("broken", func(t *testing.T) { // package config has all mistakes
		guard(t, `allow_network = ["podnet"]`)
		refused(t, podnet, `did you mean allow_networks?`)
	})
	t.Run("a dangling symlink", func(t *testing.T) {
		if err := os.Symlink(filepath.Join(n.dir, "nothing"), n.own(file)); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(n.own(file)); err != nil {
				t.Error(err)
			}
		})
		before := n.snapshot(t)
		n.invoke(t, invocation{verb: "ADD", conf: podnet}).want(t, 7, file)
		n.unchanged(t, before)
	})
	t.Run("cni_conf_dir", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet", "othernet"]`)
		n.conflist(t, "podnet", object{"randomFully": true})
		n.conflist(t, "othernet", object{"randomFully": false})
		n.addAndCheck(t, n.conf(t, "podnet", object{"randomFully": true}))
		must(t, os.Remove(filepath.Join(n.cni.ConfDir, "10-podnet.conflist")))
		n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "othernet", object{"randomFully": false})}).
			want(t, 0, `network "podnet" is no longer in any conflist and is superseded by network "othernet"`)
	})
}

// pluginFileNode is a node with a plugin.toml; the administrator owns its conflists.
type pluginFileNode struct{ *node }

func newPluginFileNode(t *testing.T, toml string) pluginFileNode {
	t.Helper()
	n := newNode(t, backends()[0])
	writeTempFile(t, n.own(config.DefaultPluginFile), fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\n%s\n", n.dataDir, n.cni.ConfDir, toml))
	return pluginFileNode{n}
}

// file returns the path of a network's conflist.
func (g pluginFileNode) file(network string) string {
	return filepath.Join(g.cni.ConfDir, "10-"+network+".conflist")
}

// wantExempt fails the test unless the network's document and the kernel's rules exempt exactly
// these prefixes of 203.0.113.0/24.
func (g pluginFileNode) wantExempt(t *testing.T, network string, prefixes ...string) {
	t.Helper()
	c := g.load(t).Find(policy.SourceID{Kind: policy.Network, Name: network})
	if c == nil || !slices.Equal(c.Policy.NonMasqueradeCIDRs, parsePrefixes(prefixes...)) {
		t.Errorf("the document of %s has %+v, want %q", network, c, prefixes)
	}
	rules := g.ruleset(t)
	for _, p := range []string{"203.0.113.16/28", "203.0.113.32/28", "203.0.113.48/28", "0.0.0.0/0"} {
		if strings.Contains(rules, p) != slices.Contains(prefixes, p) {
			t.Errorf("%s is exempt or masqueraded by mistake in\n%s", p, rules)
		}
	}
}

func (g pluginFileNode) refused(t *testing.T, conf string, says ...string) {
	t.Helper()
	before := g.snapshot(t)
	g.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 7, says...)
	g.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 7, says...)
	g.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, says...)
	g.invoke(t, invocation{verb: "DEL", conf: conf, id: "unknown"}).want(t, 0)
	g.invoke(t, invocation{verb: "GC", conf: conf}).want(t, 0)
	g.unchanged(t, before)
}

// TestPolicyComesFromTheConflist checks that with a plugin.toml the policy of a network comes from
// its conflist on disk and not from the runtime's input: the author of a
// NetworkAttachmentDefinition can choose any network name.
func TestPolicyComesFromTheConflist(t *testing.T) {
	t.Parallel()
	everything := object{"nonMasqueradeCIDRs": []string{"0.0.0.0/0"}}
	exempt := func(p string) object { return object{"nonMasqueradeCIDRs": []string{p}} }
	t.Run("an allowed network without a conflist", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet", "blue"]`)
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
		g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
		g.refused(t, g.conf(t, "blue", everything), `network "blue"`, g.cni.ConfDir, "allow_unlisted_networks", config.DefaultPluginFile)
		g.wantExempt(t, "podnet", "203.0.113.16/28")
	})
	t.Run("a conflist without the plugin entry", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["blue"]`)
		g.write(t, "blue", g.bridge("blue"))
		g.refused(t, g.conf(t, "blue", everything), `network "blue"`, g.file("blue"), "has no plugin entry")
	})
	t.Run("a network in allow_unlisted_networks", func(t *testing.T) {
		g := newPluginFileNode(t, "allow_networks = [\"blue\"]\nallow_unlisted_networks = [\"blue\", \"red\"]")
		g.addAndCheck(t, g.conf(t, "blue", exempt("203.0.113.32/28"))).noWarnings(t)
		g.wantExempt(t, "blue", "203.0.113.32/28")
		g.addAndCheck(t, g.conf(t, "blue", exempt("203.0.113.48/28"))).noWarnings(t)
		g.wantExempt(t, "blue", "203.0.113.48/28")
		// A network must be in both lists, and its conflist takes precedence.
		red := g.conf(t, "red", everything)
		g.invoke(t, invocation{verb: "ADD", conf: red}).want(t, 7, `network "red"`, "allow_networks", "add it there too")
		g.conflist(t, "blue", exempt("203.0.113.16/28"))
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "blue", everything)}).want(t, 0, g.file("blue"))
		g.wantExempt(t, "blue", "203.0.113.16/28")
	})
	t.Run("a network with a conflist", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		for _, keys := range []object{everything, {"nonMasqueradeCIDRs": []string{}}, {"masqChain": "OTHER", "nonMasqueradeCIDRs": []string{"203.0.113.32/28"}}} {
			a := g.addAndCheck(t, g.conf(t, "podnet", keys)) // no document is stored at the first ADD
			a.want(t, 0, `network "podnet"`, g.file("podnet"), "nonMasqueradeCIDRs", "which is in force")
			g.wantExempt(t, "podnet", "203.0.113.16/28")
		}
		for range 3 { // an ADD without changes confirms only the policy in force
			g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
			g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", everything)}).want(t, 0, g.file("podnet"))
			g.wantExempt(t, "podnet", "203.0.113.16/28")
		}
		// Nothing is learned from such an ADD.
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", object{"prevResult": object{
			"cniVersion": "1.1.0", "ips": []object{{"address": "10.77.2.3/24"}},
		}})}).want(t, 0, g.file("podnet"))
		if got := fmt.Sprint(g.load(t).Find(networkID("podnet")).PodSubnets); got != "[]" {
			t.Errorf("the pods' subnets are %s", got)
		}
		// Invalid input from the runtime is ignored unless it is not JSON.
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.1/8"}, "nomasq": true})}).
			want(t, 0, g.file("podnet"), "nomasq")
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", nil)[1:]}).want(t, 6)
		g.wantExempt(t, "podnet", "203.0.113.16/28")
	})
	t.Run("a changed conflist", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		old := g.conf(t, "podnet", exempt("203.0.113.16/28"))
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		for range 3 {
			g.addAndCheck(t, old).noWarnings(t)
		}
		g.conflist(t, "podnet", exempt("203.0.113.32/28")) // the runtime has not read this conflist yet
		g.invoke(t, invocation{verb: "ADD", conf: old}).want(t, 0, g.file("podnet"), "nonMasqueradeCIDRs")
		g.wantExempt(t, "podnet", "203.0.113.32/28")
	})
	t.Run("several conflists, and several entries", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		g.write(t, "podnet", g.bridge("podnet"), g.entry(exempt("203.0.113.16/28")), g.entry(everything))
		writeTempFile(t, filepath.Join(g.cni.ConfDir, "20-podnet.conflist"), strings.ReplaceAll(string(readFile(t, g.file("podnet"))), "203.0.113.16/28", "203.0.113.32/28"))
		g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", everything)}).want(t, 0, g.file("podnet"))
		g.wantExempt(t, "podnet", "203.0.113.16/28")
	})
	t.Run("an invalid entry", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		g.conflist(t, "podnet", exempt("203.0.113.17/28"))
		g.refused(t, g.conf(t, "podnet", exempt("203.0.113.16/28")), g.file("podnet"), "plugins[1]", "203.0.113.17/28")
	})
	t.Run("a partly written conflist", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet", "blue"]`)
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		conf := g.conf(t, "podnet", exempt("203.0.113.16/28"))
		g.addAndCheck(t, conf).noWarnings(t)
		g.addAndCheck(t, conf).noWarnings(t)
		writeTempFile(t, g.file("podnet"), string(readFile(t, g.file("podnet"))[:100]))
		// The last valid policy stays in force, whatever input the runtime passes.
		for _, conf := range []string{conf, g.conf(t, "podnet", everything)} {
			g.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, g.file("podnet"), "not JSON", "the last good policy of the network stays in force")
			g.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
			g.wantExempt(t, "podnet", "203.0.113.16/28")
		}
		g.refused(t, g.conf(t, "blue", everything), `network "blue"`, g.file("podnet"), "not JSON", "repair it")
	})
	t.Run("a missing directory", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		must(t, os.RemoveAll(g.cni.ConfDir))
		g.refused(t, g.conf(t, "podnet", everything), `network "podnet"`, g.cni.ConfDir, "cni_conf_dir", config.DefaultPluginFile)
	})
	t.Run("an entry with requireAgentConfig", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		g.conflist(t, "podnet", object{"requireAgentConfig": true})
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", nil)}).want(t, 11, "requireAgentConfig")
	})
}

// TestPluginFileExcludesDocuments checks that documents of networks that plugin.toml does not admit are not in force
// while the file exists, for each verb and command, though they stay on disk.
func TestPluginFileExcludesDocuments(t *testing.T) {
	t.Parallel()
	exempt := func(p, chain string) object { return object{"nonMasqueradeCIDRs": []string{p}, "masqChain": chain} }
	net, evil, other := exempt("203.0.113.16/28", "A"), exempt("203.0.113.48/28", "A"), exempt("198.51.100.0/28", "OTHER")
	wantExempt := func(t *testing.T, g pluginFileNode, excluded bool) {
		t.Helper()
		rules := g.ruleset(t)
		for text, want := range map[string]bool{"203.0.113.16/28": true, "203.0.113.48/28": !excluded, "198.51.100.0/28": !excluded, "masq-OTHER": !excluded} {
			if strings.Contains(rules, text) != want {
				t.Errorf("%s: want %t in\n%s", text, want, rules)
			}
		}
	}
	check := func(t *testing.T, g pluginFileNode, want int) {
		t.Helper()
		if stdout, stderr, code := g.reconciler(t, "check"); code != want {
			t.Errorf("check exits %d, want %d\n%s%s", code, want, stdout, stderr)
		}
	}
	for name, repair := range map[string]func(t *testing.T, g pluginFileNode){
		"ADD": func(t *testing.T, g pluginFileNode) { g.addAndCheck(t, g.conf(t, "net", net)).noWarnings(t) },
		"DEL of an admitted network": func(t *testing.T, g pluginFileNode) {
			g.invoke(t, invocation{verb: "DEL", conf: g.conf(t, "net", net), id: "unknown"}).want(t, 0).noWarnings(t)
		},
		"DEL of another network": func(t *testing.T, g pluginFileNode) {
			g.invoke(t, invocation{verb: "DEL", conf: g.conf(t, "evil", evil), id: "unknown"}).want(t, 0).noWarnings(t)
		},
		"GC": func(t *testing.T, g pluginFileNode) {
			g.invoke(t, invocation{verb: "GC", conf: g.conf(t, "net", net)}).want(t, 0).noWarnings(t)
		},
		"once": func(t *testing.T, g pluginFileNode) { g.reconcileOnce(t) },
		"run": func(t *testing.T, g pluginFileNode) {
			d := g.startReconciler(t, "--resync-interval", "10m").untilReady(t)
			d.stop(t)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := pluginFileNode{newNode(t, backends()[0])}
			g.conflist(t, "net", net)
			g.addAndCheck(t, g.conf(t, "evil", evil)).noWarnings(t)
			g.addAndCheck(t, g.conf(t, "other", other)).noWarnings(t)
			for range 2 { // the second one writes the verification cache
				g.addAndCheck(t, g.conf(t, "net", net)).noWarnings(t)
			}
			wantExempt(t, g, false)
			check(t, g, 0)
			file := g.own(config.DefaultPluginFile)
			valid := fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\nallow_networks = [\"net\"]\n", g.dataDir, g.cni.ConfDir)
			must(t, os.WriteFile(file, []byte(valid), 0o600))
			g.invoke(t, invocation{verb: "STATUS", conf: g.conf(t, "net", net)}).want(t, 0)
			g.invoke(t, invocation{verb: "CHECK", conf: g.conf(t, "net", net)}).want(t, 101, "203.0.113.48/28", "OTHER")
			check(t, g, 3)
			repair(t, g)
			wantExempt(t, g, true)
			g.invoke(t, invocation{verb: "CHECK", conf: g.conf(t, "net", net)}).want(t, 0)
			check(t, g, 0)
			for _, network := range []string{"evil", "other"} {
				if g.load(t).Find(networkID(network)) == nil {
					t.Errorf("the document of %s is gone", network)
				}
			}
			if out, _, _ := g.reconciler(t, "status"); strings.Count(out, "excluded") != 2 {
				t.Errorf("status:\n%s", out)
			}
			if out, _, _ := g.reconciler(t, "explain", "203.0.113.49"); strings.Contains(out, "evil") || !strings.Contains(out, "masqueraded") {
				t.Errorf("explain:\n%s", out)
			}
			if out, _, _ := g.reconciler(t, "render"); strings.Contains(out, "203.0.113.48") || strings.Contains(out, "OTHER") {
				t.Errorf("render:\n%s", out)
			}
			// An excluded document is in nobody's way.
			g.conflist(t, "net", object{"nonMasqueradeCIDRs": []string{"203.0.113.16/28"}, "masqueradeCIDRs": []string{"203.0.113.48/28"}, "masqChain": "A"})
			g.pod(t, "net")
			g.conflist(t, "net", net)
			g.pod(t, "net")
			// Nor is one that cannot be read: it does not come into force.
			path := store.Open(g.dataDir).DocumentPath(networkID("other"))
			document := readFile(t, path)
			must(t, os.WriteFile(path, []byte("{"), 0o600))
			g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "net", net)}).want(t, 0)
			g.reconcileOnce(t)
			wantExempt(t, g, true)
			must(t, os.WriteFile(path, document, 0o600))
			// A mistake in the file changes no rules, not even those of a reconciler that starts.
			must(t, os.WriteFile(file, []byte("allow_network"), 0o600))
			if stdout, stderr, code := g.reconciler(t, "once"); code != 1 || !strings.Contains(stderr, "not TOML") {
				t.Errorf("once: exit code %d\n%s%s", code, stdout, stderr)
			}
			wantExempt(t, g, true)
			must(t, os.WriteFile(file, []byte(valid), 0o600))
			d := g.startReconciler(t, "--resync-interval", "10m").untilReady(t)
			must(t, os.WriteFile(file, []byte("allow_network"), 0o600))
			d.until(t, "the mistake", func() bool { return strings.Contains(d.log(), "not TOML") })
			g.invoke(t, invocation{verb: "DEL", conf: g.conf(t, "evil", evil), id: "unknown"}).want(t, 0)
			wantExempt(t, g, true)
			must(t, os.Remove(file))
			d.until(t, "the end of the exclusion", func() bool { return strings.Contains(g.ruleset(t), "203.0.113.48/28") })
			d.stop(t)
			wantExempt(t, g, false)
		})
	}
}

// TestReadmittedNetwork: a network that plugin.toml excluded, and that conflicts with one added meanwhile, does not
// displace that when the file admits both.
func TestReadmittedNetwork(t *testing.T) {
	t.Parallel()
	for _, early := range []string{"early", "zearly"} { // equal orders would be decided by the name
		t.Run(early, func(t *testing.T) {
			t.Parallel()
			g := pluginFileNode{newNode(t, backends()[0])}
			wasFirst, isInForce := g.conf(t, early, object{"randomFully": false}), g.conf(t, "net", object{"randomFully": true})
			g.addAndCheck(t, wasFirst).noWarnings(t)
			g.conflist(t, "net", object{"randomFully": true})
			file := fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\nallow_networks = [\"net\"]\n", g.dataDir, g.cni.ConfDir)
			must(t, os.WriteFile(g.own(config.DefaultPluginFile), []byte(file), 0o600))
			g.addAndCheck(t, isInForce)
			rules := g.ruleset(t)
			must(t, os.Remove(g.own(config.DefaultPluginFile)))
			for range 2 {
				g.invoke(t, invocation{verb: "STATUS", conf: wasFirst}).want(t, 50, early, "net", "randomFully")
				g.invoke(t, invocation{verb: "ADD", conf: wasFirst, id: "again"}).want(t, 7, early, "net", "randomFully")
				g.addAndCheck(t, isInForce)
			}
			if stdout, stderr, code := g.reconciler(t, "once"); code != 1 || !strings.Contains(stderr, "randomFully") {
				t.Errorf("once: exit code %d\n%s%s", code, stdout, stderr)
			}
			if now := g.ruleset(t); now != rules {
				t.Errorf("the rules changed:\n%s", cmp.Diff(rules, now))
			}
		})
	}
}

// TestNothingIsLearnedWithPluginFile: with a plugin.toml, subnets that ADDs found are neither stored nor in force.
func TestNothingIsLearnedWithPluginFile(t *testing.T) {
	t.Parallel()
	g := pluginFileNode{newNode(t, backends()[0])}
	keys := object{"guard": "count"}
	guarded := func() bool { return strings.Contains(g.ruleset(t), "10.77.2.0/24") }
	with := func(address string) string {
		all := object{"prevResult": object{"cniVersion": "1.1.0", "ips": []object{{"address": address}}}, "guard": "count"}
		return g.conf(t, "podnet", all)
	}
	g.conflist(t, "podnet", keys)
	g.invoke(t, invocation{verb: "ADD", conf: with("10.77.2.3/24")}).want(t, 0).noWarnings(t)
	if !guarded() {
		t.Fatalf("without plugin.toml nothing is learned:\n%s", g.ruleset(t))
	}
	writeTempFile(t, g.own(config.DefaultPluginFile), fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\nallow_networks = [\"podnet\"]\n", g.dataDir, g.cni.ConfDir))
	for i := range 3 {
		g.invoke(t, invocation{verb: "ADD", conf: with(fmt.Sprintf("10.78.%d.3/24", i))}).want(t, 0)
		if rules := g.ruleset(t); guarded() || strings.Contains(rules, "10.78.") {
			t.Errorf("a subnet that an ADD found is in force:\n%s", rules)
		}
	}
	g.reconcileOnce(t)
	if got := fmt.Sprint(g.load(t).Find(networkID("podnet")).PodSubnets); guarded() || got != "[10.77.2.0/24]" {
		t.Errorf("stored are %s; rules:\n%s", got, g.ruleset(t))
	}
}

// TestUntrustedDELAndGC runs DEL and GC, which need no admission, with input chosen by an attacker.
// It checks that they change no policy, no rule and no other dataDir. GC believes the list of
// attachments of the network that it names, and the next ADD adds to the list again.
func TestUntrustedDELAndGC(t *testing.T) {
	t.Parallel()
	g := newPluginFileNode(t, `allow_networks = ["podnet", "othernet"]`)
	other := filepath.Join(g.dir, "other")
	policies := map[string]object{"podnet": {"randomFully": true}, "othernet": {"masqChain": "OTHER"}}
	for network, keys := range policies {
		g.conflist(t, network, keys)
		g.addAndCheck(t, g.conf(t, network, keys))
	}
	before := g.policyState(t)
	for _, network := range []string{"podnet", "evil", "PODNET", "podnet."} {
		conf := g.conf(t, network, object{"nonMasqueradeCIDRs": []string{"0.0.0.0/0"}, "dataDir": other, "masqChain": "OTHER", validAttachments: []object{}})
		for _, verb := range []string{"DEL", "GC"} {
			g.invoke(t, invocation{verb: verb, conf: conf, id: "thirdparty"}).want(t, 0)
			g.wantPolicyState(t, before)
			if _, err := os.Lstat(other); !os.IsNotExist(err) {
				t.Errorf("%s created %s: %v", verb, other, err)
			}
			if left := g.attachments(t, "othernet"); left != 1 {
				t.Errorf("%s of %s left %d attachments of othernet", verb, network, left)
			}
		}
	}
	for network, keys := range policies {
		g.invoke(t, invocation{verb: "CHECK", conf: g.conf(t, network, keys)}).want(t, 0)
	}
}

// TestDocumentedPluginFile checks that the plugin.toml in the documentation is valid.
func TestDocumentedPluginFile(t *testing.T) {
	t.Parallel()
	_, after, _ := strings.Cut(string(readFile(t, "../docs/operate.md")), "```toml\n")
	example, _, _ := strings.Cut(after, "```")
	file := filepath.Join(t.TempDir(), "plugin.toml")
	must(t, os.WriteFile(file, []byte(example), 0o600))
	p, err := config.ReadPluginFile(file)
	must(t, err)
	want := config.PluginFile{Path: file, Present: true, AllowNetworks: []string{"podnet", "storage"}, AllowUnlisted: []string{"storage"},
		DataDir: config.DefaultDataDir, CNIConfDir: config.DefaultCNIConfDir}
	if d := cmp.Diff(want, p); d != "" {
		t.Error(d)
	}
}
