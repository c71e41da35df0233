// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/mainplugins"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
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
	doc := assert.Must(json.MarshalIndent(v, "", "  "))(t)
	return doc
}

// writeMainConflist writes a conflist atomically, as a main CNI plugin does, without the plugin
// entry.
func (n *node) writeMainConflist(t *testing.T) {
	t.Helper()
	n.writeConflistFile(t, mainFile, n.mainConflist(t, "podnet"))
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
		d.untilUnready(t, "conflist: waiting for the main CNI plugin's network: find the network in "+n.cni.ConfDir)
		if got := d.metric(t, "conflist_present") + d.metric(t, "conflist_repairs_total") + d.metric(t, "conflist_flapping"); got != 0 {
			t.Errorf("the metrics report an entry: %v", got)
		}
		n.writeMainConflist(t)
		d.untilManaged(t, mainFile)
		all := onlyPod(n.pod(t, "podnet"))
		all.verdicts(t, n, false, map[string]string{"pod": "1.2.3.4"})
		all.verdicts(t, n, true, map[string]string{"pod": "1.2.4.1"})
		d.wantMetric(t, 1, "conflist_repairs_total")
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
	})
}

// TestManageWithoutEntryFile checks that the default entry has the node's dataDir, without which
// ADD fails, and that no network gets an entry while plugin.toml is bad.
func TestManageWithoutEntryFile(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.installPlugin(t)
	n.writeMainConflist(t)
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
	n.writeMainConflist(t)
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
	n.writeMainConflist(t)
	n.remount(t, dir, unix.MS_RDONLY)
	d := n.startReconciler(t, n.manageArgs(t, nil)...)
	d.untilUnready(t, "conflist: ", "read-only file system", "ReadWritePaths="+dir)
	time.Sleep(2 * time.Second)
	wantSame(t, "how often the log reports it", strings.Count(d.log(), "read-only file system"), 1)
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
		n.writeMainConflist(t)
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
		wantText(t, "status", said, "entry-differs", "in nonMasqueradeCIDRs, and ip-masq did not write it")
		install := func(args ...string) string {
			stdout, stderr, code := n.reconciler(t, slices.Concat([]string{"install", "--plugin", n.plugin(t), "--cni-bin-dir", t.TempDir(),
				"--conflist-network", "podnet", "--conflist-entry-file", n.entryPath()}, args)...)
			if code != 0 {
				t.Errorf("install: exit code %d\n%s%s", code, stdout, stderr)
			}
			return stdout
		}
		wantText(t, "install", install(), "stays; it differs from the entry file in nonMasqueradeCIDRs: install --replace replaces it")
		if got := install("--replace"); !strings.Contains(got, "changed: nonMasqueradeCIDRs") || !conflistHas("1.2.7.0/24") {
			t.Error(got)
		}
		d.until(t, "conflist_entry_differs 0", func() bool { return d.metric(t, "conflist_entry_differs") == 0 })
		d.untilReady(t)
		n.exempt(t, p, true, "1.2.7.1")
	})
}

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
	assert.Equal(t, "the file", string(readFile(t, b.conflistFile)), string(b.original))
	b.pod(t, "podnet")
	write("")
	b.wantSays(t, 0, nil, b.args("install", "--plugin", b.plugin(t))...)
	b.pod(t, "podnet")
}

// multus is Multus in the configuration directory of a node.
type multus struct{ mainplugins.Multus }

func (m *multus) start(t *testing.T) { t.Helper(); must(t, m.Start()) }
func (m *multus) stop(t *testing.T)  { t.Helper(); must(t, m.Stop()) }
func (m *multus) tick(t *testing.T)  { t.Helper(); must(t, m.Tick()) }

// files returns the files of the directory.
func (m *multus) files(t *testing.T) []string {
	t.Helper()
	return assert.Must(filepath.Glob(filepath.Join(m.Dir, "*")))(t)
}

