// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestQuantile(t *testing.T) {
	s := Series{4, 1, 3, 2}
	for q, want := range map[float64]float64{0: 1, 0.25: 1.75, 0.5: 2.5, 1: 4} {
		if got := s.Quantile(q); got != want {
			t.Errorf("quantile %v is %v, want %v", q, got, want)
		}
	}
	if !math.IsNaN(Series{}.Median()) {
		t.Error("the median of no figures is a number, want NaN")
	}
}

// TestRatioPairsRounds checks that a machine that slows down does not change paired ratios.
func TestRatioPairsRounds(t *testing.T) {
	speed := 1.0
	contender := func(name string, cost float64) Contender {
		return Contender{name, func(round int) (float64, error) {
			return cost * math.Pow(2, float64(round)) * speed, nil
		}}
	}
	f, err := Interleave(Limit{Rounds: 9, Least: 9}, contender("a", 3), contender("b", 2))
	if err != nil {
		t.Fatal(err)
	}
	if r := f.Ratio("a", "b"); r != (Estimate{1.5, 1.5, 1.5, 9}) {
		t.Errorf("ratio %v, want 1.5 of 9 rounds", r)
	}
}

// TestOrder checks that each contender runs once a round, that the order changes, and that the
// warm-up is not counted.
func TestOrder(t *testing.T) {
	const rounds = 20
	run := func() (order []string) {
		contender := func(name string) Contender {
			return Contender{name, func(int) (float64, error) { order = append(order, name); return 1, nil }}
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
	f, err := Interleave(Limit{Rounds: 50, Least: 2, Time: time.Nanosecond}, Contender{"a", func(int) (float64, error) { return 1, nil }})
	if err != nil || len(f.Of("a")) != 2 {
		t.Errorf("%d rounds, %v; want 2", len(f.Of("a")), err)
	}
}

func TestInterleaveError(t *testing.T) {
	broken := errors.New("broken")
	if _, err := Interleave(Limit{Rounds: 1}, Contender{"a", func(int) (float64, error) { return 0, broken }}); !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}

func TestEstimateContainsMedian(t *testing.T) {
	e := EstimateOf(Series{1, 2, 3, 3, 4, 4, 100})
	if e.Median != 3 || e.Low == 1 && e.High == 100 || e.Low > 3 || e.High < 3 || e.Low < 1 || e.High > 100 {
		t.Errorf("estimate %+v", e)
	}
}

func TestEstimateOfFewFigures(t *testing.T) {
	if e := EstimateOf(Series{5, 1, 2}); e != (Estimate{2, 1, 5, 3}) {
		t.Errorf("estimate %+v", e)
	}
}

func TestShort(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.0123: "0.012", 1.5: "1.50", 9.999: "10.0", 99.99: "100", 1234.5: "1234", math.NaN(): "–"} {
		if got := Short(v); got != want {
			t.Errorf("%v is written %s, want %s", v, got, want)
		}
	}
}
