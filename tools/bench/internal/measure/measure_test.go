// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestWrite checks that each contender has a line of the Go benchmark format for each round.
func TestWrite(t *testing.T) {
	contender := func(name string, cost float64) Contender {
		return Contender{name, func(round int) ([]Value, error) {
			return []Value{{cost * float64(round+1), "ns/op"}, {cost, "faults/op"}}, nil
		}}
	}
	f, err := Interleave(Limit{Rounds: 2, Least: 2}, contender("plugin=a", 3e6), contender("plugin=b", 2))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := f.Write(&b, "ADD/prefixes=64"); err != nil {
		t.Fatal(err)
	}
	want := `BenchmarkADD/prefixes=64/plugin=a 1 3e+06 ns/op 3e+06 faults/op
BenchmarkADD/prefixes=64/plugin=b 1 2 ns/op 2 faults/op
BenchmarkADD/prefixes=64/plugin=a 1 6e+06 ns/op 3e+06 faults/op
BenchmarkADD/prefixes=64/plugin=b 1 4 ns/op 2 faults/op
`
	if b.String() != want {
		t.Errorf("results\n%swant\n%s", b.String(), want)
	}
}

// TestOrder checks that each contender runs once a round, that the order changes, and that the
// warm-up is not counted.
func TestOrder(t *testing.T) {
	const rounds = 20
	run := func() (order []string) {
		contender := func(name string) Contender {
			return Contender{name, func(int) ([]Value, error) { order = append(order, name); return []Value{{1, "ns/op"}}, nil }}
		}
		f, err := Interleave(Limit{Rounds: rounds, Least: rounds}, contender("a"), contender("b"), contender("c"))
		if err != nil {
			t.Fatal(err)
		}
		if len(f.Of("c")) != rounds {
			t.Errorf("%d figures of %d rounds", len(f.Of("c")), rounds)
		}
		return order
	}
	order, seen := run(), map[string]bool{}
	for round := range slices.Chunk(order, 3) {
		seen[strings.Join(round, "")] = true
		if slices.Sort(round); strings.Join(round, "") != "abc" {
			t.Errorf("a round of %v", round)
		}
	}
	if len(seen) < 4 {
		t.Errorf("orders %v of 6", seen)
	}
}

func TestInterleaveTimeLimit(t *testing.T) {
	f, err := Interleave(Limit{Rounds: 50, Least: 2, Time: time.Nanosecond}, Contender{"a", func(int) ([]Value, error) { return []Value{{1, "ns/op"}}, nil }})
	if err != nil || len(f.Of("a")) != 2 {
		t.Errorf("%d rounds, %v; want 2", len(f.Of("a")), err)
	}
}

func TestInterleaveError(t *testing.T) {
	broken := errors.New("broken")
	if _, err := Interleave(Limit{Rounds: 1}, Contender{"a", func(int) ([]Value, error) { return nil, broken }}); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}
