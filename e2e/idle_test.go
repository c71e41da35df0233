// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go4.org/netipx"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// mostMemory is what the reconciler may have (VmRSS), in bytes.
const maxRSS = 20 << 20

// stamps tell of each file and directory of the node's state which it is and
// when it was written or anything about it was changed.
func (n *node) stateStamps(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	if err := filepath.WalkDir(n.dataDir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		s := info.Sys().(*syscall.Stat_t)
		fmt.Fprintln(&b, path, info.Mode(), s.Ino, s.Size, s.Mtim, s.Ctim)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// memory fails the test if the reconciler has too much of it, and returns how
// much that is in MiB.
func (d *daemon) wantMemory(t *testing.T) float64 {
	t.Helper()
	rss := d.rss(t)
	if rss >= maxRSS {
		t.Errorf("the reconciler has %d KiB of memory, want less than %d", rss>>10, maxRSS>>10)
	}
	return float64(rss) / (1 << 20)
}

// settled is a node as full as an ordinary one: 64 prefixes of a conflist and of
// the agents' files, pods, and rules of others.
func newPopulatedNode(t *testing.T, f backend, managed bool) *tamperNode {
	t.Helper()
	n := newNode(t, f)
	n.addThirdPartyRules(t)
	n.agentFile(t, "ip-masq-agent", "nonMasqueradeCIDRs:\n- 10.0.0.0/8\n- 192.168.0.0/16\n- fd00:9::/32\nenableIPv6: true\n")
	cidrs := []string{"10.0.0.0/8", "192.168.0.0/16", "fd00:9::/32", "fd00:7::/32"}
	for i := len(cidrs); i < 64; i++ {
		cidrs = append(cidrs, fmt.Sprintf("198.18.%d.0/24", 2*i))
	}
	n.conflist(t, "podnet", object{"enableIPv6": true, "nonMasqueradeCIDRs": cidrs})
	w := &tamperNode{node: n}
	for range 3 {
		w.pods = onlyPod(n.pod(t, "podnet"))
	}
	var args []string
	if managed {
		args = n.manageArgs(t, nil)
	}
	w.daemon = n.startReconciler(t, append(args, "--resync-interval", "1s")...).untilReady(t)
	w.commitWatcher = n.watchCommits(t)
	w.right = w.ownedRules(t)
	return w
}

// TestIdle compresses ten idle minutes, in each of which there is a pass and a
// scrape or two, by an interval of a second: nothing is written, to the kernel,
// the state or the log, and the reconciler stays small.
func TestIdle(t *testing.T) {
	for i, f := range slices.Concat(backends(), backends()[:1]) {
		managed, name := i == len(backends()), f.name
		if managed {
			name += ", managed"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newPopulatedNode(t, f, managed)
			eye := w.watchConfDir(t)
			time.Sleep(time.Second) // for passes that its start asked for, and a first scrape's inquiries
			w.scrape(t)
			commits, generation, rules, state, log := w.Count(), w.generation(t), w.ruleset(t), w.stateStamps(t), w.log()
			passes := w.metric(t, "reconciles_total", `result="unchanged"`)
			const seconds = 15
			most := 0.0
			for range 2 * seconds {
				time.Sleep(time.Second / 2)
				w.scrape(t)
				most = max(most, w.wantMemory(t))
			}
			made := w.metric(t, "reconciles_total", `result="unchanged"`) - passes
			if made < (seconds-2)/timelimit.Factor() {
				t.Errorf("%v passes in %d s", made, seconds)
			}
			if total := w.metric(t, "reconciles_total") - w.metric(t, "reconciles_total", `result="unchanged"`); total > 1 {
				t.Errorf("%v passes that changed something or failed", total)
			}
			if heard := w.Since(commits); len(heard) > 0 || w.generation(t) != generation {
				t.Errorf("commits: %v; generation %d, was %d", heard, w.generation(t), generation)
			}
			if d := cmp.Diff(rules, w.ruleset(t)); d != "" {
				t.Errorf("rules changed:\n%s", d)
			}
			if d := cmp.Diff(state, w.stateStamps(t)); d != "" {
				t.Errorf("the state was written:\n%s", d)
			}
			if _, events := eye.count(""); events > 0 {
				t.Errorf("%d changes in the directory of conflists", events)
			}
			if said := w.since(log); said != "" {
				t.Errorf("it says:\n%s", said)
			}
			t.Logf("%v passes, %d scrapes, no commit, no line of log; %.1f MiB at most", made, 2*seconds, most)
		})
	}
}

// crowd makes commits that are none of our business, as fast as one process can,
// in a table of its own. It counts them in made, and in the end tells how long
// it took, or what went wrong.
func (n *node) makeCommits(commits int64, made *atomic.Int64) (took time.Duration, err error) {
	const table, set = "crowd", "members"
	member := []netipx.IPRange{netipx.MustParseIPRange("192.0.2.1-192.0.2.1")}
	err = n.Node.Do(func() (err error) {
		conn, err := nfnetlink.Dial()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, conn.Close()) }()
		start := time.Now()
		defer func() { took = time.Since(start) }()
		for made.Load() < commits {
			var b nfnetlink.Batch
			switch now := made.Load(); {
			case now == 0:
				b.AddTable(nfnetlink.IPv4, table)
				b.AddSet(nfnetlink.IPv4, table, set, nfnetlink.TypeIPv4)
			case now%2 == 0:
				b.DeleteElements(nfnetlink.IPv4, table, set, member)
			default:
				b.AddElements(nfnetlink.IPv4, table, set, member)
			}
			if err := conn.Commit(&b); err != nil {
				return fmt.Errorf("commit %d: %w", made.Load(), err)
			}
			made.Add(1)
		}
		return nil
	})
	return took, err
}

