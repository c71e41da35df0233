// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// TestUnwritableFamily enables IPv6 on a node without ip6tables. It checks that neither the
// reconciler nor an ADD writes half of a new chain, and that the node becomes ready once the
// program exists.
func TestUnwritableFamily(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[1])
	bin := filepath.Join(n.dir, "bin")
	missing := map[string]string{}
	for _, name := range []string{"ip6tables", "ip6tables-restore", "ip6tables-save"} {
		target, err := os.Readlink(filepath.Join(bin, name))
		must(t, err)
		must(t, os.Remove(filepath.Join(bin, name)))
		missing[name] = target
	}
	n.agentFile(t, "ip-masq-agent", "backend: iptables\nenableIPv6: true\n")
	watcher := n.watchCommits(t)
	d := n.startReconciler(t)
	d.eventuallyUnready(t, "chain IP-MASQ-AGENT", "ip6tables")
	const long = 3 * time.Second
	time.Sleep(long)
	if count := watcher.Count(); count > 0 {
		t.Errorf("%d commits in %s: %s", count, long, watcher.countByProgram(0))
	}
	if lines := strings.Count(d.log(), "level=ERROR"); lines != 2 { // rules and backend
		t.Errorf("%d errors in the log, want 1:\n%s", lines, d.log())
	}
	// An ADD writes no IPv4 rules either.
	before := watcher.untilIdle(t, 50*time.Millisecond)
	n.invoke(t, invocation{verb: "ADD", conf: n.conf(t, "podnet", object{"enableIPv6": true})}).want(t, 100, "ip6tables")
	if after := watcher.untilIdle(t, 50*time.Millisecond); after != before {
		t.Errorf("ADD commits: %s", watcher.countByProgram(before))
	}
	for name, target := range missing {
		must(t, os.Symlink(target, filepath.Join(bin, name)))
	}
	d.signal(t, syscall.SIGHUP)
	d.eventuallyReady(t)
	n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
}

// TestRulesGoneAndProgramMissing flushes the rules of a node that has lost its programs of iptables. It checks that
// /readyz, the metric and `check` have both faults, as the critical alert asks for `rules`.
func TestRulesGoneAndProgramMissing(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[1])
	n.conflist(t, "podnet", nil)
	d := n.startReconciler(t).untilReady(t)
	must(t, os.Rename(filepath.Join(n.dir, "bin"), filepath.Join(n.dir, "away")))
	n.tool(t, "nft", "flush", "ruleset")
	d.eventuallyUnready(t, "rules: ", "missing jump", "backend: ", "iptables")
	for _, reason := range []string{"rules", "backend"} {
		if d.metric(t, "not_ready", fmt.Sprintf("reason=%q", reason)) != 1 {
			t.Errorf("the metric lacks the reason %s", reason)
		}
	}
}

