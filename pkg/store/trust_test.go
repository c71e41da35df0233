// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// untrusted is what can be wrong with a directory or a file.
func untrusted() map[string]struct {
	spoil func(path string) error
	want  []string
} {
	return map[string]struct {
		spoil func(path string) error
		want  []string
	}{
		"group can write":  {func(p string) error { return os.Chmod(p, 0o720) }, []string{"mode 0720", "chmod go-w"}},
		"others can write": {func(p string) error { return os.Chmod(p, 0o702) }, []string{"mode 0702", "chmod go-w"}},
		"another's":        {func(p string) error { return os.Lchown(p, 65534, 0) }, []string{"user 65534", "chown"}},
		"symlink": {func(p string) error {
			return errors.Join(os.Rename(p, p+".real"), os.Symlink(p+".real", p))
		}, []string{"symbolic link"}},
		"dangling symlink": {func(p string) error {
			return errors.Join(os.RemoveAll(p), os.Symlink("/nowhere/at/all", p))
		}, []string{"symbolic link"}},
		"FIFO": {func(p string) error {
			return errors.Join(os.RemoveAll(p), syscall.Mkfifo(p, 0o600))
		}, []string{"move it away"}},
		"socket": {func(p string) error {
			return errors.Join(os.RemoveAll(p), unix.Mknod(p, unix.S_IFSOCK|0o600, 0))
		}, []string{"move it away"}},
		"device": {func(p string) error {
			return errors.Join(os.RemoveAll(p), unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 8))))
		}, []string{"move it away"}},
	}
}

// inTime fails the test where something hangs, as it could on a FIFO.
func inTime(t *testing.T, do func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		return err
	case <-time.After(timelimit.Wait):
		t.Fatal("it hangs")
		return nil
	}
}

func refused(t *testing.T, err error, path string, want []string) {
	t.Helper()
	if !errors.Is(err, store.ErrRefused) {
		t.Errorf("got %v, want ErrRefused", err)
	}
	fails(t, err, append(want, path)...)
}

func TestUntrustedDirectoriesAreRefused(t *testing.T) {
	for name, c := range untrusted() {
		t.Run(name, func(t *testing.T) {
			all := operations(t)
			all["Backups"] = func(d *store.Dir) error { _, err := d.Backups(); return err }
			locked := func(do func(*store.Lock) error) func(*store.Dir) error {
				return func(d *store.Dir) error {
					l := assert.Must(d.Lock(t.Context()))(t)
					defer func() { ok(t, l.Release()) }()
					return do(l)
				}
			}
			all["Put"] = locked(func(l *store.Lock) error { return l.Put(newSource("net")) })
			all["Tidy"] = locked(func(l *store.Lock) error { return l.Tidy() })
			ofAttachments := []string{"Attach", "CheckAttach", "Detach", "Prune", "Attachments"}
			for _, at := range []struct {
				path       string
				operations []string
			}{
				{"", append([]string{"Load", "Lock"}, ofAttachments...)},
				{"backups", []string{"Backups"}},
				{"sources", []string{"Load", "Put", "Tidy"}},
				{"attachments", append([]string{"Tidy"}, ofAttachments...)},
				{"attachments/" + boot, ofAttachments},
				{"attachments/" + boot + "/*", ofAttachments},
			} {
				d := open(t)
				document(t, d, newSource("net"))
				ok(t, d.Attach(aPod("net", "c", "eth0")))
				assert.Must(d.Backups())(t)
				paths := assert.Must(filepath.Glob(filepath.Join(d.Path(), at.path)))(t)
				ok(t, c.spoil(paths[0]))
				before := tree(t, d.Path())
				for _, operation := range at.operations {
					err := inTime(t, func() error { return all[operation](d) })
					t.Run(operation+" with "+at.path, func(t *testing.T) { refused(t, err, paths[0], c.want) })
				}
				same(t, tree(t, d.Path()), before)
			}
		})
	}
}

