// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/mainplugins"
)

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
