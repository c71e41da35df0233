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

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
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

// TestRunIsBounded has a program that says more than anybody can remember, and
// does not listen.
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

// failing makes iptables-restore fail so often, with what it says, before it
// does its work.
func (n *node) failing(times int, err error) (calls *int) {
	calls = new(int)
	p, errOpen := n.programs.open(n.Context(), policy.IPv4, n.choice.Variant)
	if errOpen != nil {
		n.Fatal(errOpen)
	}
	restore := p.restore
	p.restore = func(ctx context.Context, input []byte, held *os.File) error {
		if *calls++; *calls <= times {
			return err
		}
		return restore(ctx, input, held)
	}
	return calls
}

func TestApplyTriesAgain(t *testing.T) {
	want := desired(policy.OwnedBy(owner), basic("X"))
	want.Chains = want.Chains[:1]
	exit := errors.New("exit status 4")
	passing := &runError{path: "/p", err: exit, stderr: "line 5: RULE_APPEND failed (Device or resource busy): rule in chain X"}
	commit := &runError{path: "/p", err: exit, stderr: "iptables-restore: line 5 failed", line: "COMMIT"}
	lasting := &runError{path: "/p", err: exit, stderr: "Bad rule (does a matching rule exist in that chain?)"}
	for _, tc := range []struct {
		name  string
		times int
		err   error
		calls int
		fails bool
	}{
		{name: "others write too", times: 3, err: passing, calls: 4},
		{name: "the commit of legacy failed", times: 2, err: commit, calls: 3},
		{name: "always", times: 1000, err: passing, calls: 6, fails: true},
		{name: "the same again would not help", times: 1000, err: lasting, calls: 1, fails: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := newNode(t, netfilter.VariantNFT)
			calls := n.failing(tc.times, tc.err)
			err := n.Apply(n.Context(), want, netfilter.Observation{}, nil)
			if *calls != tc.calls || (err != nil) != tc.fails || tc.fails && !errors.Is(err, tc.err) {
				n.Errorf("%d calls, %v", *calls, err)
			}
		})
	}
	t.Run("another plan", func(t *testing.T) {
		n := newNode(t, netfilter.VariantNFT)
		n.apply(want)
		n.load(policy.IPv4, "-A POSTROUTING -j X")
		p, err := n.programs.open(n.Context(), policy.IPv4, n.choice.Variant)
		if err != nil {
			n.Fatal(err)
		}
		calls := n.failing(0, nil)
		restore := p.restore
		p.restore = func(ctx context.Context, input []byte, held *os.File) error {
			if *calls == 0 { // somebody else deletes the jump that we are about to
				n.iptables(policy.IPv4, "-D POSTROUTING -j X")
				n.iptables(policy.IPv4, "-A POSTROUTING -p tcp -j X")
			}
			return restore(ctx, input, held)
		}
		n.apply(want)
		n.holds(want)
		if *calls != 2 {
			n.Errorf("%d calls", *calls)
		}
	})
}

// TestOthersWrite has another program write all the time, under a lock of its
// own, as from a container that does not have the host's. With iptables-legacy,
// which replaces tables whole, it can undo what we wrote; who calls Apply reads
// the rules again and calls again.
func TestOthersWrite(t *testing.T) {
	inEachVariant(t, func(n *node) {
		n.load(policy.IPv4, ":OTHER -")
		other := exec.Command("/bin/sh", "-c", "export XTABLES_LOCKFILE=/run/another.lock; while :; do "+
			"printf '*nat\\n:OTHER -\\n-A OTHER -j RETURN\\nCOMMIT\\n' | iptables-"+n.choice.Variant+"-restore --noflush 2>/dev/null; done")
		other.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		if err := other.Start(); err != nil {
			n.Fatal(err)
		}
		defer func() {
			_ = syscall.Kill(-other.Process.Pid, syscall.SIGKILL)
			_ = other.Wait()
		}()
		for i := range 30 {
			p := basic("X")
			p.RandomFully.Value = i%2 == 0
			want := desired(policy.OwnedBy(owner), p)
			most := map[string]int{netfilter.VariantNFT: 1, netfilter.VariantLegacy: 50}[n.choice.Variant]
			holds := false
			for try := 0; try < most && !holds; try++ {
				n.apply(want)
				holds = len(policy.Compare(want, n.observe(refs(want)))) == 0
			}
			if !holds {
				n.Fatal("somebody else's writes undo ours")
			}
		}
		if err := n.Remove(n.Context(), bothFamilies("X"), nil); err != nil {
			n.Error(err)
		}
	})
}

// TestLockHeld has somebody else hold the lock of iptables-legacy.
func TestLockHeld(t *testing.T) {
	n := newNode(t, netfilter.VariantLegacy)
	f, err := os.OpenFile("/run/xtables.lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	want := desired(policy.OwnedBy(owner), basic("X"))
	want.Chains = want.Chains[:1]
	start := time.Now()
	err = n.Apply(n.Context(), want, netfilter.Observation{}, nil)
	if took := time.Since(start); err == nil || !strings.Contains(err.Error(), "see which program holds the lock") || timelimit.Exceeded(took, 8*time.Second) {
		t.Errorf("after %v: %v", took, err)
	}
	// Reading waits for nobody.
	start = time.Now()
	n.observe(refs(want))
	if took := time.Since(start); timelimit.Exceeded(took, time.Second) {
		t.Errorf("reading took %v", took)
	}
}
