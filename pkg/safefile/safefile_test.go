// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// TestLock: one process at a time has a directory, no matter who locks the directory itself, as any user can.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	other := assert.Must(os.Open(dir))(t)
	defer other.Close()
	assert.NoError(t, unix.Flock(int(other.Fd()), unix.LOCK_EX))
	lock := func(wait time.Duration) (*Dir, error) { return OpenLocked(t.Context(), dir, wait) }

	const writers, times = 8, 50
	counter := 0
	var all sync.WaitGroup
	for range writers {
		all.Go(func() {
			for range times {
				d, err := lock(time.Minute)
				if err != nil {
					t.Error(err)
					return
				}
				was := counter
				time.Sleep(time.Microsecond)
				counter = was + 1
				if err := d.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if entries := assert.Must(os.ReadDir(dir))(t); counter != writers*times || len(entries) > 0 {
		t.Errorf("counted to %d, want %d; left: %v", counter, writers*times, entries)
	}

	d := assert.Must(lock(time.Minute))(t)
	_, err := lock(20 * time.Millisecond)
	assert.ErrorContains(t, err, "another process holds the lock (waited 20ms)")
	assert.NoError(t, d.Close())
}

// TestReadFileThatWaits: a regular file of the kernel that waits for data does not make the caller wait.
func TestReadFileThatWaits(t *testing.T) {
	link := filepath.Join(t.TempDir(), "10-x.conflist")
	assert.NoError(t, os.Symlink("/proc/kmsg", link))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, _, err := ReadFile(link, 1<<20)
		done <- err
	}()
	select {
	case err := <-done:
		if err == nil {
			t.Error("it was read")
		}
	case <-ctx.Done():
		t.Error("it waits")
	}
}
