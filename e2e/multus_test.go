// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/mainplugins"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// multus is Multus in the configuration directory of a node.
type multus struct{ mainplugins.Multus }

func (m *multus) start(t *testing.T) { t.Helper(); must(t, m.Start()) }
func (m *multus) stop(t *testing.T)  { t.Helper(); must(t, m.Stop()) }
func (m *multus) tick(t *testing.T)  { t.Helper(); must(t, m.Tick()) }

// file returns the current configuration of Multus.
func (m *multus) file(t *testing.T) (path string, doc []byte) {
	t.Helper()
	for _, name := range fileNames(t, m.Dir) {
		if strings.HasPrefix(name, "00-multus.") {
			path = filepath.Join(m.Dir, name)
		}
	}
	if path == "" {
		t.Fatalf("no configuration of Multus among %q", fileNames(t, m.Dir))
	}
	return path, readFile(t, path)
}

// wantConfigured fails the test unless the directory has one file of Multus, and the plugin entry
// is in the master once and in the delegate of Multus once.
func (m *multus) wantConfigured(t *testing.T) {
	t.Helper()
	path, doc := m.file(t)
	want := []string{filepath.Base(path), mainFile}
	if !timelimit.Await(timelimit.Wait, func() bool { return slices.Equal(fileNames(t, m.Dir), want) }) { // the reconciler may be replacing a file
		t.Errorf("the directory has %q", fileNames(t, m.Dir))
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
	if master := readFile(t, filepath.Join(m.Dir, mainFile)); entries(master) != 1 || m.Master != filepath.Join(m.Dir, mainFile) {
		t.Errorf("the master is %s, and %s has\n%s", m.Master, mainFile, master)
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
			m := &multus{mainplugins.Multus{Dir: n.cni.ConfDir, Follows: c.follows, Thick: c.thick}}
			m.start(t)
			generated, before := m.file(t)
			d := n.startReconciler(t, n.manageArgs(t, nil)...)
			d.until(t, "entry in the master", func() bool { return n.hasPluginEntry(t, mainFile) })
			if !c.thick {
				// Pods start without the plugin until Multus has copied the entry.
				d.untilUnready(t, "conflist: "+generated, "copy of network podnet without the plugin entry", "restart Multus")
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
				d.untilReady(t)
				for range 3 {
					time.Sleep(100 * time.Millisecond)
					m.tick(t)
				}
				m.wantConfigured(t)
			}
			// The main CNI plugin rewrites its file; Multus follows the change or is restarted.
			n.writeMultusMaster(t, c.version)
			d.until(t, "entry in the master", func() bool { return n.hasPluginEntry(t, mainFile) })
			m.tick(t)
			if !c.follows {
				m.start(t)
			}
			d.untilReady(t)
			m.wantConfigured(t)
			if d.metric(t, "conflist_present") != 1 || d.metric(t, "conflist_flapping") != 0 {
				t.Error(d.scrape(t))
			}
		})
	}
}

// besideMultus makes a node where Multus has copied the conflist with the plugin entry.
func besideMultus(t *testing.T, follows bool) (*uninstalledNode, *multus) {
	t.Helper()
	b := newUninstalledNode(t, backends()[0])
	b.writeMultusMaster(t, "0.3.1")
	b.original = readFile(t, b.conflistFile)
	m := &multus{mainplugins.Multus{Dir: b.cni.ConfDir, Follows: follows}}
	m.start(t)
	file, _ := m.file(t)
	b.wantSays(t, 0, []string{b.conflistFile, file, "restart Multus"}, b.args("install", "--plugin", b.plugin(t))...)
	if found := b.findings(t); !slices.Contains(found, "problem multus") {
		t.Errorf("doctor finds %q", found)
	}
	m.stop(t)
	m.start(t)
	m.wantConfigured(t)
	if found := b.findings(t); slices.Contains(found, "problem multus") || slices.Contains(found, "problem conflist-without-us") {
		t.Errorf("doctor finds %q", found)
	}
	return b, m
}

// findings returns what doctor reports, each finding with its severity.
func (b *uninstalledNode) findings(t *testing.T) []string {
	t.Helper()
	var all struct {
		Findings []struct{ ID, Severity string }
	}
	must(t, json.Unmarshal([]byte(b.wantSays(t, 0, nil, "doctor", "-o", "json", "--cni-bin-dir", b.bin)), &all))
	var found []string
	for _, f := range all.Findings {
		found = append(found, f.Severity+" "+f.ID)
	}
	return found
}

// TestUninstallWithMultus checks that uninstall keeps the binary while the file of Multus names the
// plugin, and removes it once Multus has generated the file again.
func TestUninstallWithMultus(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{nil, {"--no-wait"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			b, m := besideMultus(t, false)
			file, _ := m.file(t)
			for range 2 {
				b.wantSays(t, 1, []string{file, "restart Multus"}, b.args("uninstall", args...)...)
				if _, err := os.Stat(b.binary()); err != nil {
					t.Fatalf("pods cannot start: %v", err)
				}
				if have := readFile(t, b.conflistFile); !bytes.Equal(have, b.original) {
					t.Errorf("the master is\n%s", have)
				}
			}
			m.start(t)
			b.uninstall(t, args...)
			if have := fileNames(t, b.bin); len(have) != 0 {
				t.Errorf("files remain: %q", have)
			}
		})
	}
}

// TestUninstallWithMultusCleanupOnExit checks that Multus follows the removal within a second.
func TestUninstallWithMultusCleanupOnExit(t *testing.T) {
	t.Parallel()
	b, m := besideMultus(t, true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for b.hasPluginEntry(t, mainFile) {
			select {
			case <-t.Context().Done():
				return
			default:
			}
		}
		m.tick(t)
	}()
	b.uninstall(t)
	<-done
	if have := fileNames(t, b.bin); len(have) != 0 {
		t.Errorf("files remain: %q", have)
	}
}
