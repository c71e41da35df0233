// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func TestAsAnotherUser(t *testing.T) {
	// Not below t.TempDir, whose directories are root's alone.
	top, err := os.MkdirTemp("/tmp", "store-test-") //nolint:usetesting // see above
	ok(t, err)
	t.Cleanup(func() { ok(t, os.RemoveAll(top)) })
	ok(t, os.Chmod(top, 0o755))
	exe := assert.Must(os.Executable())(t)
	binary := assert.Must(os.ReadFile(exe))(t)
	copied := filepath.Join(top, "test")
	ok(t, os.WriteFile(copied, binary, 0o700))
	ok(t, os.Chmod(copied, 0o755))
	d := store.Open(filepath.Join(top, "state")).WithBoot(boot)
	run := func(name string) (string, error) {
		cmd := child(t, name, d)
		cmd.Path = copied
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		err := cmd.Run()
		return stderr.String(), err
	}
	wants := func(name string, texts ...string) {
		t.Helper()
		message, err := run(name)
		if err == nil {
			t.Errorf("%s works", name)
		}
		assert.Contains(t, name, message, append(texts, top)...)
	}
	wants("writable", "permission denied", "run as its owner")
	document(t, d, newSource("net"))
	wants("load", "permission denied", "run as its owner") // root's may be read, if its mode lets us
	ok(t, os.Chmod(d.Path(), 0o755))
	ok(t, os.Chmod(d.Path()+"/sources", 0o755))
	if message, err := run("load"); err != nil {
		t.Errorf("root's directory: %v, %s", err, message)
	}
	ok(t, os.Chown(d.Path(), 65533, 0))
	wants("load", "refused", "user 65533", "user 65534")
	ok(t, os.RemoveAll(d.Path()))
	ok(t, os.Mkdir(d.Path(), 0o700))
	ok(t, os.Chown(d.Path(), 65534, 65534))
	if message, err := run("bare umask"); err != nil {
		t.Errorf("own directory: %v, %s", err, message)
	}
}
