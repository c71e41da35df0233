// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Lock is the exclusive right to change documents and the record, and by agreement the rules in the
// kernel. It is for one goroutine. It is an flock(2), which ends with the last process that has the
// descriptor open. The file is removed by Destroy only: the removed one could still be locked.
type Lock struct {
	dir  *Dir
	root *folder
	file *os.File

	mu      sync.Mutex        // of dropped, for which readers ask in other goroutines
	dropped []policy.SourceID // and not committed, see Drop

	released bool
}

// Lock takes the lock, and creates a missing dataDir. If it takes too long, the error is an ErrBusy. On a
// read-only file system an existing lock file can be locked too: rules may need a repair that no
// document needs.
func (d *Dir) Lock(ctx context.Context) (*Lock, error) {
	l, err := d.lock(ctx, true)
	if err != nil {
		return nil, err
	}
	l.undoDrops()
	l.upgrade()
	return l, nil
}

// LockToRead takes the lock as Lock does, and writes nothing. Without a lock file, the Lock is nil.
func (d *Dir) LockToRead(ctx context.Context) (*Lock, error) {
	l, err := d.lock(ctx, false)
	return l, ignoring(err, os.ErrNotExist)
}

// mayCreate returns why no file of this size can be created in a directory, or in the nearest one above
// that exists.
func mayCreate(dir string, size int) error {
	const op = "write to directory"
	err := unix.Faccessat(unix.AT_FDCWD, dir+"/.", unix.W_OK|unix.X_OK, unix.AT_EACCESS)
	if errors.Is(err, unix.ENOENT) && dir != filepath.Dir(dir) {
		return mayCreate(filepath.Dir(dir), size)
	}
	if err != nil {
		return failure(op, dir, err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return failure(op, dir, err)
	}
	free := st.Bavail // without the blocks that are reserved for root
	if os.Geteuid() == 0 {
		free = st.Bfree
	}
	// A file system that counts none has no limit, or no such thing as inodes.
	lacksBlocks := st.Blocks > 0 && free*uint64(st.Bsize) < uint64(size)
	lacksInodes := st.Files > 0 && st.Ffree == 0
	if lacksBlocks || lacksInodes {
		return failure(op, dir, unix.ENOSPC)
	}
	return nil
}

// lock takes the lock, again as long as the file was removed while it waited: ctx ends that. If the dataDir
// is removed while it is made, it tries 100 times.
func (d *Dir) lock(ctx context.Context, create bool) (*Lock, error) {
	const attempts = 100
	ctx, cancel := context.WithTimeout(ctx, d.LockWait)
	defer cancel()
	for attempt := 1; ; attempt++ {
		l, err := d.openLock(create)
		wasRemoved := create && errors.Is(err, os.ErrNotExist) // the dataDir, meanwhile
		if wasRemoved && attempt < attempts {
			continue
		}
		if err != nil {
			return nil, err
		}
		err = l.take(ctx)
		isInPlace := isAt(l.file, l.root.in(lockFile))
		if err == nil && isInPlace {
			d.held.Store(l)
			return l, nil
		}
		err = errors.Join(err, l.Release())
		if err != nil {
			return nil, err
		}
		// The file was removed while the lock was waited for.
	}
}

// take waits for the lock of the open file. The error is an ErrBusy if ctx ends first.
func (l *Lock) take(ctx context.Context) error {
	err := safefile.Flock(ctx, l.file)
	path := l.root.in(lockFile)
	if err != nil && errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("%s %s: %w: %w; try again, or find the process with lsof",
			lockOp, shown(path), ErrBusy, err)
	}
	return failure(lockOp, path, err)
}

func isAt(file *os.File, path string) bool {
	var open, found unix.Stat_t
	err := cmp.Or(unix.Fstat(int(file.Fd()), &open), unix.Lstat(path, &found))
	return err == nil && open.Dev == found.Dev && open.Ino == found.Ino
}

// openLock opens the lock file. The process that creates it makes the dataDir durable: it comes before
// the first document.
func (d *Dir) openLock(create bool) (*Lock, error) {
	root, err := d.descend(create)
	if err != nil {
		return nil, err
	}
	file, _, err := root.open(lockOp, lockFile, unix.O_RDWR)
	switch {
	case errors.Is(err, unix.EROFS):
		file, _, err = root.open(lockOp, lockFile, unix.O_RDONLY)
	case create && errors.Is(err, os.ErrNotExist):
		file, err = root.createLock()
	}
	if err != nil {
		root.close()
		return nil, err
	}
	return &Lock{dir: d, root: root, file: file}, nil
}

