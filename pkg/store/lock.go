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

// Lock is the exclusive right to change documents and the record, and by
// agreement the rules in the kernel. It is for one goroutine.
//
// It is an flock(2), so it ends with the last process that has the descriptor
// open, however that ends. The file goes with the dataDir
// alone (Destroy): a process could otherwise hold the lock of the removed file while
// another gets that of a new one.
type Lock struct {
	dir    *Dir
	root   *folder
	file   *os.File // nil in a dry run without a lock file
	staged map[*Staged]bool

	dry      bool // see DryRun
	planned  int  // bytes of what was staged in a dry run
	released bool
}

// Lock takes the lock, and creates the dataDir first where it is missing. When
// ctx ends first the error is an ErrBusy. Where the file system is read-only the
// lock can be had all the same if its file exists: rules may need a repair that
// no document needs.
func (d *Dir) Lock(ctx context.Context) (*Lock, error) {
	l, err := d.lock(ctx, true)
	if err == nil {
		l.undoDrops()
	}
	return l, err
}

// LockToRead takes the lock as Lock does, and creates nothing. Where there is no
// lock file, nobody holds the lock, and the Lock is nil.
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
		if err == nil && isAt(l.fd(), l.root.in(lockFile)) { // or the dataDir was removed meanwhile
			return l, nil
		}
		if err := errors.Join(err, l.Release()); err != nil {
			return nil, err
		}
	}
}

const lockOp = "lock"

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

// openLock opens the lock file. Whoever makes it makes the dataDir durable too:
// it comes before the first document.
func (f *folder) openLock(create bool) (int, error) {
	fd, _, err := f.open(lockOp, lockFile, unix.O_RDWR)
	switch {
	case errors.Is(err, unix.EROFS):
		fd, _, err = f.open(lockOp, lockFile, unix.O_RDONLY)
	case create && errors.Is(err, os.ErrNotExist):
		if fd, err = f.create(lockOp, lockFile); err == nil {
			_ = f.mark() // which a Destroy may have removed since the directory was opened
			err = errors.Join(unix.Close(fd), f.sync(), f.syncParent())
		}
		if err == nil || errors.Is(err, os.ErrExist) {
			fd, _, err = f.open(lockOp, lockFile, unix.O_RDWR)
		}
	}
	return fd, err
}

// wait polls for the lock: flock(2) itself can wait, but not until ctx ends.
func (l *Lock) wait(ctx context.Context) error {
	const first, longest = time.Millisecond, 20 * time.Millisecond
	for pause := first; ; pause = min(2*pause, longest) {
		err := l.try()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s %s: %w: %w; try again, or see with lsof who that is",
				lockOp, shown(l.root.in(lockFile)), ErrBusy, context.Cause(ctx))
		case <-time.After(pause):
		}
	}
}

func (l *Lock) try() error {
	_, err := uninterrupted(func() (int, error) { return 0, unix.Flock(l.fd(), unix.LOCK_EX|unix.LOCK_NB) })
	if err != nil {
		return failure(lockOp, l.root.in(lockFile), err)
	}
	return nil
}

func (l *Lock) fd() int { return int(l.file.Fd()) }

// File returns the lock as children that write inherit it (exec.Cmd.ExtraFiles):
// as long as one of them lives nobody else gets it. It is closed by Release.
func (l *Lock) File() *os.File { return l.file }

// Release ends the lock and discards what is staged and not committed. It does
// not take the lock from children that inherited it. Twice is fine, and so is nil.
func (l *Lock) Release() error {
	if l == nil || l.released {
		return nil
	}
	var errs []error
	for s := range l.staged {
		errs = append(errs, s.Discard())
	}
	// Not LOCK_UN: that would unlock it for children too.
	if l.file != nil {
		if err := l.file.Close(); err != nil {
			errs = append(errs, failure("unlock", l.root.in(lockFile), err))
		}
	}
	l.released = true
	l.root.close()
	return errors.Join(errs...)
}

// held fails where the lock is released.
func (l *Lock) held(op, path string) error {
	if l.released {
		return failure(op, path, ErrReleased)
	}
	return nil
}
