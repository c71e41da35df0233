// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	goiptables "github.com/coreos/go-iptables/iptables"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	// probeVariable makes the test binary probe the programs in a directory, and nothing else.
	probeVariable = "IPTABLES_TEST_PROBE"
	// markVariable makes it mark a program, write its process ID to markPipeVariable, and wait.
	markVariable     = "IPTABLES_TEST_MARK"
	markPipeVariable = "IPTABLES_TEST_MARK_PIPE"
)

func probeIn(directory string) error {
	_, err := New(directory).Probe(context.Background(), "")
	return err
}

func markAndWait(program, pipe string) error {
	mark := newHangMark(program)
	mark.watch(0)
	for !mark.isSetHere() {
		time.Sleep(time.Millisecond)
	}
	err := os.WriteFile(pipe, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600)
	time.Sleep(time.Minute)
	return err
}

// isSetHere reports whether this process has the mark.
func (m *hangMark) isSetHere() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.late > 0
}

// impatient returns a driver whose programs have other limits.
func impatient(path string, limit, patience time.Duration) *Driver {
	d := New(path)
	d.programs.limit = limit
	d.programs.run = runner{limit}.run
	d.programs.patience = patience
	return d
}

// fifo makes a pipe to which a program writes its process ID, and returns its path and a function that opens the process.
func fifo(t *testing.T) (path string, process func() (pidfd int)) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "pid")
	assert.NoError(t, unix.Mkfifo(path, 0o600))
	return path, func() int {
		t.Helper()
		f := assert.Must(os.Open(path))(t)
		defer f.Close()
		line := assert.Must(bufio.NewReader(f).ReadString('\n'))(t)
		pid := assert.Must(strconv.Atoi(strings.TrimSpace(line)))(t)
		return assert.Must(unix.PidfdOpen(pid, 0))(t)
	}
}

// TestHangingProgram: the caller of a program that hangs gets an error at the limit, and nothing of the program is left,
// whatever has become of it by then.
func TestHangingProgram(t *testing.T) {
	for name, commands := range map[string]string{
		"the program":                           "echo $$ >PID; exec /bin/sleep 60",
		"a child of it":                         "/bin/sleep 60 & echo $! >PID; wait",
		"a child it awaits not":                 "/bin/sh -c '/bin/sleep 60 & echo $! >PID; wait' & exec /bin/sleep 60",
		"one that holds SIGTERM and its output": "trap '' TERM; echo $$ >PID; while :; do /bin/sleep 1; done",
	} {
		t.Run(name, func(t *testing.T) {
			isolate(t)
			pipe, process := fifo(t)
			path := pathWith(t, map[string]string{"iptables": listing(strings.ReplaceAll(commands, "PID", pipe))})
			d := impatient(path, 2*time.Second, time.Minute)
			start := time.Now()
			failures := make(chan error)
			go func() {
				_, err := d.Probe(t.Context(), "nft")
				failures <- err
			}()
			pidfd := process()
			defer unix.Close(pidfd)
			err := <-failures
			if !errors.Is(err, netfilter.ErrBusy) || errors.Is(err, netfilter.ErrUnusable) || timelimit.Exceeded(time.Since(start), 4*time.Second) {
				t.Errorf("after %v: %v", time.Since(start), err)
			}
			assert.ErrorContains(t, err, path+"/iptables", "it did not end within 2s")
			waitForEnd(t, pidfd)
			// The handle is free again.
			_, err = ask(t.Context(), d.programs, policy.IPv4, "nft", func(*goiptables.IPTables) (bool, error) { return true, nil })
			assert.NoError(t, err)
		})
	}
}

