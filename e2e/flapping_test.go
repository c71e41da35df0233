// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// loop runs a shell command on the node every 5 ms until stop is called.
func (n *node) loop(t *testing.T, command string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c := n.Node.Command(ctx, "sh", "-c", "while :; do "+command+"; sleep 0.005; done 2>/dev/null")
	must(t, c.Start())
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		var exit *exec.ExitError
		if err := c.Wait(); !errors.As(err, &exit) && !errors.Is(err, context.Canceled) {
			t.Errorf("loop: %v", err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// TestFlapping lets another program remove the owned rules as soon as they are restored. It checks
// that the reconciler backs off, is not ready, names the program and counts the repairs, and that
// it becomes ready once the program stops.
func TestFlapping(t *testing.T) {
	t.Parallel()
	for index, other := range map[int]struct{ command, program, what, remedy string }{
		0: {"nft delete table ip ip-masq", `"nft"`, "missing chain", "apart now: stop that program"},
		1: {"iptables -t nat -F", `"iptables"`, "missing jump", `set backend to "nftables" if`},
	} {
		f := backends()[index]
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			w := newTamperNode(t, f)
			repairs := w.metric(t, "reconciles_total", `result="repaired"`)
			commits := w.Count()
			began := time.Now()
			stop := w.loop(t, strings.Replace(other.command, "iptables", w.dir+"/bin/iptables", 1))
			reason := w.untilUnready(t, "flapping: ", "most likely "+other.program, other.what, other.remedy)
			suspected := time.Now()
			t.Logf("suspected after %s and %v repairs: %s", suspected.Sub(began).Round(time.Millisecond),
				w.metric(t, "reconciles_total", `result="repaired"`)-repairs, reason)
			if w.metric(t, "ready") != 0 || w.metric(t, "not_ready", `reason="flapping"`) != 1 {
				t.Errorf("the metric ready is not 0, or not for flapping:\n%s", w.scrape(t))
			}
			if n := w.metric(t, "drift_repairs_total"); n < 20 {
				t.Errorf("drift_repairs_total is %v", n)
			}

			// During the conflict there is one repair after a second and the next after two more.
			log := w.log()
			w.until(t, "a repair", func() bool {
				if code, body := w.ready(); code != 503 || !strings.Contains(body, other.program) {
					t.Errorf("/readyz while the rules are reverted: %d %s", code, body)
				}
				return time.Since(suspected) > 2500*time.Millisecond && strings.Contains(w.since(log), "repaired rules")
			})
			output, took := w.since(log), time.Since(suspected)
			made, most := strings.Count(output, "repaired rules"), 1+retriesWithin(took)
			t.Logf("then %d repairs in %s, while the other program made %d commits\n%s", made, took.Round(time.Millisecond), len(w.Since(commits)), output)
			if made > most {
				t.Errorf("%d repairs in %s of flapping, want at most %d", made, took, most)
			}
			if lines := strings.Count(output, "\n"); lines > 2+2*most {
				t.Errorf("%d lines of log in %s of flapping:\n%s", lines, took, output)
			}
			if total := len(w.log()); total > 32<<10 {
				t.Errorf("%d bytes of log", total)
			}

			stop()
			stopped := time.Now()
			w.until(t, "readiness", func() bool { code, _ := w.ready(); return code == 200 })
			t.Logf("ready again %s after the other program stopped", time.Since(stopped).Round(time.Millisecond))
			// The reconciler writes the log after it becomes ready.
			w.until(t, "the end of the conflict in the log", func() bool { return strings.Contains(w.log(), "msg=ready") })
			wantSame(t, "rules", w.ownedRules(t), w.right)
			w.checkVerdicts(t)

			// The reconciler repairs the next drift at once.
			var repaired durations
			for range 3 {
				count := w.untilIdle(t, 100*time.Millisecond)
				w.spoil(t, tamperings()[0], 0)
				repaired = append(repaired, w.repair(t, count))
			}
			repaired.wantAtOnce(t)
		})
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
	d := n.startReconciler(t).untilReady(t)
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
	wantSame(t, "rules of the refused policy's chain", n.tool(t, "iptables", "-t", "nat", "-S", "IP-MASQ-AGENT"), agent)
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
	genuine := topology.Must(os.Readlink(path))(t)
	must(t, os.Remove(path))
	must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+command+"\necho not today >&2\nexit 1\n"), 0o755))
	return func() {
		t.Helper()
		must(t, errors.Join(os.Remove(path), os.Symlink(genuine, path)))
	}
}