func TestUntrustedDocumentsAreDamaged(t *testing.T) {
	for name, c := range untrusted() {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			document(t, d, newSource("other"))
			file := document(t, d, newSource("net"))
			l := lock(t, d)
			ok(t, l.PutRecord(aRecord()))
			record := d.Path() + "/record.json"
			ok(t, c.spoil(file))
			ok(t, c.spoil(record))
			var s store.State
			ok(t, inTime(t, func() (err error) { s, err = d.Load(); return err }))
			if len(s.Unreadable) != 2 || len(s.Sources) != 1 || s.Newer() != nil || len(s.Record.Chains) != 0 {
				t.Fatalf("%+v", s)
			}
			for i, path := range []string{file, record} {
				same(t, s.Unreadable[i].File, path)
				refused(t, s.Unreadable[i].Err, path, c.want)
			}
			store1(t, l, newSource("net"))
			ok(t, inTime(t, func() error { return l.PutRecord(aRecord()) }))
			for _, path := range []string{file, record} {
				if _, err := os.Lstat(path + ".damaged"); err != nil {
					t.Error(err)
				}
			}
			loads(t, d, newSource("net"), newSource("other"))
		})
	}
}

// A document that cannot be trusted can be replaced without Tidy too, and what
// a symlink points to stays as it is.
func TestCommitReplacesASymlink(t *testing.T) {
	d := open(t)
	file := document(t, d, newSource("net"))
	victim := filepath.Join(t.TempDir(), "victim")
	ok(t, os.WriteFile(victim, []byte("mine"), 0o600))
	ok(t, os.Remove(file))
	ok(t, os.Symlink(victim, file))
	store1(t, lock(t, d), newSource("net"))
	loads(t, d, newSource("net"))
	if data, err := os.ReadFile(victim); string(data) != "mine" || err != nil {
		t.Errorf("victim: %s, %v", data, err)
	}
}

func TestUntrustedLockAndAttachments(t *testing.T) {
	for name, c := range untrusted() {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			ok(t, d.Attach(aPod("net", "c", "eth0")))
			ok(t, lock(t, d).Release())
			file := d.Path() + "/lock"
			ok(t, c.spoil(file))
			refused(t, inTime(t, func() error { _, err := d.Lock(t.Context()); return err }), file, c.want)
			files := assert.Must(filepath.Glob(d.Path() + "/attachments/*/*/*"))(t)
			ok(t, c.spoil(files[0]))
			refused(t, inTime(t, func() error { return d.Attach(aPod("net", "c", "eth0")) }), files[0], c.want)
			ok(t, d.Detach(aPod("net", "c", "eth0").Attachment))
			absent(t, files[0])
		})
	}
}

// A slash at the end would make the kernel follow the symlink.
func TestSymlinkWithASlashAtTheEnd(t *testing.T) {
	d := open(t)
	ok(t, os.Mkdir(d.Path()+".real", 0o700))
	ok(t, os.Symlink(d.Path()+".real", d.Path()))
	_, err := store.Open(d.Path() + "/").Load()
	refused(t, err, d.Path(), []string{"symbolic link"})
}

func TestParentThatIsASymlink(t *testing.T) {
	target, link := t.TempDir(), filepath.Join(t.TempDir(), "link")
	ok(t, os.Symlink(target, link))
	d := store.Open(link + "/state").WithBoot(boot)
	document(t, d, newSource("net"))
	loads(t, d, newSource("net"))
}

func TestModesWhateverTheUmask(t *testing.T) {
	for _, umask := range []string{"bare umask", "tight umask"} {
		t.Run(umask, func(t *testing.T) {
			top := t.TempDir()
			d := store.Open(filepath.Join(top, "var", "lib", "state")).WithBoot(boot)
			ok(t, child(t, umask, d).Run())
			files := 0
			for path, mode := range tree(t, d.Path()) {
				want := os.FileMode(0o600)
				if mode.IsDir() {
					want = 0o700
				} else {
					files++
				}
				if mode.Perm() != want {
					t.Errorf("%s: %v", path, mode)
				}
			}
			same(t, files, 5) // marker, lock, document, record, attachment
			loads(t, d, newSource("podnet"))
		})
	}
}
