// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/version"
)

// multus imitates Multus with --multus-conf-file=auto: it writes the same files into the
// configuration directory, at its start and, with --cleanup-config-on-exit, once a second if the
// first other file in the directory has changed.
type multus struct {
	dir string
	// follows imitates --cleanup-config-on-exit=true: Multus follows changes of its master and
	// removes its files at exit.
	follows bool
	thick   bool

	master string
	hash   [sha256.Size]byte
}

// start starts Multus as a new container does.
func (m *multus) start(t *testing.T) {
	t.Helper()
	m.master, m.hash = "", [sha256.Size]byte{}
	m.generate(t)
}

// stop ends Multus by SIGTERM. Thick Multus always removes its file.
func (m *multus) stop(t *testing.T) {
	t.Helper()
	for _, name := range []string{"00-multus.conf", "00-multus.conflist"} {
		if err := os.Remove(filepath.Join(m.dir, name)); (m.follows || m.thick) && err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
}

// tick does what Multus does once a second. Thin Multus waits for its master to come back if the
// master is gone, and does not choose another file.
func (m *multus) tick(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(m.master); m.follows && !m.thick && err == nil {
		m.generate(t)
	}
}

// generate chooses the master and writes the configuration of Multus.
func (m *multus) generate(t *testing.T) {
	t.Helper()
	skipped := "00-multus.conf"
	if m.thick {
		skipped = "00-multus"
	}
	m.master = ""
	for _, name := range fileNames(t, m.dir) {
		ext := filepath.Ext(name)
		if m.master == "" && (ext == ".conf" || ext == ".conflist") && !strings.HasPrefix(name, skipped) {
			m.master = filepath.Join(m.dir, name)
		}
	}
	if m.master == "" {
		t.Fatal("Multus finds no master")
	}
	doc := readFile(t, m.master)
	hash := sha256.Sum256(doc)
	if hash == m.hash {
		return
	}
	m.hash = hash
	var master map[string]any
	if err := json.Unmarshal(doc, &master); err != nil {
		t.Fatalf("Multus cannot read its master: %v", err)
	}
	stated, ok := master["cniVersion"].(string)
	if !ok {
		t.Fatal("Multus wants its master to state a cniVersion")
	}
	conf := object{"type": "multus", "kubeconfig": "/etc/cni/net.d/multus.d/multus.kubeconfig", "delegates": []any{master}}
	file := "00-multus.conf"
	isList, err := version.GreaterThanOrEqualTo(stated, "1.0.0")
	switch {
	case err != nil:
		t.Fatal(err)
	case m.thick:
		conf = object{"cniVersion": "0.3.1", "name": "multus-cni-network", "type": "multus-shim", "clusterNetwork": "/host" + m.master}
	case isList:
		conf = object{"cniVersion": stated, "name": "multus-cni-network", "plugins": []any{conf}}
		file = "00-multus.conflist"
	default:
		conf["cniVersion"], conf["name"] = stated, "multus-cni-network"
	}
	next := filepath.Join(m.dir, "00-multus.conf.new")
	must(t, firstOf(os.WriteFile(next, marshalIndent(t, conf), 0o600), os.Rename(next, filepath.Join(m.dir, file))))
}

// file returns the current configuration of Multus.
func (m *multus) file(t *testing.T) (path string, doc []byte) {
	t.Helper()
	for _, name := range fileNames(t, m.dir) {
		if strings.HasPrefix(name, "00-multus.") {
			path = filepath.Join(m.dir, name)
		}
	}
	if path == "" {
		t.Fatalf("no configuration of Multus among %q", fileNames(t, m.dir))
	}
	return path, readFile(t, path)
}

// wantConfigured fails the test unless the directory has one file of Multus, and the plugin entry
// is in the master once and in the delegate of Multus once.
func (m *multus) wantConfigured(t *testing.T) {
	t.Helper()
	path, doc := m.file(t)
	want, have := []string{filepath.Base(path), mainFile}, fileNames(t, m.dir)
	for range 20 { // the reconciler may be replacing a file
		if slices.Equal(have, want) {
			break
		}
		time.Sleep(50 * time.Millisecond)
		have = fileNames(t, m.dir)
	}
	if !slices.Equal(have, want) {
		t.Errorf("the directory has %q", have)
	}
	copies := 1
	if m.thick {
		copies = 0
	}
	const itself = `"type": "multus`
	entries := func(doc []byte) int { return len(regexp.MustCompile(`"type": ?"ip-masq"`).FindAll(doc, -1)) }
	if bytes.Count(doc, []byte(itself)) != 1 || entries(doc) != copies {
		t.Errorf("%s is\n%s", path, doc)
	}
	if master := readFile(t, filepath.Join(m.dir, mainFile)); entries(master) != 1 || m.master != filepath.Join(m.dir, mainFile) {
		t.Errorf("the master is %s, and %s has\n%s", m.master, mainFile, master)
	}
}

// writeMultusMaster writes a main CNI plugin's conflist with a cniVersion.
func (n *node) writeMultusMaster(t *testing.T, cniVersion string) {
	t.Helper()
	n.writeConflistFile(t, mainFile, marshalIndent(t, object{"cniVersion": cniVersion, "name": "podnet", "plugins": []any{n.bridge("podnet")}}))
}

// TestManageWithMultus checks that the reconciler inserts the entry into the network that Multus
// delegates to, does not change the file that Multus generates, and that repeated generation never
// nests the entry.
func TestManageWithMultus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, version  string
		follows, thick bool
	}{
		{name: "thin", version: "0.3.1"},
		{name: "thin, a list", version: "1.0.0"},
		{name: "thin, with cleanup on exit", version: "0.4.0", follows: true},
		{name: "thin, a list, with cleanup on exit", version: "1.0.0", follows: true},
		{name: "thick", version: "0.3.1", thick: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, backends()[0])
			n.writeMultusMaster(t, c.version)
			m := &multus{dir: n.cni.ConfDir, follows: c.follows, thick: c.thick}
			m.start(t)
			generated, before := m.file(t)
			d := n.startReconciler(t, n.manageArgs(t, nil)...)
			d.within(t, fileChangeTimeout, "entry in the master", func() bool { return n.hasPluginEntry(t, mainFile) })
			if !c.thick {
				// Pods start without the plugin until Multus has copied the entry.
				d.eventuallyUnready(t, "conflist: "+generated, "copy of network podnet without the plugin entry", "restart Multus")
			}
			if _, now := m.file(t); !bytes.Equal(now, before) {
				t.Errorf("the file of Multus was changed to\n%s", now)
			}
			for _, says := range []string{mainFile, generated} {
				d.until(t, says+" in the log", func() bool { return strings.Contains(d.log(), says) })
			}
			if c.follows {
				m.tick(t)
				m.wantConfigured(t)
			}
			for range 3 {
				m.stop(t)
				time.Sleep(200 * time.Millisecond) // time for the reconciler to act
				m.start(t)
				d.eventuallyReady(t)
				for range 3 {
					time.Sleep(100 * time.Millisecond)
					m.tick(t)
				}
				m.wantConfigured(t)
			}
			// The main CNI plugin rewrites its file; Multus follows the change or is restarted.
			n.writeMultusMaster(t, c.version)
			d.within(t, fileChangeTimeout, "entry in the master", func() bool { return n.hasPluginEntry(t, mainFile) })
			m.tick(t)
			if !c.follows {
				m.start(t)
			}
			d.eventuallyReady(t)
			m.wantConfigured(t)
			if d.metric(t, "conflist_present") != 1 || d.metric(t, "conflist_flapping") != 0 {
				t.Error(d.scrape(t))
			}
		})
	}
}

