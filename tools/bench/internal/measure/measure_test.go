// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"errors"
	"io"
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
		return Contender{name, func(round int) ([]Value, error) {
			return []Value{{cost * float64(round+1), "ns/op"}, {cost, "faults/op"}}, nil
		}}
	}
	var b strings.Builder
	if err := Interleave(&b, "ADD/prefixes=64", Limit{Rounds: rounds, Least: rounds}, contender("a", 3e6), contender("b", 2), contender("c", 5)); err != nil {
		t.Fatal(err)
	}
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
	var b strings.Builder
	err := Interleave(&b, "ADD", Limit{Rounds: 50, Least: 2, Time: time.Nanosecond}, Contender{"a", func(int) ([]Value, error) { return []Value{{1, "ns/op"}}, nil }})
	if err != nil || strings.Count(b.String(), "\n") != 2 {
		t.Errorf("%v, %q; want 2 rounds", err, b.String())
	}
}

func TestInterleaveError(t *testing.T) {
	broken := errors.New("broken")
	if err := Interleave(io.Discard, "ADD", Limit{Rounds: 1}, Contender{"a", func(int) ([]Value, error) { return nil, broken }}); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}
