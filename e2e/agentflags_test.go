// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// daemonSet is what the DaemonSet of an agent has as its container's args.
type daemonSet struct {
	name, dialect string
	args          []string
	warns         []string // flags that do nothing here
	verbose       bool     // tells of each pass
}

func daemonSets() []daemonSet {
	return []daemonSet{
		{name: "none", dialect: "v1"},
		{name: "all of the agent's with two dashes", dialect: "v1", args: []string{"--masq-chain=IP-MASQ", "--nomasq-all-reserved-ranges", "--enable-ipv6",
			"--random-fully=false", "--to-ports=1024-29999,32768-65535"}},
		{name: "all with one dash", dialect: "v1", args: []string{"-masq-chain=IP-MASQ", "-nomasq-all-reserved-ranges", "-enable-ipv6=true",
			"-random-fully=false", "-to-ports=1024-29999,32768-65535"}},
		{name: "values apart", dialect: "v1", args: []string{"-masq-chain", "IP-MASQ", "--to-ports", "2000-2999", "-v", "2", "--stderrthreshold", "0"},
			warns: []string{"stderrthreshold"}, verbose: true},
		{name: "verbosity with one dash", dialect: "v1", args: []string{"-v=2", "--enable-ipv6=false"}, verbose: true},
		{name: "other ways to write a switch", dialect: "v1", args: []string{"--nomasq-all-reserved-ranges=T", "--random-fully=0", "--enable-ipv6=1"}},
		{name: "klog's", dialect: "v1", args: []string{"--logtostderr", "--v=2", "--stderrthreshold=0", "-alsologtostderr=false", "--add_dir_header", "-skip_headers=true", "--vmodule=a=2"},
			warns: []string{"logtostderr", "stderrthreshold", "alsologtostderr", "add-dir-header", "skip-headers", "vmodule"}, verbose: true},
		{name: "the second agent's", dialect: "v2", args: []string{"--v=2", "--resync-interval=60"}, verbose: true},
		{name: "the second agent's with one dash", dialect: "v2", args: []string{"-resync-interval", "60", "-nomasq-all-reserved-ranges", "-masq-chain=AZURE", "-enable-ipv6"}},
	}
}

// TestAgentDaemonSetFlags starts the reconciler with the args of an agent's
// DaemonSet, as it is after the image is another: no command, and the flags in
// the agents' spelling. The rules are the agent's.
func TestAgentDaemonSetFlags(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[1:] {
		t.Run(f.name, func(t *testing.T) {
			theirs, ours := newNode(t, f), newNode(t, f)
			for i, c := range daemonSets() {
				for what, files := range map[string]map[string]string{"no files": noFiles(), "a file": singleFile("masqLinkLocal: true\nnonMasqueradeCIDRs: [10.9.0.0/16]\n")} {
					t.Run(c.name+" and "+what, func(t *testing.T) {
						at := 2 * i
						if len(files) > 0 {
							at++
						}
						dir := agentCase{files: files}.writeFiles(t, ours, at)
						a := readAsAgent(t, c.dialect, dir, c.args)
						a.write(t, theirs)
						want := theirs.chainRules(t, a.chain)
						if a.second {
							want.randomly() // which that agent has no flag for
						}
						log := ours.runWithAgentFlags(t, slices.Concat([]string{"--agent-config-dir", dir, "--agent-dialect", c.dialect}, c.args))
						wantSameRules(t, want, ours.chainRules(t, a.chain))
						var warned []string
						for line := range strings.Lines(log) {
							if _, flag, found := strings.Cut(line, "flag=--"); found {
								warned = append(warned, strings.TrimSpace(flag))
							}
						}
						slices.Sort(warned)
						slices.Sort(c.warns)
						if d := cmp.Diff(c.warns, warned); d != "" {
							t.Errorf("warnings about flags:\n%s\n%s", d, log)
						}
						if told := strings.Contains(log, "msg=sync"); told != c.verbose {
							t.Errorf("it tells of each pass: %v, want %v:\n%s", told, c.verbose, log)
						}
						theirs.removeRulesAndState(t)
						ours.removeRulesAndState(t)
					})
				}
			}
		})
	}
}

// replaceAgent runs the reconciler with nothing but args until it is ready, by
// its usual address, and ends it. It returns the log.
func (n *node) runWithAgentFlags(t *testing.T, args []string) string {
	t.Helper()
	ctx, kill := context.WithCancel(t.Context())
	defer kill()
	c := n.reconcilerCommand(ctx, t, args...)
	var log journal
	c.Stdout, c.Stderr = &log, &log
	must(t, c.Start())
	client := n.httpClient()
	defer client.CloseIdleConnections()
	ready := false
	for start := time.Now(); !ready && !timelimit.Exceeded(time.Since(start), 3*time.Second); time.Sleep(5 * time.Millisecond) {
		if answer, err := client.Get("http://127.0.0.1:19820/readyz"); err == nil {
			ready = answer.StatusCode == http.StatusOK
			_ = answer.Body.Close()
		}
	}
	must(t, c.Process.Signal(syscall.SIGTERM))
	_ = c.Wait() // the exit code tells
	log.mu.Lock()
	defer log.mu.Unlock()
	if code := c.ProcessState.ExitCode(); !ready || code != 0 {
		t.Fatalf("%q: ready %v, exit code %d after SIGTERM\n%s", args, ready, code, log.text.String())
	}
	return log.text.String()
}

// TestResyncInterval: --resync-interval takes seconds as ip-masq-agent-v2 has
// them, and a duration. iptables-legacy has no events, so there it shows.
func TestResyncInterval(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[2])
	for _, c := range []struct {
		arg    string
		within time.Duration // 0: not for as long as the test waits
	}{{"--resync-interval=1", time.Second}, {"-resync-interval=1s", time.Second}, {"--resync-interval=2000ms", 2 * time.Second}, {"--resync-interval=60", 0}} {
		t.Run(c.arg, func(t *testing.T) {
			dir := agentCase{files: noFiles()}.writeFiles(t, n, 0)
			d := n.startReconciler(t, append(n.agentArgs(dir), c.arg)...)
			d.eventuallyReady(t)
			// Once more when it has begun to listen to events.
			d.within(t, time.Second, "second pass", func() bool { return d.metric(t, "reconciles_total") >= 2 })
			n.flush(t)
			repaired := func() bool { ipv4, _ := n.jumps(t, "IP-MASQ-AGENT"); return len(ipv4) == 1 }
			if c.within == 0 {
				const long = 2500 * time.Millisecond
				for start := time.Now(); time.Since(start) < long; time.Sleep(100 * time.Millisecond) {
					if repaired() {
						t.Fatal("repaired before the interval is over")
					}
				}
				return
			}
			d.within(t, c.within+time.Second, "repair", repaired)
			d.stop(t)
		})
	}
	t.Run("of a file", func(t *testing.T) {
		dir := agentCase{files: singleFile("resyncInterval: 1s\n")}.writeFiles(t, n, 1)
		d := n.startReconciler(t, append(n.agentArgs(dir), "--resync-interval=60")...)
		d.eventuallyReady(t)
		n.flush(t)
		d.within(t, 2*time.Second, "repair", func() bool { ipv4, _ := n.jumps(t, "IP-MASQ-AGENT"); return len(ipv4) == 1 })
	})
}