// TestRepairsBesideARefusedPolicy makes ip6tables fail, so that the agent files' policy is refused. It checks that nothing of
// it is written, that the reconciler repairs drift of another chain at once, and that it says so once.
func TestRepairsBesideARefusedPolicy(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[1])
	n.conflist(t, "podnet", object{"masqChain": "OTHER", "sourceCIDRs": []string{"10.1.0.0/16"}})
	restore := n.breakProgram(t, "ip6tables-restore", "true")
	n.addAndCheck(t, n.conf(t, "podnet", object{"masqChain": "OTHER", "sourceCIDRs": []string{"10.1.0.0/16"}}))
	must(t, os.MkdirAll(n.agentDir(), 0o755))
	d := n.startReconciler(t)
	d.untilReady(t)
	n.wantJumps(t, "IP-MASQ-AGENT", 1, 0) // for the empty directory
	n.agentFile(t, "ip-masq-agent", "backend: iptables\nenableIPv6: true\nmasqLinkLocal: true\n")
	d.eventuallyUnready(t, "the agent files", "not today")
	agent := n.tool(t, "iptables", "-t", "nat", "-S", "IP-MASQ-AGENT")
	n.wantJumps(t, "OTHER", 1, 0)
	rules := n.tool(t, "iptables", "-t", "nat", "-S", "OTHER")
	var repairs durations
	for range 3 {
		n.tool(t, "iptables", "-t", "nat", "-D", "OTHER", "1")
		start := time.Now()
		d.until(t, "repair", func() bool { return n.tool(t, "iptables", "-t", "nat", "-S", "OTHER") == rules })
		repairs = append(repairs, time.Since(start))
		must(t, os.WriteFile(filepath.Join(n.cni.ConfDir, "50-unrelated.conf"), []byte(`{"name":"x","type":"loopback"}`), 0o644)) // a file event
	}
	repairs.wantAtOnce(t)
	if now := n.tool(t, "iptables", "-t", "nat", "-S", "IP-MASQ-AGENT"); now != agent {
		t.Errorf("the rules of the refused policy's chain changed:\n%s", now)
	}
	// A changed source is tried at once.
	restore()
	n.agentFile(t, "ip-masq-agent", "backend: iptables\nenableIPv6: true\n")
	d.until(t, "readiness", func() bool { code, _ := d.ready(); return code == 200 })
	n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
}

// TestRepairDuringBackoff checks that the reconciler repairs drift of one chain at once while
// another chain cannot be written, and writes nothing because of third-party commits.
func TestRepairDuringBackoff(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[1])
	n.conflist(t, "podnet", nil)
	n.conflist(t, "othernet", object{"masqChain": "OTHER"})
	d := n.startReconciler(t, "--resync-interval", "1h").untilReady(t)
	n.alterComment(t, "OTHER", "ip-masq/2 keeps its state in "+n.dataDir)
	d.eventuallyUnready(t, "chain OTHER (ipv4)", "form 2")
	watcher := n.watchCommits(t)
	var repairs durations
	for i := range 3 {
		time.Sleep(time.Second) // far from the next retry
		before := d.metric(t, "drift_repairs_total")
		n.tool(t, "iptables", "-t", "nat", "-D", "IP-MASQ-AGENT", "1")
		start := time.Now()
		d.until(t, "repair", func() bool { return d.metric(t, "drift_repairs_total") > before })
		repairs = append(repairs, time.Since(start))
		count := watcher.untilIdle(t, 100*time.Millisecond)
		n.tool(t, "nft", "add", "table", "ip", "thirdparty"+fmt.Sprint(i))
		if now := watcher.untilIdle(t, 500*time.Millisecond); now > count+1 {
			t.Errorf("commits after a third-party commit: %s", watcher.countByProgram(count))
		}
	}
	repairs.wantAtOnce(t)
	d.eventuallyUnready(t, "chain OTHER (ipv4)", "form 2")
}

// retriesWithin returns the number of retries in a time: after 1, 3, 7, 15 s.
func retriesWithin(took time.Duration) (retries int) {
	for next, wait := time.Second, time.Second; next < took; next += wait {
		retries++
		wait *= 2
	}
	return retries
}

// wantAtOnce fails the test if the usual repair waited for a backoff, of a second or more.
func (f durations) wantAtOnce(t *testing.T) {
	t.Helper()
	if timelimit.Exceeded(f.median(), 500*time.Millisecond) {
		t.Errorf("repairs: %v", f)
	}
}

// breakProgram replaces a program of the node's backend with a script that runs a shell command and
// fails.
func (n *node) breakProgram(t *testing.T, name, command string) (restore func()) {
	t.Helper()
	path := filepath.Join(n.dir, "bin", name)
	genuine, err := os.Readlink(path)
	must(t, err)
	must(t, os.Remove(path))
	must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+command+"\necho not today >&2\nexit 1\n"), 0o755))
	return func() {
		t.Helper()
		must(t, firstOf(os.Remove(path), os.Symlink(genuine, path)))
	}
}
