// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// made returns a dataDir that exists.
func made(t *testing.T, path string) *store.Dir {
	t.Helper()
	d := store.Open(path)
	l := assert.Must(d.InstanceLock())(t)
	ok(t, l.Release())
	return d
}

// leaveSocket makes a socket as a process leaves it that ends.
func leaveSocket(t *testing.T, d *store.Dir) {
	t.Helper()
	t.Chdir(d.Path())
	l := assert.Must(net.Listen("unix", "reconciler.sock"))(t)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	ok(t, l.Close())
}

// accepts checks that a listener gets what Dial sends.
func accepts(t *testing.T, d *store.Dir, l net.Listener) {
	t.Helper()
	c, err := d.Dial(t.Context())
	ok(t, err)
	_, err = io.WriteString(c, "hello")
	ok(t, errors.Join(err, c.Close()))
	s, err := l.Accept()
	ok(t, err)
	got, err := io.ReadAll(s)
	ok(t, errors.Join(err, s.Close()))
	same(t, string(got), "hello")
}

func TestSocket(t *testing.T) {
	dir := t.TempDir()
	for name, path := range map[string]string{
		"short path":                  filepath.Join(dir, "short"),
		"path of more than 108 bytes": filepath.Join(dir, strings.Repeat("l", 100), strings.Repeat("o", 100)),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := store.Open(path).Listen(); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("Listen without a dataDir: %v", err)
			}
			d := made(t, path)
			if _, err := d.Dial(t.Context()); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), d.SocketPath()) {
				t.Errorf("Dial without a socket: %v", err)
			}
			leaveSocket(t, d)
			if _, err := d.Dial(t.Context()); !errors.Is(err, unix.ECONNREFUSED) || !strings.Contains(err.Error(), d.SocketPath()) {
				t.Errorf("Dial to the socket of a process that was killed: %v", err)
			}
			l := assert.Must(d.Listen())(t)
			accepts(t, d, l)
			info := assert.Must(os.Lstat(d.SocketPath()))(t)
			same(t, info.Mode(), os.ModeSocket|0o600)
			ok(t, l.Close())
		})
	}
}

// What is no socket has another origin than a process that was killed.
func TestSocketReplacesNothingElse(t *testing.T) {
	for name, create := range map[string]func(path string) error{
		"file":      func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"symlink":   func(path string) error { return os.Symlink("/run/other.sock", path) },
	} {
		t.Run(name, func(t *testing.T) {
			d := made(t, filepath.Join(t.TempDir(), "data"))
			ok(t, create(d.SocketPath()))
			before := tree(t, d.Path())
			_, err := d.Listen()
			fails(t, err, "listen on "+d.SocketPath(), "it is not a socket; move it away")
			same(t, tree(t, d.Path()), before)
		})
	}
}

func TestDestroyRemovesTheSocket(t *testing.T) {
	d := made(t, filepath.Join(t.TempDir(), "data"))
	leaveSocket(t, d)
	l := lock(t, d)
	ok(t, l.Destroy())
	absent(t, d.Path())
}

// TestSocketOfTheNextReconciler checks that Close leaves the socket of another process, which has replaced it
// since somebody removed the instance lock.
func TestSocketOfTheNextReconciler(t *testing.T) {
	d := made(t, filepath.Join(t.TempDir(), "data"))
	first := assert.Must(d.Listen())(t)
	second := assert.Must(d.Listen())(t)
	ok(t, first.Close())
	accepts(t, d, second)
	ok(t, second.Close())
}
