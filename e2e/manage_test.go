// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

// manageArgs installs the plugin, writes the entry file with these keys, and returns the flags
// with which the reconciler manages the node's conflists.
func (n *node) manageArgs(t *testing.T, keys map[string]any) []string {
	t.Helper()
	n.writeEntryFile(t, string(marshalIndent(t, n.entry(keys))))
	n.installPlugin(t)
	return []string{"--conflist-manage", "--conflist-entry-file", n.entryPath(), "--cni-bin-dir", n.pluginDir(), "--resync-interval", "10m"}
}

func (n *node) entryPath() string { return filepath.Join(n.dir, "entry", "entry.json") }

func (n *node) writeEntryFile(t *testing.T, text string) {
	t.Helper()
	must(t, errors.Join(os.MkdirAll(filepath.Dir(n.entryPath()), 0o755), os.WriteFile(n.entryPath()+".next", []byte(text), 0o644),
		os.Rename(n.entryPath()+".next", n.entryPath())))
}

func (n *node) pluginDir() string { return filepath.Join(n.dir, "plugins") }

// installPlugin puts the plugin into the directory where the runtime looks for it.
func (n *node) installPlugin(t *testing.T) {
	t.Helper()
	must(t, errors.Join(os.MkdirAll(n.pluginDir(), 0o755), os.Symlink(n.plugin(t), filepath.Join(n.pluginDir(), "ip-masq"))))
}

func marshalIndent(t *testing.T, v any) []byte {
	t.Helper()
	doc, err := json.MarshalIndent(v, "", "  ")
	must(t, err)
	return doc
}

// writeMainConflist writes a conflist atomically, as a main CNI plugin does, without the plugin
// entry.
func (n *node) writeMainConflist(t *testing.T, network string) {
	t.Helper()
	n.writeConflistFile(t, mainFile, n.mainConflist(t, network))
}

func (n *node) mainConflist(t *testing.T, network string) []byte {
	t.Helper()
	return marshalIndent(t, object{"cniVersion": "1.0.0", "name": network, "plugins": []any{n.bridge(network)}})
}

func (n *node) writeConflistFile(t *testing.T, file string, doc []byte) {
	t.Helper()
	next := filepath.Join(n.cni.ConfDir, "next-"+file+".tmp")
	must(t, errors.Join(os.MkdirAll(n.cni.ConfDir, 0o755), os.WriteFile(next, doc, 0o644), os.Rename(next, filepath.Join(n.cni.ConfDir, file))))
}

// hasPluginEntry reports whether a file contains the plugin entry.
func (n *node) hasPluginEntry(t *testing.T, file string) bool {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join(n.cni.ConfDir, file))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Contains(string(doc), `"ip-masq"`)
}

// untilManaged waits until a file contains the plugin entry, the node is ready, and the metric
// conflist_present is 1.
func (d *daemon) untilManaged(t *testing.T, file string) {
	t.Helper()
	d.until(t, "entry in "+file, func() bool { return d.n.hasPluginEntry(t, file) })
	d.untilReady(t)
	d.until(t, "conflist_present 1", func() bool { return d.metric(t, "conflist_present") == 1 })
}

const mainFile = "10-podnet.conflist"

