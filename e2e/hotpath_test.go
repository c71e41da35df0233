// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// addCost is the cost of an ADD with nothing to do, in units that depend neither on the machine nor
// on its load.
type addCost struct {
	allocations int
	kilobytes   int // allocated
	reads       int // calls of read(2): files; netlink replies come by recvfrom(2)
	writes      int // calls of write(2): netlink requests
}

// TestHotPath checks the cost of an ADD with nothing to do, because every pod waits for it. It runs
// ADD in this process and on a real kernel, with and without the verification cache.
//
// Allocations and bytes vary by less than 1 % between runs, because maps grow in random order and
// the garbage collector empties pools; releases of Go and iptables change them a little more. So a
// tenth more is tolerated, and so are two more or fewer reads, and one more write, with which the
// Go runtime wakes a thread now and then.
// A change that adds cost on purpose updates the numbers, and so does a change that saves a
// quarter.
//
// TestHotPath measures no time, because other load changes it; `make bench` does.
func TestHotPath(t *testing.T) {
	want := map[string]addCost{
		"nftables, 64 prefixes":                            {1165, 186, 4, 15},
		"nftables, 64 prefixes, cached":                    {420, 60, 5, 2},
		"nftables, 64 prefixes and 5000 rules":             {1165, 186, 4, 15},
		"nftables, 64 prefixes and 5000 rules, cached":     {420, 60, 5, 2},
		"nftables, 1000 prefixes":                          {3990, 1110, 4, 15},
		"nftables, 1000 prefixes, cached":                  {420, 150, 5, 2},
		"iptables-nft, 64 prefixes":                        {1595, 268, 4, 13},
		"iptables-nft, 64 prefixes, cached":                {420, 60, 5, 2},
		"iptables-nft, 64 prefixes and 5000 rules":         {1595, 268, 4, 13},
		"iptables-nft, 64 prefixes and 5000 rules, cached": {420, 60, 5, 2},
		"iptables-nft, 1000 prefixes":                      {10990, 1890, 4, 13},
		"iptables-nft, 1000 prefixes, cached":              {420, 150, 5, 2},
		"iptables-legacy, 64 prefixes":                     {1500, 233, 6, 6},
		"iptables-legacy, 64 prefixes and 5000 rules":      {4035, 3140, 6, 6},
		"iptables-legacy, 1000 prefixes":                   {10875, 1805, 6, 6},
	}
	for _, f := range backends() {
		for _, c := range []struct {
			suffix   string
			prefixes int
		}{{"", 64}, {fmt.Sprintf(" and %d rules", manyRules), 64}, {"", 1000}} {
			name := fmt.Sprintf("%s, %d prefixes%s", f.name, c.prefixes, c.suffix)
			t.Run(name, func(t *testing.T) {
				n := newNode(t, f)
				if c.suffix != "" {
					restore := "iptables-" + cmp.Or(f.variant, "nft") + "-restore"
					n.feed(t, fixtures.KubeProxy(manyRules), restore, "--noflush")
				}
				var cidrs []string
				for i := range c.prefixes {
					cidrs = append(cidrs, fmt.Sprintf("20.%d.%d.0/24", i/100, 2*(i%100)))
				}
				conf := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": cidrs, "cidrLimit": c.prefixes})
				n.invoke(t, invocation{verb: "ADD", conf: conf}).want(t, 0)
				for _, noCache := range []bool{true, false} {
					name := name
					if !noCache {
						if f.variant == "legacy" {
							continue // each ADD reads the rules
						}
						name += ", cached"
					}
					cost := n.measureADD(t, conf, noCache)
					t.Logf("%s: %+v", name, cost)
					cost.wantWithin(t, want[name])
				}
			})
		}
	}
}

// TestStartupAllocations checks the number of allocations before main, which every pod pays for. It
// finds a library that builds tables when a program starts. A tenth more is tolerated, because
// releases of Go differ.
func TestStartupAllocations(t *testing.T) {
	const wanted = 254 // allocations by the initialization of packages
	n := newNode(t, backends()[0])
	c := n.prepare(t, invocation{verb: "VERSION", noNetns: true})
	c.Env = append(c.Env, "GODEBUG=inittrace=1")
	_, trace, code := run(t, c)
	allocations := 0
	for line := range strings.Lines(trace) {
		// init internal/godebug @0.13 ms, 0.008 ms clock, 512 bytes, 2 allocs
		if words := strings.Fields(line); len(words) == 11 && words[0] == "init" {
			count, err := strconv.Atoi(words[9])
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			allocations += count
		}
	}
	if code != 0 || allocations > wanted+wanted/10 || allocations < wanted-wanted/4 {
		t.Errorf("exit code %d; %d allocations before main, want about %d:\n%s", code, allocations, wanted, trace)
	}
}

