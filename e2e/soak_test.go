// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

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
	cpuTime := func() time.Duration { return topology.Must(w.command.CPUTime())(t) }
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
			entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/%s", w.command.Process.Pid, what))
			must(t, err)
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
