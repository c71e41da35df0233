// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// kept is a Keeper at work on real files, in a bubble whose time is its own.
type kept struct {
	*Manager
	t       *testing.T
	dir     string // of all files; those of the runtimes are in net.d
	changed chan struct{}
	leads   atomic.Bool
	wrote   func() // called when the entry was put in
	stop    func()

	// As of the last time that the test waited.
	last   Status
	writes int
	log    string

	mu  sync.Mutex
	now struct {
		last   Status
		writes int
		log    bytes.Buffer
	}
}

// Write takes the log.
func (k *kept) Write(line []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now.log.Write(line)
}

func (k *kept) take(s Status) {
	k.mu.Lock()
	k.now.last = s
	if s.Wrote {
		k.now.writes++
	}
	k.mu.Unlock()
	if s.Wrote {
		k.tell()
		k.wrote()
	}
}

// wait waits until the Keeper has nothing to do at this time.
func (k *kept) wait() {
	synctest.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.last, k.writes, k.log = k.now.last, k.now.writes, k.now.log.String()
}

// keep starts a Keeper with a plugin and no network.
func keep(t *testing.T, change func(*kept)) *kept {
	k := &kept{t: t, dir: t.TempDir(), changed: make(chan struct{}, 1), wrote: func() {}}
	k.leads.Store(true)
	k.write("bin/ip-masq", "x")
	if err := os.Chmod(k.path("bin/ip-masq"), 0o755); err != nil {
		t.Fatal(err)
	}
	o := Options{
		Dir: k.path("net.d"), Backups: k.path("backups"), Entry: func() ([]byte, error) { return ReadEntry(k.path("entry.json")) }, Bin: k.path("bin"),
		Changed: k.changed, Every: 30 * time.Second, Leads: k.leads.Load,
		Log: slog.New(slog.NewTextHandler(k, nil)), Tell: k.take,
	}
	k.Manager = NewManager(o)
	if change != nil {
		change(k)
	}
	select {
	case <-k.changed: // what is there from the beginning is no change
	default:
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); k.Run(ctx) }()
	k.stop = func() { cancel(); <-ended }
	t.Cleanup(func() {
		k.stop()
		k.wait()
		if t.Failed() {
			t.Log(k.log)
		}
	})
	k.wait()
	return k
}

func (k *kept) path(name string) string { return filepath.Join(k.dir, name) }

func (k *kept) tell() {
	select {
	case k.changed <- struct{}{}:
	default:
	}
}

// write writes a file at once and whole, and tells of it.
func (k *kept) write(name, text string) {
	k.t.Helper()
	path := k.path(name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".next", []byte(text), 0o644),
		os.Rename(path+".next", path)); err != nil {
		k.t.Fatal(err)
	}
	k.tell()
}

func (k *kept) remove(name string) {
	k.t.Helper()
	if err := os.RemoveAll(k.path(name)); err != nil {
		k.t.Fatal(err)
	}
	k.tell()
}

// lock locks a directory until the returned function is called.
func (k *kept) lock(name string) func() {
	k.t.Helper()
	dir, err := os.Open(k.path(name))
	if err != nil {
		k.t.Fatal(err)
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		k.t.Fatal(err)
	}
	return func() {
		if err := dir.Close(); err != nil {
			k.t.Fatal(err)
		}
	}
}

// present tells whether a file has our entry.
func (k *kept) present(name string) bool {
	doc, err := os.ReadFile(k.path(name))
	return err == nil && bytes.Contains(doc, []byte(`"ip-masq"`))
}

// after lets time go by.
func (k *kept) after(d time.Duration) {
	time.Sleep(d)
	k.wait()
}

// says fails the test unless there are these problems, and no more.
func (k *kept) says(want ...string) {
	k.t.Helper()
	if len(k.last.Problems) != len(want) {
		k.t.Fatalf("problems %v, want %q", k.last.Problems, want)
	}
	for i, p := range k.last.Problems {
		for piece := range strings.SplitSeq(want[i], "*") {
			if !strings.Contains(p.Err.Error(), piece) {
				k.t.Errorf("%q does not say %q", p.Err, piece)
			}
		}
	}
}

// logged fails the test unless the log says something so often.
func (k *kept) logged(n int, text string) {
	k.t.Helper()
	if got := strings.Count(k.log, text); got != n {
		k.t.Errorf("%q is in the log %d times, want %d:\n%s", text, got, n, k.log)
	}
}
