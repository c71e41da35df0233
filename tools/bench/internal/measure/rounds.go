// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"bytes"
	"math/rand/v2"
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
	Run func(round int) []Value
}

// Limit limits the number of rounds and the time, with a minimum number of rounds.
type Limit struct {
	Rounds, Least int
	Time          time.Duration
	Cold          bool // no warm-up, for what takes many seconds
}

// Interleave runs all contenders once a round in a shuffled order, so that no contender always runs
// after the same other one. The shuffles are reproducible. The first round is a warm-up and not
// counted. It writes a line for each contender in each round.
func Interleave(w *bytes.Buffer, benchmark string, limit Limit, contenders ...Contender) {
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
		for _, at := range random.Perm(len(contenders)) {
			c := contenders[at]
			if costs := c.Run(round); round >= 0 {
				WriteLine(w, benchmark+"/"+c.Name, costs...)
			}
		}
	}
}

// WriteLine writes a line of the Go benchmark format. A benchmark's name must not end with a hyphen and
// a number, which would be a number of processors.
func WriteLine(w *bytes.Buffer, benchmark string, costs ...Value) {
	line := "Benchmark" + benchmark + " 1"
	for _, v := range costs {
		line += " " + strconv.FormatFloat(v.Cost, 'g', 6, 64) + " " + v.Unit
	}
	w.WriteString(line + "\n")
}
