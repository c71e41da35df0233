// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// tampering changes the rules of a family in one commit. An empty field means that the backend has
// no such change.
type tampering struct {
	name string
	// iptables is one command; restore has several, applied at once by iptables-nft-restore.
	iptables, restore string
	// nft is an nft script for nftables, script one for either backend.
	nft, script string
}

// tamperings are the twelve changes. Words in capitals are replaced by family: FAM, SET,
// LINKLOCAL, EXEMPT (a prefix that the policy exempts) and OTHER (a prefix that it does not list).
func tamperings() []tampering {
	const chain, first, last = " FAM ip-masq masq-IP-MASQ-AGENT", "FAM daddr @SET counter ", "counter masquerade fully-random"
	return []tampering{{
		name:     "jump deleted",
		iptables: "-D POSTROUTING 1",
		nft:      "flush chain FAM ip-masq postrouting",
	}, {
		name:    "jump duplicated",
		restore: "-A POSTROUTING -m comment --comment \"" + agents()[0].jumpComment + "\" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT",
		nft:     "add rule FAM ip-masq postrouting fib daddr type != local jump masq-IP-MASQ-AGENT",
	}, {
		name:     "chain flushed",
		iptables: "-F IP-MASQ-AGENT",
		nft:      "flush chain" + chain,
	}, {
		name:    "chain deleted",
		restore: "-F POSTROUTING\n-F IP-MASQ-AGENT\n-X IP-MASQ-AGENT",
		nft:     "flush chain FAM ip-masq postrouting\ndelete chain" + chain,
	}, {
		name:    "chain reordered",
		restore: "-D IP-MASQ-AGENT -d EXEMPT -j RETURN\n-A IP-MASQ-AGENT -d EXEMPT -j RETURN",
		nft:     "flush chain" + chain + "\nadd rule" + chain + " " + last + "\nadd rule" + chain + " " + first + "return",
	}, {
		name:     "RETURN turned ACCEPT",
		iptables: "-R IP-MASQ-AGENT 1 -d LINKLOCAL -j ACCEPT",
		nft:      "flush chain" + chain + "\nadd rule" + chain + " " + first + "accept\nadd rule" + chain + " " + last,
	}, {
		name:     "third-party rule inside",
		iptables: "-I IP-MASQ-AGENT -p tcp --dport 25 -j ACCEPT",
		nft:      "insert rule" + chain + " tcp dport 25 accept",
	}, {
		name: "set element removed",
		nft:  "delete element FAM ip-masq SET { EXEMPT }",
	}, {
		name: "set element added",
		nft:  "add element FAM ip-masq SET { OTHER }",
	}, {
		name:   "table deleted",
		script: "delete table FAM TABLE",
	}, {
		name:     "iptables -t nat -F",
		iptables: "-F",
	}, {
		name:   "nft flush ruleset",
		script: "flush ruleset",
	}}
}

// tamperNode is a node whose rules are in sync, with a reconciler and a commit watcher.
type tamperNode struct {
	*node
	*daemon
	*commitWatcher
	pods  senders
	right string
}