// TestOthersDoNotWait: while a program hangs, other calls of it fail soon, in this process and in others.
func TestOthersDoNotWait(t *testing.T) {
	isolate(t)
	pipe, process := fifo(t)
	const patience = 300 * time.Millisecond
	for what, script := range map[string]string{
		"while it lists":       listing("echo $$ >" + pipe + "; exec /bin/sleep 60"),
		"whatever it is to do": "echo $$ >" + pipe + "; exec /bin/sleep 60",
	} {
		t.Run(what, func(t *testing.T) {
			isolate(t)
			path := pathWith(t, map[string]string{"iptables": script})
			ctx, cancel := context.WithCancel(t.Context())
			d := impatient(path, time.Minute, patience)
			failures := make(chan error)
			go func() {
				_, err := d.Probe(ctx, "")
				failures <- err
			}()
			pidfd := process()
			defer unix.Close(pidfd)
			awaitMark(t, d.programs, path+"/iptables")

			other := exec.Command("/proc/self/exe")
			other.Env = append(os.Environ(), probeVariable+"="+path)
			start := time.Now()
			out, _ := other.CombinedOutput()
			if took := time.Since(start); timelimit.Exceeded(took, 2*time.Second) || !strings.Contains(string(out), path+"/iptables: it hangs for another process") ||
				!strings.Contains(string(out), netfilter.ErrBusy.Error()) {
				t.Errorf("another process, after %v: %s", took, out)
			}
			cancel()
			if err := <-failures; !errors.Is(err, context.Canceled) || !errors.Is(err, netfilter.ErrBusy) {
				t.Errorf("got %v", err)
			}
			waitForEnd(t, pidfd)
			// The mark is gone.
			assert.NoError(t, os.WriteFile(path+"/iptables", []byte("#!/bin/sh\n"+listing("exit 1")), 0o755))
			other = exec.Command("/proc/self/exe")
			other.Env = append(os.Environ(), probeVariable+"="+path)
			if out, _ := other.CombinedOutput(); !strings.Contains(string(out), "exit status 1") {
				t.Errorf("the program that ends: %s", out)
			}
		})
	}
}

// awaitMark waits until other processes would see that a program hangs.
func awaitMark(t *testing.T, p *programs, path string) {
	t.Helper()
	mark := p.hangMark(path)
	for range 100 {
		if mark.isSetHere() {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("the program is not marked")
}

// TestNextCall: a call of a program does not wait for one that hangs.
func TestNextCall(t *testing.T) {
	isolate(t)
	pipe, process := fifo(t)
	path := pathWith(t, map[string]string{"iptables-nft": listing("echo $$ >" + pipe + "; exec /bin/sleep 60")})
	d := impatient(path, time.Minute, 300*time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	failures := make(chan error)
	go func() {
		_, err := d.Probe(ctx, "nft")
		failures <- err
	}()
	pidfd := process()
	defer unix.Close(pidfd)
	start := time.Now()
	_, err := d.Probe(t.Context(), "nft")
	if took := time.Since(start); !errors.Is(err, netfilter.ErrBusy) || !strings.Contains(err.Error(), path+"/iptables-nft") || timelimit.Exceeded(took, 2*time.Second) {
		t.Errorf("after %v: %v", took, err)
	}
	cancel()
	if err := <-failures; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	waitForEnd(t, pidfd)
}

// TestMarkOfAnotherUser: a user who is not trusted cannot make programs look as if they hang.
func TestMarkOfAnotherUser(t *testing.T) {
	isolate(t)
	path := pathWith(t, map[string]string{"iptables": listing("exit 1")}) + "/iptables"
	pipe, process := fifo(t)
	holder := exec.Command("/proc/self/exe")
	holder.Env = append(os.Environ(), markVariable+"="+path, markPipeVariable+"="+pipe)
	assert.NoError(t, holder.Start())
	pidfd := process()
	defer unix.Close(pidfd)
	mark := newHangMark(path)
	root, nobody := mark.isSet(func(uint32) bool { return true }), mark.isSet(func(uint32) bool { return false })
	if !root || nobody {
		t.Errorf("of a trusted user %v, of another one %v", root, nobody)
	}
	assert.NoError(t, holder.Process.Kill())
	_ = holder.Wait()
	if mark.isSet(func(uint32) bool { return true }) {
		t.Error("the mark outlives its process")
	}
}

func TestJoinQuoted(t *testing.T) {
	lines := []string{
		"-P POSTROUTING ACCEPT",
		`-A POSTROUTING -m comment --comment "it is \"odd\\" -j X`,
		`-A POSTROUTING -m comment --comment "one`,
		"",
		`-A POSTROUTING -j X" -j Y`,
		"-A POSTROUTING -o -;d -j X",
	}
	want := []string{lines[0], lines[1], strings.Join(lines[2:5], "\n"), lines[5]}
	if got := joinQuoted(lines); !cmp.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestDeleteOddInterfaces: jumps of interfaces with unusual names are deleted as they are.
func TestDeleteOddInterfaces(t *testing.T) {
	inEachVariant(t, func(n *node) {
		want := desired(policy.OwnedBy(owner), basic("X"))
		n.apply(want)
		for _, name := range []string{"-;d", "$(x)", "a#b", "'q'"} {
			out, err := n.command(policy.IPv4, "", "", "-t", "nat", "-A", "POSTROUTING", "-o", name, "-j", "X")
			if err != nil {
				n.Fatal(err, out)
			}
		}
		n.apply(want)
		n.holds(want)
	})
}
