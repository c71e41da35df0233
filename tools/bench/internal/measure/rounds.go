// SPDX-License-Identifier: Apache-2.0

package measure

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Contender is an operation to compare.
type Contender struct {
	Name string
	// Run performs the operation once and returns its cost, in a unit that all contenders share.
	// Rounds count from 0; the warm-up is -1.
	Run func(round int) (float64, error)
}

// Limit limits the number of rounds and the time, with a minimum number of rounds.
type Limit struct {
	Rounds, Least int
	Time          time.Duration
	Cold          bool // no warm-up, for what takes many seconds
}

// Figures has the cost of each contender in each round.
type Figures struct {
	names  []string
	rounds [][]float64 // by round, then contender
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
		costs := make([]float64, len(contenders))
		for _, at := range random.Perm(len(contenders)) {
			cost, err := contenders[at].Run(round)
			if err != nil {
				return Figures{}, fmt.Errorf("%s, round %d: %w", contenders[at].Name, round, err)
			}
			costs[at] = cost
		}
		if round >= 0 {
			f.rounds = append(f.rounds, costs)
		}
	}
	return f, nil
}

// Of returns the costs of a contender by round, or nil if there is no contender with the name.
func (f Figures) Of(name string) Series {
	var s Series
	for i, known := range f.names {
		if known != name {
			continue
		}
		for _, costs := range f.rounds {
			s = append(s, costs[i])
		}
	}
	return s
}

// Ratio compares a contender with another, round by round.
func (f Figures) Ratio(name, base string) Estimate {
	return Paired(f.Of(name), f.Of(base))
}

// Extra returns the difference between a contender's cost and another's, round by round.
func (f Figures) Extra(name, base string) Series {
	return combine(f.Of(name), f.Of(base), func(a, b float64) float64 { return a - b })
}

func combine(a, b Series, how func(a, b float64) float64) Series {
	var s Series
	for i := range min(len(a), len(b)) {
		s = append(s, how(a[i], b[i]))
	}
	return s
}

// Paired compares figures that were taken in the same rounds.
func Paired(a, b Series) Estimate {
	return estimate(combine(a, b, func(a, b float64) float64 { return a / b }))
}
