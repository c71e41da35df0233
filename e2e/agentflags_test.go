// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// daemonSet is the container of an agent's DaemonSet.
type daemonSet struct {
	name, dialect string
	args          []string
	warns         []string // flags that the reconciler accepts and ignores
	verbose       bool     // logs each sync
}

func daemonSets() []daemonSet {
	return []daemonSet{
		{name: "none", dialect: "v1"},
		{name: "all flags with two dashes", dialect: "v1", args: []string{"--masq-chain=IP-MASQ", "--nomasq-all-reserved-ranges", "--enable-ipv6",
			"--random-fully=false", "--to-ports=1024-29999,32768-65535"}},
		{name: "all flags with one dash", dialect: "v1", args: []string{"-masq-chain=IP-MASQ", "-nomasq-all-reserved-ranges", "-enable-ipv6=true",
			"-random-fully=false", "-to-ports=1024-29999,32768-65535"}},
		{name: "flag and value as two arguments", dialect: "v1", args: []string{"-masq-chain", "IP-MASQ", "--to-ports", "2000-2999", "-v", "2", "--stderrthreshold", "0"},
			warns: []string{"stderrthreshold"}, verbose: true},
		{name: "verbosity with one dash", dialect: "v1", args: []string{"-v=2", "--enable-ipv6=false"}, verbose: true},
		{name: "other spellings of a boolean", dialect: "v1", args: []string{"--nomasq-all-reserved-ranges=T", "--random-fully=0", "--enable-ipv6=1"}},
		{name: "klog flags", dialect: "v1", args: []string{"--logtostderr", "--v=2", "--stderrthreshold=0", "-alsologtostderr=false", "--add_dir_header", "-skip_headers=true", "--vmodule=a=2"},
			warns: []string{"logtostderr", "stderrthreshold", "alsologtostderr", "add-dir-header", "skip-headers", "vmodule"}, verbose: true},
		{name: "ip-masq-agent-v2", dialect: "v2", args: []string{"--v=2", "--resync-interval=60"}, verbose: true},
		{name: "ip-masq-agent-v2 with one dash", dialect: "v2", args: []string{"-resync-interval", "60", "-nomasq-all-reserved-ranges", "-masq-chain=AZURE", "-enable-ipv6"}},
	}
}

// TestAgentDaemonSetFlags starts the reconciler with the args of an agent's DaemonSet, as after a
// change of the image: without a command, with flags in the agents' spelling. It checks that the
// rules equal the agent's.
func TestAgentDaemonSetFlags(t *testing.T) {
	t.Parallel()
	agentNode, ownNode := newNode(t, backends()[1]), newNode(t, backends()[1]) // TestAgentCases has both variants
	for i, c := range daemonSets() {
		for what, files := range map[string]map[string]string{"no files": noFiles(), "a file": singleFile("masqLinkLocal: true\nnonMasqueradeCIDRs: [10.9.0.0/16]\n")} {
			t.Run(c.name+" and "+what, func(t *testing.T) {
				at := 2 * i
				if len(files) > 0 {
					at++
				}
				dir := agentCase{files: files}.writeFiles(t, ownNode, at)
				a := readAsAgent(t, c.dialect, dir, c.args)
				a.random = a.random || a.second // ip-masq-agent-v2 has no such flag
				a.write(t, agentNode)
				want := agentNode.chainRules(t, a.chain)
				log := ownNode.runWithAgentFlags(t, slices.Concat([]string{"--agent-config-dir", dir, "--agent-dialect", c.dialect}, c.args))
				wantSameRules(t, want, ownNode.chainRules(t, a.chain))
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
				if logged := strings.Contains(log, "msg=sync"); logged != c.verbose {
					t.Errorf("logs each sync: %v, want %v:\n%s", logged, c.verbose, log)
				}
				agentNode.removeRulesAndState(t)
				ownNode.removeRulesAndState(t)
			})
		}
	}
}

// runWithAgentFlags runs the reconciler with only args until it is ready at its default address,
// and stops it. It returns the log.
func (n *node) runWithAgentFlags(t *testing.T, args []string) string {
	t.Helper()
	ctx, kill := context.WithCancel(t.Context())
	defer kill()
	c := n.reconcilerCommand(ctx, t, args...)
	var log journal
	c.Stdout, c.Stderr = &log, &log
	must(t, c.Start())
	ready := timelimit.Await(timelimit.Wait, func() bool { return n.isReady("127.0.0.1:19820") })
	must(t, c.Process.Signal(syscall.SIGTERM))
	_ = c.Wait() // the exit code is checked below
	log.mu.Lock()
	defer log.mu.Unlock()
	if code := c.ProcessState.ExitCode(); !ready || code != 0 {
		t.Fatalf("%q: ready %v, exit code %d after SIGTERM\n%s", args, ready, code, log.text.String())
	}
	return log.text.String()
}
