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

// overwritten is how often the main CNI plugin overwrites its conflist.
const overwritten = 50

// TestOverwritten: the main CNI plugin overwrites the conflist as soon as it sees
// our entry, fifty times, under a containerd that watches. The entry is back in
// less than a second each time, and containerd has reloaded in proportion: with
// each of the two renames, and no more when all is quiet. No load fails, and the
// pod after it all is judged right.
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
		// A file that is written and renamed makes two; to put the entry back, by
		// an exchange of two files of which one is removed, four.
		if reloads < 2*overwritten || reloads > 7*overwritten {
			t.Errorf("containerd has reloaded %d times for %d overwrites", reloads, overwritten)
		}
		for line := range strings.Lines(strings.TrimPrefix(n.Daemon.Output(), said)) {
			if strings.Contains(line, "failed to reload cni") {
				t.Errorf("a load has failed: %s", line)
			}
		}
		// That the entry was removed so often is told for a while.
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

// reloads is how often containerd has read the conflists anew, by what it says.
func (n *criNode) reloads() int {
	return strings.Count(n.Daemon.Output(), "receiving change event from cni conf dir")
}

// quiet waits until containerd has not reloaded for a while.
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
