// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
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

// runError says that a program failed.
type runError struct {
	path   string
	err    error  // of exec or of the process
	stderr string // the first lines of it
	line   string // the line of its input that the program names, if any
}

// Error names the program, its exit status, its message and the remedy.
func (e *runError) Error() string {
	parts := []string{"run " + e.path, e.err.Error()}
	if e.stderr != "" {
		parts = append(parts, e.stderr)
	}
	if e.line != "" {
		parts = append(parts, "in "+policy.Quote(e.line))
	}
	if remedy, _ := remedyFor(e.stderr); remedy != "" {
		parts = append(parts, remedy)
	}
	return strings.Join(parts, ": ")
}

// Unwrap adds netfilter.ErrUnusable if the kernel lacks what iptables needs: some
// hosts have an iptables that lists rules and cannot write any.
func (e *runError) Unwrap() []error {
	if _, unusable := remedyFor(e.stderr); unusable && !isTransient(e) {
		return []error{e.err, netfilter.ErrUnusable}
	}
	return []error{e.err}
}

// isTransient reports whether another try may succeed: another program writes at
// the same time, or holds the lock for a moment.
func isTransient(err error) bool {
	var failed *runError
	if !errors.As(err, &failed) {
		return errors.Is(err, errChanging)
	}
	contained := func(text string) bool { return strings.Contains(failed.stderr, text) }
	// iptables-legacy-restore does not print why the kernel refused the commit.
	return failed.line == "COMMIT" || slices.ContainsFunc([]string{
		"Another app is currently holding the xtables lock",
		"Resource temporarily unavailable", // EAGAIN
		"Device or resource busy",          // EBUSY
		"Interrupted system call should be restarted",
		"try again", "Try again",
	}, contained)
}

// run runs a program and returns its standard output.
//
// The program's environment is env alone. It inherits the held lock, and dies with
// this process: an iptables-restore whose parent was killed would otherwise still
// write after another process has taken the lock. The kernel sends that signal when
// the *thread* that started the child ends (prctl(2), PR_SET_PDEATHSIG), so the
// goroutine keeps its thread.
func run(ctx context.Context, env []string, held *os.File, input []byte, path string, args ...string) ([]byte, error) {
	const (
		maxStderr = 4 << 10 // bytes
		afterKill = time.Second
	)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = env
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
	message := ""
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		message = string(exit.Stderr[:min(len(exit.Stderr), maxStderr)])
	}
	if cause := context.Cause(ctx); cause != nil {
		err = fmt.Errorf("%w (%w)", cause, err)
	}
	return nil, &runError{path: path, err: err, stderr: firstLines(message), line: lineAt(input, message)}
}

// environment returns the environment of iptables. XTABLES_LOCKFILE is the path of
// the xtables lock, if it is not /run/xtables.lock.
func environment(path string) []string {
	env := []string{"PATH=" + path, "LC_ALL=C"}
	if file, set := os.LookupEnv("XTABLES_LOCKFILE"); set {
		env = append(env, "XTABLES_LOCKFILE="+file)
	}
	return env
}

// firstLines returns the first lines of a message, as one line.
func firstLines(s string) string {
	const limit = 3
	var lines []string
	for line := range strings.Lines(s) {
		line = strings.TrimSpace(line)
		// "Try `iptables -h'" ends every usage error.
		if line != "" && !strings.HasPrefix(line, "Try `") && !strings.HasPrefix(line, "#") && len(lines) < limit {
			lines = append(lines, line)
		}
	}
	return strings.ToValidUTF8(strings.Join(lines, "; "), "?")
}

// lineAt returns the line of the input whose number is in an error message of
// iptables-restore: `line 5 failed` or `occurred at line: 5`.
func lineAt(input []byte, stderr string) string {
	m := regexp.MustCompile(`\bline:? ([0-9]+)`).FindStringSubmatch(stderr)
	if m == nil {
		return ""
	}
	lines := strings.Split(string(input), "\n")
	n, err := strconv.Atoi(m[1])
	if err != nil || n < 1 || n > len(lines) {
		return ""
	}
	return lines[n-1]
}

// remedyFor returns the remedy for an error message of iptables, "" if it is not
// known, and whether iptables cannot work on this host until then.
func remedyFor(stderr string) (remedy string, unusable bool) {
	const (
		modules = "xt_addrtype xt_comment xt_statistic xt_MASQUERADE xt_nat" // of ruleCommand

		root   = "run as root with CAP_NET_ADMIN (and CAP_NET_RAW for iptables-legacy)"
		lock   = "see which program holds the lock; in a container mount the host's /run/xtables.lock"
		mixed  = "table nat holds rules that iptables did not write; remove them with nft, or set backend to nftables"
		denied = "SELinux or another security module may forbid it: see ausearch -m avc or dmesg, and allow it"
		old    = "install iptables 1.8, or set backend to nftables"
		buffer = "in a user namespace a batch is limited by net.core.wmem_max: raise that, shorten the list, or set backend to nftables"
		noIPv6 = "the kernel has no IPv6 (ipv6.disable=1), or a filter (RestrictAddressFamilies= of systemd, seccomp) denies its sockets: " +
			"set enableIPv6 to false, or backend to nftables, which needs no such socket"
	)
	var (
		xt     = "the kernel needs " + strings.ReplaceAll(modules, " ", ", ") + "; " + netfilter.HowToLoad(modules) + ", or set backend to nftables"
		absent = "the kernel needs iptable_nat, for IPv6 ip6table_nat; " + netfilter.HowToLoad("iptable_nat ip6table_nat") + ", or set backend to nftables, which needs neither"
		nft    = "the kernel needs nf_tables and nft_compat (CONFIG_NF_TABLES, CONFIG_NFT_COMPAT); " + netfilter.HowToLoad("nft_compat") + ", or install iptables-legacy"
		nat    = "the kernel needs CONFIG_NFT_NAT; " + netfilter.HowToLoad("nft_chain_nat") + ", or install iptables-legacy"
	)
	if strings.Contains(stderr, "ip6tables") && !hasIPv6() {
		absent = noIPv6
	}
	for _, s := range []struct {
		message, remedy string
		unusable        bool
	}{
		{"you must be root", root, false},
		{"can't open lock file /run/xtables.lock: Permission denied", denied, false},
		{"Permission denied", root, false},
		{"Operation not permitted", root, false},
		{"xtables lock", lock, false},
		{"xtables.lock", lock, false},
		{"is incompatible, use 'nft' tool", mixed, false},
		{"CHAIN_ADD failed (Operation not supported)", mixed, false},
		{"CHAIN_ADD failed (No such file or directory)", nat, true},
		{"Could not fetch rule set generation id: Invalid argument", nft, true},
		{"Failed to initialize nft: Protocol not supported", nft, true},
		{"unknown option", old, true},
		{"invalid option", old, true},
		{"missing kernel module", xt, true},
		{"Couldn't load", xt, true},
		{"No chain/target/match by that name", xt, false},
		{"RULE_APPEND failed (No such file or directory)", xt, false},
		{"Message too long", buffer, false},
		{"can't initialize", absent, true},
		{"unable to initialize table", absent, true},
		{"do you need to insmod", absent, true},
	} {
		if strings.Contains(stderr, s.message) {
			return s.remedy, s.unusable
		}
	}
	return "", false
}

// hasIPv6 reports whether this process can open the sockets of IPv6 that iptables-legacy needs.
func hasIPv6() bool {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		_ = unix.Close(fd)
	}
	return err == nil
}
