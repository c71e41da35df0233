// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// TestPluginFile checks that with a plugin.toml a network needs a conflist with its plugin entry, and that data_dir
// is that of the node.
func TestPluginFile(t *testing.T) {
	t.Parallel()
	n := newPluginFileNode(t)
	podnet, othernet := n.conf(t, "podnet", nil), n.conf(t, "othernet", nil)
	elsewhere := filepath.Join(n.dir, "elsewhere")
	n.conflist(t, "podnet", nil)
	n.addAndCheck(t, podnet).noWarnings(t)
	t.Run("another dataDir on stdin", func(t *testing.T) {
		n.addAndCheck(t, n.conf(t, "podnet", object{"dataDir": elsewhere})).want(t, 0, "dataDir", n.file("podnet"))
		if _, err := os.Lstat(elsewhere); !os.IsNotExist(err) {
			t.Errorf("the entry's dataDir was used: %v", err)
		}
	})
	t.Run("another dataDir in the entry", func(t *testing.T) {
		n.conflist(t, "podnet", object{"dataDir": elsewhere})
		n.refused(t, n.conf(t, "podnet", object{"dataDir": elsewhere}), n.file("podnet"), "dataDir", elsewhere, config.DefaultPluginFile, n.dataDir)
		n.wantSays(t, 1, []string{elsewhere}, "once")
		n.conflist(t, "podnet", object{"dataDir": nil})
		n.addAndCheck(t, n.conf(t, "podnet", object{"dataDir": nil})).noWarnings(t)
		n.conflist(t, "podnet", nil)
		n.addAndCheck(t, podnet).noWarnings(t)
	})
	t.Run("no conflist", func(t *testing.T) {
		n.refused(t, othernet, `network "othernet" has no policy`, config.DefaultPluginFile)
	})
	t.Run("cleanup of another dataDir", func(t *testing.T) {
		before := n.snapshot(t)
		n.wantSays(t, 1, []string{elsewhere, "cleanup --data-dir \"" + n.dataDir + `"`}, "cleanup", "--data-dir", elsewhere)
		n.unchanged(t, before)
	})
	t.Run("DEL of a network without a conflist repairs", func(t *testing.T) {
		n.flush(t)
		n.invoke(t, invocation{verb: "DEL", conf: n.conf(t, "othernet", object{"dataDir": elsewhere})}).want(t, 0)
		n.invoke(t, invocation{verb: "CHECK", conf: podnet}).want(t, 0)
	})
	t.Run("a network that has left the directory", func(t *testing.T) {
		n.conflist(t, "podnet", object{"randomFully": true})
		n.conflist(t, "othernet", object{"randomFully": false})
		n.addAndCheck(t, n.conf(t, "podnet", object{"randomFully": true}))
		must(t, os.Remove(n.file("podnet")))
		n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "othernet", object{"randomFully": false})}).
			want(t, 0, `network "podnet" is no longer in any conflist and is superseded by network "othernet"`)
	})
}

// TestBadPluginFile: while the file is bad ADD and STATUS fail, DEL and GC pass, rules and documents stay, and it is a
// fault.
func TestBadPluginFile(t *testing.T) {
	t.Parallel()
	file := config.DefaultPluginFile
	for name, c := range map[string]struct {
		spoil func(path, valid string) error
		says  string
	}{
		"a key of earlier versions": {func(path, valid string) error {
			return os.WriteFile(path, []byte(valid+"allow_networks = [\"podnet\"]\n"), 0o600)
		}, "allow_networks: is not a known key"},
		"a misspelled key": {func(path, valid string) error {
			return os.WriteFile(path, []byte(valid+"cni_confdir = \"/etc\"\n"), 0o600)
		}, "did you mean cni_conf_dir?"},
		"others may write it": {func(path, _ string) error { return os.Chmod(path, 0o666) }, "chmod"},
		"a dangling symlink": {func(path, _ string) error {
			must(t, os.Remove(path))
			return os.Symlink("nothing", path)
		}, "symlink"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newPluginFileNode(t)
			n.conflist(t, "podnet", nil)
			podnet := n.conf(t, "podnet", nil)
			n.addAndCheck(t, podnet).noWarnings(t)
			d := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
			path := n.own(file)
			must(t, c.spoil(path, string(readFile(t, path))))
			d.untilUnready(t, "source: ", file, c.says)
			n.conflist(t, "podnet", object{"masqChain": "OTHER"})
			n.conflist(t, "othernet", object{"masqChain": "THIRD"})
			n.refused(t, podnet, file, c.says)
			n.invoke(t, invocation{verb: "DEL", conf: podnet}).want(t, 0)
			n.flush(t) // the rules stay in force
			d.until(t, "the repair", func() bool { return strings.Contains(n.ruleset(t), "IP-MASQ-AGENT") })
			n.wantSays(t, 1, []string{c.says}, "check")
			if rules := n.ruleset(t); strings.Contains(rules, "OTHER") || strings.Contains(rules, "THIRD") {
				t.Errorf("the rules changed:\n%s", rules)
			}
			must(t, os.Remove(path))
			d.stop(t)
		})
	}
}

