// SPDX-License-Identifier: Apache-2.0

package conntrack

import (
	"fmt"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// BenchmarkReset resets 1 % of the entries after one of 64 prefixes is no longer exempt, or is exempt now.
func BenchmarkReset(b *testing.B) {
	var exempt []string
	for i := range 64 {
		exempt = append(exempt, fmt.Sprintf("10.%d.0.0/16", 2*i))
	}
	fewer, more := merged(nil, exempt...), merged(nil, append(exempt, "192.0.2.0/24")...)
	for _, n := range []int{1_000, 100_000, 250_000} {
		b.Run(fmt.Sprint("no longer exempt/", n), func(b *testing.B) {
			benchmarkReset(b, policy.NewConnectionJudge(fewer, [][]policy.Policy{more}, false), n, false)
		})
		b.Run(fmt.Sprint("exempt now/", n), func(b *testing.B) {
			benchmarkReset(b, policy.NewConnectionJudge(more, [][]policy.Policy{fewer}, false), n, true)
		})
	}
}
func benchmarkReset(b *testing.B, judge *policy.ConnectionJudge, n int, translated bool) {
	namespace(b)
	fill(b, n, 1, translated)
	var cpu float64
	var allocated uint64 // more than the peak
	b.ResetTimer()
	for range b.N {
		b.StopTimer()
		runtime.GC()
		var memory, memoryAfter runtime.MemStats
		runtime.ReadMemStats(&memory)
		before := cpuMilliseconds(b)
		b.StartTimer()
		deleted, err := Reset(b.Context(), judge)
		b.StopTimer()
		cpu += cpuMilliseconds(b) - before
		runtime.ReadMemStats(&memoryAfter)
		allocated = max(allocated, memoryAfter.TotalAlloc-memory.TotalAlloc)
		if err != nil || deleted[chains.v4] != uint64(n/100) {
			b.Fatalf("deleted %v, %v", deleted, err)
		}
		fill(b, n, 100, translated)
		b.StartTimer()
	}
	b.ReportMetric(cpu/float64(b.N), "cpu-ms/op")
	b.ReportMetric(float64(allocated)/(1<<20), "MiB-allocated")
}

// cpuMilliseconds returns the CPU time of the process.
func cpuMilliseconds(b *testing.B) float64 {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1e6
}
