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
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// runError says that a program failed.
type runError struct {
	path, variant string
	err           error // of exec or of the process
}

// Error names the program, its exit status, its message and, unless it was killed, what it needs.
func (e *runError) Error() string {
	const maxText = 2 << 10 // bytes
	text := e.err.Error()
	text = strings.ToValidUTF8(strings.TrimSpace(text[:min(len(text), maxText)]), "?")
	text = "run " + e.path + ": " + strings.ReplaceAll(text, "\n", "; ")
	if e.exitCode() < 0 {
		return text
	}
	return text + "; " + needs(e.variant)
}

// resourceProblem is the exit status RESOURCE_PROBLEM of xtables.h: the kernel refused something, or another
// program has the xtables lock.
const resourceProblem = 4

// exitCode returns the exit status, -1 of a program that was killed, and 0 if it did not run.
func (e *runError) exitCode() int {
	var exit interface{ ExitCode() int }
	if !errors.As(e.err, &exit) {
		return 0
	}
	return exit.ExitCode()
}

// Unwrap adds netfilter.ErrUnusable or netfilter.ErrBusy.
func (e *runError) Unwrap() []error {
	if verdict := e.verdict(); verdict != nil {
		return []error{e.err, verdict}
	}
	return []error{e.err}
}

// verdict returns what the failure says about the host, nil if nothing ran. A program that was killed, or failed with
// resourceProblem, says nothing about it, unless it prints an error that lasts, of the kernel or of the lock file: only
// the text has the number, in the C locale, as the environment has no other one.
func (e *runError) verdict() error {
	switch code := e.exitCode(); {
	case code < 0, errors.Is(e.err, exec.ErrWaitDelay): // or something that it started has not ended
		return netfilter.ErrBusy
	case code == 0:
		return nil
	case code == resourceProblem:
		lasts := func(errno syscall.Errno) bool { return strings.Contains(strings.ToLower(e.err.Error()), errno.Error()) }
		if !slices.ContainsFunc([]syscall.Errno{unix.EPERM, unix.EACCES, unix.ENOENT, unix.EROFS, unix.EINVAL,
			unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT}, lasts) {
			return netfilter.ErrBusy
		}
	}
	return netfilter.ErrUnusable
}

// needs returns what a variant of iptables needs to work, for messages: the causes of most failures.
func needs(variant string) string {
	what, modules := "CAP_NET_ADMIN", "nft_chain_nat nft_compat"
	if variant == netfilter.VariantLegacy {
		what, modules = "CAP_NET_ADMIN, CAP_NET_RAW, the host's /run/xtables.lock", "iptable_nat ip6table_nat"
	}
	modules += " xt_addrtype xt_comment xt_statistic xt_MASQUERADE xt_nat" // of ruleCommand
	return "it needs " + what + " and modules of the kernel; " + netfilter.HowToLoad(modules) + ", or set backend to nftables"
}

var errHangs = errors.New("it hangs")

// runner runs programs. One that does not end in time is killed.
type runner struct{ limit time.Duration }

// run runs a program and returns its standard output. It kills the program with its children.
//
// It inherits the held lock, and dies with this process: an iptables-restore whose parent was killed would otherwise
// still write after another process has taken the lock. The kernel sends that signal when the *thread* that started
// the child ends (prctl(2), PR_SET_PDEATHSIG), so the goroutine keeps its thread.
func (r runner) run(ctx context.Context, held *os.File, input []byte, path string, args ...string) ([]byte, error) {
	const (
		childPath = "/usr/sbin:/usr/bin:/sbin:/bin"
		forOutput = 10 * time.Second // after the program has ended: a loaded machine is no reason to fail
	)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithTimeoutCause(ctx, r.limit, fmt.Errorf("%w: it did not end within %s", errHangs, r.limit))
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
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && len(exit.Stderr) > 0 {
		err = fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	if cause := context.Cause(ctx); cause != nil {
		err = fmt.Errorf("%w (%w)", cause, err)
	}
	return nil, err
}
