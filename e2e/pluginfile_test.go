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
)

// TestPluginFile: where there is a plugin.toml, only the networks that
// it lists contribute, and its data_dir holds.
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
		n.invoke(t, invocation{verb: "DEL", conf: conf, id: "nobody"}).want(t, 0)
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
	t.Run("DEL repairs for those who may not", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet"]`)
		n.flush(t)
		n.invoke(t, invocation{verb: "DEL", conf: n.conf(t, "othernet", object{"dataDir": elsewhere})}).want(t, 0)
		n.invoke(t, invocation{verb: "CHECK", conf: podnet}).want(t, 0)
	})
	t.Run("nobody", func(t *testing.T) {
		guard(t, `allow_networks = []`)
		refused(t, podnet, `network "podnet" may not contribute`)
	})
	t.Run("nobody is listed", func(t *testing.T) {
		guard(t, ``)
		refused(t, podnet, `has no allow_networks, which allows no network`, `allow_networks = ["podnet"]`)
	})
	t.Run("broken", func(t *testing.T) {
		for text, says := range map[string]string{
			`allow_networks = "podnet"`:                     `write a list: ["podnet"]`,
			`allow_network = ["podnet"]`:                    `did you mean allow_networks?`,
			"allow_networks = [\"podnet\"]\n[x":             `not TOML`,
			"allow_networks = [\"podnet\"]\ndata_dir = 'x'": `plugin.toml`,
		} {
			guard(t, text)
			refused(t, podnet, says)
		}
	})
	t.Run("writable by others", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet", "othernet"]`)
		if err := os.Chmod(n.own(file), 0o666); err != nil {
			t.Fatal(err)
		}
		refused(t, othernet, "can be written by others", "chmod it to 0644")
	})
	t.Run("a link to nothing", func(t *testing.T) {
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
	t.Run("its conflists decide", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet", "othernet"]`)
		n.conflist(t, "podnet", object{"randomFully": true})
		n.conflist(t, "othernet", object{"randomFully": false})
		n.addAndCheck(t, n.conf(t, "podnet", object{"randomFully": true}))
		must(t, os.Remove(filepath.Join(n.cni.ConfDir, "10-podnet.conflist")))
		n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "othernet", object{"randomFully": false})}).
			want(t, 0, `network "podnet" is no longer in any conflist and is superseded by network "othernet"`)
	})
}

// guarded is a node with a plugin.toml, whose conflists are the administrators'.
type pluginFileNode struct{ *node }

func newPluginFileNode(t *testing.T, toml string) pluginFileNode {
	t.Helper()
	n := newNode(t, backends()[0])
	writeTempFile(t, n.own(config.DefaultPluginFile), fmt.Sprintf("data_dir = %q\ncni_conf_dir = %q\n%s\n", n.dataDir, n.cni.ConfDir, toml))
	return pluginFileNode{n}
}

// file is the conflist of a network.
func (g pluginFileNode) file(network string) string {
	return filepath.Join(g.cni.ConfDir, "10-"+network+".conflist")
}

// has fails the test unless the node's rules exempt these prefixes of 203.0.113.0/24
// and no others of it, by the document of the network and in the kernel.
func (g pluginFileNode) wantExempt(t *testing.T, network string, prefixes ...string) {
	t.Helper()
	c := g.load(t).Find(policy.SourceID{Kind: policy.Network, Name: network})
	if c == nil || !slices.Equal(c.Policy.NonMasqueradeCIDRs, parsePrefixes(prefixes...)) {
		t.Errorf("the document of %s has %+v, want %q", network, c, prefixes)
	}
	rules := g.ruleset(t)
	for _, p := range []string{"203.0.113.16/28", "203.0.113.32/28", "203.0.113.48/28", "0.0.0.0/0"} {
		if strings.Contains(rules, p) != slices.Contains(prefixes, p) {
			t.Errorf("%s is not as it should be in\n%s", p, rules)
		}
	}
}

func (g pluginFileNode) refused(t *testing.T, conf string, says ...string) {
	t.Helper()
	before := g.snapshot(t)
	g.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 7, says...)
	g.invoke(t, invocation{verb: "CHECK", conf: conf}).want(t, 7, says...)
	g.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 50, says...)
	g.invoke(t, invocation{verb: "DEL", conf: conf, id: "nobody"}).want(t, 0)
	g.invoke(t, invocation{verb: "GC", conf: conf}).want(t, 0)
	g.unchanged(t, before)
}