// wantWithin fails the test if the cost is above the tolerance, or so far below that the limit no
// longer detects a regression.
func (e addCost) wantWithin(t *testing.T, wanted addCost) {
	t.Helper()
	for _, c := range []struct {
		what         string
		cost, wanted int
		more, fewer  int // tolerance
	}{
		{"allocations", e.allocations, wanted.allocations, wanted.allocations / 10, wanted.allocations / 4},
		{"kilobytes", e.kilobytes, wanted.kilobytes, wanted.kilobytes / 10, wanted.kilobytes / 4},
		{"calls of read(2)", e.reads, wanted.reads, 2, 2},
		{"calls of write(2)", e.writes, wanted.writes, 1, 0},
	} {
		switch {
		case c.cost > c.wanted+c.more:
			t.Errorf("%d %s, want %d and at most %d more: an ADD with nothing to do costs more", c.cost, c.what, c.wanted, c.more)
		case c.cost < c.wanted-c.fewer:
			t.Errorf("%d %s, far below %d: update the number in this test", c.cost, c.what, c.wanted)
		}
	}
}

// measureADD measures ADD with a configuration on the node. With noCache the ADD ignores the
// verification cache and reads the rules.
func (n *node) measureADD(t *testing.T, conf string, noCache bool) (e addCost) {
	t.Helper()
	l := inProcessPlugin{node: n, noCache: noCache}
	add := func() {
		l.call(t, conf, func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Add(args) })
	}
	generation := n.generation(t)
	must(t, n.Node.Do(func() error {
		const times = 20
		e.allocations = int(testing.AllocsPerRun(times, add))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for range times {
			add()
		}
		runtime.ReadMemStats(&after)
		e.kilobytes = int(after.TotalAlloc-before.TotalAlloc) / times >> 10
		reads, writes := syscallCounts(t)
		add()
		readsAfter, writesAfter := syscallCounts(t)
		again, _ := syscallCounts(t) // the cost of counting
		e.reads, e.writes = readsAfter-reads-(again-readsAfter), writesAfter-writes
		return nil
	}))
	if now := n.generation(t); now != generation {
		t.Fatalf("generation %d, was %d: the ADD wrote rules", now, generation)
	}
	return e
}

// syscallCounts returns how often the thread has called read(2), write(2) and similar calls
// (proc_pid_io(5)).
func syscallCounts(t *testing.T) (reads, writes int) {
	t.Helper()
	found := map[string]int{}
	for line := range strings.Lines(string(readFile(t, "/proc/thread-self/io"))) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		number, err := strconv.Atoi(value)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		found[key] = number
	}
	if found["syscr"] == 0 {
		t.Fatal("the kernel does not count system calls (CONFIG_TASK_IO_ACCOUNTING)")
	}
	return found["syscr"], found["syscw"]
}

// withoutLockLimit is the time limit of a call that does not wait for the lock. It is far below the
// plugin's lock timeout.
const withoutLockLimit = 4 * time.Second

// tracePrograms returns a PATH with scripts that log each call and run the program of the node's
// backend. For nftables these are the programs of iptables-nft.
func (n *node) tracePrograms(t *testing.T) (path, log string) {
	t.Helper()
	path, log = filepath.Join(n.dir, "traps"), filepath.Join(n.dir, "called")
	must(t, os.Mkdir(path, 0o755))
	variant := n.backend.variant
	if variant == "" {
		variant = "nft"
	}
	programs := map[string]string{"nft": "nft", "conntrack": "conntrack", "ipset": "true"}
	for _, f := range families() {
		for _, suffix := range []string{"", "-save", "-restore"} {
			for _, v := range []string{"", "-" + variant} {
				programs[f[0]+v+suffix] = f[0] + "-" + variant + suffix
			}
		}
	}
	for name, program := range programs {
		target, err := exec.LookPath(program)
		if err != nil {
			t.Fatalf("%v (`make packages` installs it)", err)
		}
		script := fmt.Sprintf("#!/bin/sh\necho %s \"$@\" >> %s\nexec %s \"$@\"\n", name, log, target)
		must(t, os.WriteFile(filepath.Join(path, name), []byte(script), 0o755))
	}
	return path, log
}

