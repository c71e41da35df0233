// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/mainplugins"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// multus is Multus in the configuration directory of a node.
type multus struct{ mainplugins.Multus }

func (m *multus) start(t *testing.T) { t.Helper(); must(t, m.Start()) }
func (m *multus) stop(t *testing.T)  { t.Helper(); must(t, m.Stop()) }
func (m *multus) tick(t *testing.T)  { t.Helper(); must(t, m.Tick()) }

// files returns the files of the directory.
func (m *multus) files(t *testing.T) []string {
	t.Helper()
	return topology.Must(filepath.Glob(filepath.Join(m.Dir, "*")))(t)
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
			if _, now := m.file(t); !bytes.Equal(now, before) {
				t.Errorf("the file of Multus was changed to\n%s", now)
			}
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
