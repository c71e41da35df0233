// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// parentVariable makes the test binary run the program that it names by run,
// and nothing else.
const parentVariable = "IPTABLES_TEST_RUN"

func script(t *testing.T, text string) string {
	t.Helper()
	return filepath.Join(pathWith(t, map[string]string{"prog": text}), "prog")
}

func TestRun(t *testing.T) {
	t.Setenv("SECRET", "x")
	lock := assert.Must(os.Create(filepath.Join(t.TempDir(), "lock")))(t)
	defer lock.Close()
	path := script(t, "readlink /proc/self/fd/3; pwd; cat; /usr/bin/env | /usr/bin/sort; echo \"$@\"\n")
	out := assert.Must(runner{time.Minute}.run(t.Context(), lock, []byte("input\n"), path, "one", "two"))(t)
	want := []string{lock.Name(), "/", "input", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "PWD=/", "one two", ""}
	got := slices.DeleteFunc(strings.Split(string(out), "\n"), func(l string) bool { return strings.HasPrefix(l, "_=") || strings.HasPrefix(l, "SHLVL") })
	assert.Equal(t, "run", got, want)
}

func TestRunErrors(t *testing.T) {
	for _, tc := range []struct {
		name, script, variant string
		want                  string
		says                  error // about the host
	}{
		{name: "silent", script: "exit 3", want: "exit status 3; it needs", says: netfilter.ErrUnusable},
		{name: "lines", script: "echo 'line 4 failed' >&2; echo why >&2; exit 1", variant: "legacy",
			want: "exit status 1: line 4 failed; why; it needs CAP_NET_ADMIN, CAP_NET_RAW, the host's /run/xtables.lock and modules of the kernel; try: modprobe -a iptable_nat", says: netfilter.ErrUnusable},
		{name: "lock", script: "exit 4", variant: "legacy", want: "exit status 4", says: netfilter.ErrBusy},
		{name: "silent kernel", script: "exit 4", variant: "nft", says: netfilter.ErrBusy,
			want: "exit status 4; it needs CAP_NET_ADMIN and modules of the kernel; try: modprobe -a nft_chain_nat nft_compat"},
		{name: "no memory", script: "echo 'line 2: RULE_APPEND failed (Cannot allocate memory): rule in chain X' >&2; exit 4", variant: "nft",
			want: "exit status 4: line 2: RULE_APPEND failed", says: netfilter.ErrBusy},
		{name: "signal", script: "kill -9 $$", want: "signal: killed", says: netfilter.ErrBusy},
		{name: "signal of a program that a script ran", script: "/bin/sh -c 'kill -9 $$'; exit $?", want: "exit status 137", says: netfilter.ErrBusy},
		{name: "crash", script: "kill -SEGV $$", want: "signal: segmentation fault; it crashed", says: netfilter.ErrBusy},
		// It prints 10 MB and does not read its input.
		{name: "bounded", script: "exec </dev/null; /usr/bin/head -c 10000000 /dev/zero | /usr/bin/tr '\\0' x >&2; exit 1", want: "exit status 1: xxx", says: netfilter.ErrUnusable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := script(t, tc.script)
			_, err := runner{time.Minute}.run(t.Context(), nil, bytes.Repeat([]byte("x\n"), 1<<20), path)
			if err == nil {
				t.Fatal("no error")
			}
			err = failed(path, tc.variant, err)
			if text := err.Error(); !strings.HasPrefix(text, "run "+path+": "+tc.want) || len(text) > 3<<10 {
				t.Errorf("got  %v\nwant %s", err, tc.want)
			}
			for _, verdict := range []error{netfilter.ErrUnusable, netfilter.ErrBusy} {
				if errors.Is(err, verdict) != errors.Is(tc.says, verdict) {
					t.Errorf("got %v, want that it says: %v", err, tc.says)
				}
			}
		})
	}
	_, err := runner{time.Minute}.run(t.Context(), nil, nil, "/nowhere/prog")
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// TestRunLeavesAChild: a program that ends well, and whose output does not, says nothing about the host.
func TestRunLeavesAChild(t *testing.T) {
	path := script(t, "/bin/sleep 20 &")
	_, err := runner{time.Second}.run(t.Context(), nil, nil, path)
	if err = failed(path, netfilter.VariantNFT, err); !errors.Is(err, netfilter.ErrBusy) || errors.Is(err, netfilter.ErrUnusable) {
		t.Errorf("got %v", err)
	}
}

// TestRunEnds: a program that does not end is killed with its children, at the end of its context and after its time.
func TestRunEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		context, limit time.Duration
		want           error
		says           string
	}{
		"context": {2 * time.Second, time.Minute, context.DeadlineExceeded, "deadline exceeded"},
		"time":    {time.Minute, 2 * time.Second, netfilter.ErrBusy, "it did not end within 2s"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), tc.context)
			defer cancel()
			pidFile := filepath.Join(t.TempDir(), "pid")
			path := script(t, "/bin/sleep 60 & echo $! >"+pidFile+"; wait")
			start := time.Now()
			_, err := runner{tc.limit}.run(ctx, nil, nil, path)
			if err = failed(path, netfilter.VariantNFT, err); !errors.Is(err, tc.want) || !errors.Is(err, netfilter.ErrBusy) || !strings.Contains(err.Error(), path) ||
				!strings.Contains(err.Error(), tc.says) || time.Since(start) > timelimit.Wait {
				t.Errorf("after %v: %v", time.Since(start), err)
			}
			text := assert.Must(os.ReadFile(pidFile))(t)
			pid := assert.Must(strconv.Atoi(strings.TrimSpace(string(text))))(t)
			if child, err := unix.PidfdOpen(pid, 0); err == nil {
				defer unix.Close(child)
				waitForEnd(t, child)
			}
		})
	}
}

// TestRunDiesWithItsParent kills a process that runs a program, and waits for
// the end of that program.
func TestRunDiesWithItsParent(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	assert.NoError(t, unix.Mkfifo(pidFile, 0o600))
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), parentVariable+"="+script(t, "echo $$ >"+pidFile+"; exec /bin/sleep 60"))
	assert.NoError(t, parent.Start())
	f := assert.Must(os.Open(pidFile))(t)
	defer f.Close()
	line := assert.Must(bufio.NewReader(f).ReadString('\n'))(t)
	pid := assert.Must(strconv.Atoi(strings.TrimSpace(line)))(t)
	child := assert.Must(unix.PidfdOpen(pid, 0))(t)
	defer unix.Close(child)
	assert.NoError(t, parent.Process.Kill())
	if err := parent.Wait(); err == nil {
		t.Error("the parent ended well")
	}
	waitForEnd(t, child)
}

// waitForEnd waits for the end of a process, and ends it if it does not end.
func waitForEnd(t *testing.T, pidfd int) {
	t.Helper()
	poll := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	if n, err := unix.Poll(poll, 10_000); n != 1 {
		_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
		t.Errorf("the process goes on: %v", err)
	}
}
