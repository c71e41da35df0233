// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Modes, whatever the umask.
const (
	dirMode    = 0o700
	parentMode = 0o755
	fileMode   = 0o600
)

// folder is an open directory of the state that was found trustworthy. All that
// happens in it goes by its descriptor and by bare names, so that nobody who
// renames a directory above can lead it elsewhere.
type folder struct {
	fd     int
	path   string // for messages
	marked bool   // it is a dataDir that has its marker
}

// openFolder opens a directory below another, or by its path with AT_FDCWD.
func openFolder(at int, name, path string) (*folder, error) {
	const op = "open directory"
	fd, err := openDirectory(at, name)
	if err != nil {
		return nil, whyNot(op, at, name, path, unix.S_IFDIR, err)
	}
	f := &folder{fd: fd, path: path}
	st, err := f.stat()
	if err == nil {
		err = distrust(op, path, &st, unix.S_IFDIR)
	}
	if err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

func openDirectory(at int, name string) (fd int, err error) {
	return uninterrupted(func() (int, error) {
		return unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	})
}

// makeFolder creates a directory, unless somebody just did, and opens it.
func makeFolder(at int, name, path string) (*folder, error) {
	if err := makeDirectory(at, name, path, dirMode); err != nil {
		return nil, err
	}
	return openFolder(at, name, path)
}

func makeDirectory(at int, name, path string, mode uint32) error {
	err := unix.Mkdirat(at, name, mode)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err == nil {
		err = setMode(at, name, mode)
	}
	if err != nil {
		return failure("create directory", path, err)
	}
	return nil
}

// setMode puts back the bits that the umask took from a new directory.
func setMode(at int, name string, mode uint32) error {
	fd, err := openDirectory(at, name)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fchmod(fd, mode), unix.Close(fd))
}

// makeParents creates the directories above the dataDir that are missing, with
// the mode of system directories.
func makeParents(path string) error {
	err := makeDirectory(unix.AT_FDCWD, path, path, parentMode)
	if !errors.Is(err, os.ErrNotExist) || path == filepath.Dir(path) {
		return err
	}
	if err := makeParents(filepath.Dir(path)); err != nil {
		return err
	}
	return makeDirectory(unix.AT_FDCWD, path, path, parentMode)
}

// whyNot explains an open that failed: it is a refusal where what lies there is
// not to be trusted, whatever the kernel made of it.
func whyNot(op string, at int, name, path string, format uint32, err error) error {
	var st unix.Stat_t
	if errors.Is(err, unix.ENOENT) || unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return failure(op, path, err)
	}
	if refused := distrust(op, path, &st, format); refused != nil {
		return refused
	}
	return failure(op, path, err)
}

func (f *folder) close() { _ = unix.Close(f.fd) } // nothing was written through it

// in returns the path of a name in the directory, for messages.
func (f *folder) in(name string) string { return f.path + "/" + name }

// folder opens a directory in this one, and with create makes it first where it
// is missing.
func (f *folder) folder(name string, create bool) (*folder, error) {
	sub, err := openFolder(f.fd, name, f.in(name))
	if create && errors.Is(err, os.ErrNotExist) {
		return makeFolder(f.fd, name, f.in(name))
	}
	return sub, err
}

func (f *folder) stat() (unix.Stat_t, error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return st, failure("look at directory", f.path, err)
	}
	return st, nil
}

// changed returns when something was last added, removed or renamed.
func (f *folder) changed() (time.Time, error) {
	st, err := f.stat()
	return time.Unix(st.Mtim.Unix()), err
}

// names returns what the directory holds, sorted, and never nil.
func (f *folder) names() ([]string, error) {
	names := []string{}
	err := f.each(func(name string) error {
		names = append(names, name)
		return nil
	})
	slices.Sort(names)
	return slices.Compact(names), err // what is renamed meanwhile can come twice
}

// each calls visit with the name of each entry of the directory, until it fails.
func (f *folder) each(visit func(name string) error) error {
	if _, err := unix.Seek(f.fd, 0, io.SeekStart); err != nil {
		return failure("list directory", f.path, err)
	}
	buf := make([]byte, 8<<10)
	for {
		n, err := uninterrupted(func() (int, error) { return unix.ReadDirent(f.fd, buf) })
		if err != nil {
			return failure("list directory", f.path, err)
		}
		if n == 0 {
			return nil
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			if err := visit(name); err != nil {
				return err
			}
		}
	}
}

// sync makes durable what was added, removed or renamed in the directory.
func (f *folder) sync() error {
	if _, err := uninterrupted(func() (int, error) { return 0, unix.Fsync(f.fd) }); err != nil {
		return failure("sync directory", f.path, err)
	}
	return nil
}

// syncParent makes the directory's own entry durable.
func (f *folder) syncParent() error {
	parent := filepath.Dir(f.path)
	fd, err := openParent(parent)
	if err != nil {
		return failure("sync directory", parent, err)
	}
	up := &folder{fd: fd, path: parent}
	defer up.close()
	return up.sync()
}

// openParent opens a directory above the dataDir. Those may be symlinks, and
// whose they are is the administrators' affair.
func openParent(path string) (int, error) {
	return uninterrupted(func() (int, error) {
		return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
}
