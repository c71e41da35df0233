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
	"strings"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// runError says that a program failed.
type runError struct {
	path, variant string
	err           error // of exec or of the process
}

// Error names the program, its exit status, its message and what it needs.
func (e *runError) Error() string {
	const maxText = 2 << 10 // bytes
	text := e.err.Error()
	text = strings.ToValidUTF8(strings.TrimSpace(text[:min(len(text), maxText)]), "?")
	return "run " + e.path + ": " + strings.ReplaceAll(text, "\n", "; ") + "; " + needs(e.variant)
}

// Unwrap adds netfilter.ErrUnusable: some hosts have an iptables that lists rules and cannot write any. A program
// that was killed says nothing about the host, nor does one of iptables-legacy that did not get the xtables lock.
func (e *runError) Unwrap() []error {
	const resourceProblem = 4 // RESOURCE_PROBLEM in xtables.h; iptables-nft has it for each error of the kernel
	var exit interface{ ExitCode() int }
	if !errors.As(e.err, &exit) || exit.ExitCode() <= 0 || e.variant == netfilter.VariantLegacy && exit.ExitCode() == resourceProblem {
		return []error{e.err}
	}
	return []error{e.err, netfilter.ErrUnusable}
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

// run runs a program and returns its standard output.
//
// The program's environment is a PATH alone. It inherits the held lock, and dies with
// this process: an iptables-restore whose parent was killed would otherwise still
// write after another process has taken the lock. The kernel sends that signal when
// the *thread* that started the child ends (prctl(2), PR_SET_PDEATHSIG), so the
// goroutine keeps its thread.
func run(ctx context.Context, held *os.File, input []byte, path string, args ...string) ([]byte, error) {
	const (
		childPath = "/usr/sbin:/usr/bin:/sbin:/bin"
		afterKill = time.Second
	)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"PATH=" + childPath}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = afterKill
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
