// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestReadyMeansPodsStart checks that each fault that makes every ADD fail also makes the node not
// ready, is found by doctor, and is repaired or reported by install.
func TestReadyMeansPodsStart(t *testing.T) {
	t.Parallel()
	b := newUninstalledNode(t, backends()[0])
	plugin := readFile(t, b.plugin(t))
	entry := b.node.entry(object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
	right := func() {
		t.Helper()
		writeTempFile(t, b.binary(), string(plugin))
		must(t, os.Chmod(b.binary(), 0o755))
		b.write(t, "podnet", b.bridge("podnet"), entry)
	}
	right()
	d := b.startReconciler(t, "--cni-bin-dir", b.bin, "--resync-interval", "10m")
	d.eventuallyReady(t)
	for _, c := range []struct {
		name, reason string
		spoil        func()
		says         string
		repaired     bool // install repairs the fault
	}{
		{"the plugin is missing", "plugin", func() { must(t, os.Remove(b.binary())) }, "is missing", true},
		{"the plugin is not executable", "plugin", func() { must(t, os.Chmod(b.binary(), 0o644)) }, "is not executable", true},
		{"the entry is first", "conflist", func() { b.write(t, "podnet", entry, b.bridge("podnet")) }, "first", false},
		{"the entry is the only plugin", "conflist", func() { b.write(t, "podnet", entry) }, "alone", false},
		{"another dataDir", "conflist", func() {
			other := b.node.entry(object{"dataDir": filepath.Join(b.dir, "elsewhere")})
			b.write(t, "podnet", b.bridge("podnet"), other)
		}, filepath.Join(b.dir, "elsewhere"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.spoil()
			d.eventuallyUnready(t, c.reason+": ", c.says)
			d.until(t, "reason "+c.reason+" in the log", func() bool { return strings.Contains(d.log(), "reason="+c.reason) })
			if _, body := d.ready(); strings.Count(strings.TrimSpace(body), "\n") > 0 {
				t.Errorf("/readyz gives more than one reason:\n%s", body)
			}
			if _, _, code := b.add(t, "podnet", b.newPod(t)); code == 0 && c.name != "another dataDir" {
				t.Error("ADD succeeds")
			}
			if found := b.findings(t); !slices.Contains(found, "fault "+c.reason) {
				t.Errorf("doctor finds %q", found)
			}
			stdout, stderr, code := b.reconciler(t, b.args("install", "--plugin", b.plugin(t))...)
			if c.repaired && code != 0 || !c.repaired && (code != 1 || !strings.Contains(stderr, c.says) || strings.Contains(stdout, "has the plugin entry")) {
				t.Errorf("install: exit code %d\n%s%s", code, stdout, stderr)
			}
			if !c.repaired {
				right()
			}
			d.eventuallyReady(t)
			b.pod(t, "podnet")
			if found := b.findings(t); slices.Contains(found, "fault "+c.reason) {
				t.Errorf("doctor still finds %q", found)
			}
			b.reconciler(t, "cleanup", "--data-dir", filepath.Join(b.dir, "elsewhere"))
		})
	}
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
