// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

func TestInstanceLock(t *testing.T) {
	d := store.Open(filepath.Join(t.TempDir(), "data"))
	first, err := d.InstanceLock()
	ok(t, err)
	if _, err := d.InstanceLock(); !errors.Is(err, store.ErrBusy) {
		t.Errorf("a second has it too: %v", err)
	}
	lock, err := d.Lock(t.Context()) // the instance lock is another lock
	ok(t, err)
	if !first.Held() || !d.ReconcilerActive() {
		t.Error("it is not held")
	}
	ok(t, lock.Destroy())
	if first.Held() {
		t.Error("it is held of a file that is gone")
	}
	assert.NoError(t, errors.Join(first.Release(), first.Release(), lock.Release()))
	if d.ReconcilerActive() {
		t.Error("it is held without a dataDir")
	}
	second, err := d.InstanceLock()
	ok(t, err)
	if !d.ReconcilerSeen().IsZero() {
		t.Errorf("a command that creates the lock counts as a reconciler: %s", d.ReconcilerSeen())
	}
	old := time.Unix(1e9, 0)
	ok(t, os.Chtimes(filepath.Join(d.Path(), "reconciler.lock"), old, old))
	assert.NoError(t, second.Release())
	command, err := d.InstanceLock()
	if err := errors.Join(err, command.Release()); err != nil || !d.ReconcilerSeen().Equal(old) {
		t.Errorf("a command counts as a reconciler: %s, %v", d.ReconcilerSeen(), err)
	}
	reconciler, err := d.InstanceLock()
	reconciler.RecordSync()
	synced := d.ReconcilerSeen()
	ok(t, os.Chtimes(filepath.Join(d.Path(), "reconciler.lock"), old, old))
	reconciler.RecordSync()
	if err := errors.Join(err, reconciler.Release()); err != nil || !synced.After(old) || !d.ReconcilerSeen().Equal(old) {
		t.Errorf("a reconciler was seen at %s, and within the second at %s, %v", synced, d.ReconcilerSeen(), err)
	}
	if d.ReconcilerActive() {
		t.Error("it is held after its release")
	}

	// A process that checks whether it is held, which takes it less than 50 ms, does not keep another from
	// taking it.
	if !timelimit.Await(timelimit.Wait, func() bool {
		reader, err := os.Open(filepath.Join(d.Path(), "reconciler.lock"))
		ok(t, err)
		ok(t, unix.Flock(int(reader.Fd()), unix.LOCK_SH))
		time.AfterFunc(5*time.Millisecond, func() { _ = reader.Close() })
		third, err := d.InstanceLock()
		return err == nil && third.Release() == nil
	}) {
		t.Error("a process that looks keeps another from taking it")
	}
}

func TestResetLock(t *testing.T) {
	d := store.Open(filepath.Join(t.TempDir(), "data"))
	if l, err := d.ResetLock(t.Context()); l != nil || err != nil || d.ResetsRunning() {
		t.Errorf("without a dataDir: %v, %v", l, err)
	}
	if l, err := d.Lock(t.Context()); err != nil || l.Release() != nil {
		t.Fatal(err)
	}
	first, err := d.ResetLock(t.Context())
	if err != nil || !d.ResetsRunning() {
		t.Fatalf("%v, running: %t", err, d.ResetsRunning())
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := d.ResetLock(short); !errors.Is(err, store.ErrBusy) {
		t.Errorf("a second has it too: %v", err)
	}
	time.AfterFunc(5*time.Millisecond, func() { _ = first.Close() })
	second, err := d.ResetLock(t.Context())
	if err := errors.Join(err, second.Close()); err != nil || d.ResetsRunning() {
		t.Errorf("%v, running: %t", err, d.ResetsRunning())
	}
}

// Destroy removes the files of ip-masq, and leaves those of other programs.
func TestDestroy(t *testing.T) {
	for _, foreign := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "data")
		d := store.Open(path)
		lock, err := d.Lock(t.Context())
		ok(t, err)
		err = errors.Join(lock.Put(newSource("podnet")), lock.Put(newSource("other")))
		if err == nil {
			err = errors.Join(d.Attach(aPod("podnet", "pod1", "eth0")), lock.PutRecord(store.Record{Boot: d.Boot()}))
		}
		if err == nil {
			err = lock.Drop(newSource("other").ID) // and never committed
		}
		ok(t, err)
		backups, err := d.Backups()
		ok(t, err)
		ok(t, os.WriteFile(filepath.Join(backups, "10-podnet.conflist."+strings.Repeat("0", 64)+".bak"), nil, 0o600))
		if foreign {
			ok(t, os.WriteFile(filepath.Join(path, "note"), nil, 0o600))
		}
		ok(t, errors.Join(lock.Destroy(), lock.Release()))
		left, err := os.ReadDir(path)
		if !foreign && !os.IsNotExist(err) {
			t.Errorf("the directory is left: %v, %v", left, err)
		}
		if foreign && (err != nil || len(left) != 1 || left[0].Name() != "note") {
			t.Errorf("left is %v, %v", left, err)
		}
		if err := lock.Destroy(); err == nil {
			t.Error("without the lock: no error")
		}
	}
}

