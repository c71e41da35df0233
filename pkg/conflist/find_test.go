// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

const (
	loopback = `{"cniVersion":"1.0.0","name":"lo","type":"loopback"}`
	single   = `{"cniVersion":"1.0.0","name":"one","type":"ptp"}`
)

func listNamed(name string) string {
	return `{"name":"` + name + `","cniVersion":"1.0.0","plugins":[{"type":"bridge"}]}`
}

// dirWith makes a directory of files.
func dirWith(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, doc := range files {
		path := filepath.Join(dir, name)
		assert.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		assert.NoError(t, os.WriteFile(path, []byte(doc), 0o644))
	}
	return dir
}

func TestFind(t *testing.T) {
	for _, c := range []struct {
		name, network string
		files         map[string]string
		file          string
		is            error
		says          string
	}{
		{name: "the first by name", file: "10-a.conflist", files: map[string]string{
			"10-a.conflist": listNamed("a"), "05-x.conflist.bak": "", "20-b.conf": single, "calico-kubeconfig": "x"}},
		{name: "a single configuration", file: "10-b.conf", files: map[string]string{"10-b.conf": single, "20.conflist": listNamed("a")}},
		{name: "json", file: "1.json", files: map[string]string{"1.json": single}},
		{name: "what is broken behind it", file: "1.conflist", files: map[string]string{"1.conflist": listNamed("a"), "2.conflist": "{"}},
		{name: "loopback is no network of pods", file: "99.conflist", files: map[string]string{
			"00.conf": loopback, "01.conflist": `{"name":"lo","plugins":[` + loopback + `]}`, "99.conflist": listNamed("a")}},
		{name: "the named one", network: "b", file: "3.conflist", files: map[string]string{
			"1.conflist": listNamed("a"), "2.conflist": "{", "3.conflist": listNamed("b"), "4.conflist": listNamed("b")}},
		{name: "nothing yet", is: ErrNoNetworks, says: "--cni-conf-dir", files: map[string]string{"x/1.conflist": listNamed("a"), "a.yaml": ""}},
		{name: "loopback alone", is: ErrNoNetworks, says: "install the main CNI plugin", files: map[string]string{"99.conf": loopback}},
		{name: "no such one", network: "c", is: ErrNetworkNotFound, says: "one of a, one with --conflist-network",
			files: map[string]string{"1.conflist": listNamed("a"), "2.conf": single}},
		{name: "no such one, or in the broken file", network: "c", is: ErrBroken, says: "2.conflist",
			files: map[string]string{"1.conflist": listNamed("a"), "2.conflist": "{"}},
		{name: "a broken one first", is: ErrBroken, says: "0.conflist", files: map[string]string{"0.conflist": "", "1.conflist": listNamed("a")}},
		{name: "a list in a .conf", is: ErrBroken, says: "rename a list to .conflist", files: map[string]string{"0.conf": listNamed("a")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := dirWith(t, c.files)
			n, err := Find(dir, c.network)
			if !errors.Is(err, c.is) || err != nil && (!strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), dir)) {
				t.Fatal(n, err)
			}
			if c.file == "" {
				if err == nil {
					t.Fatal("found", n.Path)
				}
				return
			}
			if n.Path != filepath.Join(dir, c.file) || string(n.Conflist.Doc) != c.files[c.file] || !n.Conflist.IsList() == n.Conflist.IsList() {
				t.Errorf("%+v", n)
			}
		})
	}
	if _, err := Find(filepath.Join(t.TempDir(), "none"), ""); !errors.Is(err, ErrNoNetworks) {
		t.Error(err)
	}
}

// TestFindReportsDanglingSymlinks: where its target is seen it is the network.
func TestFindReportsDanglingSymlinks(t *testing.T) {
	for what, files := range map[string]map[string]string{
		"alone":          nil,
		"before another": {"20-b.conflist": listNamed("b")},
	} {
		dir := dirWith(t, files)
		link, says := filepath.Join(dir, "10-a.conflist"), "it is a symlink to what is not there"
		assert.NoError(t, os.Symlink("/nowhere/x", link))
		if n, err := Find(dir, ""); !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), link) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %s, %v", what, n.Path, err)
		}
	}
	dir := dirWith(t, map[string]string{"20-b.conflist": listNamed("b")})
	assert.NoError(t, os.Symlink("/nowhere/x", filepath.Join(dir, "10-a.conflist")))
	if n, err := Find(dir, "b"); err != nil || n.Name != "b" {
		t.Error("another one is named:", n, err)
	}
}

// multusOf is the configuration that Multus generates of a delegate's.
func multusOf(delegate string) string {
	return `{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus","kubeconfig":"/k","delegates":[` + delegate + `]}`
}

// shim is that of Multus, thick.
func shim(clusterNetwork string) string {
	return fmt.Sprintf(`{"cniVersion":"0.3.1","name":"multus-cni-network","type":"multus-shim","clusterNetwork":%q}`, clusterNetwork)
}

