// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// variable is the environment variable with the state of a process: "entering:NETNS", then
// "inside:NETNS", where NETNS is the network namespace outside. Because of NETNS the variable
// alone, set by mistake, does not allow work in the machine's own namespace.
const variable = "IPMASQ_SANDBOX"

const (
	entering = "entering:"
	inside   = "inside:"
)

// Run runs the tests of m in a sandbox and returns the exit code:
//
//	func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }
//
// The process that `go test` started waits outside and forwards signals. The tests run in a second
// process with the same arguments.
func Run(m interface{ Run() int }) int {
	return Enter(m.Run)
}

// Enter runs body in a sandbox and returns its exit code, for programs that are not tests:
//
//	func main() { os.Exit(sandbox.Enter(run)) }
//
// The code in main before Enter runs twice, outside and inside, and three times in a chroot. A
// process that was started inside, directly or not, stays in its sandbox. If the sandbox cannot be
// made, body does not run, the error goes to standard error, and the code is 1. If a signal ends
// body, the code is 128 plus the signal's number, as in a shell.
func Enter(body func() int) int {
	code, err := enter(body)
	if err != nil {
		fmt.Fprintf(os.Stderr, "sandbox: %v\n", err)
		return 1
	}
	return code
}

// NetworkNamespace gives the calling test a network namespace of its own, in which it and the programs that it
// runs stay: the thread ends with the test.
func NetworkNamespace(t assert.T) {
	t.Helper()
	assert.NoError(t, Check())
	runtime.LockOSThread()
	assert.NoError(t, unix.Unshare(unix.CLONE_NEWNET))
}

// WithoutFiles lets the process open no file and no socket until the test ends: with EMFILE.
func WithoutFiles(t *testing.T) {
	t.Helper()
	var before unix.Rlimit
	assert.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	none := unix.Rlimit{Cur: 0, Max: before.Max}
	assert.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
	t.Cleanup(func() { assert.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before)) })
}

// Feed runs a program in the thread's network namespace with the input.
func Feed(t assert.T, input, program string, args ...string) {
	t.Helper()
	c := exec.Command(program, args...)
	c.Stdin = strings.NewReader(input)
	assert.Output(t, c)
}

// Check returns nil inside a sandbox, and otherwise an error that explains how to enter one. Code
// that changes the network must call it first.
func Check() error {
	state := os.Getenv(variable)
	if !strings.HasPrefix(state, inside) {
		return errors.New("not in a sandbox: call sandbox.Run in TestMain, or sandbox.Enter in main")
	}
	return left(strings.TrimPrefix(state, inside))
}

func enter(body func() int) (int, error) {
	state := os.Getenv(variable)
	switch {
	case strings.HasPrefix(state, inside):
		if err := Check(); err != nil {
			return 0, err
		}
		return body(), nil
	case strings.HasPrefix(state, entering):
		outside := strings.TrimPrefix(state, entering)
		if err := left(outside); err != nil {
			return 0, err
		}
		program, err := os.Executable()
		if err != nil {
			return 0, err
		}
		moved, err := furnish()
		if err != nil {
			return 0, fmt.Errorf("%w%s", err, advice(err))
		}
		if err := os.Setenv(variable, inside+outside); err != nil {
			return 0, fmt.Errorf("set %s: %w", variable, err)
		}
		if moved {
			// The kernel has no path of the running program below the new root, so the program is
			// started again by its path there. If that fails, only os.Executable is wrong.
			_ = unix.Exec(program, os.Args, os.Environ())
		}
		return body(), nil
	default:
		return reexec()
	}
}

// left checks that this thread is in another network namespace than the process outside.
func left(outside string) error {
	current, err := networkNamespace()
	if err != nil {
		return err
	}
	if current == outside {
		return fmt.Errorf("%s is set, but this is still the network namespace %s: unset it", variable, outside)
	}
	return nil
}

// networkNamespace returns the calling thread's network namespace, such as "net:[4026531840]".
func networkNamespace() (string, error) {
	name, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		return "", fmt.Errorf("identify network namespace: %w", err)
	}
	return name, nil
}

// KernelBefore reports whether the kernel is older than version major.minor, for tests of what
// kernels can do since then.
func KernelBefore(major, minor int) bool {
	var u unix.Utsname
	var x, y int
	if err := unix.Uname(&u); err != nil {
		return false
	}
	_, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &x, &y)
	return err == nil && (x < major || x == major && y < minor)
}
