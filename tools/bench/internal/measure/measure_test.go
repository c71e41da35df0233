// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestInterleave checks that each contender has a line of the Go benchmark format for each round, that
// the order changes, and that the warm-up is not counted.
func TestInterleave(t *testing.T) {
	const rounds = 20
	contender := func(name string, cost float64) Contender {
		return Contender{name, func(round int) []Value {
			return []Value{{cost * float64(round+1), "ns/op"}, {cost, "faults/op"}}
		}}
	}
	var b bytes.Buffer
	Interleave(&b, "ADD/prefixes=64", Limit{Rounds: rounds, Least: rounds}, contender("a", 3e6), contender("b", 2), contender("c", 5))
	lines := slices.Collect(strings.Lines(b.String()))
	if len(lines) != 3*rounds || !slices.Contains(lines[3:6], "BenchmarkADD/prefixes=64/a 1 6e+06 ns/op 3e+06 faults/op\n") {
		t.Fatalf("results\n%s", b.String())
	}
	orders := map[string]bool{}
	for round := range slices.Chunk(lines, 3) {
		order := ""
		for _, line := range round {
			order += line[len("BenchmarkADD/prefixes=64/"):][:1]
		}
		orders[order] = true
	}
	if len(orders) < 4 {
		t.Errorf("orders %v of 6", orders)
	}
}

func TestInterleaveTimeLimit(t *testing.T) {
	var b bytes.Buffer
	Interleave(&b, "ADD", Limit{Rounds: 50, Least: 2, Time: time.Nanosecond}, Contender{"a", func(int) []Value { return []Value{{1, "ns/op"}} }})
	if strings.Count(b.String(), "\n") != 2 {
		t.Errorf("%q; want 2 rounds", b.String())
	}
}