// newTamperNode makes a tamperNode. Its resync interval is so long that only events start a sync.
func newTamperNode(t *testing.T, f backend) *tamperNode {
	t.Helper()
	n := newNode(t, f)
	n.conflist(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": []string{"10.0.0.0/8", "192.168.0.0/16", "fd00:9::/32", "fd00:7::/32"}})
	w := &tamperNode{node: n}
	w.pods = onlyPod(n.pod(t, "podnet"))
	w.daemon = n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
	w.commitWatcher = n.watchCommits(t)
	w.checkVerdicts(t)
	w.right = w.ownedRules(t)
	return w
}

// ownedRules returns the owned rules in the node's backend, and those of the saves() of other
// programs, without counters, the order of tables, and the numbers in names of sets.
func (w *tamperNode) ownedRules(t *testing.T) string {
	t.Helper()
	var kept []string
	if w.backend.variant != "" {
		for line := range strings.Lines(w.saved(t)) {
			if strings.Contains(line, "IP-MASQ-AGENT") || slices.Contains(saveCommands(), strings.TrimSpace(line)) {
				kept = append(kept, line)
			}
		}
		return strings.Join(kept, "")
	}
	rules := regexp.MustCompile(`(exempt-IP-MASQ-AGENT)\.\d+`).ReplaceAllString(w.tool(t, "nft", "-s", "list", "ruleset"), "$1")
	for table := range strings.SplitSeq(rules, "\n}\n") {
		if strings.Contains(table, " ip-masq {\n") {
			kept = append(kept, table+"\n}\n")
		}
	}
	slices.Sort(kept)
	return strings.Join(kept, "")
}

// checkVerdicts fails the test unless packets get the policy's verdict.
func (w *tamperNode) checkVerdicts(t *testing.T) {
	t.Helper()
	w.pods.verdicts(t, w.node, false, map[string]string{"pod": "10.9.9.9 192.168.7.7 fd00:9::9"})
	w.pods.verdicts(t, w.node, true, map[string]string{"pod": "1.2.3.4 172.16.9.9 2001:db8:5::5"})
}

// appliesTo reports whether the backend has this change.
func (way tampering) appliesTo(f backend) bool {
	return way.script != "" || f.variant == "" && way.nft != "" || f.variant != "" && way.iptables+way.restore != ""
}

// spoil changes the rules of the nth family.
func (w *tamperNode) spoil(t *testing.T, way tampering, nth int) {
	t.Helper()
	program, family := families()[nth][0], families()[nth][1]
	words := strings.NewReplacer("FAM", family, "SET", w.set(t, family), "TABLE", map[bool]string{true: "ip-masq", false: "nat"}[w.backend.variant == ""],
		"LINKLOCAL", []string{"169.254.0.0/16", "fe80::/10"}[nth],
		"EXEMPT", []string{"10.0.0.0/8", "fd00:9::/32"}[nth], "OTHER", []string{"192.0.2.0/24", "2001:db8:2::/48"}[nth])
	switch script := way.script + way.nft; {
	case way.script != "" || w.backend.variant == "":
		w.feed(t, words.Replace(script)+"\n", "nft", "-f", "-")
	case way.restore != "":
		w.feed(t, "*nat\n"+words.Replace(way.restore)+"\nCOMMIT\n", program+"-nft-restore", "--noflush")
	default:
		w.tool(t, program, append([]string{"-t", "nat"}, strings.Fields(words.Replace(way.iptables))...)...)
	}
}

// set returns the current name of the set of exempt destinations.
func (w *tamperNode) set(t *testing.T, family string) string {
	t.Helper()
	if w.backend.variant != "" {
		return ""
	}
	_, rest, found := strings.Cut(w.tool(t, "nft", "-s", "list", "table", family, "ip-masq"), "\tset ")
	name, _, _ := strings.Cut(rest, " ")
	if !found {
		t.Fatalf("no set of %s in:\n%s", family, w.right)
	}
	return name
}

// repair waits until the rules are repaired. It returns the time from the first commit after the
// count to the last.
func (w *tamperNode) repair(t *testing.T, count int) time.Duration {
	t.Helper()
	const settled = 60 * time.Millisecond
	var all []fixtures.Commit
	w.until(t, "repair", func() bool {
		all = w.Since(count)
		if len(all) == 0 || !w.isReconcilerCommit(all[len(all)-1]) || time.Since(all[len(all)-1].At) < settled {
			return false
		}
		return w.ownedRules(t) == w.right && len(w.Since(count)) == len(all)
	})
	if first := all[0]; first.Program == "ip-masq-reconci" {
		t.Fatalf("the first commit is the reconciler's: %v", all)
	}
	return all[len(all)-1].At.Sub(all[0].At)
}

// repairDuringCommits waits until the ith change is repaired while other programs keep committing,
// and returns the time from the change to the repair.
func (w *tamperNode) repairDuringCommits(t *testing.T, count, i int) time.Duration {
	t.Helper()
	tamperer := "nft"
	if w.backend.variant != "" {
		tamperer = families()[i%len(families())][0]
	}
	var changed, right fixtures.Commit
	w.until(t, "repair", func() bool {
		for _, c := range w.Since(count) {
			switch {
			case c.Program == tamperer && changed.At.IsZero():
				changed = c
			case w.isReconcilerCommit(c) && !changed.At.IsZero():
				right = c
			}
		}
		return !right.At.IsZero()
	})
	return right.At.Sub(changed.At)
}

// isReconcilerCommit reports whether the commit is a repair by the reconciler.
func (w *tamperNode) isReconcilerCommit(c fixtures.Commit) bool {
	if w.backend.variant == "" {
		return c.Program == "ip-masq-reconci"
	}
	return c.Program == "iptables-restor" || c.Program == "ip6tables-resto"
}

// TestTampering checks that the reconciler repairs each change without a resync, in each backend on
// nf_tables. Most of the time of a repair belongs to the kernel: a program that deletes objects
// delays all commits until the kernel has freed them at its exit, 8 to 20 ms later.
func TestTampering(t *testing.T) {
	onNFTables := backends()[:2]
	for _, way := range tamperings() {
		if !slices.ContainsFunc(onNFTables, way.appliesTo) {
			t.Errorf("no backend has the change: %s", way.name)
		}
	}
	for _, f := range onNFTables {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel() // the test waits most of the time
			var all durations
			w := newTamperNode(t, f)
			for _, way := range tamperings() {
				if !way.appliesTo(f) {
					continue
				}
				var took durations
				for i := range families() {
					before := w.metric(t, "drift_repairs_total")
					count := w.untilIdle(t, 100*time.Millisecond)
					w.spoil(t, way, i)
					took = append(took, w.repair(t, count))
					w.until(t, "drift_repairs_total to rise", func() bool { return w.metric(t, "drift_repairs_total") > before }) // once the sync has ended
				}
				w.checkVerdicts(t)
				t.Logf("%-22s %v", way.name, took)
				all = append(all, took...)
			}
			t.Logf("%-22s %v", "all", all)
			if code, body := w.ready(); code != 200 {
				t.Errorf("/readyz: %d\n%s", code, body)
			}
		})
	}
}

