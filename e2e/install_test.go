// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// uninstalledNode is a node without the ip-masq plugin: its plugin directory has only the reference
// plugins, its conflist only the bridge. The plugin entry that install adds is in a file, with the
// node's backend.
type uninstalledNode struct {
	*node
	bin, conflistFile, entry string
	original                 []byte // conflist before install
}

func newUninstalledNode(t *testing.T) *uninstalledNode {
	t.Helper()
	n := newNode(t, backends()[0])
	b := &uninstalledNode{node: n, bin: filepath.Join(n.dir, "opt"), entry: filepath.Join(n.dir, "entry.json")}
	n.write(t, "podnet", n.bridge("podnet"))
	b.conflistFile = filepath.Join(n.cni.ConfDir, "10-podnet.conflist")
	b.original = readFile(t, b.conflistFile)
	n.cni.Path = []string{b.bin, n.cni.Path[1]}
	text, err := json.Marshal(n.entry(object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}}))
	must(t, errors.Join(err, os.Mkdir(b.bin, 0o755), os.WriteFile(b.entry, text, 0o600)))
	return b
}

// args returns a command with the flags of install and uninstall.
func (b *uninstalledNode) args(command string, args ...string) []string {
	return append([]string{command, "--cni-bin-dir", b.bin, "--conflist-entry-file", b.entry}, args...)
}

// TestInstallWithPluginFile checks that install takes the directory of the conflists from plugin.toml, and adds no entry
// while that file is bad, because no pod would start.
func TestInstallWithPluginFile(t *testing.T) {
	t.Parallel()
	b := newUninstalledNode(t)
	const pluginFile = "/etc/ip-masq/plugin.toml"
	write := func(line string) { must(t, os.WriteFile(b.own(pluginFile), []byte(b.pluginFile(line)), 0o600)) }
	write("bogus = 1")
	b.wantSays(t, 1, []string{"bogus: is not a known key", pluginFile}, b.args("install", "--plugin", b.plugin(t))...)
	if have := readFile(t, b.conflistFile); !bytes.Equal(have, b.original) {
		t.Errorf("the conflist is\n%s", have)
	}
	b.pod(t, "podnet")
	write("")
	b.wantSays(t, 0, nil, b.args("install", "--plugin", b.plugin(t))...)
	b.pod(t, "podnet")
}