// TestPolicyComesFromTheConflist: where there is a plugin.toml, a name is no
// proof. The policy of a network is what its conflist says, whatever the runtime
// hands over: the author of a NetworkAttachmentDefinition chooses its name.
func TestPolicyComesFromTheConflist(t *testing.T) {
	t.Parallel()
	everything := object{"nonMasqueradeCIDRs": []string{"0.0.0.0/0"}}
	exempt := func(p string) object { return object{"nonMasqueradeCIDRs": []string{p}} }
	t.Run("a name that is admitted and has no conflist", func(t *testing.T) {
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
	t.Run("one whose entries are taken as they come", func(t *testing.T) {
		g := newPluginFileNode(t, "allow_networks = [\"blue\"]\nallow_unlisted_networks = [\"blue\", \"red\"]")
		g.addAndCheck(t, g.conf(t, "blue", exempt("203.0.113.32/28"))).noWarnings(t)
		g.wantExempt(t, "blue", "203.0.113.32/28")
		g.addAndCheck(t, g.conf(t, "blue", exempt("203.0.113.48/28"))).noWarnings(t)
		g.wantExempt(t, "blue", "203.0.113.48/28")
		// A name has to be in both lists, and a conflist comes first.
		red := g.conf(t, "red", everything)
		g.invoke(t, invocation{verb: "ADD", conf: red}).want(t, 7, `network "red"`, "allow_networks", "add it there too")
		g.conflist(t, "blue", exempt("203.0.113.16/28"))
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "blue", everything)}).want(t, 0, g.file("blue"))
		g.wantExempt(t, "blue", "203.0.113.16/28")
	})
	t.Run("the name of a conflist", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		for _, keys := range []object{everything, {"nonMasqueradeCIDRs": []string{}}, {"masqChain": "OTHER", "nonMasqueradeCIDRs": []string{"203.0.113.32/28"}}} {
			a := g.addAndCheck(t, g.conf(t, "podnet", keys)) // nothing is stored yet, the first time
			a.want(t, 0, `network "podnet"`, g.file("podnet"), "nonMasqueradeCIDRs", "which is in force")
			g.wantExempt(t, "podnet", "203.0.113.16/28")
		}
		for range 3 { // one who finds all right vouches for what is in force, and for nothing else
			g.addAndCheck(t, g.conf(t, "podnet", exempt("203.0.113.16/28"))).noWarnings(t)
			g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", everything)}).want(t, 0, g.file("podnet"))
			g.wantExempt(t, "podnet", "203.0.113.16/28")
		}
		// What is wrong with what the runtime hands over does no harm, unless it is no JSON.
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.1/8"}, "nomasq": true})}).
			want(t, 0, g.file("podnet"), "nomasq")
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", nil)[1:]}).want(t, 6)
		g.wantExempt(t, "podnet", "203.0.113.16/28")
	})
	t.Run("a conflist that changes", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		old := g.conf(t, "podnet", exempt("203.0.113.16/28"))
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		for range 3 {
			g.addAndCheck(t, old).noWarnings(t)
		}
		g.conflist(t, "podnet", exempt("203.0.113.32/28")) // which the runtime has not read yet
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
	t.Run("an entry that is bad", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		g.conflist(t, "podnet", exempt("203.0.113.17/28"))
		g.refused(t, g.conf(t, "podnet", exempt("203.0.113.16/28")), g.file("podnet"), "plugins[1]", "203.0.113.17/28 has host bits set")
	})
	t.Run("a conflist that is being written", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet", "blue"]`)
		g.conflist(t, "podnet", exempt("203.0.113.16/28"))
		conf := g.conf(t, "podnet", exempt("203.0.113.16/28"))
		g.addAndCheck(t, conf).noWarnings(t)
		g.addAndCheck(t, conf).noWarnings(t)
		writeTempFile(t, g.file("podnet"), string(readFile(t, g.file("podnet"))[:100]))
		// What it said last stays in force, whatever the runtime hands over.
		for _, conf := range []string{conf, g.conf(t, "podnet", everything)} {
			g.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0, g.file("podnet"), "not JSON", "its last good policy stays in force")
			g.invoke(t, invocation{verb: "STATUS", conf: conf}).want(t, 0)
			g.wantExempt(t, "podnet", "203.0.113.16/28")
		}
		g.refused(t, g.conf(t, "blue", everything), `network "blue"`, g.file("podnet"), "not JSON", "repair it")
	})
	t.Run("a directory that is not there", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		must(t, os.RemoveAll(g.cni.ConfDir))
		g.refused(t, g.conf(t, "podnet", everything), `network "podnet"`, g.cni.ConfDir, "cni_conf_dir", config.DefaultPluginFile)
	})
	t.Run("an entry that waits for the agents", func(t *testing.T) {
		g := newPluginFileNode(t, `allow_networks = ["podnet"]`)
		g.conflist(t, "podnet", object{"requireAgentConfig": true})
		g.invoke(t, invocation{verb: "ADD", conf: g.conf(t, "podnet", nil)}).want(t, 11, "requireAgentConfig")
	})
}

// TestUntrustedDELAndGC: DEL and GC need no admission. An attacker who chooses what they are
// handed changes no policy, no rule and no other dataDir; the list of attachments that
// GC gets is believed, for the network that it names, and the next ADD adds to it.
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
			g.invoke(t, invocation{verb: verb, conf: conf, id: "stranger"}).want(t, 0)
			g.wantPolicyState(t, before)
			if _, err := os.Lstat(other); !os.IsNotExist(err) {
				t.Errorf("%s made %s: %v", verb, other, err)
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

// TestDocumentedPluginFile: the example in the documentation is one.
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
