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

// TestUnwritableFamily: the agent files enable IPv6 and there is no ip6tables. The
// reconciler notices that before it writes IPv4 rules, which it would only take
// back; the node is not ready until the program is there.
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
	n.agentFile(t, "ip-masq-agent", "enableIPv6: true\n")
	watcher := n.watchCommits(t)
	d := n.startReconciler(t)
	d.eventuallyUnready(t, "the agent files", "ip6tables")
	const long = 3 * time.Second
	time.Sleep(long)
	if count := watcher.Count(); count > 0 {
		t.Errorf("%d commits in %s: %s", count, long, watcher.countByProgram(0))
	}
	if lines := strings.Count(d.log(), "level=ERROR"); lines != 1 {
		t.Errorf("%d lines of log:\n%s", lines, d.log())
	}
	// An ADD does not write half a chain either.
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

// TestBackoffAfterRollback: IPv6 rules of the agent files are refused when they
// are written, and what was written for IPv4 is taken back. That is tried again
// after 1 s, 2 s, 4 s, whatever else happens on the node; drift of another chain
// is repaired at once.
func TestBackoffAfterRollback(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[1])
	n.conflist(t, "podnet", object{"masqChain": "OTHER", "sourceCIDRs": []string{"10.1.0.0/16"}})
	tries := filepath.Join(n.dir, "tries")
	mend := n.breakProgram(t, "ip6tables-restore", "echo try >> "+tries)
	n.agentFile(t, "ip-masq-agent", "enableIPv6: true\nmasqLinkLocal: true\n")
	began := time.Now()
	d := n.startReconciler(t)
	d.eventuallyUnready(t, "the agent files", "not today")
	watcher := n.watchCommits(t)
	n.wantJumps(t, "OTHER", 1, 0)
	// Each try takes the IPv4 half back, which makes commits; so do repairs.
	for i := range 6 {
		time.Sleep(time.Second)
		before := d.metric(t, "drift_repairs_total")
		n.tool(t, "iptables", "-t", "nat", "-D", "OTHER", "1")
		start := time.Now()
		d.until(t, "repair", func() bool { return d.metric(t, "drift_repairs_total") > before })
		if took := time.Since(start); timelimit.Exceeded(took, 10*worstRepair) {
			t.Errorf("repair %d took %s", i, took)
		}
		must(t, os.WriteFile(filepath.Join(n.cni.ConfDir, "50-unrelated.conf"), []byte(`{"name":"x","type":"loopback"}`), 0o644)) // an event of files
	}
	text, err := os.ReadFile(tries)
	must(t, err)
	took := time.Since(began)
	most, at := 2, time.Second // at first with the network and by itself, then after 1, 3, 7, 15 s
	for next := at; next < took; at, next = 2*at, next+2*at {
		most++
	}
	if count := strings.Count(string(text), "try"); count > most || count < 2 {
		t.Errorf("%d tries in %s, want at most %d and at least 2; commits %s", count, took, most, watcher.countByProgram(0))
	}
	if lines := strings.Count(d.log(), "level=ERROR"); lines != 1 {
		t.Errorf("%d lines of log:\n%s", lines, d.log())
	}
	// A source that states something else is tried soon, and so is all on request.
	mend()
	n.agentFile(t, "ip-masq-agent", "enableIPv6: true\n")
	d.within(t, 3*time.Second, "readiness", func() bool { code, _ := d.ready(); return code == 200 })
	n.wantJumps(t, "IP-MASQ-AGENT", 1, 1)
}

// TestRepairDuringBackoff: while nothing can be done about one chain, drift of
// another is repaired at once, and nothing is written for commits of other programs.
func TestRepairDuringBackoff(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[1])
	n.conflist(t, "podnet", nil)
	n.conflist(t, "othernet", object{"masqChain": "OTHER"})
	d := n.startReconciler(t, "--resync-interval", "1h").untilReady(t)
	n.alterComment(t, "OTHER", "ip-masq/2 keeps its state in "+n.dataDir)
	d.eventuallyUnready(t, "chain OTHER (ipv4)", "form 2")
	watcher := n.watchCommits(t)
	for i := range 3 {
		time.Sleep(time.Second) // the next retry is far away
		before := d.metric(t, "drift_repairs_total")
		n.tool(t, "iptables", "-t", "nat", "-D", "IP-MASQ-AGENT", "1")
		start := time.Now()
		d.until(t, "repair", func() bool { return d.metric(t, "drift_repairs_total") > before })
		if took := time.Since(start); timelimit.Exceeded(took, 10*worstRepair) {
			t.Errorf("repair %d took %s", i, took)
		}
		count := watcher.untilIdle(t, 100*time.Millisecond)
		n.tool(t, "nft", "add", "table", "ip", "stranger"+fmt.Sprint(i))
		if now := watcher.untilIdle(t, 500*time.Millisecond); now > count+1 {
			t.Errorf("commits after that of a third party: %s", watcher.countByProgram(count))
		}
	}
	d.eventuallyUnready(t, "chain OTHER (ipv4)", "form 2")
}

// spoilProgram has a program of the node's form fail, after a command of the shell.
func (n *node) breakProgram(t *testing.T, name, command string) (mend func()) {
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
