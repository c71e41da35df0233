// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"flag"
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

	"go4.org/netipx"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// maxRSS is the limit on the memory of the reconciler (VmRSS) in bytes.
const maxRSS = 20 << 20

// stateStamps returns the inode, mode, size and times of each file and directory of the node's
// state and conflists. The time of the instance lock is that of the last sync.
func (n *node) stateStamps(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, dir := range []string{n.dataDir, n.cni.ConfDir} {
		must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil || e.Name() == "reconciler.lock" {
				return err
			}
			s := info.Sys().(*syscall.Stat_t)
			fmt.Fprintln(&b, path, info.Mode(), s.Ino, s.Size, s.Mtim, s.Ctim)
			return nil
		}))
	}
	return b.String()
}

// wantMemory fails the test if the reconciler uses too much memory, and returns its memory in MiB.
func (d *daemon) wantMemory(t *testing.T) float64 {
	t.Helper()
	rss, _, err := d.command.Memory()
	must(t, err)
	if rss >= maxRSS {
		t.Errorf("the reconciler uses %d KiB of memory, want less than %d", rss>>10, maxRSS>>10)
	}
	return float64(rss) / (1 << 20)
}

// newPopulatedNode returns a node with the load of a usual one: 64 prefixes in a conflist, agent
// files, pods and third-party rules.
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

// TestIdle runs the reconciler for twelve resyncs and scrapes its metrics. It checks that neither the
// kernel nor the state nor the log is written, and that the memory stays small.
func TestIdle(t *testing.T) {
	for i, f := range slices.Concat(backends(), backends()[:1]) {
		managed, name := i == len(backends()), f.name
		if managed {
			name += ", managed"
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newPopulatedNode(t, f, managed)
			begun := w.metric(t, "reconciles_total")
			w.until(t, "the end of the syncs at the start", func() bool { return w.metric(t, "reconciles_total") > begun+1 })
			commits, generation, rules, state, log := w.Count(), w.generation(t), w.ruleset(t), w.stateStamps(t), w.log()
			syncs := w.metric(t, "reconciles_total", `result="unchanged"`)
			scrapes, most := 0, 0.0
			w.until(t, "twelve syncs", func() bool {
				time.Sleep(time.Second / 2)
				scrapes++
				most = max(most, w.wantMemory(t))
				return w.metric(t, "reconciles_total", `result="unchanged"`) >= syncs+12
			})
			if total := w.metric(t, "reconciles_total") - w.metric(t, "reconciles_total", `result="unchanged"`); total > 1 {
				t.Errorf("%v syncs changed something or failed", total)
			}
			if recorded := w.Since(commits); len(recorded) > 0 || w.generation(t) != generation {
				t.Errorf("commits: %v; generation %d, was %d", recorded, w.generation(t), generation)
			}
			wantSame(t, "rules", w.ruleset(t), rules)
			wantSame(t, "files", w.stateStamps(t), state)
			wantSame(t, "the log", w.since(log), "")
			t.Logf("%d scrapes, no commit, no log; %.1f MiB at most", scrapes, most)
		})
	}
}

