// SPDX-License-Identifier: Apache-2.0

package system

import (
	"io/fs"

	"golang.org/x/sys/unix"
)

// Root is an open directory.
type Root struct {
	dir  *inode
	path string
}

func OpenRoot(path string) (*Root, error) {
	f, err := OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	return &Root{f.node, path}, f.Close()
}

func (r *Root) Close() error                    { return nil }
func (r *Root) Open(name string) (*File, error) { return r.OpenFile(name, unix.O_RDONLY, 0) }

func (r *Root) OpenFile(name string, flags int, mode fs.FileMode) (*File, error) {
	f, err := machine.open(r.dir, name, flags, uint32(mode.Perm()))
	return f, pathError("openat", name, err)
}

func (r *Root) Lstat(name string) (fs.FileInfo, error) {
	i := info{name: name}
	if err := machine.stat(r.dir, name, &i.st); err != nil {
		return nil, pathError("lstatat", name, err)
	}
	return i, nil
}

func (r *Root) Rename(from, to string) error {
	return pathError("renameat", from, machine.rename(r.dir, from, r.dir, to, 0))
}

func (r *Root) Remove(name string) error {
	return pathError("unlinkat", name, machine.unlink(r.dir, name, false))
}

func (r *Root) FS() fs.FS { return rootFS{r} }

type rootFS struct{ r *Root }

// Open implements fs.FS, which fs.ReadDirFS embeds.
func (r rootFS) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
}

// ReadDir implements fs.ReadDirFS.
func (r rootFS) ReadDir(string) ([]fs.DirEntry, error) { return ReadDir(r.r.path) }
