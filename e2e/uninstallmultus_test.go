// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
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
	stdout, stderr, code := b.reconciler(t, b.args("install", "--plugin", b.plugin(t))...)
	file, _ := m.file(t)
	if code != 0 || !strings.Contains(stdout, b.conflistFile) || !strings.Contains(stderr, file) || !strings.Contains(stderr, "restart Multus") {
		t.Fatalf("install: exit code %d\n%s%s", code, stdout, stderr)
	}
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
	stdout, stderr, code := b.reconciler(t, "doctor", "-o", "json", "--cni-bin-dir", b.bin)
	var all struct {
		Findings []struct{ ID, Severity string }
	}
	if err := json.Unmarshal([]byte(stdout), &all); err != nil || code != 0 {
		t.Fatalf("doctor: %v, exit code %d\n%s%s", err, code, stdout, stderr)
	}
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
				stdout, stderr, code := b.reconciler(t, b.args("uninstall", args...)...)
				if code != 1 || !strings.Contains(stderr, file) || !strings.Contains(stderr, "restart Multus") {
					t.Fatalf("uninstall: exit code %d\n%s%s", code, stdout, stderr)
				}
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

// TestUninstallWithMultusCache checks that uninstall keeps the binary while Multus has a cached
// conflist of a running pod, which it uses for DEL, also with containerd.
func TestUninstallWithMultusCache(t *testing.T) {
	t.Parallel()
	b := newUninstalledNode(t, backends()[0])
	b.install(t, b.plugin(t))
	const id, cache = "7b0f", "/var/lib/cni/multus"
	task := filepath.Join(b.own("/run/containerd"), "io.containerd.runtime.v2.task/k8s.io", id)
	file := filepath.Join(cache, id)
	delegate := readFile(t, b.conflistFile)
	for range 40 { // the deepest nesting seen with Multus
		delegate = marshalIndent(t, object{"name": "multus-cni-network", "plugins": []any{object{"type": "multus", "delegates": []any{json.RawMessage(delegate)}}}})
	}
	must(t, firstOf(os.MkdirAll(task, 0o711), os.MkdirAll(b.own(cache), 0o755),
		os.WriteFile(b.own(file), marshalIndent(t, []any{object{"Conf": object{"type": ""}, "Bytes": delegate}}), 0o600)))
	stdout, stderr, code := b.reconciler(t, b.args("uninstall")...)
	if code != 1 || !strings.Contains(stderr, "the plugin stays") || !strings.Contains(stderr, file) || !strings.Contains(stderr, "Multus") {
		t.Fatalf("uninstall under Multus: exit code %d\n%s%s", code, stdout, stderr)
	}
	if _, err := os.Stat(b.binary()); err != nil {
		t.Fatal(err)
	}
	stdout, stderr, code = b.reconciler(t, b.args("uninstall", "--no-wait")...)
	if have := fileNames(t, b.bin); code != 0 || len(have) != 0 {
		t.Fatalf("uninstall --no-wait: exit code %d, %q\n%s%s", code, have, stdout, stderr)
	}
}

// TestUninstallLooksIntoEveryFile checks that a file that names the plugin keeps the binary if a
// runtime reads files with its extension.
func TestUninstallLooksIntoEveryFile(t *testing.T) {
	t.Parallel()
	const multusDir = "/etc/cni/multus/net.d"
	b := newUninstalledNode(t, backends()[0])
	b.install(t, b.plugin(t))
	named := marshalIndent(t, object{"cniVersion": "1.0.0", "name": "x", "plugins": []any{object{"type": "bridge"}, object{"type": "ip-masq"}}})
	for path, stays := range map[string]bool{
		filepath.Join(b.cni.ConfDir, "20-danm.conf"):                  true,
		filepath.Join(b.cni.ConfDir, "chain", "30.conf"):              true,
		filepath.Join(multusDir, "storage.conf"):                      true,
		filepath.Join(b.cni.ConfDir, "10-podnet.conflist.cilium_bak"): false,
	} {
		doc := marshalIndent(t, object{"cniVersion": "1.0.0", "name": "x", "type": "danm", "delegate": object{"inner": json.RawMessage(named)}})
		where := path
		if filepath.Dir(path) == multusDir {
			where = b.own(path)
		}
		must(t, firstOf(os.MkdirAll(filepath.Dir(where), 0o755), os.WriteFile(where, doc, 0o644)))
		stdout, stderr, code := b.reconciler(t, b.args("uninstall", "--keep-rules")...)
		_, err := os.Stat(b.binary())
		if stayed := err == nil; stayed != stays || (code == 1) != stays || strings.Contains(stderr, path) != stays {
			t.Errorf("%s: exit code %d, the plugin stays: %t\n%s%s", path, code, stayed, stdout, stderr)
		}
		must(t, os.Remove(where))
		if !stays {
			b.install(t, b.plugin(t))
		}
	}
	must(t, os.RemoveAll(b.own("/etc/cni/multus")))
	b.uninstall(t)
	if have := fileNames(t, b.bin); !slices.Equal(have, nil) {
		t.Errorf("files remain: %q", have)
	}
}
