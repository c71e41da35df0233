// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func busy(t *testing.T, d *store.Dir) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Millisecond)
	defer cancel()
	l, err := d.Lock(ctx)
	if err == nil {
		t.Fatal("the lock is free", l.Release())
	}
	if !errors.Is(err, store.ErrBusy) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want ErrBusy", err)
	}
	fails(t, err, "lock "+d.Path()+"/lock", "another process", "try again")
}

func TestLockExcludes(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	busy(t, d)
	ok(t, l.Release())
	ok(t, l.Release())
	ok(t, lock(t, d).Release())

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	free := assert.Must(d.Lock(ended))(t) // tried once all the same
	defer func() { ok(t, free.Release()) }()
	if _, err := d.Lock(ended); !errors.Is(err, store.ErrBusy) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

func TestLockExcludesOtherProcesses(t *testing.T) {
	d := open(t)
	holder := child(t, "hold", d)
	line, end := start(t, holder)
	same(t, line, "locked "+d.Path()+"/lock")
	busy(t, d)
	end()
	ok(t, holder.Wait())
	ok(t, lock(t, d).Release())

	holder = child(t, "hold", d)
	start(t, holder)
	busy(t, d)
	ok(t, holder.Process.Kill())
	if err := holder.Wait(); err == nil {
		t.Error("not killed")
	}
	ok(t, lock(t, d).Release())
}

// Release leaves the lock to children that inherited it.
func TestReleaseDoesNotUnlockChildren(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	c := child(t, "wait", d)
	in := assert.Must(c.StdinPipe())(t)
	c.ExtraFiles = []*os.File{l.File()}
	ok(t, c.Start())
	ok(t, l.Release())
	busy(t, d)
	ok(t, in.Close())
	ok(t, c.Wait())
	ok(t, lock(t, d).Release())
}

func TestLockIsNotInheritedByOthers(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	c := child(t, "wait", d)
	in := assert.Must(c.StdinPipe())(t)
	ok(t, c.Start())
	ok(t, l.Release())
	ok(t, lock(t, d).Release())
	ok(t, in.Close())
	ok(t, c.Wait())
}

// Where somebody removes the whole directory, nobody is left with the lock of a
// file that others do not find.
func TestLockOfARemovedDirectory(t *testing.T) {
	d := open(t)
	old := lock(t, d)
	got := make(chan *store.Lock, 1)
	go func() {
		l, err := d.Lock(t.Context())
		if err != nil {
			t.Error(err)
		}
		got <- l
	}()
	time.Sleep(50 * time.Millisecond) // it waits for the old file by now
	ok(t, os.RemoveAll(d.Path()))
	ok(t, old.Release())
	l := <-got
	busy(t, d)
	ok(t, l.PutRecord(aRecord()))
	same(t, load(t, d).Record, aRecord())
	ok(t, l.Release())
}

func TestNothingIsWrittenAfterRelease(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	ok(t, l.Release())
	for _, err := range []error{l.Put(newSource("net")), drop(l, network("net")), l.PutRecord(aRecord()), l.Tidy()} {
		fails(t, err, d.Path())
	}
	loads(t, d)
}

func TestReadOnlyFileSystem(t *testing.T) {
	d := open(t)
	document(t, d, newSource("podnet"))
	l := lock(t, d)
	ok(t, l.PutRecord(aRecord()))
	ok(t, l.Release())
	ok(t, d.Attach(aPod("podnet", "c", "eth0")))
	made(t, d.Path())
	inMountNamespace(t, "read-only", d)
	loads(t, d, newSource("podnet"))
}

// TestFullDisk: what Tidy frees is room for the record, and errors name the cause and the remedy.
func TestFullDisk(t *testing.T) {
	d := open(t)
	ok(t, os.Mkdir(d.Path(), 0o700))
	inMountNamespace(t, "full", d)
}

func inMountNamespace(t *testing.T, name string, d *store.Dir) {
	t.Helper()
	cmd := child(t, name, d)
	// The runtime makes the mounts private first, so that ours end with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	ok(t, cmd.Run())
}