// makeCommits makes commits in a table of its own as fast as one process can, and counts them in
// made.
func (n *node) makeCommits(commits int64, made *atomic.Int64) (took time.Duration, err error) {
	const table, set = "crowd", "members"
	member := []netipx.IPRange{netipx.MustParseIPRange("192.0.2.1-192.0.2.1")}
	err = n.Node.Do(func() (err error) {
		var conn nfnetlink.Conn
		defer func() { err = errors.Join(err, conn.Close()) }()
		start := time.Now()
		defer func() { took = time.Since(start) }()
		for made.Load() < commits {
			var b nfnetlink.Batch
			switch now := made.Load(); {
			case now == 0:
				b.AddTable(nfnetlink.IPv4, table)
				b.AddSet(nfnetlink.IPv4, table, nfnetlink.AddressRanges(nfnetlink.IPv4, set))
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

// lostMessages returns how many messages the kernel dropped because the netfilter sockets of the
// reconciler were full (netlink(7), /proc/net/netlink).
func (d *daemon) lostMessages(t *testing.T) int {
	t.Helper()
	pid := strconv.Itoa(d.command.Process.Pid)
	sockets := map[string]bool{}
	descriptors := assert.Must(filepath.Glob("/proc/" + pid + "/fd/*"))(t)
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
		count := assert.Must(strconv.Atoi(column[drops]))(t)
		lost += count
		if column[groups] != "00000000" {
			members++
		}
	}
	if members != 1 {
		t.Fatalf("%d sockets in multicast groups, want one:\n%s", members, readFile(t, "/proc/"+pid+"/net/netlink"))
	}
	return lost
}

// manyRules is the number of rules that a third party restores in one commit.
const manyRules = 5000

// TestThirdPartyCommits makes ten thousand third-party commits and drift among them. It checks that
// the reconciler loses no event and repairs all drift, that log and memory do not grow with the
// commits, and that only drift causes syncs.
func TestThirdPartyCommits(t *testing.T) {
	t.Parallel()
	for _, f := range backends()[:2] {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			w := newTamperNode(t, f)
			for range 5 {
				w.scrape(t)
			}
			const commits, times = 10000, 5
			restore := func() { w.feed(t, fixtures.KubeProxy(manyRules), "iptables-nft-restore", "--noflush") }
			restore() // makes table nat, where owned chains can be, with backend nftables
			w.untilIdle(t, 200*time.Millisecond)
			before := w.wantMemory(t)
			log, repaired := w.log(), w.metric(t, "reconciles_total", `result="repaired"`)
			syncs, start := w.metric(t, "reconciles_total"), w.Count()

			var made atomic.Int64
			var took time.Duration
			var failure error
			var all sync.WaitGroup
			all.Go(func() { took, failure = w.makeCommits(commits, &made) })
			var repairs durations
			for i := range times {
				// Four times during the commits, and once right after the last.
				w.until(t, "commits", func() bool { return made.Load() >= int64((i+1)*commits/times) })
				if i == 0 {
					restore()
					w.wantMetric(t, syncs, "reconciles_total")
				}
				count := w.Count()
				w.spoil(t, tamperings()[0], i%len(families()))
				repairs = append(repairs, w.repairDuringCommits(t, count, i))
			}
			all.Wait()
			if failure != nil {
				t.Fatal(failure)
			}
			w.untilIdle(t, 200*time.Millisecond)
			if recorded := len(w.Since(start)); recorded < commits+2*times {
				t.Errorf("%d commits recorded, want at least %d", recorded, commits+2*times)
			}
			wantSame(t, "rules", w.ownedRules(t), w.right)
			// A write that other commits delay may repair later drift too.
			repairCount := w.metric(t, "reconciles_total", `result="repaired"`) - repaired
			if repairCount < 1 || repairCount > times {
				t.Errorf("%v repairs of %d", repairCount, times)
			}
			output := w.since(log)
			if float64(strings.Count(output, "\n")) != repairCount || float64(strings.Count(output, "repaired rules")) != repairCount {
				t.Errorf("log, want only %v repairs:\n%s", repairCount, output)
			}
			if lost := w.lostMessages(t); lost > 0 {
				t.Errorf("%d events were lost", lost)
			}
			w.checkVerdicts(t)
			t.Logf("%d commits in %s, none lost; %v syncs meanwhile; repairs: %v; %.1f MiB before and %.1f after",
				commits, took.Round(time.Millisecond), w.metric(t, "reconciles_total")-syncs, repairs, before, w.wantMemory(t))
		})
	}
}

var soak = flag.Duration("soak", 6*time.Second, "how long TestSoak runs")

// TestSoak runs a reconciler beside 20 commits a second of another program, with rules that are changed each 2 s and
// policies that change each 5 s: what it uses must not grow with time.
func TestSoak(t *testing.T) {
	t.Parallel()
	w := newTamperNode(t, backends()[0])
	deadline := time.Now().Add(*soak)
	var made atomic.Int64
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() {
		for n := int64(0); time.Now().Before(deadline) && !t.Failed(); n++ {
			if _, err := w.makeCommits(n+1, &made); err != nil {
				t.Error(err)
			}
			time.Sleep(time.Second / 20)
		}
	})
	resources := map[string][]int{}
	cpuTime := func() time.Duration { return assert.Must(w.command.CPUTime())(t) }
	before := cpuTime()
	for second := 1; time.Now().Before(deadline); second++ {
		if second%2 == 0 {
			count := w.Count()
			w.spoil(t, tamperings()[0], second/2%len(families()))
			w.repairDuringCommits(t, count, second)
		}
		if second%5 == 0 {
			w.agentFile(t, "ip-masq-soak", fmt.Sprintf("nonMasqueradeCIDRs: [100.64.%d.0/24]\n", second%250))
		}
		time.Sleep(time.Second)
		rss, _, err := w.command.Memory()
		must(t, err)
		resources["KiB"] = append(resources["KiB"], int(rss>>10))
		for _, what := range []string{"fd", "task"} {
			entries := assert.Must(os.ReadDir(fmt.Sprintf("/proc/%d/%s", w.command.Process.Pid, what)))(t)
			resources[what] = append(resources[what], len(entries))
		}
	}
	w.wantMemory(t)
	for what, samples := range resources {
		half := len(samples) / 2
		early, late := slices.Max(samples[:half]), slices.Max(samples[half:])
		if late > early+early/10+3 {
			t.Errorf("%s: %d at most in the first half and %d in the second", what, early, late)
		}
		t.Logf("%s: %d at most in the first half, %d in the second", what, early, late)
	}
	if lost := w.lostMessages(t); lost > 0 {
		t.Errorf("%d events were lost", lost)
	}
	t.Logf("%d commits of another program in %s, %.0f repairs; the reconciler took %s of processor time",
		made.Load(), *soak, w.metric(t, "reconciles_total", `result="repaired"`), (cpuTime() - before).Round(time.Millisecond))
}

// since returns what was logged after an earlier log.
func (d *daemon) since(before string) string { return strings.TrimPrefix(d.log(), before) }

// TestSIGHUP checks that SIGHUP starts a sync at once. With iptables-legacy no event starts one.
func TestSIGHUP(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		n.agentFile(t, "ip-masq-of-mine", "{}\n")
		d := n.startReconciler(t, "--resync-interval", "10m").untilReady(t)
		time.Sleep(100 * time.Millisecond) // for syncs of the start
		log, syncs := d.log(), d.metric(t, "reconciles_total")
		d.signal(t, syscall.SIGHUP)
		d.until(t, "sync", func() bool { return d.metric(t, "reconciles_total") > syncs })
		wantSame(t, "the log of a sync without drift", d.since(log), "")
		if n.backend.variant != "legacy" {
			return
		}
		n.flush(t)
		time.Sleep(500 * time.Millisecond)
		n.wantJumps(t, "IP-MASQ-AGENT", 0, 0)
		start := time.Now()
		d.signal(t, syscall.SIGHUP)
		d.until(t, "repair", func() bool { ipv4, _ := n.jumps(t, "IP-MASQ-AGENT"); return len(ipv4) == 1 })
		t.Logf("repaired and seen %s after SIGHUP", time.Since(start).Round(time.Millisecond))
	})
}
