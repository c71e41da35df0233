// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/metrics"
)

// socket is the path of the socket on which the active reconciler serves its status.
func (n *node) socket() string { return filepath.Join(n.dataDir, "reconciler.sock") }

// askSocket returns the status that the active reconciler serves.
func (n *node) askSocket(t *testing.T) (s metrics.Status, err error) {
	t.Helper()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", n.socket())
	}
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}
	answer, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Get("http://reconciler/v1/status")
	if err != nil {
		return s, err
	}
	err = json.NewDecoder(answer.Body).Decode(&s)
	return s, errors.Join(err, answer.Body.Close())
}

// wantActive waits until the socket is that of the daemon.
func (n *node) wantActive(t *testing.T, d *daemon) {
	t.Helper()
	soon(t, func() string {
		s, err := n.askSocket(t)
		if want := d.command.Process.Pid; err != nil || s.PID != want {
			return fmt.Sprintf("the socket is of pid %d, want %d (%v)", s.PID, want, err)
		}
		return ""
	})
}

// TestSocketAfterKill checks that a reconciler replaces the socket of one that has ended, and that only its user can
// use the socket.
func TestSocketAfterKill(t *testing.T) {
	t.Parallel()
	n := newFaultyNode(t, backends()[0])
	n.wantActive(t, n.d)
	n.d.kill(t)
	if _, err := os.Lstat(n.socket()); err != nil {
		t.Errorf("the socket after SIGKILL: %v", err)
	}
	n.wantStatus(t, 1, "no reconciler runs")
	n.d = n.startReconciler(t, n.flags...)
	n.wantActive(t, n.d)
	n.wantStatus(t, 0)

	info, err := os.Lstat(n.socket())
	must(t, err)
	if want := os.ModeSocket | 0o600; info.Mode() != want {
		t.Errorf("the socket has mode %s, want %s", info.Mode(), want)
	}
	must(t, errors.Join(os.Chmod(filepath.Dir(n.dataDir), 0o755), os.Chmod(n.dataDir, 0o755)))
	if err := connectAs(otherUser(t), n.socket()); !errors.Is(err, unix.EACCES) {
		t.Errorf("another user connects: %v", err)
	}
	n.d.stop(t)
	n.wantStatus(t, 1, "no reconciler runs")
}

// otherUser returns the UID of a user that owns no file of the test. A user namespace that maps only root has none.
func otherUser(t *testing.T) int {
	t.Helper()
	const nobody = 65534
	if err := os.Chown(t.TempDir(), nobody, nobody); err != nil {
		t.Fatalf("%v (run as root, as this test needs a second user)", err)
	}
	return nobody
}

// connectAs connects to a Unix socket as a user that has no capability.
func connectAs(uid int, path string) error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		if _, err := unix.SetfsuidRetUid(uid); err != nil {
			result <- err
			return
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = errors.Join(unix.Connect(fd, &unix.SockaddrUnix{Name: path}), unix.Close(fd))
		}
		result <- err
	}()
	return <-result
}

// TestHangingReconciler checks that commands go on without a reconciler that does not answer, and say so.
func TestHangingReconciler(t *testing.T) {
	t.Parallel()
	n := newFaultyNode(t, backends()[0])
	n.d.signal(t, syscall.SIGSTOP)
	t.Cleanup(func() { n.d.signal(t, syscall.SIGCONT) })
	for command, code := range map[string]int{"status": 3, "check": 0, "doctor": 0, "explain 8.8.8.8": 0, "render": 0} {
		start := time.Now()
		stdout, stderr, have := n.byHand(t, strings.Fields(command)...)
		if took := time.Since(start); timelimit.Exceeded(took, 3900*time.Millisecond) {
			t.Errorf("%s took %s", command, took)
		}
		if have != code || len(lacking(stdout+stderr, []string{"no answer in 2s"})) > 0 {
			t.Errorf("%s: exit code %d, want %d\n%s%s", command, have, code, stdout, stderr)
		}
	}
}

// TestStatusOfOtherDataDir checks that /readyz and status of a reconciler that has another dataDir than the node, and a
// conflist that names the node's, say how to move.
func TestStatusOfOtherDataDir(t *testing.T) {
	t.Parallel()
	n := newFaultyNode(t, backends()[0])
	n.listeners = -181 // as newFaultyNode
	n.restart(t, "--data-dir", filepath.Join(n.dir, "elsewhere"))
	move := "to move, run ip-masq-reconciler cleanup --data-dir "
	n.d.untilUnready(t, "conflist: ", "state: ", move)
	stdout, stderr, code := n.byHand(t, "status")
	missing := lacking(stdout, []string{"running, but does not answer: it serves 127.0.0.1:19820, and does not use ", move, "reconciler-not-running"})
	if code != 3 || len(missing) > 0 || strings.Contains(stdout, "no reconciler runs") {
		t.Errorf("exit code %d, lacks %q:\n%s%s", code, missing, stdout, stderr)
	}
}

// TestStatusOfAddressInUse checks that status has an address that the reconciler cannot bind as a problem, and that the
// node is ready.
func TestStatusOfAddressInUse(t *testing.T) {
	t.Parallel()
	n := newNode(t, backends()[0])
	n.conflist(t, "podnet", nil)
	address := n.unusedAddress()
	must(t, n.Node.Do(func() error {
		l, err := net.Listen("tcp", address)
		if err == nil {
			t.Cleanup(func() { _ = l.Close() })
		}
		return err
	}))
	n.startReconciler(t, "--metrics-listen", address).untilReady(t)
	soon(t, func() string {
		stdout, stderr, code := n.reconciler(t, "status")
		if missing := lacking(stdout, []string{"listen-failed", "metrics_listen: ", "address already in use"}); code != 0 || len(missing) > 0 || strings.Count(stdout, "ss -ltnp") != 1 {
			return fmt.Sprintf("exit code %d, lacks %q:\n%s%s", code, missing, stdout, stderr)
		}
		return ""
	})
}

// TestStatusOfOtherUser checks that status of a user who may not read the state tells that, and nothing about the node.
func TestStatusOfOtherUser(t *testing.T) {
	t.Parallel()
	n := newFaultyNode(t, backends()[0])
	uid := uint32(otherUser(t))
	dir, err := os.MkdirTemp("", "other-user") //nolint:usetesting // other users cannot reach what TempDir returns
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	program := filepath.Join(dir, "ip-masq-reconciler")
	must(t, os.Chmod(dir, 0o755))
	run(t, n.Node.Command(n.timeout(t), "cp", reconcilerProgram(t), program)) // a program that this process wrote may be busy
	c := n.Node.Command(n.timeout(t), program, "status", "--data-dir", n.dataDir)
	c.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	stdout, stderr, code := run(t, c)
	if code != 1 || stdout != "" || !strings.HasPrefix(stderr, "ip-masq-reconciler: only root can read the state of the node, in ") {
		t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
	}
}
