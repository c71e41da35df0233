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

// effort is what an ADD takes that has nothing to do, counted in what does not
// depend on the machine or on what else runs there.
type addCost struct {
	allocations int
	kilobytes   int // allocated
	reads       int // calls of read(2): files, and answers of netlink
	writes      int // calls of write(2): requests of netlink
}

// TestHotPath is the guard of the way that every pod's start waits for. It runs
// ADD in this process, on a real kernel, and counts: of an ADD that looks at the
// rules, and of one that finds that nothing changed since another looked.
//
// The figures of a run differ by less than one in a hundred: maps grow in an
// order that is random, and pools of encoding/json are emptied by the garbage
// collector. Another release of Go, or of the iptables that writes the rules,
// may move them by some more. So allocations and bytes may be a tenth above what
// is committed here. Of answers and files there may be two more or fewer, for
// kernels cut long answers in different places, and of requests one more, with
// which the runtime of Go wakes a thread of its own now and then.
// A change that adds to them on purpose writes the new figures here; and so does
// one that saves a fourth, for a guard that hangs too low catches nothing.
//
// Time is not measured here: on a machine that others use it says nothing.
// `make bench` measures it, side by side.
func TestHotPath(t *testing.T) {
	want := map[string]addCost{
		"nftables, 64 prefixes":                               {775, 140, 14, 8},
		"nftables, 64 prefixes, cached":                       {320, 54, 5, 1},
		"nftables, 64 prefixes beside 5000 rules":             {775, 139, 14, 8},
		"nftables, 64 prefixes beside 5000 rules, cached":     {320, 55, 5, 1},
		"nftables, 1000 prefixes":                             {3607, 1040, 15, 8},
		"nftables, 1000 prefixes, cached":                     {320, 144, 5, 1},
		"iptables-nft, 64 prefixes":                           {962, 184, 11, 6},
		"iptables-nft, 64 prefixes, cached":                   {320, 55, 5, 1},
		"iptables-nft, 64 prefixes beside 5000 rules":         {959, 184, 11, 6},
		"iptables-nft, 64 prefixes beside 5000 rules, cached": {320, 55, 5, 1},
		"iptables-nft, 1000 prefixes":                         {6623, 1676, 19, 6},
		"iptables-nft, 1000 prefixes, cached":                 {318, 144, 5, 1},
		"iptables-legacy, 64 prefixes":                        {890, 119, 5, 0},
		"iptables-legacy, 64 prefixes beside 5000 rules":      {974, 3093, 5, 0},
		"iptables-legacy, 1000 prefixes":                      {7529, 1374, 5, 0},
	}
	for _, f := range backends() {
		for _, c := range []struct {
			suffix   string
			prefixes int
		}{{"", 64}, {fmt.Sprintf(" beside %d rules", manyRules), 64}, {"", 1000}} {
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
				for _, blind := range []bool{true, false} {
					name := name
					if !blind {
						if f.variant == "legacy" {
							continue // each looks
						}
						name += ", cached"
					}
					took := n.measureADD(t, conf, blind)
					t.Logf("%s: %+v", name, took)
					took.wantWithin(t, want[name])
				}
			})
		}
	}
}

// TestStartupAllocations is the guard of what is done before main, for each pod: a library
// that makes tables when a program starts is met here. A tenth more is let pass,
// as another release of Go may do some more itself.
func TestStartupAllocations(t *testing.T) {
	const committed = 254 // allocations by what packages do when they are initialized
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
	if code != 0 || allocations > committed+committed/10 || allocations < committed-committed/4 {
		t.Errorf("exit code %d; %d allocations before main, where %d are committed:\n%s", code, allocations, committed, trace)
	}
}

// within fails the test where more was done than is committed, or so much less
// that the figure says nothing any more.
func (e addCost) wantWithin(t *testing.T, committed addCost) {
	t.Helper()
	for _, c := range []struct {
		what            string
		took, committed int
		more, fewer     int // that are tolerated
	}{
		{"allocations", e.allocations, committed.allocations, committed.allocations / 10, committed.allocations / 4},
		{"kilobytes", e.kilobytes, committed.kilobytes, committed.kilobytes / 10, committed.kilobytes / 4},
		{"calls of read(2)", e.reads, committed.reads, 2, 2},
		{"calls of write(2)", e.writes, committed.writes, 1, 0},
	} {
		switch {
		case c.took > c.committed+c.more:
			t.Errorf("%d %s, want %d, and %d more at most: an ADD that has nothing to do has become dearer", c.took, c.what, c.committed, c.more)
		case c.took < c.committed-c.fewer:
			t.Errorf("%d %s where %d are committed: write the new figure down", c.took, c.what, c.committed)
		}
	}
}

// effort counts what ADD of a configuration takes on the node; of one that is
// blind, what it takes to look at the rules.
func (n *node) measureADD(t *testing.T, conf string, blind bool) (e addCost) {
	t.Helper()
	l := inProcessPlugin{node: n, noCache: blind}
	add := func() {
		l.call(t, conf, func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Add(args) })
	}
	generation := n.generation(t)
	if err := n.Node.Do(func() error {
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
		again, _ := syscallCounts(t) // what the counting itself takes
		e.reads, e.writes = readsAfter-reads-(again-readsAfter), writesAfter-writes
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if now := n.generation(t); now != generation {
		t.Fatalf("generation %d, was %d: this was no ADD that has nothing to do", now, generation)
	}
	return e
}

// calls returns how often the thread has called read and write, and their like,
// so far (proc_pid_io(5)).
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
