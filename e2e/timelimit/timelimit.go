// SPDX-License-Identifier: Apache-2.0

package timelimit

import (
	"os/exec"
	"slices"
	"time"
)

const (
	// starts is how many processes are started to measure the machine, and idle is
	// how long one takes at most on an idle one: 0.6 ms on two cores of 2021.
	starts = 40
	idle   = time.Millisecond
	// Most is the largest factor: a test that hangs fails in the end.
	Most = 20
)

// Factor measures how many times slower the machine is now than an idle one, from 1
// to Most. That takes 25 ms on an idle machine.
//
// It starts processes, as most of what tests wait for does: a new process meets
// every queue that a loaded machine has. The slowest quarter counts, as limits are
// about the worst.
func Factor() float64 {
	took := make([]time.Duration, starts)
	for i := range took {
		began := time.Now()
		if err := exec.Command("true").Run(); err != nil {
			return 1 // and limits are those of an idle machine
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	const quarter = starts / 4
	var sum time.Duration
	for _, d := range took[starts-quarter:] {
		sum += d
	}
	return min(max(1, float64(sum)/float64(quarter*idle)), Most)
}

// Scale returns what a limit is on the machine as it is now.
func Scale(limit time.Duration) time.Duration {
	return time.Duration(Factor() * float64(limit))
}

// Exceeded reports whether something took longer than a limit, and longer than what
// the limit is now. It measures the machine only where the limit itself is exceeded,
// so it is to be asked right then.
func Exceeded(took, limit time.Duration) bool {
	return took > limit && took > Scale(limit)
}

// Fair returns how long something would have taken on an idle machine, as far as can
// be known: what took no longer than the limit is returned as it is, and what took
// longer is divided by Factor.
func Fair(took, limit time.Duration) time.Duration {
	if took <= limit {
		return took
	}
	return time.Duration(float64(took) / Factor())
}