// TestManage checks that the reconciler inserts the plugin entry once a network appears, into a
// .conflist and a .conf file, that pods get the policy, and that the entry follows the network
// when its file is removed and written again.
func TestManage(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		d := n.startReconciler(t, n.manageArgs(t, object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24"}})...)
		d.untilUnready(t, "conflist: waiting for the main CNI plugin's network in "+n.cni.ConfDir)
		if got := d.metric(t, "conflist_present") + d.metric(t, "conflist_repairs_total") + d.metric(t, "conflist_flapping"); got != 0 {
			t.Errorf("the metrics report an entry: %v", got)
		}
		n.writeMainConflist(t, "podnet")
		d.untilManaged(t, mainFile)
		all := onlyPod(n.pod(t, "podnet"))
		all.verdicts(t, n, false, map[string]string{"pod": "1.2.3.4"})
		all.verdicts(t, n, true, map[string]string{"pod": "1.2.4.1"})
		if got := d.metric(t, "conflist_repairs_total"); got != 1 {
			t.Errorf("conflist_repairs_total is %v", got)
		}
		must(t, os.Remove(filepath.Join(n.cni.ConfDir, mainFile)))
		d.untilUnready(t, "conflist: waiting")
		n.writeConflistFile(t, "20-podnet.conf", marshalIndent(t, func() object {
			conf := n.bridge("podnet")
			conf["name"], conf["cniVersion"] = "podnet", "1.0.0"
			return conf
		}()))
		d.untilManaged(t, "20-podnet-made-by-ip-masq.conflist")
		if n.hasPluginEntry(t, "20-podnet.conf") {
			t.Error("the .conf file was changed")
		}
		all = onlyPod(n.pod(t, "podnet"))
		all.verdicts(t, n, false, map[string]string{"pod": "1.2.3.4"})
		if strings.Contains(d.log(), "level=ERROR") || strings.Contains(d.log(), "level=WARN") {
			t.Errorf("the reconciler logged warnings or errors:\n%s", d.log())
		}

		// The entry stays when the reconciler stops.
		log := d.log()
		d.stop(t)
		if !n.hasPluginEntry(t, "20-podnet-made-by-ip-masq.conflist") || strings.Count(d.since(log), "\n") != 1 {
			t.Errorf("the entry was removed when the reconciler stopped; it logged:\n%s", d.since(log))
		}
		backups, err := filepath.Glob(filepath.Join(n.dataDir, "backups", mainFile+".*.bak"))
		if err != nil || len(backups) != 1 || strings.Contains(string(readFile(t, backups[0])), "ip-masq") {
			t.Errorf("backups: %v %v", backups, err)
		}
		// cleanup removes the dataDir.
		n.reconciler(t, "cleanup")
		if _, err := os.Stat(n.dataDir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the dataDir still exists: %v", err)
		}
	})
}

// TestManageWithoutEntryFile checks that the default entry has the node's dataDir, without which
// ADD fails, and that no network gets an entry while plugin.toml is bad.
func TestManageWithoutEntryFile(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.installPlugin(t)
	n.writeMainConflist(t, "podnet")
	guard := func(line string) { writeTempFile(t, n.own(config.DefaultPluginFile), n.pluginFile(line)) }
	guard("bogus = 1")
	d := n.startReconciler(t, "--conflist-manage", "--cni-bin-dir", n.pluginDir(), "--resync-interval", "10m")
	d.untilUnready(t, "bogus: is not a known key", config.DefaultPluginFile)
	if n.hasPluginEntry(t, mainFile) {
		t.Fatal("the entry was inserted into a network that the plugin refuses")
	}
	guard("")
	d.untilManaged(t, mainFile)
	n.pod(t, "podnet")

	must(t, os.Remove(n.own(config.DefaultPluginFile)))
	n.writeMainConflist(t, "podnet")
	d.until(t, "the entry names the dataDir", func() bool {
		return strings.Contains(string(readFile(t, filepath.Join(n.cni.ConfDir, mainFile))), n.dataDir)
	})
	n.pod(t, "podnet")
}

// TestManageReadOnly checks that a read-only directory is logged once, with the remedy, and that
// the reconciler retries.
func TestManageReadOnly(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	dir := n.cni.ConfDir
	must(t, errors.Join(os.MkdirAll(dir, 0o755), unix.Mount(dir, dir, "", unix.MS_BIND, "")))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	n.writeMainConflist(t, "podnet")
	n.remount(t, dir, unix.MS_RDONLY)
	d := n.startReconciler(t, n.manageArgs(t, nil)...)
	d.untilUnready(t, "conflist: ", "read-only file system", "ReadWritePaths="+dir)
	time.Sleep(2 * time.Second)
	if tells := strings.Count(d.log(), "read-only file system"); tells != 1 {
		t.Errorf("the log reports it %d times:\n%s", tells, d.log())
	}
	n.remount(t, dir, 0)
	d.until(t, "entry", func() bool { return n.hasPluginEntry(t, mainFile) })
	d.untilManaged(t, mainFile)
}

