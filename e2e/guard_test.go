// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// TestAdministratorsGuard: where there is a plugin.toml, only the networks that
// it lists contribute, and its data_dir holds.
func TestAdministratorsGuard(t *testing.T) {
	n := newNode(t, forms()[0])
	podnet, othernet := n.conf(t, "podnet", nil), n.conf(t, "othernet", nil)
	elsewhere := filepath.Join(n.dir, "elsewhere")
	moved := n.conf(t, "podnet", object{"dataDir": elsewhere})
	file := config.DefaultPluginFile
	guard := func(t *testing.T, text string) {
		t.Helper()
		place(t, file, "data_dir = \""+n.dataDir+"\"\ncni_conf_dir = \""+n.cni.ConfDir+"\"\n"+text)
	}
	refused := func(t *testing.T, conf string, says ...string) {
		t.Helper()
		before := n.snapshot(t)
		n.ask(t, request{verb: "ADD", conf: conf}).want(t, 7, append(says, file)...)
		n.ask(t, request{verb: "STATUS", conf: conf}).want(t, 50, append(says, file)...)
		n.ask(t, request{verb: "DEL", conf: conf, id: "nobody"}).want(t, 0)
		n.ask(t, request{verb: "GC", conf: conf}).want(t, 0)
		n.unchanged(t, before)
	}
	t.Run("allowed", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet"]`)
		n.makeSure(t, podnet).quiet(t)
		n.makeSure(t, moved).quiet(t)
		if _, err := os.Lstat(elsewhere); !os.IsNotExist(err) {
			t.Errorf("the entry's dataDir was used: %v", err)
		}
		refused(t, othernet, `network "othernet" may not contribute`, "allow_networks", "add it there")
	})
	t.Run("DEL repairs for those who may not", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet"]`)
		n.flush(t)
		n.ask(t, request{verb: "DEL", conf: n.conf(t, "othernet", object{"dataDir": elsewhere})}).want(t, 0)
		n.ask(t, request{verb: "CHECK", conf: podnet}).want(t, 0)
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
		if err := os.Chmod(file, 0o666); err != nil {
			t.Fatal(err)
		}
		refused(t, othernet, "can be written by others", "chmod it to 0644")
	})
	t.Run("a link to nothing", func(t *testing.T) {
		if err := os.Symlink(filepath.Join(n.dir, "nothing"), file); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.Remove(file); err != nil {
				t.Error(err)
			}
		})
		before := n.snapshot(t)
		n.ask(t, request{verb: "ADD", conf: podnet}).want(t, 7, file)
		n.unchanged(t, before)
	})
	t.Run("its conflists decide", func(t *testing.T) {
		guard(t, `allow_networks = ["podnet", "othernet"]`)
		n.conflist(t, "othernet", object{"randomFully": false})
		n.makeSure(t, n.conf(t, "podnet", object{"randomFully": true}))
		n.ask(t, request{verb: "ADD", conf: n.conf(t, "othernet", object{"randomFully": false})}).
			want(t, 0, `network "podnet" is in no conflist any more and yields to network "othernet"`)
	})
}