// pluginFileNode is a node with a plugin.toml; the administrator owns its conflists.
type pluginFileNode struct{ *node }

func newPluginFileNode(t *testing.T) pluginFileNode {
	t.Helper()
	n := newNode(t, backends()[0])
	writeTempFile(t, n.own(config.DefaultPluginFile), n.pluginFile(""))
	return pluginFileNode{n}
}

// pluginFile returns a plugin.toml for the node, with more lines.
func (n *node) pluginFile(lines string) string {
	return fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\n%s\n", n.dataDir, n.cni.ConfDir, lines)
}

// file returns the path of a network's conflist.
func (g pluginFileNode) file(network string) string {
	return filepath.Join(g.cni.ConfDir, "10-"+network+".conflist")
}

// wantExempt fails the test unless the document of podnet and the kernel's rules exempt exactly
// these prefixes of 203.0.113.0/24.
func (g pluginFileNode) wantExempt(t *testing.T, exempt ...string) {
	t.Helper()
	c := g.load(t).Find(networkID("podnet"))
	if c == nil || !slices.Equal(c.Policy.NonMasqueradeCIDRs, prefixes(exempt...)) {
		t.Errorf("the document of podnet has %+v, want %q", c, exempt)
	}
	rules := g.ruleset(t)
	for _, p := range []string{"203.0.113.16/28", "203.0.113.32/28", "203.0.113.48/28", "0.0.0.0/0"} {
		if strings.Contains(rules, p) != slices.Contains(exempt, p) {
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
	t.Run("a network without a conflist", func(t *testing.T) {
		g := newPluginFileNode(t)
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
		g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
		g.refused(t, g.conf(t, "blue", everything), `network "blue"`, g.cni.ConfDir, config.DefaultPluginFile)
		g.wantExempt(t, "203.0.113.16/28")
	})
	t.Run("a conflist without the plugin entry", func(t *testing.T) {
		g := newPluginFileNode(t)
		g.write(t, "blue", g.bridge("blue"))
		g.refused(t, g.conf(t, "blue", everything), `network "blue"`, g.file("blue"), "has no plugin entry")
	})
	t.Run("a network with a conflist", func(t *testing.T) {
		g := newPluginFileNode(t)
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		for _, keys := range []object{everything, {"nonMasqueradeCIDRs": []string{}}, {"masqChain": "OTHER", "nonMasqueradeCIDRs": []string{"203.0.113.32/28"}}} {
			a := g.addAndCheck(t, g.conf(t, "podnet", keys)) // no document is stored at the first ADD
			a.want(t, 0, `network "podnet"`, g.file("podnet"), "nonMasqueradeCIDRs", "which is in force")
			g.wantExempt(t, "203.0.113.16/28")
		}
		for range 3 { // an ADD without changes confirms only the policy in force
			g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
			g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", everything)}).want(t, 0, g.file("podnet"))
			g.wantExempt(t, "203.0.113.16/28")
		}
		// Nothing is learned from such an ADD.
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", object{"prevResult": object{
			"cniVersion": "1.1.0", "ips": []object{{"address": "10.77.2.3/24"}},
		}})}).want(t, 0, g.file("podnet"))
		wantSame(t, "the pods' subnets", fmt.Sprint(g.load(t).Find(networkID("podnet")).PodSubnets), "[]")
		// Invalid input from the runtime is ignored unless it is not JSON.
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.1/8"}, "nomasq": true})}).
			want(t, 0, g.file("podnet"), "nomasq")
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", nil)[1:]}).want(t, 6)
		g.wantExempt(t, "203.0.113.16/28")
	})
	t.Run("a changed conflist", func(t *testing.T) {
		g := newPluginFileNode(t)
		old := g.conf(t, "podnet", exempt("203.0.113.16/28"))
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		for range 3 {
			g.addAndCheck(t, old).noWarnings(t)
		}
		g.conflist(t, "podnet", exempt("203.0.113.32/28")) // the runtime has not read this conflist yet
		g.invoke(t, invocation{verb: "ADD", conf: old}).want(t, 0, g.file("podnet"), "nonMasqueradeCIDRs")
		g.wantExempt(t, "203.0.113.32/28")
	})
	t.Run("several conflists, and several entries", func(t *testing.T) {
		g := newPluginFileNode(t)
		g.write(t, "podnet", g.bridge("podnet"), g.entry(exempt("203.0.113.16/28")), g.entry(everything))
		writeTempFile(t, filepath.Join(g.cni.ConfDir, "20-podnet.conflist"), strings.ReplaceAll(string(readFile(t, g.file("podnet"))), "203.0.113.16/28", "203.0.113.32/28"))
		g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", everything)}).want(t, 0, g.file("podnet"))
		g.reconcileOnce(t)
		g.wantExempt(t, "203.0.113.16/28")
		// The first one counts, as for the runtime.
		g.write(t, "podnet", g.bridge("podnet"))
		g.refused(t, g.conf(t, "podnet", exempt("203.0.113.32/28")), g.file("podnet"), "has no plugin entry")
		g.reconcileOnce(t)
		g.wantExempt(t, "203.0.113.16/28")
	})
	t.Run("an invalid entry", func(t *testing.T) {
		g := newPluginFileNode(t)
		g.conflist(t, "podnet", exempt("203.0.113.17/28"))
		g.refused(t, g.conf(t, "podnet", exempt("203.0.113.16/28")), g.file("podnet"), "plugins[1]", "203.0.113.17/28")
	})
	t.Run("a partly written conflist", func(t *testing.T) {
		g := newPluginFileNode(t)
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		conf := g.conf(t, "podnet", exempt("203.0.113.16/28"))
		g.addAndCheck(t, conf).noWarnings(t)
		g.addAndCheck(t, conf).noWarnings(t)
		writeTempFile(t, g.file("podnet"), string(readFile(t, g.file("podnet"))[:100]))
		// The last valid policy stays in force, whatever input the runtime passes.
		for _, conf := range []string{conf, g.conf(t, "podnet", everything)} {
			g.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, g.file("podnet"), "not JSON", "the last good policy of the network stays in force")
			g.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
			g.wantExempt(t, "203.0.113.16/28")
		}
		g.refused(t, g.conf(t, "blue", everything), `network "blue"`, g.file("podnet"), "not JSON", "repair it")
	})
	t.Run("a missing directory", func(t *testing.T) {
		g := newPluginFileNode(t)
		must(t, os.RemoveAll(g.cni.ConfDir))
		g.refused(t, g.conf(t, "podnet", everything), `network "podnet"`, g.cni.ConfDir, "cni_conf_dir", config.DefaultPluginFile)
	})
	t.Run("an entry with requireAgentConfig", func(t *testing.T) {
		g := newPluginFileNode(t)
		g.conflist(t, "podnet", object{"requireAgentConfig": true})
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", nil)}).want(t, 11, "requireAgentConfig")
	})
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
	writeTempFile(t, g.own(config.DefaultPluginFile), g.pluginFile(""))
	for i := range 3 {
		g.invoke(t, invocation{verb: "ADD", conf: with(fmt.Sprintf("10.78.%d.3/24", i))}).want(t, 0)
		if rules := g.ruleset(t); guarded() || strings.Contains(rules, "10.78.") {
			t.Errorf("a subnet that an ADD found is in force:\n%s", rules)
		}
	}
	g.reconcileOnce(t)
	if got := fmt.Sprint(g.load(t).Find(networkID("podnet")).PodSubnets); guarded() || got != "[]" {
		t.Errorf("stored are %s; rules:\n%s", got, g.ruleset(t))
	}
}

// TestUntrustedDELAndGC runs DEL and GC, which need no conflist, with input chosen by an attacker.
// It checks that they change no policy, no rule and no other dataDir. GC believes the list of
// attachments of the network that it names, and the next ADD adds to the list again.
func TestUntrustedDELAndGC(t *testing.T) {
	t.Parallel()
	g := newPluginFileNode(t)
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
			g.wantAttachments(t, "othernet", 1)
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
	p := assert.Must(config.ReadPluginFile(file))(t)
	want := config.PluginFile{Path: file, Present: true, DataDir: config.DefaultDataDir, CNIConfDir: config.DefaultCNIConfDir}
	assert.Equal(t, "plugin.toml", p, want)
}
