// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// DryRun takes the lock as Lock does, for a caller that wants to know whether it
// could write: Stage and PutRecord fail where they would fail with a Lock, and
// write nothing. That is found out by reading (access(2), statfs(2)), so a disk
// quota is not seen. Nothing is created; where there is no lock file, nobody can
// hold it.
func (d *Dir) DryRun(ctx context.Context) (*Lock, error) {
	l, err := d.lock(ctx, false)
	if errors.Is(err, os.ErrNotExist) {
		l, err = d.withoutLockFile()
	}
	if err != nil {
		return nil, err
	}
	l.dry = true
	return l, nil
}

func (d *Dir) withoutLockFile() (*Lock, error) {
	root, err := d.dataDir()
	if errors.Is(err, os.ErrNotExist) {
		root, err = missing(d.path), nil
	}
	if err != nil {
		return nil, err
	}
	if err := root.mayCreate(0); err != nil {
		root.close()
		return nil, err
	}
	return &Lock{dir: d, root: root}, nil
}

// DryRun reports whether nothing is to be written with this lock, rules included.
func (l *Lock) DryRun() bool { return l.dry }

// mayStage tells why a file of this size could not be staged beside those that
// have been.
func (l *Lock) mayStage(f *folder, size int) error { return f.mayCreate(l.planned + blocks(size)) }

// blocks is the space that a file takes.
func blocks(size int) int {
	const block = 4096
	return (size + block - 1) / block * block
}

// missing represents a directory that does not exist.
func missing(path string) *folder { return &folder{fd: -1, path: path} }

// mayCreate tells why a file of this size could not be created in a directory. For
// one that does not exist, the nearest above it that does has to be made use of.
func (f *folder) mayCreate(size int) error {
	if f.fd >= 0 {
		return mayCreateIn(f.fd, f.path, size)
	}
	for path := filepath.Dir(f.path); ; path = filepath.Dir(path) {
		fd, err := openParent(path)
		if errors.Is(err, os.ErrNotExist) && path != filepath.Dir(path) {
			continue
		}
		if err != nil {
			return failure("open directory", path, err)
		}
		return errors.Join(mayCreateIn(fd, path, size), unix.Close(fd))
	}
}

func mayCreateIn(fd int, path string, size int) error {
	const op = "write to directory"
	if err := unix.Faccessat(fd, ".", unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return failure(op, path, err)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return failure(op, path, err)
	}
	free := st.Bavail // what is kept for root is out of others' reach
	if os.Geteuid() == 0 {
		free = st.Bfree
	}
	// A file system that counts none has no limit, or no such thing as inodes.
	if st.Blocks > 0 && free*uint64(st.Bsize) < uint64(size) || st.Files > 0 && st.Ffree == 0 {
		return failure(op, path, unix.ENOSPC)
	}
	return nil
}
