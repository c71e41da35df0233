// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// T is the part of testing.TB and rapid.T that this package uses, so that programs do not import
// package testing.
type T interface {
	assert.T
	Cleanup(func())
}

// Run gives a program what a test has: it calls f, which ends where it fails, then the functions for Cleanup, and
// returns all failures.
func Run(f func(T)) error {
	var p program
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer p.cleanUp()
		f(&p)
	}()
	<-ended
	return p.failed
}

type program struct {
	failed   error
	cleanups []func()
}

func (p *program) Helper() {}

func (p *program) Cleanup(f func()) { p.cleanups = append(p.cleanups, f) }

func (p *program) Errorf(format string, args ...any) {
	p.failed = errors.Join(p.failed, fmt.Errorf(format+"\n%s", append(args, debug.Stack())...))
}

func (p *program) Fatalf(format string, args ...any) {
	p.Errorf(format, args...)
	runtime.Goexit()
}

func (p *program) cleanUp() {
	if n := len(p.cleanups); n > 0 {
		f := p.cleanups[n-1]
		p.cleanups = p.cleanups[:n-1]
		defer p.cleanUp()
		f()
	}
}
