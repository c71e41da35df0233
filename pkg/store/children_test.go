// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

const (
	childEnv = "STORE_TEST_CHILD"
	dirEnv   = "STORE_TEST_DIR"
)

// TestMain is the children too: the test binary runs itself where a test needs
// another process.
func TestMain(m *testing.M) {
	name := os.Getenv(childEnv)
	if name == "" {
		os.Exit(sandbox.Run(m)) // for mounts of its own
	}
	do, known := children()[name]
	err := fmt.Errorf("no child %q", name)
	if known {
		err = do(store.Open(os.Getenv(dirEnv)).WithBoot(boot))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func children() map[string]func(*store.Dir) error {
	return map[string]func(*store.Dir) error{
		"hold": hold,
		"wait": untilEOF,
		"killed while it drops": func(d *store.Dir) error {
			l, err := lockNow(d)
			if err == nil {
				err = l.Drop(network("net"))
			}
			if err != nil {
				return err
			}
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		},
		"load": func(d *store.Dir) error {
			_, err := d.Load()
			return err
		},
		"writable":    (*store.Dir).CheckWritable,
		"bare umask":  func(d *store.Dir) error { return writeWithUmask(d, 0) },
		"tight umask": func(d *store.Dir) error { return writeWithUmask(d, 0o077) },
		"read-only":   onReadOnly,
		"full":        onFullDisk,
		"alternate":   alternate,
	}
}

// child returns a command that is one of the children.
func child(t testing.TB, name string, d *store.Dir) *exec.Cmd {
	t.Helper()
	exe := assert.Must(os.Executable())(t)
	cmd := exec.CommandContext(t.Context(), exe)
	cmd.Env = append(os.Environ(), childEnv+"="+name, dirEnv+"="+d.Path())
	cmd.Stderr = os.Stderr
	return cmd
}

// start runs a child until the returned function ends its input, and waits for
// its first line.
func start(t *testing.T, cmd *exec.Cmd) (line string, end func()) {
	t.Helper()
	in := assert.Must(cmd.StdinPipe())(t)
	out := assert.Must(cmd.StdoutPipe())(t)
	ok(t, cmd.Start())
	line = assert.Must(bufio.NewReader(out).ReadString('\n'))(t)
	return strings.TrimSpace(line), func() { ok(t, in.Close()) }
}

func untilEOF(*store.Dir) error {
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

func lockNow(d *store.Dir) (*store.Lock, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timelimit.Wait)
	defer cancel()
	return d.Lock(ctx)
}

// hold has the lock until its input ends, and releases it only by dying.
func hold(d *store.Dir) error {
	l, err := lockNow(d)
	if err != nil {
		return err
	}
	fmt.Println("locked", l.File().Name())
	return untilEOF(d)
}

func writeWithUmask(d *store.Dir, mask int) error {
	syscall.Umask(mask)
	l, err := lockNow(d)
	if err != nil {
		return err
	}
	return errors.Join(l.Put(newSource("podnet")), l.PutRecord(aRecord()), d.Attach(aPod("podnet", "c", "eth0")), l.Release())
}

// onReadOnly runs in a mount namespace of its own, on a dataDir with everything
// in it.
func onReadOnly(d *store.Dir) error {
	if err := unix.Mount(d.Path(), d.Path(), "", unix.MS_BIND, ""); err != nil {
		return err
	}
	if err := unix.Mount("", d.Path(), "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return err
	}
	s, err := d.Load()
	if err != nil || len(s.Sources) != 1 || len(s.Unreadable) != 0 {
		return fmt.Errorf("load: %+v, %w", s, err)
	}
	instance, err := d.InstanceLock() // one reconciler is active here too
	if err == nil && !d.ReconcilerActive() {
		err = errors.New("the instance lock is not held")
	}
	if err := errors.Join(err, instance.Release()); err != nil {
		return err
	}
	l, err := lockNow(d) // for a repair of rules
	if err != nil {
		return err
	}
	if err := errors.Join(
		l.PutRecord(s.Record), d.Detach(aPod("podnet", "other", "eth0").Attachment),
		d.Detach(aPod("unseen", "c", "eth0").Attachment), l.Tidy(), drop(l, network("unseen")),
	); err != nil {
		return fmt.Errorf("nothing to write: %w", err)
	}
	other := s.Record
	other.Boot = "another"
	return errors.Join(
		isReadOnly(l.Put(newSource("podnet")), d), isReadOnly(l.PutRecord(other), d), isReadOnly(d.Attach(aPod("podnet", "d", "eth0")), d), isReadOnly(d.Attach(aPod("podnet", "c", "eth0")), d),
		isReadOnly(d.Detach(aPod("podnet", "c", "eth0").Attachment), d), isReadOnly(d.Prune("podnet", nil), d),
		isReadOnly(drop(l, network("podnet")), d), l.Release(), isReadOnly(d.CheckWritable(), d),
		isReadOnly(store.Open(d.Path()+"/absent/too").CheckWritable(), d),
	)
}

// onFullDisk runs in a mount namespace of its own, on a file system without room but for what an earlier boot
// left.
func onFullDisk(d *store.Dir) error {
	if err := unix.Mount("tmpfs", d.Path(), "tmpfs", 0, "mode=700,size=64k"); err != nil {
		return err
	}
	former := store.Open(d.Path()).WithBoot(strings.Replace(boot, "5", "6", 1))
	l, err := lockNow(d)
	if err := errors.Join(err, l.Put(newSource("podnet")), former.Attach(aPod("podnet", "c", "eth0"))); err != nil {
		return err
	}
	cached := aPod("podnet", "cached", "eth0")
	if _, err := d.AttachCached(cached); err != nil {
		return err
	}
	file, err := os.Create(d.Path() + "/of-another-program")
	if err != nil {
		return err
	}
	fill := func() {
		for err = nil; err == nil; {
			_, err = file.Write(make([]byte, 4096))
		}
	}
	fill()
	full := func(err error) error { return isFailure(err, unix.ENOSPC, d, "free space") }
	if err := errors.Join(full(l.PutRecord(aRecord())), l.Tidy(), l.PutRecord(aRecord())); err != nil {
		return fmt.Errorf("beside the attachments of an earlier boot: %w", err)
	}
	fill()
	larger := cached
	larger.Name = strings.Repeat("n", 5000) // so that a part of it fits where the record is
	_, err = d.AttachCached(larger)
	if err := full(err); err != nil {
		return fmt.Errorf("replace the record of a cached pod: %w", err)
	}
	kept, err := d.Pod(cached.Attachment)
	if err != nil || kept == nil || kept.Name != cached.Name {
		return fmt.Errorf("the record of a cached pod that cannot be replaced: %v, %w", kept, err)
	}
	return errors.Join(full(l.Put(newSource("other"))), file.Close(), l.Release())
}

func isReadOnly(err error, d *store.Dir) error { return isFailure(err, unix.EROFS, d, "mount") }

// isFailure holds a failure to name its errno, the path and the remedy.
func isFailure(err error, errno unix.Errno, d *store.Dir, remedy string) error {
	if !errors.Is(err, errno) || !strings.Contains(err.Error(), d.Path()) || !strings.Contains(err.Error(), remedy) {
		return fmt.Errorf("got %w, want %w with the path and %q", err, errno, remedy)
	}
	return nil
}

// alternate runs in a mount namespace of its own, on a file system where a sync
// takes no time, and reads for a while as two documents take turns.
func alternate(d *store.Dir) error {
	if err := unix.Mount("tmpfs", d.Path(), "tmpfs", 0, "mode=700"); err != nil {
		return err
	}
	l, err := lockNow(d)
	if err != nil {
		return err
	}
	put := func(name string) error {
		return l.Put(newSource(name))
	}
	if err := put("left"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	written := make(chan error, 1)
	go func() {
		var err error
		for here, there := "left", "right"; err == nil && ctx.Err() == nil; here, there = there, here {
			err = errors.Join(put(there), drop(l, network(here)))
		}
		written <- err
	}()
	for err == nil && ctx.Err() == nil {
		var s store.State
		s, err = d.Load()
		if err == nil && (len(s.Sources) == 0 || len(s.Unreadable) > 0) {
			err = fmt.Errorf("loaded %+v", s)
		}
	}
	cancel()
	return errors.Join(err, <-written, l.Release())
}