// tracedCalls returns the calls since the last call of tracedCalls.
func tracedCalls(t *testing.T, log string) []string {
	t.Helper()
	text, err := os.ReadFile(log)
	if os.IsNotExist(err) {
		return nil
	}
	must(t, err)
	must(t, os.Remove(log))
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// holdLock takes the lock of the node's dataDir as another process does.
func (n *node) holdLock(t *testing.T) (release func()) {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(n.dataDir, "lock"), os.O_RDWR, 0)
	must(t, err)
	// A program that another test starts has a lock of this process until its exec.
	if !timelimit.Await(timelimit.Wait, func() bool {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		return err == nil
	}) {
		t.Fatalf("take the lock: %v", err)
	}
	release = sync.OnceFunc(func() { _ = f.Close() })
	t.Cleanup(release)
	return release
}

// documentStamps returns the inode and modification time of each document and of the record.
func (n *node) documentStamps(t *testing.T) string {
	t.Helper()
	paths := assert.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*.json")))(t)
	var b strings.Builder
	for _, path := range append(paths, filepath.Join(n.dataDir, "record.json")) {
		info := assert.Must(os.Stat(path))(t)
		stat := info.Sys().(*syscall.Stat_t)
		fmt.Fprintln(&b, path, stat.Ino, stat.Ctim) // a new document can have the time of the former one
	}
	return b.String()
}

// TestIdempotence checks that the verbs take no lock, write no rule and no document and run no
// program on nf_tables while the rules are correct. ADD, DEL and GC change only attachments.
func TestIdempotence(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		path, log := n.tracePrograms(t)
		conf := n.conf(t, "podnet", object{"enableIPv6": true, "masqueradeCIDRs": []string{"10.9.0.0/16", "fd00:9::/32"},
			"toPorts": "1024-29999,32768-65535", "sourceCIDRs": []string{"10.1.0.0/16", "fd00:1::/64"}, "outputInterfaces": []string{"lan", "out+"}})
		n.storeSource(t, agentFilesSource(func(s *policy.SourcePolicy) { s.NonMasqueradeCIDRs = prefixes("10.0.0.0/8", "192.0.2.0/24") }))
		n.addThirdPartyRules(t)
		n.invoke(t, invocation{verb: "ADD", conf: conf, path: path}).want(t, 0)
		made := tracedCalls(t, log)
		if restored := strings.Contains(strings.Join(made, " "), "-restore"); restored != (n.backend.variant != "") {
			t.Fatalf("the first ADD ran %q", made) // otherwise the trace is broken
		}
		n.addAndCheck(t, conf)
		n.holdLock(t)
		documents, rules, generation, attached := n.documentStamps(t), n.ruleset(t), n.generation(t), n.attachments(t, "podnet")
		for _, verb := range []string{"ADD", "ADD", "CHECK", "STATUS", "DEL", "GC"} {
			a := n.invoke(t, invocation{verb: verb, conf: conf, path: path, id: "another"}).want(t, 0)
			a.noWarnings(t)
			if timelimit.Exceeded(a.took, withoutLockLimit) {
				t.Errorf("%s took %v while the lock was held", verb, a.took)
			}
			want := attached
			if verb == "ADD" {
				want++
			}
			if verb != "CHECK" && verb != "STATUS" {
				n.wantAttachments(t, "podnet", want)
			}
			wantFewPrograms(t, n, verb, tracedCalls(t, log))
		}
		wantSame(t, "generation", n.generation(t), generation)
		wantSame(t, "rules", n.ruleset(t), rules)
		wantSame(t, "documents", n.documentStamps(t), documents)
	})
}

// wantFewPrograms fails the test if a verb ran programs. For iptables-legacy it allows one listing
// per family.
func wantFewPrograms(t *testing.T, n *node, verb string, calls []string) {
	t.Helper()
	if n.backend.variant != "legacy" {
		if len(calls) > 0 {
			t.Errorf("%s ran %q", verb, calls)
		}
		return
	}
	if len(calls) > len(families()) || strings.Contains(strings.Join(calls, " "), "-restore") {
		t.Errorf("%s ran %q", verb, calls)
	}
}
