// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

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