// file returns the current configuration of Multus.
func (m *multus) file(t *testing.T) (path string, doc []byte) {
	t.Helper()
	files := m.files(t)
	at := slices.IndexFunc(files, func(f string) bool { return strings.HasPrefix(filepath.Base(f), "00-multus.") })
	if at < 0 {
		t.Fatalf("no configuration of Multus among %q", files)
	}
	return files[at], readFile(t, files[at])
}

// wantConfigured fails the test unless the directory has one file of Multus, and the plugin entry
// is in the master once and in the delegate of Multus once.
func (m *multus) wantConfigured(t *testing.T) {
	t.Helper()
	path, doc := m.file(t)
	main := filepath.Join(m.Dir, mainFile)
	if !timelimit.Await(timelimit.Wait, func() bool { return slices.Equal(m.files(t), []string{path, main}) }) { // the reconciler may be replacing a file
		t.Errorf("the directory has %q", m.files(t))
	}
	copies := 1
	if m.Thick {
		copies = 0
	}
	plugins := func(name string, doc []byte) int { return len(regexp.MustCompile(`"type": ?"`+name).FindAll(doc, -1)) }
	entries := func(doc []byte) int { return plugins("ip-masq", doc) }
	if plugins("multus", doc) != 1 || entries(doc) != copies {
		t.Errorf("%s is\n%s", path, doc)
	}
	if master := readFile(t, main); entries(master) != 1 || m.Master != main {
		t.Errorf("the master is %s, and %s has\n%s", m.Master, mainFile, master)
	}
}

// TestManageWithMultus checks that the reconciler inserts the entry into the network that Multus
// delegates to, does not change the file that Multus generates, and that repeated generation never
// nests the entry.
func TestManageWithMultus(t *testing.T) {
	t.Parallel()
	for name, thick := range map[string]bool{"thin": false, "thick": true} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			writeMaster := func() {
				n.writeConflistFile(t, mainFile, marshalIndent(t, object{"cniVersion": "0.3.1", "name": "podnet", "plugins": []any{n.bridge("podnet")}}))
			}
			writeMaster()
			m := &multus{mainplugins.Multus{Dir: n.cni.ConfDir, Thick: thick}}
			m.start(t)
			generated, before := m.file(t)
			d := n.startReconciler(t, n.manageArgs(t, nil)...)
			d.until(t, "entry in the master", func() bool { return n.hasPluginEntry(t, mainFile) })
			if !thick {
				// Pods start without the plugin until Multus has copied the entry.
				d.untilUnready(t, "conflist: "+generated, "copy of network podnet without the plugin entry", "restart Multus")
			}
			_, now := m.file(t)
			assert.Equal(t, "the file", string(now), string(before))
			for _, says := range []string{mainFile, generated} {
				d.until(t, says+" in the log", func() bool { return strings.Contains(d.log(), says) })
			}
			for range 3 {
				m.stop(t)
				time.Sleep(200 * time.Millisecond) // time for the reconciler to act
				m.start(t)
				d.untilReady(t)
				for range 3 {
					time.Sleep(100 * time.Millisecond)
					m.tick(t)
				}
				m.wantConfigured(t)
			}
			// The main CNI plugin rewrites its file; Multus follows the change or is restarted.
			writeMaster()
			d.until(t, "entry in the master", func() bool { return n.hasPluginEntry(t, mainFile) })
			m.tick(t)
			m.start(t)
			d.untilReady(t)
			m.wantConfigured(t)
			if d.metric(t, "conflist_present") != 1 || d.metric(t, "conflist_flapping") != 0 {
				t.Error(d.scrape(t))
			}
			if !thick {
				d.stop(t)
				writeMaster()
				m.start(t)
				n.wantSays(t, 0, []string{filepath.Join(n.cni.ConfDir, mainFile), generated, "restart Multus"},
					"install", "--plugin", n.plugin(t), "--cni-bin-dir", t.TempDir(), "--conflist-entry-file", n.entryPath())
			}
		})
	}
}
