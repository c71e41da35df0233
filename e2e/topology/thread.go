// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// thread is an operating system thread that stays in one network namespace. Its child processes get
// the parent death signal when it ends (prctl(2)). Threads that the Go runtime manages cannot
// guarantee that.
type thread struct {
	work chan func()
	done chan struct{}
}

// startThread starts a thread that first calls setUp. If setUp fails, the thread ends and
// startThread returns the error.
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
	// The thread stays locked: it ends when its goroutine returns.
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread must not be used, because /proc/self shows it. While this goroutine
		// occupies it, the new goroutine gets another thread.
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

// do runs f on the thread, after earlier calls.
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
