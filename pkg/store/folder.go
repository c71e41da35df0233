// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Modes, whatever the umask.
const (
	dirMode    = 0o700
	parentMode = 0o755
	fileMode   = 0o600
)

// maxDocument is the most bytes that a document may have. A million prefixes, the most that cidrLimit
// allows, take a fifth of it.
const maxDocument = 256 << 20

var (
	// ErrRefused says that a directory or file cannot be trusted: it is a symlink, belongs to another
	// user, is writable by others, or has the wrong type.
	ErrRefused = errors.New("refused")
	// ErrBusy says that another process held the lock for too long.
	ErrBusy = errors.New("another process holds it")
	// ErrNewer says that a newer version wrote a document, which stays as it is.
	ErrNewer = errors.New("a newer version wrote it")
	// ErrReleased says that a lock was used after its release.
	ErrReleased = errors.New("the lock is released")
)

// folder is an open directory of the dataDir that passed the checks of distrust. All operations use
// its descriptor and base names, so that renaming a directory above does not redirect them. It uses
// descriptors rather than os.Root: an os.File would start the runtime's poller in each ADD.
type folder struct {
	fd     int
	path   string // for messages
	marked bool   // it is a dataDir with a marker
}

// openFolder opens a directory in another one, or with AT_FDCWD by its path.
func openFolder(at int, name, path string) (*folder, error) {
	const op = "open directory"
	fd, err := openDirectory(at, name)
	if err != nil {
		return nil, openError(op, at, name, path, unix.S_IFDIR, err)
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

// openParent opens a directory above the dataDir. It may be a symlink and belong to any user.
func openParent(path string) (int, error) {
	return uninterrupted(func() (int, error) {
		return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
}

// makeDirectory creates a directory unless it exists.
func makeDirectory(at int, name, path string, mode uint32) error {
	err := unix.Mkdirat(at, name, mode)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	if err == nil { // the umask may have cleared bits
		var fd int
		if fd, err = openDirectory(at, name); err == nil {
			err = errors.Join(unix.Fchmod(fd, mode), unix.Close(fd))
		}
	}
	if err != nil {
		return failure("create directory", path, err)
	}
	return nil
}

// makeParents creates the directories above the dataDir that are missing, with the mode of system
// directories.
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

func (f *folder) close() { _ = unix.Close(f.fd) } // nothing was written through it

// in returns the path of a name in the directory, for messages.
func (f *folder) in(name string) string { return f.path + "/" + name }

// folder opens a directory in this one. With create, it creates a missing one.
func (f *folder) folder(name string, create bool) (*folder, error) {
	sub, err := openFolder(f.fd, name, f.in(name))
	if create && errors.Is(err, os.ErrNotExist) {
		if err := makeDirectory(f.fd, name, f.in(name), dirMode); err != nil {
			return nil, err
		}
		return openFolder(f.fd, name, f.in(name))
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

// changed returns when a name was last added, removed or renamed.
func (f *folder) changed() (time.Time, error) {
	st, err := f.stat()
	return time.Unix(st.Mtim.Unix()), err
}

// names returns the sorted names in the directory, never nil.
func (f *folder) names() ([]string, error) {
	names := []string{}
	err := f.each(func(name string) error {
		names = append(names, name)
		return nil
	})
	slices.Sort(names)
	return slices.Compact(names), err // a file that is renamed meanwhile can be listed twice
}

// each calls visit with each name in the directory, until it fails.
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

// sync makes additions, removals and renames in the directory durable.
func (f *folder) sync() error {
	if _, err := uninterrupted(func() (int, error) { return 0, unix.Fsync(f.fd) }); err != nil {
		return failure("sync directory", f.path, err)
	}
	return nil
}

// syncParent makes the directory itself durable.
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

// open opens a regular file. It does not wait at a FIFO or a device.
func (f *folder) open(op, name string, flags int) (int, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := uninterrupted(func() (int, error) {
		return unix.Openat(f.fd, name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, fileMode)
	})
	if err != nil {
		return -1, st, openError(op, f.fd, name, f.in(name), unix.S_IFREG, err)
	}
	if err = unix.Fstat(fd, &st); err != nil {
		err = failure(op, f.in(name), err)
	} else {
		err = distrust(op, f.in(name), &st, unix.S_IFREG)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, st, err
	}
	return fd, st, nil
}

// openOrCreate opens a regular file, and creates it first if it is missing.
func (f *folder) openOrCreate(op, name string, flags int) (int, error) {
	fd, _, err := f.open(op, name, flags)
	if errors.Is(err, os.ErrNotExist) {
		if fd, err = f.create(op, name); errors.Is(err, os.ErrExist) {
			fd, _, err = f.open(op, name, flags)
		}
	}
	return fd, err
}

// create creates a file, open for reading and writing.
func (f *folder) create(op, name string) (int, error) { return f.createFor(op, name, name) }

// createFor creates a file that is to become another one, which errors name.
func (f *folder) createFor(op, name, shown string) (int, error) {
	fd, err := uninterrupted(func() (int, error) {
		return unix.Openat(f.fd, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, fileMode)
	})
	if err != nil {
		return -1, failure(op, f.in(shown), err)
	}
	if err := unix.Fchmod(fd, fileMode); err != nil { // the umask may have cleared bits
		return -1, errors.Join(failure(op, f.in(shown), err), unix.Close(fd), f.remove(name))
	}
	return fd, nil
}

const readDocument = "read document"

// read returns the contents of a document.
func (f *folder) read(name string) ([]byte, error) {
	fd, st, err := f.open(readDocument, name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	if st.Size > maxDocument {
		return nil, fmt.Errorf("%s %s: it has %d bytes, and at most %d are possible; remove it",
			readDocument, shown(f.in(name)), st.Size, maxDocument)
	}
	data, err := readAll(fd, st.Size)
	if err != nil {
		return nil, failure(readDocument, f.in(name), err)
	}
	return data, nil
}

// readAll reads a file of the given size. ip-masq never writes documents in place; if another program
// does, the document is torn, which the decoder finds.
func readAll(fd int, size int64) ([]byte, error) {
	buf := make([]byte, size)
	for have := 0; have < len(buf); {
		n, err := uninterrupted(func() (int, error) { return unix.Read(fd, buf[have:]) })
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return buf[:have], nil
		}
		have += n
	}
	return buf, nil
}

// replace renames a file over another.
func (f *folder) replace(op, from, to string) error {
	if err := unix.Renameat(f.fd, from, f.fd, to); err != nil {
		return failure(op, f.in(to), err)
	}
	return nil
}

// remove removes a file. It is no error if there is none, also on a read-only file system.
func (f *folder) remove(name string) error {
	err := unix.Unlinkat(f.fd, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	var st unix.Stat_t
	if errors.Is(unix.Fstatat(f.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW), unix.ENOENT) {
		return nil
	}
	return failure("remove", f.in(name), err)
}

// failure wraps an error with the operation, its path and a remedy.
func failure(op, path string, err error) error {
	var remedy string
	var errno unix.Errno
	if errors.As(err, &errno) {
		switch errno {
		case unix.ENOSPC, unix.EDQUOT:
			remedy = "; free space or inodes on its file system"
		case unix.EROFS:
			remedy = "; mount its file system writable, or set another dataDir"
		case unix.EACCES, unix.EPERM:
			remedy = "; run as its owner, and see its mode and attributes (lsattr)"
		case unix.EMFILE, unix.ENFILE:
			remedy = "; raise the limit on open files"
		case unix.EIO:
			remedy = "; check the disk"
		case unix.ENOLCK, unix.EOPNOTSUPP:
			remedy = "; set a dataDir on a local file system"
		}
	}
	return fmt.Errorf("%s %s: %w%s", op, shown(path), err, remedy)
}

// openError returns the error of a failed open: a refusal if the file itself is not trusted, whatever
// the kernel's error is.
func openError(op string, at int, name, path string, format uint32, err error) error {
	var st unix.Stat_t
	if !errors.Is(err, unix.ENOENT) && unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
		if refused := distrust(op, path, &st, format); refused != nil {
			return refused
		}
	}
	return failure(op, path, err)
}

// distrust returns ErrRefused with the cause and a remedy, unless the file has the format and only
// root or the user of this process owns it and can write it.
func distrust(op, path string, st *unix.Stat_t, format uint32) error {
	var problem, remedy string
	self := os.Geteuid()
	switch kind := st.Mode & unix.S_IFMT; {
	case kind == unix.S_IFLNK:
		problem, remedy = "it is a symbolic link", "put what it points to in its place, or name that"
	case kind != format && format == unix.S_IFDIR:
		problem, remedy = "it is not a directory", "move it away"
	case kind != format:
		problem, remedy = "it is not a regular file", "move it away"
	case st.Uid != 0 && int64(st.Uid) != int64(self):
		problem = fmt.Sprintf("it belongs to user %d, and this process runs as user %d", st.Uid, self)
		remedy = fmt.Sprintf("look who wrote it, then chown it to %d or move it away", self)
	case st.Mode&0o022 != 0:
		problem = fmt.Sprintf("users other than its owner can write it (mode %04o)", st.Mode&0o7777)
		remedy = "look who did, then chmod go-w it"
	default:
		return nil
	}
	return fmt.Errorf("%s %s: %w: %s; %s", op, shown(path), ErrRefused, problem, remedy)
}

// shown writes a path into a message.
func shown(path string) string { return policy.Printable(path) }

// bounded keeps an error short that repeats parts of a document.
func bounded(err error) error {
	const limit = 512
	if text := err.Error(); len(text) > limit {
		return errors.New(policy.Quote(text))
	}
	return err
}

// uninterrupted repeats a system call that a signal interrupts, as network and FUSE file systems allow.
func uninterrupted(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

// ignoring returns nil for the expected errors, and any other error as it is.
func ignoring(err error, expected ...error) error {
	if slices.ContainsFunc(expected, func(e error) bool { return errors.Is(err, e) }) {
		return nil
	}
	return err
}
