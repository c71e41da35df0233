// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// childPath is the PATH of the programs that are run.
const childPath = "/usr/sbin:/usr/bin:/sbin:/bin"

var errHangs = errors.New("it hangs")

// didNotEnd is the error of a program that was ended at its limit.
func didNotEnd(limit time.Duration) error {
	return fmt.Errorf("%w: it did not end within %s", errHangs, limit)
}

// runner runs programs. One that does not end in time is killed.
type runner struct{ limit time.Duration }

// run runs a program and returns its standard output. It kills the program with its children.
//
// It inherits the held lock, and dies with this process: an iptables-restore whose parent was
// killed would otherwise still write after another process has taken the lock. The kernel sends
// that signal when the *thread* that started the child ends (prctl(2), PR_SET_PDEATHSIG), so the
// goroutine keeps its thread.
func (r runner) run(
	ctx context.Context, held *os.File, input []byte, path string, args ...string,
) ([]byte, error) {
	const forOutput = 10 * time.Second // after the program has ended: a loaded machine is no reason to fail
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeoutCause(ctx, r.limit, didNotEnd(r.limit))
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"PATH=" + childPath}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = min(r.limit, forOutput)
	if held != nil {
		cmd.ExtraFiles = []*os.File{held}
	}
	if input != nil {
		cmd.Stdin = bytes.NewReader(input)
	}
	stdout, err := cmd.Output()
	if err == nil {
		return stdout, nil
	}
	if exit, is := errors.AsType[*exec.ExitError](err); is && len(exit.Stderr) > 0 {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	if cause := context.Cause(ctx); cause != nil {
		err = fmt.Errorf("%w (%w)", cause, err)
	}
	return nil, err
}
