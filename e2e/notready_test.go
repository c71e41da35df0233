// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// notReadyReasons returns the reasons for which the metric not_ready is 1.
func (d *daemon) notReadyReasons(t *testing.T) (all []string) {
	t.Helper()
	for line := range strings.Lines(d.scrape(t)) {
		if rest, is := strings.CutPrefix(line, `ip_masq_not_ready{reason="`); is && strings.HasSuffix(rest, " 1\n") {
			reason, _, _ := strings.Cut(rest, `"`)
			all = append(all, reason)
		}
	}
	return all
}

// TestNotReadyReasons checks that each fault of a node sets exactly one reason in the metric
// not_ready, because alerts select on it.
func TestNotReadyReasons(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, reason, says string
		backend            int
		args               []string
		spoil              func(t *testing.T, n *node)
		mend               func(t *testing.T, n *node)
		// bad is the number of invalid sources, conflicts the number of conflicts.
		bad, conflicts float64
	}{
		{name: "a full disk", reason: "state", says: "no space left on device",
			spoil: func(t *testing.T, n *node) {
				fillFileSystem(t, filepath.Join(n.dir, "disk", "ballast"))
				n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [20.0.0.0/8]\n")
			},
			mend: func(t *testing.T, n *node) { must(t, os.Remove(filepath.Join(n.dir, "disk", "ballast"))) }},
		{name: "a full disk after a reboot", reason: "state", says: "no space left on device",
			spoil: func(t *testing.T, n *node) {
				record := filepath.Join(n.dataDir, "record.json")
				text := regexp.MustCompile(`"boot":\s*"[^"]*"`).ReplaceAll(readFile(t, record), []byte(`"boot":"another"`))
				must(t, os.WriteFile(record, text, 0o600))
				fillFileSystem(t, filepath.Join(n.dir, "disk", "ballast"))
				n.flush(t)
			},
			mend: func(t *testing.T, n *node) { must(t, os.Remove(filepath.Join(n.dir, "disk", "ballast"))) }},
		{name: "a bad agent file", reason: "source", says: "host bits", bad: 1,
			spoil: func(t *testing.T, n *node) {
				n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [20.0.0.1/8]\n")
			}},
		{name: "a bad reconciler.toml", reason: "source", says: "not a known key",
			spoil: func(t *testing.T, n *node) { n.settingsFile(t, "no_such_key = 1\n") }},
		{name: "agent files conflict with a network", reason: "conflict", says: "conflicts with", conflicts: 1,
			spoil: func(t *testing.T, n *node) { n.agentFile(t, "ip-masq-agent", "randomFully: false\n") }},
		{name: "two networks conflict", reason: "conflict", says: "conflicts with", conflicts: 1,
			spoil: func(t *testing.T, n *node) { n.conflist(t, "zlatenet", object{"randomFully": false}) }},
		{name: "no plugin", reason: "plugin", says: "no pod can start", args: []string{"--cni-bin-dir", "/run/nothing-here"}},
		{name: "the entry is first", reason: "conflist", says: "plugins[0]",
			spoil: func(t *testing.T, n *node) {
				n.write(t, "podnet", n.entry(object{"randomFully": true}), n.bridge("podnet"))
			}},
		{name: "no iptables", reason: "backend", says: "iptables", backend: 1,
			spoil: func(t *testing.T, n *node) {
				for _, program := range []string{"iptables", "iptables-restore", "iptables-save"} {
					must(t, os.Remove(filepath.Join(n.path, program)))
				}
			}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t, backends()[c.backend])
			disk := filepath.Join(n.dir, "disk")
			n.dataDir = filepath.Join(disk, "data")
			must(t, os.Mkdir(disk, 0o700))
			must(t, syscall.Mount("full", disk, "tmpfs", 0, "size=128k,mode=0700"))
			t.Cleanup(func() { must(t, syscall.Unmount(disk, syscall.MNT_DETACH)) })
			n.conflist(t, "podnet", object{"randomFully": true})
			n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs: [1.2.3.0/24]\n")
			args := append([]string{"--resync-interval", "1h", "--config", n.settingsFile(t, "")}, c.args...)
			d := n.startReconciler(t, args...)
			if len(c.args) == 0 {
				d.untilReady(t)
				if all := d.notReadyReasons(t); len(all) > 0 || d.metric(t, "ready") != 1 {
					t.Fatalf("a ready node has reasons %q", all)
				}
			}
			if c.spoil != nil {
				c.spoil(t, n)
			}
			d.signal(t, syscall.SIGHUP)
			d.untilUnready(t, c.says)
			if all := d.notReadyReasons(t); fmt.Sprint(all) != "["+c.reason+"]" || d.metric(t, "ready") != 0 {
				_, body := d.ready()
				t.Errorf("reasons %q, want %s; /readyz:\n%s", all, c.reason, body)
			}
			body := d.scrape(t)
			valid, sources := d.metric(t, "source_valid"), float64(strings.Count(body, "\nip_masq_source_valid{"))
			if sources-valid != c.bad {
				t.Errorf("%v of %v sources are valid, want %v bad ones", valid, sources, c.bad)
			}
			if conflicts := d.metric(t, "policy_conflict"); conflicts != c.conflicts {
				t.Errorf("policy_conflict is %v, want %v", conflicts, c.conflicts)
			}
			if said, _, _ := run(t, n.reconcilerCommand(n.timeout(t), t, append([]string{"doctor", "--config", n.settingsFile(t, "")}, c.args...)...)); !strings.Contains(said, c.says) && c.reason == "conflict" {
				t.Errorf("doctor does not say %q:\n%s", c.says, said)
			}
			if c.mend != nil {
				c.mend(t, n)
				d.signal(t, syscall.SIGHUP)
				d.untilReady(t)
				if all := d.notReadyReasons(t); len(all) > 0 {
					t.Errorf("after the repair the node has reasons %q", all)
				}
			}
		})
	}
}

// fillFileSystem writes a file until the file system is full.
func fillFileSystem(t *testing.T, ballast string) {
	t.Helper()
	f, err := os.Create(ballast)
	must(t, err)
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	must(t, f.Close())
}
