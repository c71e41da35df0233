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

// ear hears every commit to nf_tables on a node.
type commitWatcher struct{ *fixtures.CommitWatcher }

// listen hears commits from now until the end of the test.
func (n *node) watchCommits(t *testing.T) *commitWatcher {
	t.Helper()
	e := &commitWatcher{}
	if err := n.Node.Do(func() (err error) {
		e.CommitWatcher, err = fixtures.WatchCommits()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Errorf("listening ended with %v", err)
		}
	})
	return e
}

// quiet waits until nothing was heard for a while, of which there may have been
// some since a call before, and returns how many commits there were by then.
func (e *commitWatcher) untilIdle(t *testing.T, while time.Duration) int {
	t.Helper()
	const most = 10 * time.Second
	count, last := e.Count(), time.Now()
	for start := time.Now(); time.Since(last) < while; time.Sleep(time.Millisecond) {
		if now := e.Count(); now != count {
			count, last = now, time.Now()
		}
		if time.Since(start) > most {
			t.Fatalf("commits go on and on: %v", e.Since(max(0, count-20)))
		}
	}
	return count
}

// after tells the programs that made the commits after a generation.
func (e *commitWatcher) programsAfter(generation uint32) (programs []string) {
	for _, c := range e.Since(0) {
		if c.Generation > generation {
			programs = append(programs, c.Program)
		}
	}
	return programs
}

// by counts those since then by program.
func (e *commitWatcher) countByProgram(since int) string {
	count := map[string]int{}
	for _, c := range e.Since(since) {
		count[c.Program]++
	}
	var b strings.Builder
	for _, program := range slices.Sorted(maps.Keys(count)) {
		fmt.Fprintf(&b, "%d by %s ", count[program], program)
	}
	return b.String()
}

// figures are how long something took, each time.
type durations []time.Duration

func (f durations) median() time.Duration {
	sorted := slices.Sorted(slices.Values(f))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

func (f durations) String() string {
	return fmt.Sprintf("median %5.1f ms, worst %5.1f ms of %d", ms(f.median()), ms(slices.Max(f)), len(f))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (f durations) slow() bool {
	return timelimit.Exceeded(f.median(), medianRepair) || slices.Max(f) > worstRepair
}
