// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const lockOp = "lock"

// Lock is the exclusive right to change documents and the record, and by agreement the rules in the
// kernel. It is for one goroutine. It is an flock(2), which ends with the last process that has the
// descriptor open. The file is removed with the dataDir only (Destroy): otherwise one process could
// lock the removed file and another a new one.
type Lock struct {
	dir    *Dir
	root   *folder
	file   *os.File // nil in a dry run without a lock file
	staged map[*Staged]bool

	dry      bool // see DryRun
	planned  int  // bytes of what was staged in a dry run
	released bool
}

// Lock takes the lock, and creates a missing dataDir. If ctx ends first, the error is an ErrBusy. On a
// read-only file system an existing lock file can be locked too: rules may need a repair that no
// document needs.
func (d *Dir) Lock(ctx context.Context) (*Lock, error) {
	l, err := d.lock(ctx, true)
	if err == nil {
		l.undoDrops()
	}
	return l, err
}

// LockToRead takes the lock as Lock does, and creates nothing. Without a lock file, the Lock is nil.
func (d *Dir) LockToRead(ctx context.Context) (*Lock, error) {
	l, err := d.lock(ctx, false)
	return l, ignoring(err, os.ErrNotExist)
}

func (d *Dir) lock(ctx context.Context, create bool) (*Lock, error) {
	const attempts = 100
	for attempt := 1; ; attempt++ {
		l, err := d.openLock(create)
		if create && errors.Is(err, os.ErrNotExist) && attempt < attempts {
			continue // the dataDir was removed meanwhile
		}
		if err != nil {
			return nil, err
		}
		err = l.wait(ctx)
		if err == nil && isAt(l.fd(), l.root.in(lockFile)) { // else the dataDir was removed meanwhile
			return l, nil
		}
		if err := errors.Join(err, l.Release()); err != nil {
			return nil, err
		}
	}
}

func (d *Dir) openLock(create bool) (*Lock, error) {
	root, err := d.descend(create)
	if err != nil {
		return nil, err
	}
	fd, err := root.openLock(create)
	if err != nil {
		root.close()
		return nil, err
	}
	return &Lock{
		dir: d, root: root, staged: map[*Staged]bool{},
		file: os.NewFile(uintptr(fd), root.in(lockFile)),
	}, nil
}

// openLock opens the lock file. The process that creates it makes the dataDir durable: it comes before
// the first document.
func (f *folder) openLock(create bool) (int, error) {
	fd, _, err := f.open(lockOp, lockFile, unix.O_RDWR)
	switch {
	case errors.Is(err, unix.EROFS):
		fd, _, err = f.open(lockOp, lockFile, unix.O_RDONLY)
	case create && errors.Is(err, os.ErrNotExist):
		if fd, err = f.create(lockOp, lockFile); err == nil {
			_ = f.mark() // a Destroy may have removed the marker since the directory was opened
			err = errors.Join(unix.Close(fd), f.sync(), f.syncParent())
		}
		if err == nil || errors.Is(err, os.ErrExist) {
			fd, _, err = f.open(lockOp, lockFile, unix.O_RDWR)
		}
	}
	return fd, err
}

// wait polls for the lock until ctx ends.
func (l *Lock) wait(ctx context.Context) error {
	const first, longest = time.Millisecond, 20 * time.Millisecond
	for pause := first; ; pause = min(2*pause, longest) {
		err := flock(l.fd())
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return failure(lockOp, l.root.in(lockFile), err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s %s: %w: %w; try again, or see with lsof who that is",
				lockOp, shown(l.root.in(lockFile)), ErrBusy, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

// flock locks a file, or fails with EWOULDBLOCK.
func flock(fd int) error {
	_, err := uninterrupted(func() (int, error) { return 0, unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	return err
}

func (l *Lock) fd() int { return int(l.file.Fd()) }

// File returns the lock for child processes that write to inherit (exec.Cmd.ExtraFiles): the lock is
// held as long as one of them lives. Release closes it.
func (l *Lock) File() *os.File { return l.file }

// Release ends the lock and discards what is staged and not committed. Children that inherited the
// lock keep it. It may be called twice, and on nil.
func (l *Lock) Release() error {
	if l == nil || l.released {
		return nil
	}
	var errs []error
	for s := range l.staged {
		errs = append(errs, s.Discard())
	}
	// Not LOCK_UN, which would unlock it for children too.
	if l.file != nil {
		if err := l.file.Close(); err != nil {
			errs = append(errs, failure("unlock", l.root.in(lockFile), err))
		}
	}
	l.released = true
	l.root.close()
	return errors.Join(errs...)
}

// held returns an error if the lock is released.
func (l *Lock) held(op, path string) error {
	if l.released {
		return failure(op, path, ErrReleased)
	}
	return nil
}

// InstanceLock is the right to be the active reconciler of the node. It is apart from the Lock, which
// all processes take for moments. It is an flock(2), so it ends with the process.
type InstanceLock struct {
	file *os.File
	path string
}

// InstanceLock takes the instance lock, and creates a missing dataDir. The error is an ErrBusy if
// another process has it.
func (d *Dir) InstanceLock() (*InstanceLock, error) {
	root, err := d.makeDataDir()
	if err != nil {
		return nil, err
	}
	defer root.close()
	fd, err := root.openOrCreate("take the instance lock by", instanceLockFile, unix.O_RDWR)
	if err != nil {
		return nil, err
	}
	path := root.in(instanceLockFile)
	if err = flock(fd); errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another ip-masq-reconciler runs on this node: %s: %w", shown(path), ErrBusy)
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &InstanceLock{file: os.NewFile(uintptr(fd), path), path: path}, nil
}

// Held reports whether the lock is still the one that other processes would take: the whole dataDir may
// have been removed. Nil is not held.
func (l *InstanceLock) Held() bool {
	return l != nil && l.file != nil && isAt(int(l.file.Fd()), l.path)
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
