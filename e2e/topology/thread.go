// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// thread is an operating system thread that stays in one network namespace.
// What it starts gets the parent death signal when it ends (prctl(2)), which
// borrowed threads, whose lives the Go runtime decides, cannot promise.
type thread struct {
	work chan func()
	done chan struct{}
}

// startThread starts a thread that first does setUp. If that fails, the thread
// ends and the error is returned.
func startThread(setUp func() error) (*thread, error) {
	t := &thread{work: make(chan func()), done: make(chan struct{})}
	result := make(chan error)
	go t.run(setUp, result)
	if err := <-result; err != nil {
		<-t.done
		return nil, err
	}
	return t, nil
}

func (t *thread) run(setUp func() error, result chan<- error) {
	// Never unlocked: a thread whose goroutine returns locked ends.
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// Not so the main thread, which also is what /proc/self shows. While
		// it is held here, the other goroutine gets another.
		moved := make(chan error)
		go t.run(setUp, moved)
		result <- <-moved
		runtime.UnlockOSThread()
		return
	}
	defer close(t.done)
	err := setUp()
	result <- err
	if err != nil {
		return
	}
	for f := range t.work {
		f()
	}
}

// do runs f on the thread, after what others want of it.
func (t *thread) do(f func() error) error {
	result := make(chan error)
	t.work <- func() { result <- f() }
	return <-result
}

// stop ends the thread.
func (t *thread) stop() {
	close(t.work)
	<-t.done
}
