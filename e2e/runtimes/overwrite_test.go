// SPDX-License-Identifier: Apache-2.0

//go:build e2e_runtimes

package runtimes

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"
)

// overwritten is the number of times that the main CNI plugin overwrites its conflist.
const overwritten = 50

// TestOverwritten overwrites the conflist fifty times as soon as it has the plugin entry, under a
// containerd that watches it. It checks that the entry is restored within a second each time, that
// containerd reloads only for these writes and without an error, and that the next pod gets the
// right verdicts.
func TestOverwritten(t *testing.T) {
	onEvery(t, forms()[:1], func(t *testing.T, n *criNode) {
		const entryFile = "/etc/ip-masq/entry.json"
		text, err := json.Marshal(n.entry(prefixes()))
		must(t, err)
		must(t, n.WriteFile(entryFile, string(text), 0o644))
		n.conflist(t, bridge())
		r := n.reconciler(t, "/nonexistent", "--conflist-manage", "--conflist-entry-file", entryFile, "--cni-bin-dir", binDir)
		has := func() bool {
			text, err := os.ReadFile(n.Path(conflistDir + "/10-pods.conflist"))
			must(t, err)
			return strings.Contains(string(text), `"ip-masq"`)
		}
		until(t, 5*time.Second, "entry", has)
		n.soonReady(t, r)
		n.quiet(t)
		said := n.Daemon.Output()
		before := n.reloads()
		var longest time.Duration
		for range overwritten {
			n.conflist(t, bridge())
			start := time.Now()
			until(t, time.Second, "entry", has)
			longest = max(longest, time.Since(start))
		}
		n.quiet(t)
		reloads := n.reloads() - before
		t.Logf("%s: %d overwrites, %d reloads, entry back in %s at most", n.Version, overwritten, reloads, longest)
		// Writing and renaming a file makes two events; restoring the entry by an exchange of two
		// files and the removal of one makes four.
		if reloads < 2*overwritten || reloads > 7*overwritten {
			t.Errorf("containerd has reloaded %d times for %d overwrites", reloads, overwritten)
		}
		for line := range strings.Lines(strings.TrimPrefix(n.Daemon.Output(), said)) {
			if strings.Contains(line, "failed to reload cni") {
				t.Errorf("a load has failed: %s", line)
			}
		}
		// The node stays not ready for a while after so many removals.
		until(t, time.Minute, "readiness", func() bool {
			code, _ := r.ready(t)
			return code == 200
		})
		n.ready(t, true)
		p := n.pod(t, "pod")
		n.firstPackets(t, p)
		n.end(t, p)
		n.wantAttachments(t, 0)
	})
}

// reloads returns how often containerd has reloaded the conflists, from its log.
func (n *criNode) reloads() int {
	return strings.Count(n.Daemon.Output(), "receiving change event from cni conf dir")
}

// quiet waits until containerd stops reloading.
func (n *criNode) quiet(t *testing.T) {
	t.Helper()
	last, since := n.reloads(), time.Now()
	until(t, 10*time.Second, "quiet", func() bool {
		if now := n.reloads(); now != last {
			last, since = now, time.Now()
		}
		return time.Since(since) > 500*time.Millisecond
	})
}