func TestFindThroughMultus(t *testing.T) {
	a, withEntry := listWith("a"), listWith("a", bareEntry)
	const made = "10-one-made-by-ip-masq.conflist"
	list := func(plugins string) string {
		return `{"cniVersion":"1.0.0","name":"multus-cni-network","plugins":[` + plugins + `]}`
	}
	for _, c := range []struct {
		name, network string
		files         map[string]string
		file          string // of the network; "" : none is found
		via           string // the file of Multus, and what is wrong with it
		says          string
	}{
		{name: "thin", files: map[string]string{"00-multus.conf": multusOf(a), "10-a.conflist": a}, file: "10-a.conflist", via: "00-multus.conf lacks"},
		{name: "thin, a list", files: map[string]string{"00-multus.conflist": list(multusOf(a)), "10-a.conflist": a}, file: "10-a.conflist", via: "00-multus.conflist lacks"},
		{name: "thin, with a copy of the entry", files: map[string]string{"00-multus.conf": multusOf(withEntry), "10-a.conflist": withEntry}, file: "10-a.conflist", via: "00-multus.conf"},
		{name: "thin, of a master that was 1.0.0", file: "10-a.conflist", via: "00-multus.conf lacks",
			files: map[string]string{"00-multus.conf": multusOf(a), "00-multus.conflist": list(multusOf(a)), "10-a.conflist": withEntry}},
		{name: "its name overridden", network: "a", file: "10-a.conflist", via: "00-multus.conf lacks",
			files: map[string]string{"00-multus.conf": strings.Replace(multusOf(a), "multus-cni-network", "a", 1), "10-a.conflist": a}},
		{name: "Multus's own network is named", network: "multus-cni-network", file: "10-a.conflist", via: "00-multus.conf lacks",
			files: map[string]string{"00-multus.conf": multusOf(a), "10-a.conflist": a}},
		{name: "another network is named", network: "b", file: "20-b.conflist",
			files: map[string]string{"00-multus.conf": multusOf(a), "10-a.conflist": a, "20-b.conflist": listWith("b")}},
		{name: "Multus is not the first", file: "00-a.conflist", files: map[string]string{"00-a.conflist": a, "70-multus.conf": multusOf(a)}},
		{name: "thick", files: map[string]string{"00-multus.conf": shim("/host/etc/cni/net.d/10-a.conflist"), "10-a.conflist": a}, file: "10-a.conflist", via: "00-multus.conf"},
		{name: "thick, with a single configuration", file: "10-one.conf", via: "00-multus.conf",
			files: map[string]string{"00-multus.conf": shim("/host/etc/cni/net.d/10-one.conf"), "10-one.conf": single}},
		{name: "thick, until it restarts", file: made, via: "00-multus.conf lacks",
			files: map[string]string{"00-multus.conf": shim("/host/etc/cni/net.d/10-one.conf"), "10-one.conf": single, made: madeOf(t, single, bareEntry)}},
		{name: "thick, restarted", file: made, via: "00-multus.conf",
			files: map[string]string{"00-multus.conf": shim("/host/etc/cni/net.d/" + made), "10-one.conf": single, made: madeOf(t, single, bareEntry)}},
		{name: "the second delegate is no master", says: "no other file of this directory has network b",
			files: map[string]string{"00-multus.conf": multusOf(listWith("b") + "," + a), "10-a.conflist": a}},
		{name: "the entry beside Multus", file: "00-multus.conflist", files: map[string]string{"00-multus.conflist": list(multusOf(a) + "," + bareEntry), "10-a.conflist": a}},
		{name: "the entry in a delegate that is nowhere else", file: "70-multus.conf", files: map[string]string{"70-multus.conf": multusOf(withEntry)}},
		{name: "a delegate that is nowhere else", says: "has network a", files: map[string]string{"70-multus.conf": multusOf(a)}},
		{name: "or in a broken file", says: "fix or remove it", files: map[string]string{"70-multus.conf": multusOf(a), "80.conflist": "{"}},
		{name: "itself", says: "has network multus-cni-network", files: map[string]string{"00-multus.conf": shim("/etc/cni/net.d/00-multus.conf")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := dirWith(t, c.files)
			n, err := Find(dir, c.network)
			if c.file == "" {
				if !errors.Is(err, ErrDelegate) || errors.Is(err, ErrNetworkNotFound) || !strings.Contains(strings.ReplaceAll(err.Error(), `"`, ""), c.says) || !strings.Contains(err.Error(), "--conflist-network") {
					t.Fatal(n.Path, err)
				}
				before := filesOf(t, dir)
				if change, err := (Editor{Dir: dir, Network: c.network, Entry: []byte(bareEntry)}).Insert(t.Context()); !errors.Is(err, ErrDelegate) || change.Wrote {
					t.Error(change, err)
				}
				assert.Equal(t, "files", filesOf(t, dir), before)
				return
			}
			if err != nil || n.Path != filepath.Join(dir, c.file) {
				t.Fatal(n.Path, err)
			}
			via := ""
			if n.Multus != "" {
				via = filepath.Base(n.Multus)
				if n.MultusErr != nil {
					via += " lacks"
				}
			}
			assert.Equal(t, "through", via, c.via)
		})
	}
}