// TestDestroyKeepsTheNextDocument: a process that takes the lock while a dataDir is
// destroyed keeps what it writes. The lock is the last file that goes.
func TestDestroyKeepsTheNextDocument(t *testing.T) {
	for range 3 {
		d := open(t)
		l := lock(t, d)
		for i := range 1000 { // so that it takes a while
			name := filepath.Join(d.Path(), "sources", fmt.Sprintf("%064x.json", i))
			ok(t, errors.Join(os.MkdirAll(filepath.Dir(name), 0o700), os.WriteFile(name, nil, 0o600)))
		}
		wrote := make(chan error, 1)
		go func() {
			for _, err := os.Lstat(d.Path() + "/lock"); err == nil; {
				_, err = os.Lstat(d.Path() + "/lock")
			}
			next, err := d.Lock(t.Context())
			if err == nil {
				err = errors.Join(next.Put(newSource("next")), next.Release())
			}
			wrote <- err
		}()
		ok(t, l.Destroy())
		ok(t, <-wrote)
		if s := load(t, d); len(s.Sources) != 1 {
			t.Fatalf("the document is lost: %+v", s.Sources)
		}
	}
}

func TestWritten(t *testing.T) {
	d := store.Open(filepath.Join(t.TempDir(), "data"))
	source := newSource("podnet").ID
	if at, err := d.Written(source); err != nil || !at.IsZero() {
		t.Errorf("without a dataDir: %v, %v", at, err)
	}
	before := time.Now().Add(-time.Second)
	lock := assert.Must(d.Lock(t.Context()))(t)
	ok(t, errors.Join(lock.Put(newSource("podnet")), lock.Release()))
	if at, err := d.Written(source); err != nil || at.Before(before) || at.After(time.Now().Add(time.Second)) {
		t.Errorf("written at %v, %v", at, err)
	}
	if at, err := d.Written(policy.SourceID{Kind: policy.AgentFiles}); err != nil || !at.IsZero() {
		t.Errorf("what was never written: %v, %v", at, err)
	}
}

// TestWrittenIsAboutThePolicy: a learned subnet keeps the time of the policy, another policy does not.
func TestWrittenIsAboutThePolicy(t *testing.T) {
	d := open(t)
	l := lock(t, d)
	source := newSource("podnet")
	store1(t, l, source)
	old := time.Now().Add(-time.Hour).Truncate(time.Second)
	ok(t, os.Chtimes(d.DocumentPath(source.ID), old, old))
	written := func() time.Time {
		return assert.Must(d.Written(source.ID))(t)
	}
	source.PodSubnets = append(source.PodSubnets, netip.MustParsePrefix("10.99.0.0/24"))
	store1(t, l, source)
	if at := written(); !at.Equal(old) {
		t.Errorf("with a learned subnet, the policy is of %v, want %v", at, old)
	}
	source.Policy.NonMasqueradeCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	store1(t, l, source)
	if at := written(); !at.After(old) {
		t.Errorf("another policy is as old as the former one: %v", at)
	}
}
