// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/measure"
	"github.com/ip-masq/ip-masq-cni/tools/bench/internal/scene"
)

func main() { os.Exit(sandbox.Enter(run)) }

func run() int {
	quick := flag.Bool("quick", false, "Run few rounds without the largest sizes, for development. The figures are not reliable.")
	out := flag.String("out", "", "Directory to write results.txt to. The default is bin/bench, or bin/bench/quick for a quick or partial run.")
	only := flag.String("only", "", "Comma-separated parts to measure, for development.")
	flag.Parse()
	b := &bench{quick: *quick}
	usual := filepath.Join("bin", "bench")
	if *quick || *only != "" {
		usual = filepath.Join(usual, "quick")
	}
	if err := topology.Run(func(t topology.T) { b.run(t, cmp.Or(*out, usual), *only) }); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		return 1
	}
	return 0
}

// bench is one run of the benchmark.
type bench struct {
	quick   bool
	results bytes.Buffer // in the Go benchmark format
}

// part measures one or more comparisons.
type part struct {
	name string
	run  func(topology.T)
}

func (b *bench) parts() []part {
	return []part{
		{"add", b.add},
		{"burst", b.burst},
		{"first", b.firstPod},
		{"rebuild", b.rebuild},
		{"connections", b.connections},
		{"guard", b.guard},
		{"reset", b.reset},
		{"repair", b.besideReconciler(b.repairs)},
		{"commits", b.besideReconciler(b.commits)},
		{"published", b.besideReconciler(b.published)},
	}
}

func (b *bench) run(t topology.T, out, only string) {
	describeMachine(t, &b.results)
	scene.Install(t)
	for _, p := range b.parts() {
		if only != "" && !strings.Contains(","+only+",", ","+p.name+",") {
			continue
		}
		start := time.Now()
		separately(t, p.run)
		fmt.Printf("%-12s %5.1f s\n", p.name, time.Since(start).Seconds())
	}
	assert.NoError(t, os.MkdirAll(out, 0o755))
	assert.NoError(t, os.WriteFile(filepath.Join(out, "results.txt"), b.results.Bytes(), 0o644))
}

// separately closes the nodes that a function makes before it returns.
func separately(t topology.T, run func(topology.T)) { assert.NoError(t, topology.Run(run)) }

// compare runs contenders in turn and writes their costs.
func (b *bench) compare(benchmark string, limit measure.Limit, contenders ...measure.Contender) {
	measure.Interleave(&b.results, benchmark, limit, contenders...)
}

// limit returns the limit of a comparison; a quick run has fewer rounds and less time. benchstat needs six
// rounds for an interval.
func (b *bench) limit(rounds int, most time.Duration) measure.Limit {
	l := measure.Limit{Rounds: rounds, Least: min(6, rounds), Time: most}
	if b.quick {
		l = measure.Limit{Rounds: max(3, rounds/6), Least: 3, Time: most / 5}
	}
	return l
}

// sizes drops the largest size in a quick run.
func (b *bench) sizes(all ...int) []int {
	if b.quick {
		return all[:len(all)-1]
	}
	return all
}

// wall is a cost in time.
func wall(d time.Duration) measure.Value { return measure.Value{Cost: float64(d), Unit: "ns/op"} }

// processor is a cost in processor time.
func processor(d time.Duration) measure.Value {
	return measure.Value{Cost: float64(d), Unit: "cpu-ns/op"}
}

// describeMachine writes the machine and the programs as configuration of the Go benchmark format.
func describeMachine(t topology.T, w io.Writer) {
	var u unix.Utsname
	assert.NoError(t, unix.Uname(&u))
	cpuinfo, load := assert.Must(os.ReadFile("/proc/cpuinfo"))(t), assert.Must(os.ReadFile("/proc/loadavg"))(t)
	_, model, _ := strings.Cut(string(cpuinfo), "model name\t: ") // not every architecture has it
	model, _, _ = strings.Cut(model, "\n")
	fmt.Fprintf(w, "goos: %s\ngoarch: %s\ncpu: %s\nprocessors: %d\nkernel: %s\nload-before: %s\ndate: %s\n", runtime.GOOS, runtime.GOARCH, model,
		runtime.NumCPU(), bytes.TrimRight(u.Release[:], "\x00"), strings.Fields(string(load))[0], time.Now().UTC().Format(time.DateOnly))
	for name, program := range map[string][]string{
		"ip-masq": {topology.BinDir(t) + "/ip-masq-reconciler", "version"}, "iptables": {"iptables-nft", "--version"}, "nft": {"nft", "--version"},
	} {
		out := assert.Must(exec.Command(program[0], program[1:]...).Output())(t)
		first, _, _ := strings.Cut(string(out), "\n")
		fmt.Fprintf(w, "%s: %s\n", name, first)
	}
}
