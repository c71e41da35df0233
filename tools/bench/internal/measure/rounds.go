// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

// Value is a cost with its unit, as in the Go benchmark format: ns/op.
type Value struct {
	Cost float64
	Unit string
}

// Contender is an operation to compare.
type Contender struct {
	// Name is the part of the benchmark's name that distinguishes the contender: plugin=empty.
	Name string
	// Run performs the operation once and returns its costs, always with the same units. Rounds count
	// from 0; the warm-up is -1.
	Run func(round int) ([]Value, error)
}

// Limit limits the number of rounds and the time, with a minimum number of rounds.
type Limit struct {
	Rounds, Least int
	Time          time.Duration
	Cold          bool // no warm-up, for what takes many seconds
}

// Figures has the costs of each contender in each round.
type Figures struct {
	names  []string
	rounds [][][]Value // by round, then contender
}

// Interleave runs all contenders once a round in a shuffled order, so that no contender always runs
// after the same other one. The shuffles are reproducible. The first round is a warm-up and not
// counted.
func Interleave(limit Limit, contenders ...Contender) (Figures, error) {
	var f Figures
	for _, c := range contenders {
		f.names = append(f.names, c.Name)
	}
	start := time.Now()
	random := rand.New(rand.NewPCG(3, 4))
	first := -1
	if limit.Cold {
		first = 0
	}
	for round := first; round < limit.Rounds; round++ {
		if round >= limit.Least && time.Since(start) > limit.Time {
			break
		}
		costs := make([][]Value, len(contenders))
		for _, at := range random.Perm(len(contenders)) {
			var err error
			if costs[at], err = contenders[at].Run(round); err != nil {
				return Figures{}, fmt.Errorf("%s, round %d: %w", contenders[at].Name, round, err)
			}
		}
		if round >= 0 {
			f.rounds = append(f.rounds, costs)
		}
	}
	return f, nil
}

// Of returns the first cost of a contender by round, or nil if there is no contender with the name.
func (f Figures) Of(name string) []float64 {
	at := slices.Index(f.names, name)
	if at < 0 {
		return nil
	}
	var s []float64
	for _, costs := range f.rounds {
		s = append(s, costs[at][0].Cost)
	}
	return s
}

// Write writes a line of the Go benchmark format for each contender in each round.
func (f Figures) Write(w io.Writer, benchmark string) error {
	for _, costs := range f.rounds {
		for i, name := range f.names {
			if err := WriteLine(w, benchmark+"/"+name, costs[i]...); err != nil {
				return err
			}
		}
	}
	return nil
}

// WriteLine writes a line of the Go benchmark format. A benchmark's name must not end with a hyphen and
// a number, which would be a number of processors.
func WriteLine(w io.Writer, benchmark string, costs ...Value) error {
	line := "Benchmark" + benchmark + " 1"
	for _, v := range costs {
		line += " " + strconv.FormatFloat(v.Cost, 'g', 6, 64) + " " + v.Unit
	}
	_, err := fmt.Fprintln(w, line)
	return err
}
