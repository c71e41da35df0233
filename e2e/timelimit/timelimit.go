// SPDX-License-Identifier: Apache-2.0

package timelimit

import (
	"context"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"time"
)

const (
	// starts is the number of processes started for a measurement. idle is the longest start on an
	// idle machine: 0.6 ms on two cores of 2021.
	starts = 40
	idle   = time.Millisecond
	// Most is the largest factor, so that a hanging test fails. Emulated machines need a larger one and
	// set it with the environment variable IPMASQ_MOST_SLOWDOWN.
	Most = 20
	// Wait is the limit of whatever a test waits for: longer than everything that the programs do, and
	// shorter than the reconciler's resync interval, which would hide that it missed an event.
	Wait = 50 * time.Second
)

func most() float64 {
	if f, err := strconv.ParseFloat(os.Getenv("IPMASQ_MOST_SLOWDOWN"), 64); err == nil {
		return f
	}
	return Most
}

// Factor measures how many times slower the machine is now than an idle one, from 1 to Most. It
// takes 25 ms on an idle machine. It starts processes, because most tests wait for processes, and a
// new process waits in every queue of a loaded machine. It uses the slowest quarter of the starts,
// as limits apply to the slowest case.
func Factor() float64 {
	took := make([]time.Duration, starts)
	for i := range took {
		began := time.Now()
		if err := exec.Command("true").Run(); err != nil {
			return 1 // the limits of an idle machine apply
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	const quarter = starts / 4
	var sum time.Duration
	for _, d := range took[starts-quarter:] {
		sum += d
	}
	return min(max(1, float64(sum)/float64(quarter*idle)), most())
}

// Scale returns a limit for the current load of the machine.
func Scale(limit time.Duration) time.Duration {
	return time.Duration(Factor() * float64(limit))
}

// Exceeded reports whether took exceeds the limit and the scaled limit. It must be called right
// after the measurement, because it measures the machine only then.
func Exceeded(took, limit time.Duration) bool {
	return took > limit && took > Scale(limit)
}

// Await waits until a condition holds and reports whether it did within the limit, or the scaled one.
func Await(limit time.Duration, done func() bool) bool {
	for began := time.Now(); !done(); time.Sleep(5 * time.Millisecond) {
		if Exceeded(time.Since(began), limit) {
			return false
		}
	}
	return true
}

// Context returns a context that ends when Wait is exceeded.
func Context(parent context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(parent)
	began := time.Now()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(Wait):
				if Exceeded(time.Since(began), Wait) {
					cancel()
				}
			}
		}
	}()
	return ctx, cancel
}
