// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// runError is the failure of a program that was run.
type runError struct {
	path   string
	err    error  // of exec or of the process
	stderr string // the beginning of what it said
	line   string // the line of its input that it complains about, where it names one
}

// Error names the program, how it ended, what it said and what helps.
func (e *runError) Error() string {
	parts := []string{"run " + e.path, e.err.Error()}
	if e.stderr != "" {
		parts = append(parts, e.stderr)
	}
	if e.line != "" {
		parts = append(parts, "in "+policy.Quote(e.line))
	}
	if s := symptomOf(e.stderr); s.remedy != "" {
		parts = append(parts, s.remedy)
	}
	return strings.Join(parts, ": ")
}

// Unwrap has netfilter.ErrUnusable too where the kernel lacks what iptables
// needs: it may be there, and list rules, and not be able to write one.
func (e *runError) Unwrap() []error {
	if symptomOf(e.stderr).unusable && !passing(e.stderr) {
		return []error{e.err, netfilter.ErrUnusable}
	}
	return []error{e.err}
}

// run runs a program to its end and returns what it wrote to standard output.
//
// The program gets nothing of our environment but what the callers list. It
// inherits the held lock, and dies with us: a restore whose parent was killed
// would otherwise still write, after somebody else has taken the lock. As the
// kernel sends that signal when the *thread* that started the child ends
// (prctl(2), PR_SET_PDEATHSIG), the goroutine keeps its thread meanwhile.
func run(ctx context.Context, env []string, held *os.File, input []byte, path string, args ...string) ([]byte, error) {
	const (
		mostErrors = 4 << 10 // bytes
		afterKill  = time.Second
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
	var stdout bytes.Buffer
	stderr := head{most: mostErrors}
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if err == nil {
		return stdout.Bytes(), nil
	}
	if cause := context.Cause(ctx); cause != nil {
		err = fmt.Errorf("%w (%w)", cause, err)
	}
	said := string(stderr.kept)
	return nil, &runError{path: path, err: err, stderr: firstLines(said), line: lineAt(input, said)}
}

// environment is what a program sees of ours: the lock file that all users of
// iptables-legacy on the host have to share may be moved by it.
func environment(path string) []string {
	env := []string{"PATH=" + path, "LC_ALL=C"}
	if file, set := os.LookupEnv("XTABLES_LOCKFILE"); set {
		env = append(env, "XTABLES_LOCKFILE="+file)
	}
	return env
}

// head is a writer that keeps the beginning of what is written.
type head struct {
	kept []byte
	most int
}

func (h *head) Write(p []byte) (int, error) {
	h.kept = append(h.kept, p[:min(len(p), h.most-len(h.kept))]...)
	return len(p), nil
}

// firstLines returns the first lines that say something, as one.
func firstLines(s string) string {
	const most = 3
	var lines []string
	for line := range strings.Lines(s) {
		line = strings.TrimSpace(line)
		// The tail of every usage error, which is about our own input.
		if line != "" && !strings.HasPrefix(line, "Try `") && !strings.HasPrefix(line, "#") && len(lines) < most {
			lines = append(lines, line)
		}
	}
	return strings.ToValidUTF8(strings.Join(lines, "; "), "?")
}

// lineAt returns the line of the input that iptables-restore complains about:
// it names no more than its number, as `line 5 failed` or `occurred at line: 5`.
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

// symptom is something that iptables says, with what helps, and whether iptables
// cannot work on this host until that is done.
type symptom struct {
	says, remedy string
	unusable     bool
}

// symptomOf returns what a program has said that tells what helps, if anything.
func symptomOf(stderr string) symptom {
	const (
		xt     = "load the kernel's xt modules (xt_addrtype, xt_comment, xt_statistic, xt_MASQUERADE), or set backend to nftables"
		root   = "run as root with CAP_NET_ADMIN (and CAP_NET_RAW for iptables-legacy)"
		lock   = "see which program holds the lock; in a container mount the host's /run/xtables.lock"
		mixed  = "table nat holds rules that iptables did not write; remove them with nft, or set backend to nftables"
		absent = "load the kernel module iptable_nat, or set backend to nftables"
		buffer = "in a user namespace a batch is limited by net.core.wmem_max: raise that, shorten the list, or set backend to nftables"
	)
	for _, s := range []symptom{
		{"you must be root", root, false},
		{"Permission denied", root, false},
		{"Operation not permitted", root, false},
		{"xtables lock", lock, false},
		{"xtables.lock", lock, false},
		{"is incompatible, use 'nft' tool", mixed, false},
		{"CHAIN_ADD failed (Operation not supported)", mixed, false},
		{"missing kernel module", xt, true},
		{"Couldn't load", xt, true},
		{"No chain/target/match by that name", xt, false},
		{"RULE_APPEND failed (No such file or directory)", xt, false},
		{"Message too long", buffer, false},
		{"can't initialize", absent, true},
		{"do you need to insmod", absent, true},
	} {
		if strings.Contains(stderr, s.says) {
			return s
		}
	}
	return symptom{}
}

// passing reports whether a failure is one that another try may not meet:
// others write at the same time, or hold the lock for a moment.
func passing(stderr string) bool {
	for _, says := range []string{
		"Another app is currently holding the xtables lock",
		"Resource temporarily unavailable", // EAGAIN
		"Device or resource busy",          // EBUSY
		"Interrupted system call should be restarted",
		"try again", "Try again",
	} {
		if strings.Contains(stderr, says) {
			return true
		}
	}
	return false
}
