// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The names of temporary files: no runtime loads a file whose name ends so, or runs a plugin whose
// name begins with a dot.
const (
	TempPrefix = ".ip-masq-"
	TempSuffix = ".tmp"
)

var (
	// ErrIrregular says that a file is a directory, a symlink, a FIFO, a socket or a device.
	ErrIrregular = errors.New("not a regular file")
	// ErrLocked says that another process holds a lock.
	ErrLocked = errors.New("another process holds the lock")
)

// Dir is an open directory.
type Dir struct {
	path string
	root *os.Root
	file *os.File // the directory itself, for what os.Root lacks
}

// Open opens a directory. The path may lead through symlinks.
func Open(path string) (*Dir, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, Error("open the directory", path, err)
	}
	return newDir(path, root)
}

func newDir(path string, root *os.Root) (*Dir, error) {
	file, err := root.Open(".")
	if err != nil {
		return nil, errors.Join(Error("open the directory", path, err), root.Close())
	}
	return &Dir{path: path, root: root, file: file}, nil
}

// OpenLocked opens and locks a directory, and removes the temporary files that killed processes
// left there.
func OpenLocked(ctx context.Context, path string, wait time.Duration) (*Dir, error) {
	d, err := Open(path)
	if err != nil {
		return nil, err
	}
	if err = Flock(ctx, d.file, wait); err != nil {
		err = Error("lock the directory", path, err)
	} else {
		err = d.removeTemps()
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// Flock locks a file by flock(2). It waits for another process until ctx ends, but for wait at most
// (0: not at all); the error is then ErrLocked. The lock ends with the last process that has the
// file open.
func Flock(ctx context.Context, file *os.File, wait time.Duration) error {
	const poll = 10 * time.Millisecond
	for deadline := time.Now().Add(wait); ; {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return err
		case !time.Now().Before(deadline):
			return fmt.Errorf("%w (waited %s); find it with lsof", ErrLocked, wait)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(poll):
		}
	}
}

// OpenDir opens a directory in the directory. A symlink is not followed.
func (d *Dir) OpenDir(name string) (*Dir, error) {
	const op = "open the directory"
	path := d.PathOf(name)
	before, err := d.root.Lstat(name)
	if err != nil {
		return nil, Error(op, path, err)
	}
	if !before.IsDir() {
		return nil, Error(op, path, unix.ENOTDIR)
	}
	root, err := d.root.OpenRoot(name)
	if err != nil {
		return nil, Error(op, path, err)
	}
	sub, err := newDir(path, root)
	if err != nil {
		return nil, err
	}
	if after, err := sub.Stat(); err != nil || !os.SameFile(before, after) {
		return nil, errors.Join(fmt.Errorf("%s %s: it was replaced meanwhile", op, policy.Printable(path)), err, sub.Close())
	}
	return sub, nil
}

// Path returns the path by which the directory was opened.
func (d *Dir) Path() string { return d.path }

// PathOf returns the path of a file in the directory, for messages and for other programs.
func (d *Dir) PathOf(name string) string { return filepath.Join(d.path, name) }

// Stat returns what the kernel says of the directory itself.
func (d *Dir) Stat() (fs.FileInfo, error) {
	info, err := d.file.Stat()
	return info, Error("look at", d.path, err)
}

// Lstat returns what the kernel says of a file.
func (d *Dir) Lstat(name string) (fs.FileInfo, error) {
	info, err := d.root.Lstat(name)
	return info, Error("look at", d.PathOf(name), err)
}

// Close closes the directory and ends its lock.
func (d *Dir) Close() error { return errors.Join(d.file.Close(), d.root.Close()) }

// Sync makes additions, renames and removals durable.
func (d *Dir) Sync() error { return Error("sync the directory", d.path, d.file.Sync()) }

// Names returns the sorted names of all files.
func (d *Dir) Names() ([]string, error) {
	list, err := d.root.Open(".")
	if err != nil {
		return nil, Error("read the directory", d.path, err)
	}
	names, err := list.Readdirnames(-1)
	if err = errors.Join(err, list.Close()); err != nil {
		return nil, Error("read the directory", d.path, err)
	}
	slices.Sort(names)
	return names, nil
}

// OpenFile opens a regular file, and neither follows a symlink nor waits for the writer of a FIFO.
// The flags are those of os.OpenFile; a new file has mode 0600, whatever the umask.
func (d *Dir) OpenFile(name string, flags int) (*os.File, fs.FileInfo, error) {
	const mode = 0o600
	file, err := d.root.OpenFile(name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY, mode)
	if err == nil && flags&os.O_EXCL != 0 {
		err = file.Chmod(mode)
	}
	info, err := regular(file, err)
	if err == nil {
		var named fs.FileInfo
		// os.Root follows symlinks that lead to another file in the directory.
		if named, err = d.root.Lstat(name); err == nil && named.Mode()&fs.ModeSymlink != 0 {
			err = ErrIrregular
		}
	}
	if err != nil {
		if file != nil {
			err = errors.Join(err, file.Close())
		}
		return nil, nil, Error("open", d.PathOf(name), err)
	}
	return file, info, nil
}

// ReadFile reads a regular file of the directory, as the function ReadFile does. A symlink is not
// followed.
func (d *Dir) ReadFile(name string, limit int) ([]byte, fs.FileInfo, error) {
	file, info, err := d.OpenFile(name, os.O_RDONLY)
	if err != nil {
		return nil, nil, err
	}
	return readAll(file, info, d.PathOf(name), limit)
}

// ReadFile reads the whole of a regular file of at most limit bytes. It follows symlinks, and does
// not wait for the writer of a FIFO.
func ReadFile(path string, limit int) ([]byte, fs.FileInfo, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	info, err := regular(file, err)
	switch {
	case err != nil && file != nil:
		return nil, nil, errors.Join(Error("read", path, err), file.Close())
	case errors.Is(err, ErrIrregular):
		return nil, nil, Error("read", path, err)
	case err != nil:
		return nil, nil, Error("open", path, err)
	}
	return readAll(file, info, path, limit)
}

// regular returns what the kernel says of an open file, or ErrIrregular.
func regular(file *os.File, err error) (fs.FileInfo, error) {
	if errors.Is(err, unix.ENXIO) { // a socket
		return nil, ErrIrregular
	}
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = ErrIrregular
	}
	return info, err
}