// TestManageReportsNestedMultus checks that the reconciler reports nested copies in the file of
// Multus until Multus has generated it again.
func TestManageReportsNestedMultus(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.writeMultusMaster(t, "0.3.1")
	m := &multus{dir: n.cni.ConfDir}
	const wrapper = "00-a-wrapper.conflist"
	for range 3 {
		m.start(t)
		_, doc := m.file(t)
		n.writeConflistFile(t, wrapper, fmt.Appendf(nil, `{"cniVersion": "0.3.1", "name": "multus-cni-network", "plugins": [%s, %s]}`, doc, marshalIndent(t, n.entry(nil))))
	}
	m.start(t) // Multus takes the wrapper as its master
	must(t, os.Remove(filepath.Join(n.cni.ConfDir, wrapper)))
	generated, doc := m.file(t)
	if depth := bytes.Count(doc, []byte(`"type": "multus"`)); depth != 4 {
		t.Fatalf("%d levels:\n%s", depth, doc)
	}
	d := n.startReconciler(t, n.manageArgs(t, nil)...)
	d.within(t, fileChangeTimeout, "entry in the master", func() bool { return n.hasPluginEntry(t, mainFile) })
	d.eventuallyUnready(t, "conflist: "+generated, "nested", "4", "restart Multus")
	m.start(t)
	d.eventuallyReady(t)
	m.wantConfigured(t)
}

