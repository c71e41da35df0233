// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
)

// addCost is the cost of an ADD with nothing to do, in units that depend neither on the machine nor
// on its load.
type addCost struct {
	allocations int
	kilobytes   int // allocated
	reads       int // calls of read(2): files and netlink replies
	writes      int // calls of write(2): netlink requests
}

// TestHotPath checks the cost of an ADD with nothing to do, because every pod waits for it. It runs
// ADD in this process and on a real kernel, with and without the verification cache.
//
// Allocations and bytes vary by less than 1 % between runs, because maps grow in random order and
// the garbage collector empties pools; releases of Go and iptables change them a little more. So a
// tenth more is tolerated. Kernels split long netlink dumps differently, so two more or fewer
// reads are tolerated, and one more write, with which the Go runtime wakes a thread now and then.
// A change that adds cost on purpose updates the numbers, and so does a change that saves a
// quarter.
//
// TestHotPath measures no time, because other load changes it; `make bench` does.
func TestHotPath(t *testing.T) {
	want := map[string]addCost{
		"nftables, 64 prefixes":                            {1085, 185, 14, 9},
		"nftables, 64 prefixes, cached":                    {420, 60, 5, 2},
		"nftables, 64 prefixes and 5000 rules":             {1085, 185, 14, 9},
		"nftables, 64 prefixes and 5000 rules, cached":     {420, 60, 5, 2},
		"nftables, 1000 prefixes":                          {3910, 1110, 15, 9},
		"nftables, 1000 prefixes, cached":                  {420, 150, 5, 2},
		"iptables-nft, 64 prefixes":                        {1505, 232, 11, 7},
		"iptables-nft, 64 prefixes, cached":                {420, 60, 5, 2},
		"iptables-nft, 64 prefixes and 5000 rules":         {1505, 232, 11, 7},
		"iptables-nft, 64 prefixes and 5000 rules, cached": {420, 60, 5, 2},
		"iptables-nft, 1000 prefixes":                      {10890, 1780, 19, 7},
		"iptables-nft, 1000 prefixes, cached":              {420, 150, 5, 2},
		"iptables-legacy, 64 prefixes":                     {1425, 194, 5, 1},
		"iptables-legacy, 64 prefixes and 5000 rules":      {3960, 3100, 5, 1},
		"iptables-legacy, 1000 prefixes":                   {10800, 1730, 5, 1},
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