// lost is how many messages the kernel could not give the process's netfilter
// sockets, for they were full (netlink(7), /proc/net/netlink).
func (d *daemon) lostMessages(t *testing.T) int {
	t.Helper()
	pid := strconv.Itoa(d.command.Process.Pid)
	sockets := map[string]bool{}
	descriptors, err := filepath.Glob("/proc/" + pid + "/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range descriptors {
		if target, err := os.Readlink(path); err == nil && strings.HasPrefix(target, "socket:[") {
			sockets[strings.TrimSuffix(strings.TrimPrefix(target, "socket:["), "]")] = true
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	const protocol, groups, drops, inode = 1, 3, 8, 9 // columns
	lost, members := 0, 0
	for line := range bytes.Lines(readFile(t, "/proc/"+pid+"/net/netlink")) {
		column := strings.Fields(string(line))
		if len(column) <= inode || column[protocol] != strconv.Itoa(syscall.NETLINK_NETFILTER) || !sockets[column[inode]] {
			continue
		}
		count, err := strconv.Atoi(column[drops])
		if err != nil {
			t.Fatal(err)
		}
		lost += count
		if column[groups] != "00000000" {
			members++
		}
	}
	if members != 1 {
		t.Fatalf("%d sockets listen to events, want one:\n%s", members, readFile(t, "/proc/"+pid+"/net/netlink"))
	}
	return lost
}

// TestThirdPartyCommits: ten thousand commits of other programs cost no event, no drift
// among them is missed, and neither the log nor the memory grows by them.
func TestThirdPartyCommits(t *testing.T) {
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			w := newTamperNode(t, f)
			for range 5 {
				w.scrape(t)
			}
			const commits, times = 10000, 5
			before := w.wantMemory(t)
			log, repaired := w.log(), w.metric(t, "reconciles_total", `result="repaired"`)
			passes, start := w.metric(t, "reconciles_total"), w.Count()

			var made atomic.Int64
			var took time.Duration
			var failure error
			var all sync.WaitGroup
			all.Go(func() { took, failure = w.makeCommits(commits, &made) })
			var repairs durations
			for i := range times {
				// Four times among the others' commits, and once right after the last.
				w.until(t, "commits", func() bool { return made.Load() >= int64((i+1)*commits/times) })
				count := w.Count()
				w.spoil(t, tamperings()[0], i%len(families()))
				repairs = append(repairs, timelimit.Fair(w.repairDuringCommits(t, count, i), time.Second))
			}
			all.Wait()
			if failure != nil {
				t.Fatal(failure)
			}
			w.untilIdle(t, 200*time.Millisecond)
			if heard := len(w.Since(start)); heard < commits+2*times {
				t.Errorf("%d commits were heard, want %d at least", heard, commits+2*times)
			}
			if rules := w.ownedRules(t); rules != w.right {
				t.Errorf("rules are not what they were:\n%s", cmp.Diff(w.right, rules))
			}
			// A write that others hold up may repair what comes meanwhile too.
			mended := w.metric(t, "reconciles_total", `result="repaired"`) - repaired
			if mended < 1 || mended > times {
				t.Errorf("%v repairs of %d", mended, times)
			}
			said := w.since(log)
			if float64(strings.Count(said, "\n")) != mended || float64(strings.Count(said, "repaired rules")) != mended {
				t.Errorf("the log has something else than %v repairs:\n%s", mended, said)
			}
			if lost := w.lostMessages(t); lost > 0 {
				t.Errorf("%d events were lost", lost)
			}
			if worst := slices.Max(repairs); worst > time.Second {
				t.Errorf("drift was repaired after %s: %v", worst, repairs)
			}
			w.checkVerdicts(t)
			t.Logf("%d commits in %s, none lost; %v passes meanwhile; repairs: %v; %.1f MiB before and %.1f after",
				commits, took.Round(time.Millisecond), w.metric(t, "reconciles_total")-passes, repairs, before, w.wantMemory(t))
		})
	}
}

// TestLegacyResync: iptables-legacy tells nobody of changes. Drift there is
// found when the interval is over.
func TestLegacyResync(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[2])
	n.agentFile(t, "ip-masq-agent", "enableIPv6: true\nresyncInterval: 1s\n")
	d := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
	right := n.saved(t)
	var took durations
	for i, damage := range []string{"-F", "-F POSTROUTING", "-D IP-MASQ-AGENT 1", "-R IP-MASQ-AGENT 1 -j RETURN", "-I IP-MASQ-AGENT -j ACCEPT"} {
		program := families()[i%2][0]
		n.tool(t, program, append([]string{"-t", "nat"}, strings.Fields(damage)...)...)
		start := time.Now()
		d.within(t, 3*time.Second, "repair of "+damage, func() bool { return n.saved(t) == right })
		took = append(took, timelimit.Fair(time.Since(start), 1500*time.Millisecond))
	}
	t.Log(took)
	if took.median() > 1500*time.Millisecond {
		t.Errorf("%v with an interval of 1s", took)
	}
	d.until(t, "each repair in the log", func() bool { return strings.Count(d.log(), "repaired rules") >= len(took) })
	if repairs := strings.Count(d.log(), "repaired rules"); repairs != len(took) {
		t.Errorf("%d repairs in the log, want %d:\n%s", repairs, len(took), d.log())
	}
}
