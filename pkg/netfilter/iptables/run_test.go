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
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// parentVariable makes the test binary run the program that it names by run,
// and nothing else.
const parentVariable = "IPTABLES_TEST_RUN"

func script(t *testing.T, text string) string {
	t.Helper()
	return filepath.Join(pathWith(t, map[string]string{"prog": text}), "prog")
}

func TestRun(t *testing.T) {
	t.Setenv("XTABLES_LOCKFILE", "/elsewhere")
	t.Setenv("SECRET", "x")
	lock, err := os.Create(filepath.Join(t.TempDir(), "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	path := script(t, "readlink /proc/self/fd/3; pwd; cat; /usr/bin/env | /usr/bin/sort; echo \"$@\"\n")
	out, err := run(t.Context(), environment("/usr/bin:/bin"), lock, []byte("input\n"), path, "one", "two")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{lock.Name(), "/", "input", "LC_ALL=C", "PATH=/usr/bin:/bin", "PWD=/", "XTABLES_LOCKFILE=/elsewhere", "one two", ""}
	got := slices.DeleteFunc(strings.Split(string(out), "\n"), func(l string) bool { return strings.HasPrefix(l, "_=") || strings.HasPrefix(l, "SHLVL") })
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestRunErrors(t *testing.T) {
	for _, tc := range []struct {
		name, script string
		input        string
		want         string // PATH is the program's
	}{
		{name: "silent", script: "exit 3", want: "run PATH: exit status 3"},
		{name: "first lines", script: "for i in 1 2 3 4; do echo $i >&2; done; echo 'Try `x --help`' >&2; exit 1", want: "run PATH: exit status 1: 1; 2; 3"},
		{name: "line", script: "cat >/dev/null; echo 'iptables-restore: line 2 failed' >&2; exit 1", input: "one\ntwo\n",
			want: `run PATH: exit status 1: iptables-restore: line 2 failed: in "two"`},
		{name: "another form of it", script: "cat >/dev/null; echo 'Error occurred at line: 1' >&2; exit 2", input: "one\ntwo\n",
			want: `run PATH: exit status 2: Error occurred at line: 1: in "one"`},
		{name: "line that is not there", script: "cat >/dev/null; echo 'line 9 failed' >&2; exit 2", input: "one\n",
			want: `run PATH: exit status 2: line 9 failed`},
		{name: "remedy", script: "echo 'Fatal: cannot open lock file /run/xtables.lock: No such file or directory' >&2; exit 4",
			want: "run PATH: exit status 4: Fatal: cannot open lock file /run/xtables.lock: No such file or directory: " +
				"see which program holds the lock; in a container mount the host's /run/xtables.lock"},
		{name: "old iptables", script: "echo 'iptables-restore v1.6.1: unknown option \"--random-fully\"' >&2; exit 2",
			want: `run PATH: exit status 2: iptables-restore v1.6.1: unknown option "--random-fully": install iptables 1.8, or set backend to nftables`},
		{name: "signal", script: "kill -9 $$", want: "run PATH: signal: killed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := script(t, tc.script)
			_, err := run(t.Context(), environment("/bin"), nil, []byte(tc.input), path)
			if want := strings.ReplaceAll(tc.want, "PATH", path); err == nil || err.Error() != want {
				t.Errorf("got  %v\nwant %s", err, want)
			}
		})
	}
	_, err := run(t.Context(), nil, nil, nil, "/nowhere/prog")
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// TestRunIsBounded runs a program that prints 10 MB of errors and does not read its
// input.
func TestRunIsBounded(t *testing.T) {
	path := script(t, "exec </dev/null; /usr/bin/head -c 10000000 /dev/zero | /usr/bin/tr '\\0' x >&2; exit 1")
	_, err := run(t.Context(), environment("/bin"), nil, bytes.Repeat([]byte("x\n"), 1<<20), path)
	if err == nil || len(err.Error()) > 5<<10 {
		t.Errorf("an error of %d bytes", len(err.Error()))
	}
}

func TestRunEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := run(ctx, nil, nil, nil, script(t, "/bin/sleep 60 & wait"))
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > 10*time.Second {
		t.Errorf("after %v: %v", time.Since(start), err)
	}
}

// TestRunDiesWithItsParent kills a process that runs a program, and waits for
// the end of that program.
func TestRunDiesWithItsParent(t *testing.T) {
	pidFile := filepath.Join(t.TempDir(), "pid")
	if err := unix.Mkfifo(pidFile, 0o600); err != nil {
		t.Fatal(err)
	}
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), parentVariable+"="+script(t, "echo $$ >"+pidFile+"; exec /bin/sleep 60"))
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	line, err := bufio.NewReader(f).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	child, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(child)
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := parent.Wait(); err == nil {
		t.Error("the parent ended well")
	}
	poll := []unix.PollFd{{Fd: int32(child), Events: unix.POLLIN}}
	if n, err := unix.Poll(poll, 10_000); n != 1 {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		t.Errorf("the program outlived its parent: %v", err)
	}
}