func readAll(file *os.File, info fs.FileInfo, path string, limit int) ([]byte, fs.FileInfo, error) {
	defer func() { _ = file.Close() }() // nothing was written
	var data bytes.Buffer
	data.Grow(int(min(info.Size(), int64(limit))) + bytes.MinRead)
	_, err := data.ReadFrom(io.LimitReader(file, int64(limit)+1))
	switch {
	case err != nil:
		return nil, nil, Error("read", path, err)
	case data.Len() > limit:
		return nil, nil, fmt.Errorf("read %s: larger than %d KiB", policy.Printable(path), limit>>10)
	}
	return data.Bytes(), info, nil
}

// IsTemp reports whether a name is one that Stage chooses.
func IsTemp(name string) bool {
	random, isOne := strings.CutPrefix(name, TempPrefix)
	random, ends := strings.CutSuffix(random, TempSuffix)
	if !isOne || !ends {
		return false
	}
	_, err := strconv.ParseUint(random, 36, 64)
	return err == nil
}

func (d *Dir) removeTemps() error {
	names, err := d.Names()
	errs := []error{err}
	for _, name := range names {
		if info, err := d.root.Lstat(name); IsTemp(name) && err == nil && info.Mode().IsRegular() {
			errs = append(errs, d.Remove(name))
		}
	}
	return errors.Join(errs...)
}

// Stage writes and syncs a temporary file, and returns its name. The file has mode 0600 and belongs
// to this process's user, unless adjust, which may be nil, changes that. A runtime that watches the
// directory looks again at each write, so the data is written at once, after adjust.
func (d *Dir) Stage(data []byte, adjust func(*os.File) error) (string, error) {
	name := TempPrefix + strconv.FormatUint(rand.Uint64(), 36) + TempSuffix
	file, _, err := d.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL)
	if err != nil {
		return "", err
	}
	if adjust != nil {
		err = adjust(file)
	}
	if err == nil {
		_, err = file.Write(data)
	}
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(Error("write", d.PathOf(name), err), d.Remove(name))
	}
	return name, nil
}

// Rename renames a file, and replaces one that has the new name.
func (d *Dir) Rename(from, to string) error {
	return Error("rename a file to", d.PathOf(to), d.root.Rename(from, to))
}

// Exchange exchanges two files. Some file systems, such as NFS, cannot (errors.ErrUnsupported).
func (d *Dir) Exchange(a, b string) error {
	fd := int(d.file.Fd())
	err := unix.Renameat2(fd, a, fd, b, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.EINVAL) {
		err = errors.ErrUnsupported
	}
	return Error("exchange files at", d.PathOf(b), err)
}

// Link gives a file a second name, which must be free (fs.ErrExist).
func (d *Dir) Link(from, to string) error {
	return Error("link a file to", d.PathOf(to), d.root.Link(from, to))
}

// Remove removes a file or an empty directory. It is no error if there is none.
func (d *Dir) Remove(name string) error {
	if err := d.root.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		return Error("remove", d.PathOf(name), err)
	}
	return nil
}

// Error returns an error of the os package as "operation path: cause", where the path is quoted if
// need be; nil stays nil.
func Error(op, path string, err error) error {
	if err == nil {
		return nil
	}
	var pathErr *fs.PathError
	var linkErr *os.LinkError
	switch {
	case errors.As(err, &pathErr):
		err = pathErr.Err
	case errors.As(err, &linkErr):
		err = linkErr.Err
	}
	return fmt.Errorf("%s %s: %w", op, policy.Printable(path), err)
}
