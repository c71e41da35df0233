// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// lockSeconds is how long iptables-legacy waits for the xtables lock, /run/xtables.lock.
const lockSeconds = 5

type programs struct {
	finder finder
	run    func(ctx context.Context, held *os.File, input []byte, path string, args ...string) ([]byte, error)
}

func baseName(f policy.Family) string {
	return map[policy.Family]string{policy.IPv4: "iptables", policy.IPv6: "ip6tables"}[f]
}

// locate finds iptables-VARIANT, or a plain iptables of the variant. The suffix "-restore" finds
// iptables-VARIANT-restore or iptables-restore.
func (p *programs) locate(ctx context.Context, f policy.Family, variant, suffix string) (string, error) {
	named, plain := baseName(f)+"-"+variant+suffix, baseName(f)+suffix
	path, err := p.finder.find(named, plain)
	if err != nil || filepath.Base(path) == named {
		return path, err
	}
	switch has, err := p.variantOf(ctx, path); {
	case err != nil:
		return "", err
	case has != variant:
		return "", fmt.Errorf("find %s: %s is of the %s variant; install the %s one too: %w", named, path, has, variant, fs.ErrNotExist)
	}
	return path, nil
}

// variantOf runs a program with --version to learn its variant. Versions before 1.8, all legacy, do not print it.
func (p *programs) variantOf(ctx context.Context, path string) (string, error) {
	out, err := p.run(ctx, nil, nil, path, "--version")
	if err != nil {
		return "", failed(path, netfilter.VariantNFT, err) // which opens a socket before it reads its arguments
	}
	if bytes.Contains(out, []byte("(nf_tables)")) {
		return netfilter.VariantNFT, nil
	}
	return netfilter.VariantLegacy, nil
}

// list returns the rules of a chain of table nat as `iptables -S` prints them.
func (p *programs) list(ctx context.Context, f policy.Family, variant, chain string) ([]string, error) {
	out, err := p.exec(ctx, f, variant, "", nil, nil, "-t", Table, "-S", chain)
	lines := strings.Split(string(out), "\n")
	return slices.DeleteFunc(lines, func(line string) bool { return !strings.HasPrefix(line, "-A ") }), err
}

// exec runs the program that locate finds. It waits for the xtables lock.
func (p *programs) exec(ctx context.Context, f policy.Family, variant, suffix string, held *os.File, input []byte, args ...string) ([]byte, error) {
	path, err := p.locate(ctx, f, variant, suffix)
	if err != nil {
		return nil, err
	}
	if variant == netfilter.VariantLegacy {
		args = append([]string{"-w", strconv.Itoa(lockSeconds)}, args...)
	}
	out, err := p.run(ctx, held, input, path, args...)
	if err != nil {
		return nil, failed(path, variant, err)
	}
	return out, nil
}

// runError is the failure of a program: its text, and what errors.Is finds in it.
type runError struct {
	text  string
	wraps []error
}

func (e *runError) Error() string { return e.text }

func (e *runError) Unwrap() []error { return e.wraps }

// resourceProblem is RESOURCE_PROBLEM of xtables.h: the kernel refused, or the lock is taken.
const resourceProblem = 4

// failed returns the error of a program with its exit status, its message and, unless it was killed, what it needs. Of one
// that ran it wraps what that says about the host: netfilter.ErrUnusable, as some hosts have an iptables that lists rules
// and cannot write any, or netfilter.ErrBusy. A program that was killed, or failed with resourceProblem, says nothing about
// the host, unless it prints an error that lasts, of the kernel or of the lock file: only the text has the number, in the C
// locale, as the environment has no other one.
func failed(path, variant string, err error) error {
	const maxText = 2 << 10 // bytes
	text := err.Error()
	lasts := func(errno syscall.Errno) bool { return strings.Contains(strings.ToLower(err.Error()), errno.Error()) }
	text = strings.ToValidUTF8(strings.TrimSpace(text[:min(len(text), maxText)]), "?")
	text = "run " + path + ": " + strings.ReplaceAll(text, "\n", "; ")
	code := 0 // of a program that did not run; that of one that was killed is -1
	if exit := (interface{ ExitCode() int })(nil); errors.As(err, &exit) {
		code = exit.ExitCode()
	}
	if code >= 0 {
		text += "; " + needs(variant)
	}
	switch {
	case code < 0, errors.Is(err, exec.ErrWaitDelay), // or something that it started has not ended
		code == resourceProblem && !slices.ContainsFunc([]syscall.Errno{unix.EPERM, unix.EACCES, unix.ENOENT, unix.EROFS, unix.EINVAL,
			unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT}, lasts):
		return &runError{text, []error{err, netfilter.ErrBusy}}
	case code == 0:
		return &runError{text, []error{err}}
	}
	return &runError{text, []error{err, netfilter.ErrUnusable}}
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
// It inherits the held lock, and dies with this process: an iptables-restore whose parent was
// killed would otherwise still write after another process has taken the lock. The kernel sends
// that signal when the *thread* that started the child ends (prctl(2), PR_SET_PDEATHSIG), so the
// goroutine keeps its thread.
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