// commitWatcher records every nf_tables commit on a node.
type commitWatcher struct{ *fixtures.CommitWatcher }

// watchCommits records commits until the end of the test.
func (n *node) watchCommits(t *testing.T) *commitWatcher {
	t.Helper()
	w := &commitWatcher{}
	must(t, n.Node.Do(func() (err error) {
		w.CommitWatcher, err = fixtures.WatchCommits()
		return err
	}))
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Errorf("commit watcher: %v", err)
		}
	})
	return w
}

// untilIdle waits until no commit was recorded for a while. It returns the number of recorded
// commits.
func (w *commitWatcher) untilIdle(t *testing.T, idle time.Duration) int {
	t.Helper()
	count, last := w.Count(), time.Now()
	for start := time.Now(); time.Since(last) < idle; time.Sleep(time.Millisecond) {
		if now := w.Count(); now != count {
			count, last = now, time.Now()
		}
		if timelimit.Exceeded(time.Since(start), timelimit.Wait) {
			t.Fatalf("commits do not stop: %v", w.Since(max(0, count-20)))
		}
	}
	return count
}

// countByProgram counts the commits from index since on, by program.
func (w *commitWatcher) countByProgram(since int) string {
	count := map[string]int{}
	for _, c := range w.Since(since) {
		count[c.Program]++
	}
	var b strings.Builder
	for _, program := range slices.Sorted(maps.Keys(count)) {
		fmt.Fprintf(&b, "%d by %s ", count[program], program)
	}
	return b.String()
}

// durations are the measured times of one operation.
type durations []time.Duration

func (f durations) median() time.Duration {
	sorted := slices.Sorted(slices.Values(f))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

func (f durations) String() string {
	return fmt.Sprintf("median %5.1f ms, worst %5.1f ms of %d", ms(f.median()), ms(slices.Max(f)), len(f))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

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
	genuine := assert.Must(os.Readlink(path))(t)
	must(t, os.Remove(path))
	must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+command+"\necho not today >&2\nexit 1\n"), 0o755))
	return func() {
		t.Helper()
		must(t, errors.Join(os.Remove(path), os.Symlink(genuine, path)))
	}
}
