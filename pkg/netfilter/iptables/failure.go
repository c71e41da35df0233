// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// failure is the failure of a program: its text, and what errors.Is finds in it.
type failure struct {
	text          string
	cause         error // of exec, or of the process
	verdict       error // on the host: netfilter.ErrUnusable, netfilter.ErrBusy, or nil if no program ran
	status        int   // of a program that ended
	mayBeAccident bool  // a second one in a row is a verdict
}

func (e *failure) Error() string { return e.text }

func (e *failure) Unwrap() []error {
	if e.verdict == nil {
		return []error{e.cause}
	}
	return []error{e.cause, e.verdict}
}

// withVerdict returns the failure with another verdict on the host, and its reason.
func (e *failure) withVerdict(verdict error, reason string) *failure {
	judged := *e
	judged.verdict = verdict
	judged.text += "; " + reason
	return &judged
}

// resourceProblem is RESOURCE_PROBLEM of xtables.h: the kernel refused, or the lock is taken.
// Whether the kernel refuses for good is asked of the kernel (reader.refuses), not read in the
// program's message, which has other words in another libc.
const resourceProblem = 4

// failed returns the error of a program with its exit status, its message and, unless it was
// killed, what it needs. Its verdict is that of the exit status: some hosts have an iptables that
// lists rules and cannot write any. A program that was killed says nothing about the host, nor does
// one that failed with resourceProblem.
func failed(path, variant string, err error) *failure {
	const maxText = 2 << 10 // bytes
	text := err.Error()
	text = strings.ToValidUTF8(strings.TrimSpace(text[:min(len(text), maxText)]), "?")
	f := &failure{text: "run " + path + ": " + strings.ReplaceAll(text, "\n", "; "), cause: err}
	status, ended := waitStatus(err)
	signal := signalOf(status)
	leftAChild := errors.Is(err, exec.ErrWaitDelay)
	switch {
	case isCrash(signal):
		f.mayBeAccident = true
		f.verdict = netfilter.ErrBusy
		f.text += "; it crashed"
		return f
	case signal != 0, leftAChild, errors.Is(err, errStopped):
		f.verdict = netfilter.ErrBusy
		return f
	}
	f.text += "; " + needs(variant)
	if ended {
		f.status = status.ExitStatus()
		f.verdict = netfilter.ErrUnusable
	}
	if f.status == resourceProblem {
		f.verdict = netfilter.ErrBusy
	}
	return f
}

// waitStatus returns how a process ended that is the cause of an error, of os/exec or of go-iptables.
func waitStatus(err error) (status syscall.WaitStatus, ended bool) {
	var exit interface{ Sys() any }
	if !errors.As(err, &exit) {
		return 0, false
	}
	status, ended = exit.Sys().(syscall.WaitStatus)
	return status, ended
}

// signalOf returns the signal that ended a program, or one that a shell ran and waited for; 0 if none did.
func signalOf(status syscall.WaitStatus) syscall.Signal {
	const ofShell = 128 // added to the number of the signal
	if status.Signaled() {
		return status.Signal()
	}
	if code := status.ExitStatus(); code > ofShell && code <= ofShell+int(unix.SIGSYS) {
		return syscall.Signal(code - ofShell)
	}
	return 0
}

// isCrash reports whether a signal is the program's own fault, as opposed to one that somebody sent.
func isCrash(signal syscall.Signal) bool {
	switch signal {
	case unix.SIGSEGV, unix.SIGILL, unix.SIGABRT, unix.SIGBUS, unix.SIGFPE, unix.SIGTRAP, unix.SIGSYS:
		return true
	}
	return false
}

// needs returns what a variant of iptables needs to work, for messages: the causes of most failures.
func needs(variant string) string {
	what, modules := "CAP_NET_ADMIN", "nft_chain_nat nft_compat"
	if variant == netfilter.VariantLegacy {
		what, modules = "CAP_NET_ADMIN, CAP_NET_RAW, the host's "+lockFile, "iptable_nat ip6table_nat"
	}
	modules += " xt_addrtype xt_comment xt_statistic xt_MASQUERADE xt_nat" // of ruleCommand
	remedy := netfilter.HowToLoad(modules) + ", or set backend to nftables"
	return "it needs " + what + " and modules of the kernel; " + remedy
}
