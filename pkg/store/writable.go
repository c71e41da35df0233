// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Writable tells why a document could not be written now, or nil. It only reads
// (access(2), statfs(2)): what a disk quota would say is not among it.
func (d *Dir) Writable() error {
	root, err := d.dataDir()
	if errors.Is(err, os.ErrNotExist) {
		return d.creatable()
	}
	if err != nil {
		return err
	}
	defer root.close()
	if err := mayCreateIn(root.fd, root.path); err != nil {
		return err
	}
	fd, _, err := root.open(lockOp, lockFile, unix.O_RDONLY)
	if err == nil {
		_ = unix.Close(fd)
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	sources, err := root.folder(sourcesDir, false)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer sources.close()
	return mayCreateIn(sources.fd, sources.path)
}

// creatable tells why the dataDir, which is missing, could not be made.
func (d *Dir) creatable() error {
	for path := filepath.Dir(d.path); ; path = filepath.Dir(path) {
		fd, err := openParent(path)
		if errors.Is(err, os.ErrNotExist) && path != filepath.Dir(path) {
			continue
		}
		if err != nil {
			return failure("open directory", path, err)
		}
		return errors.Join(mayCreateIn(fd, path), unix.Close(fd))
	}
}

// mayCreateIn tells why a file could not be created in a directory.
func mayCreateIn(fd int, path string) error {
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
	if st.Blocks > 0 && free == 0 || st.Files > 0 && st.Ffree == 0 {
		return failure(op, path, unix.ENOSPC)
	}
	return nil
}