// TestManageFollowsEntryFile changes the entry file while the reconciler runs. It checks that conflist and packets
// follow within two seconds, that an entry with which no pod would start changes nothing and is a fault of the source,
// that an entry which somebody else wrote stays and is reported, and what install says and does about it.
func TestManageFollowsEntryFile(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		entry := func(exempt ...string) string {
			return string(marshalIndent(t, n.entry(object{"nonMasqueradeCIDRs": exempt})))
		}
		conflistHas := func(exempt string) bool {
			list := string(readFile(t, filepath.Join(n.cni.ConfDir, mainFile)))
			return strings.Contains(list, exempt) && strings.Count(list, `"ip-masq"`) == 1
		}
		n.conflist(t, "other", object{"masqueradeCIDRs": []string{"1.2.5.0/24"}, "nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
		n.writeMainConflist(t, "podnet")
		d := n.startReconciler(t, append(n.manageArgs(t, object{"nonMasqueradeCIDRs": []string{"1.2.3.0/24"}}), "--conflist-network", "podnet")...)
		d.untilManaged(t, mainFile)
		p := n.pod(t, "podnet")
		all := onlyPod(p)
		n.exempt(t, p, true, "1.2.3.4")

		n.writeEntryFile(t, entry("1.2.4.0/24"))
		d.until(t, "the new entry in the conflist", func() bool { return conflistHas("1.2.4.0/24") })
		d.until(t, "the new policy", func() bool { return strings.Count(d.log(), "changed=nonMasqueradeCIDRs") == 2 })
		n.exempt(t, p, true, "1.2.4.1")
		n.exempt(t, p, false, "1.2.3.4")
		all.verdicts(t, n, true, map[string]string{"pod": "1.2.3.4"})
		if !strings.Contains(d.log(), `msg="replaced the plugin entry"`) || conflistHas("1.2.3.0/24") {
			t.Errorf("the former prefix is in the conflist, or the log does not say what happened:\n%s", d.log())
		}

		for _, bad := range [][]string{
			{entry("1.2.5.0/24"), "1.2.5.0/24", "other"},
			{entry("1.2.5.1/24"), "nonMasqueradeCIDRs[0]", "1.2.5.0/24"},
			{strings.Replace(entry("1.2.4.0/24"), "{", `{"prevResult": 3,`, 1), "prevResult"},
		} {
			n.writeEntryFile(t, bad[0])
			d.untilUnready(t, append([]string{"source: ", "conflist.entry_file"}, bad[1:]...)...)
			n.pod(t, "podnet")
			n.exempt(t, p, true, "1.2.4.1")
			if !conflistHas("1.2.4.0/24") {
				t.Error("a bad entry file changed the conflist")
			}
		}
		n.writeEntryFile(t, entry("1.2.4.0/24"))
		d.untilReady(t)

		byHand := strings.Replace(string(readFile(t, filepath.Join(n.cni.ConfDir, mainFile))), "1.2.4.0/24", "1.2.6.0/24", 1)
		n.writeConflistFile(t, mainFile, []byte(byHand))
		d.until(t, "conflist_entry_differs 1", func() bool { return d.metric(t, "conflist_entry_differs") == 1 })
		d.untilReady(t)
		n.writeEntryFile(t, entry("1.2.7.0/24"))
		time.Sleep(300 * time.Millisecond)
		if !conflistHas("1.2.6.0/24") {
			t.Error("somebody else's entry was replaced")
		}
		n.exempt(t, p, true, "1.2.6.1")
		said, _, _ := n.reconciler(t, "status", "--cni-bin-dir", n.pluginDir())
		if !strings.Contains(said, "entry-differs") || !strings.Contains(said, "in nonMasqueradeCIDRs, and ip-masq did not write it") {
			t.Errorf("status: %s", said)
		}
		install := func(args ...string) string {
			stdout, stderr, code := n.reconciler(t, slices.Concat([]string{"install", "--plugin", n.plugin(t), "--cni-bin-dir", t.TempDir(),
				"--conflist-network", "podnet", "--conflist-entry-file", n.entryPath()}, args)...)
			if code != 0 {
				t.Errorf("install: exit code %d\n%s%s", code, stdout, stderr)
			}
			return stdout
		}
		if got := install(); !strings.Contains(got, "stays; it differs from the entry file in nonMasqueradeCIDRs: install --replace replaces it") {
			t.Error(got)
		}
		if got := install("--replace"); !strings.Contains(got, "changed: nonMasqueradeCIDRs") || !conflistHas("1.2.7.0/24") {
			t.Error(got)
		}
		d.until(t, "conflist_entry_differs 0", func() bool { return d.metric(t, "conflist_entry_differs") == 0 })
		d.untilReady(t)
		n.exempt(t, p, true, "1.2.7.1")
	})
}
