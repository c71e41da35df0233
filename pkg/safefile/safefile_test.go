// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
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

// TestFullDirectory: who cannot create the lock file, as the disk is full, changes nothing when another process
// has the lock once there is room again.
func TestFullDirectory(t *testing.T) {
	const file = "10-x.conflist"
	dir := t.TempDir()
	runtime.LockOSThread() // and not unlocked: the thread ends with the test, and the mount with it
	assert.NoError(t, errors.Join(
		unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=755,nr_inodes=5"),
	))
	t.Cleanup(func() { assert.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	others := []string{"one", "two", "three"}
	for _, name := range append(others, file) {
		assert.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	unlocked := assert.Must(OpenLocked(t.Context(), dir, time.Minute))(t)
	_, stageErr := unlocked.Stage(nil, nil)
	assert.ErrorContains(t, stageErr, "create a file in "+dir, "no space left on device")

	for _, name := range others {
		assert.NoError(t, os.Remove(filepath.Join(dir, name)))
	}
	locked := assert.Must(OpenLocked(t.Context(), dir, time.Minute))(t)
	temp := assert.Must(locked.Stage([]byte("text"), nil))(t)
	_, stageErr = unlocked.Stage(nil, nil)
	if stageErr == nil {
		t.Error("two processes write at the same time")
	}
	assert.ErrorContains(t, unlocked.Remove(file), "remove "+filepath.Join(dir, file), "no space left on device")
	assert.NoError(t, locked.Rename(temp, file))
	assert.NoError(t, errors.Join(unlocked.Close(), locked.Close()))
	text := assert.Must(os.ReadFile(filepath.Join(dir, file)))(t)
	assert.Equal(t, "file", string(text), "text")
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