func (f *folder) createLock() (*os.File, error) {
	file, err := f.openOrCreate(lockOp, lockFile, unix.O_RDWR)
	if err != nil {
		return nil, err
	}
	// A Destroy may have removed the marker since the directory was opened.
	err = errors.Join(f.mark(), f.sync(), f.syncParent())
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// File returns the lock for child processes that write to inherit (exec.Cmd.ExtraFiles): the lock is
// held as long as one of them lives. Release closes it.
func (l *Lock) File() *os.File { return l.file }

// Release ends the lock and restores dropped documents that are not committed. Children that inherited the
// lock keep it. It may be called twice, and on nil.
func (l *Lock) Release() error {
	if l == nil || l.released {
		return nil
	}
	l.released = true
	var errs []error
	for _, src := range slices.Clone(l.dropped) {
		errs = append(errs, l.UndoDrop(src))
	}
	l.dir.held.CompareAndSwap(l, nil)
	// Not LOCK_UN, which would unlock it for children too.
	errs = append(errs, failure("unlock", l.file.Name(), l.file.Close()))
	l.root.close()
	return errors.Join(errs...)
}

// InstanceLock is the right to be the active reconciler of the node. Unlike the Lock, a process holds it
// as long as it runs. It is an flock(2), so it ends with the process.
type InstanceLock struct {
	file *os.File
	seen time.Time // see RecordSync
}

// InstanceLock takes the instance lock, and creates a missing dataDir. The error is an ErrBusy if
// another process has it.
func (d *Dir) InstanceLock() (*InstanceLock, error) {
	root, err := d.makeDataDir()
	if err != nil {
		return nil, err
	}
	defer root.close()
	const op = "take the instance lock by"
	file, err := root.openInstanceLock(op)
	if err != nil {
		return nil, err
	}
	const asks = 50 * time.Millisecond // at most, for which ReconcilerActive has a shared lock
	ctx, cancel := context.WithTimeout(context.Background(), asks)
	defer cancel()
	err = safefile.Flock(ctx, file)
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("another ip-masq-reconciler runs on this node: %s: %w", shown(file.Name()), ErrBusy)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &InstanceLock{file: file}, nil
}

// openInstanceLock opens the file of the instance lock, and creates a missing one: without a time, as a
// command takes this lock, too.
func (f *folder) openInstanceLock(op string) (*os.File, error) {
	file, _, err := f.open(op, instanceLockFile, unix.O_RDWR)
	switch {
	case errors.Is(err, unix.EROFS):
		file, _, err = f.open(op, instanceLockFile, unix.O_RDONLY)
	case errors.Is(err, os.ErrNotExist):
		file, err = f.openOrCreate(op, instanceLockFile, unix.O_RDWR)
		if err == nil {
			never := time.Unix(0, 0)
			_ = os.Chtimes(file.Name(), never, never)
		}
	}
	return file, err
}

// RecordSync records that the holder is a reconciler that makes a sync now, not a command that keeps
// reconcilers from running. It writes at most once a second.
func (l *InstanceLock) RecordSync() {
	now := time.Now()
	if l == nil || now.Sub(l.seen) < time.Second {
		return
	}
	l.seen = now
	_ = os.Chtimes(l.file.Name(), now, now) // on a read-only file system the time is older
}

// ReconcilerSeen returns when an active reconciler last made a sync, zero if none did.
func (d *Dir) ReconcilerSeen() time.Time {
	info, err := os.Lstat(filepath.Join(d.path, instanceLockFile))
	if err != nil || info.ModTime().Unix() == 0 {
		return time.Time{}
	}
	return info.ModTime()
}

// CheckWritable returns why no file of the size of the largest document can be created in the dataDir: it is
// read-only, or full. It only reads.
func (d *Dir) CheckWritable() error {
	largest := int64(1)
	for _, dir := range []string{d.path, filepath.Join(d.path, sourcesDir)} {
		files, _ := os.ReadDir(dir) // without documents any size will do
		for _, f := range files {
			info, err := f.Info()
			if err == nil && info.Mode().IsRegular() {
				largest = max(largest, info.Size())
			}
		}
	}
	return mayCreate(d.path, int(largest))
}

// ResetLock takes the lock of the one process that resets connections. The caller closes it. If ctx ends
// first, the error is an ErrBusy. It is nil without a dataDir. It is not the Lock, as no ADD may wait for the
// walk of another process.
func (d *Dir) ResetLock(ctx context.Context) (*os.File, error) {
	root, err := d.dataDir()
	if err != nil {
		return nil, ignoring(err, os.ErrNotExist)
	}
	defer root.close()
	file, err := root.openOrCreate("take the lock of resets by", resetLockFile, unix.O_RDWR)
	if err != nil {
		return nil, err
	}
	err = safefile.Flock(ctx, file)
	if err != nil {
		err = fmt.Errorf("another process resets connections: %s: %w: %w", shown(file.Name()), ErrBusy, err)
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// ReconcilerActive reports whether a process holds the instance lock.
func (d *Dir) ReconcilerActive() bool { return d.isLocked(instanceLockFile) }

// ResetsRunning reports whether a process holds the lock that ResetLock takes.
func (d *Dir) ResetsRunning() bool { return d.isLocked(resetLockFile) }

func (d *Dir) isLocked(name string) bool {
	root, err := d.dataDir()
	if err != nil {
		return false
	}
	defer root.close()
	return root.isLocked(name)
}

// isLocked reports whether a process, this one included, has locked a file.
func (f *folder) isLocked(name string) bool {
	file, _, err := f.open("open the lock", name, unix.O_RDONLY)
	if err != nil {
		return false
	}
	err = unix.Flock(int(file.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	_ = file.Close() // it was only read
	return errors.Is(err, unix.EWOULDBLOCK)
}

// Held reports whether the lock is still the one that other processes would take: the whole dataDir may
// have been removed. Nil is not held.
func (l *InstanceLock) Held() bool {
	return l != nil && l.file != nil && isAt(l.file, l.file.Name())
}

// Release ends the instance lock. It may be called twice, and on nil.
func (l *InstanceLock) Release() error {
	if l == nil || l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	return err
}
