// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

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
	d.untilUnready(t, "the agent files", "not today")
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