// TestManageUnknownMultusDelegate checks that the reconciler writes nothing if it cannot determine
// the network that Multus delegates to.
func TestManageUnknownMultusDelegate(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.writeMainConflist(t, mainFile, "podnet")
	args := n.manageArgs(t, nil)
	const file = "00-multus.conf"
	for _, c := range []struct {
		conf object
		says []string
	}{
		{object{"clusterNetwork": "/host/run/multus/cni/net.d/10-ovn-kubernetes.conf"}, []string{"/host/run/multus/cni/net.d/10-ovn-kubernetes.conf", "--cni-conf-dir"}},
		{object{"clusterNetwork": "main"}, []string{`main`, "--conflist-network"}},
		{object{"delegates": []any{object{"type": "weave-net"}}}, []string{"name", "--conflist-network"}},
		{object{"delegates": []any{object{"name": "another", "type": "weave-net"}}}, []string{`another`, "--conflist-network"}},
		{object{"delegates": "?"}, []string{"--conflist-network"}},
		{object{}, []string{"--conflist-network"}},
	} {
		c.conf["cniVersion"], c.conf["name"], c.conf["type"] = "0.3.1", "multus-cni-network", "multus"
		doc := marshalIndent(t, c.conf)
		n.writeConflistFile(t, file, doc)
		t.Run(fmt.Sprint(c.conf), func(t *testing.T) {
			d := n.startReconciler(t, args...)
			d.eventuallyUnready(t, append(c.says, "conflist: ", filepath.Join(n.cni.ConfDir, file))...)
			time.Sleep(200 * time.Millisecond)
			if have := fileNames(t, n.cni.ConfDir); !slices.Equal(have, []string{file, mainFile}) || n.hasPluginEntry(t, mainFile) || n.hasPluginEntry(t, file) {
				t.Errorf("the reconciler wrote: %q", have)
			}
			// With --conflist-network the delegate of Multus does not matter.
			d.stop(t)
			d = n.startReconciler(t, append(args, "--conflist-network", "podnet")...)
			d.untilManaged(t, mainFile)
			d.stop(t)
			n.writeMainConflist(t, mainFile, "podnet")
		})
	}
	// An entry in the delegate itself is recognized.
	n.writeConflistFile(t, file, marshalIndent(t, object{"cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus",
		"delegates": []any{object{"name": "x", "plugins": []any{object{"type": "weave-net"}, n.entry(nil)}}}}))
	d := n.startReconciler(t, args...)
	d.eventuallyReady(t)
	if d.metric(t, "conflist_present") != 1 || n.hasPluginEntry(t, mainFile) {
		t.Error("the entry in the delegate is not recognized")
	}
}
