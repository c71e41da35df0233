// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

const (
	dirMode    = 0o700
	parentMode = 0o755
	fileMode   = 0o600
)

// maxDocument is the largest size of a document in bytes. A million prefixes, the most that cidrLimit
// allows, take a fifth of it.
const maxDocument = 256 << 20

var (
	// ErrRefused reports that a directory or file cannot be trusted: it is a symlink, belongs to another
	// user, is writable by others, or has the wrong type.
	ErrRefused = errors.New("refused")
	// ErrBusy reports that another process held the lock for too long.
	ErrBusy = errors.New("another process holds it")
	// ErrNewer reports that a newer version wrote a document or rules, which stay as they are.
	ErrNewer = errors.New("written by a newer version of ip-masq")
)

// folder is an open directory of the dataDir that passed the checks of distrust. All operations use
// its descriptor and base names, so that renaming a directory above does not redirect them. Files are
// opened by openat(2): os.Root and os.Open would start the runtime's poller in each ADD.
type folder struct {
	file   *os.File
	below  string // its path below the dataDir, "" of that itself
	marked bool   // it is a dataDir with a marker
}

// openFolder opens a directory in another one, or with AT_FDCWD by its path.
func openFolder(at int, name, path string) (*folder, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY
	file, _, err := openTrusted("open directory", at, name, path, flags, unix.S_IFDIR)
	if err != nil {
		return nil, err
	}
	return &folder{file: file}, nil
}

// openTrusted opens a file of the given format that only root or the user of this process can write. A
// file is checked before it is opened too, so that no device is. Opening a directory has no effect.
func openTrusted(
	op string, at int, name, path string, flags int, format uint32,
) (*os.File, unix.Stat_t, error) {
	isDir := format == unix.S_IFDIR
	if !isDir {
		if err := distrustName(op, at, name, path, format); err != nil {
			return nil, unix.Stat_t{}, err
		}
		flags |= unix.O_NONBLOCK // or opening a FIFO that replaced the file would wait
	}
	fd, err := unix.Openat(at, name, flags|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil { // of the name, which explains a symlink
		return nil, unix.Stat_t{}, cmp.Or(distrustName(op, at, name, path, format), failure(op, path, err))
	}
	if !isDir {
		// Or os.NewFile would start the poller.
		_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFL, flags&^unix.O_NONBLOCK)
	}
	file := os.NewFile(uintptr(fd), path)
	var st unix.Stat_t
	err = failure(op, path, unix.Fstat(fd, &st))
	if err == nil {
		err = distrust(op, path, &st, format)
	}
	if err != nil {
		return nil, st, errors.Join(err, file.Close())
	}
	return file, st, nil
}

// distrustName is distrust for a name in an open directory.
func distrustName(op string, at int, name, path string, format uint32) error {
	var st unix.Stat_t
	if err := unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failure(op, path, err)
	}
	return distrust(op, path, &st, format)
}

func makeDirectory(at int, name, path string) error {
	return failure("create directory", path, ignoring(unix.Mkdirat(at, name, dirMode), unix.EEXIST))
}

func (f *folder) fd() int { return int(f.file.Fd()) }

func (f *folder) path() string { return f.file.Name() }

func (f *folder) close() { _ = f.file.Close() } // nothing was written through it

// in returns the path of a name in the directory, for messages.
func (f *folder) in(name string) string { return f.path() + "/" + name }

// folder opens a directory in this one. With create, it creates a missing one.
func (f *folder) folder(name string, create bool) (*folder, error) {
	sub, err := openFolder(f.fd(), name, f.in(name))
	if create && errors.Is(err, os.ErrNotExist) {
		if err := makeDirectory(f.fd(), name, f.in(name)); err != nil {
			return nil, err
		}
		sub, err = openFolder(f.fd(), name, f.in(name))
	}
	if err != nil {
		return nil, err
	}
	sub.below = strings.TrimPrefix(f.below+"/"+name, "/")
	return sub, nil
}

// within runs a function on a directory in this one, unless that is missing or removed meanwhile.
func (f *folder) within(name string, do func(*folder) error) error {
	sub, err := f.folder(name, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer sub.close()
	return ignoring(do(sub), os.ErrNotExist)
}

// changed returns when a name was last added, removed or renamed.
func (f *folder) changed() (time.Time, error) {
	var st unix.Stat_t
	err := unix.Fstat(f.fd(), &st)
	return time.Unix(st.Mtim.Unix()), failure("stat directory", f.path(), err)
}

// names returns the sorted names in the directory.
func (f *folder) names() ([]string, error) {
	_, err := f.file.Seek(0, io.SeekStart)
	var names []string
	if err == nil {
		names, err = f.file.Readdirnames(-1)
	}
	slices.Sort(names)
	// A file that is renamed meanwhile can be listed twice.
	return slices.Compact(names), failure("list directory", f.path(), err)
}

// sync makes additions, removals and renames in the directory durable.
func (f *folder) sync() error { return failure("sync directory", f.path(), f.file.Sync()) }

// syncParent makes the directory itself durable.
func (f *folder) syncParent() error {
	parent := filepath.Dir(f.path())
	fd, err := unix.Open(parent, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Fsync(fd), unix.Close(fd))
	}
	return failure("sync directory", parent, err)
}

func (f *folder) open(op, name string, flags int) (*os.File, unix.Stat_t, error) {
	return openTrusted(op, f.fd(), name, f.in(name), flags, unix.S_IFREG)
}

func (f *folder) openOrCreate(op, name string, flags int) (*os.File, error) {
	file, _, err := f.open(op, name, flags)
	if !errors.Is(err, os.ErrNotExist) {
		return file, err
	}
	file, err = f.create(op, name, name)
	if !errors.Is(err, os.ErrExist) {
		return file, err
	}
	file, _, err = f.open(op, name, flags)
	return file, err
}

// create creates a file that is or becomes the final one, which errors name.
func (f *folder) create(op, name, final string) (*os.File, error) {
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(f.fd(), name, flags, fileMode)
	if err != nil {
		return nil, failure(op, f.in(final), err)
	}
	return os.NewFile(uintptr(fd), f.in(name)), nil
}

// read returns the contents of a document. ip-masq never writes documents in place; if another program
// does, the document is torn, which the decoder detects.
func (f *folder) read(name string) ([]byte, error) {
	file, st, err := f.open(readDocument, name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }() // nothing was written
	if st.Size > maxDocument {
		return nil, fmt.Errorf("%s %s: it has %d bytes, more than the limit of %d; remove it",
			readDocument, shown(f.in(name)), st.Size, maxDocument)
	}
	buf := make([]byte, st.Size)
	n, err := io.ReadFull(file, buf)
	return buf[:n], failure(readDocument, f.in(name), ignoring(err, io.EOF, io.ErrUnexpectedEOF))
}

// start returns the first bytes of a document, which have its schema.
func (f *folder) start(name string) ([]byte, error) {
	file, _, err := f.open(readDocument, name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	start := make([]byte, 64)
	n, err := io.ReadFull(file, start)
	return start[:n], ignoring(err, io.EOF, io.ErrUnexpectedEOF)
}

// overwrite makes data the content of a file, in place, and closes it. A reader, which takes no lock, may
// come between the two steps, and a killed process ends there. So the first one writes newlines where a
// longer content goes on, which the readers of such files ignore: without them the end of the old content
// would be read as part of the new one. To empty the file first would be worse: it would be lost for a
// moment, and ext4 would write to the disk as the file is closed.
func overwrite(file *os.File, data []byte) error {
	var before unix.Stat_t
	err := unix.Fstat(int(file.Fd()), &before)
	surplus := int(before.Size) - len(data)
	if err == nil {
		padding := bytes.Repeat([]byte("\n"), max(surplus, 0))
		_, err = file.Write(slices.Concat(data, padding))
	}
	if err == nil && surplus > 0 {
		err = file.Truncate(int64(len(data)))
	}
	return errors.Join(err, file.Close())
}

// fillUnsynced writes a new file, and closes it; see safefile.Fill.
func fillUnsynced(file *os.File, data []byte) error {
	_, err := file.Write(data)
	return errors.Join(err, file.Close())
}

func (f *folder) replace(op, from, to string) error {
	return failure(op, f.in(to), unix.Renameat(f.fd(), from, f.fd(), to))
}

func (f *folder) copyTime(from, to string) {
	var st unix.Stat_t
	if unix.Fstatat(f.fd(), from, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
		_ = unix.UtimesNanoAt(f.fd(), to, []unix.Timespec{st.Mtim, st.Mtim}, unix.AT_SYMLINK_NOFOLLOW)
	}
}

// remove removes a file. It is no error if there is none, also on a read-only file system.
func (f *folder) remove(name string) error {
	err := unix.Unlinkat(f.fd(), name, 0)
	if err != nil && !f.has(name) {
		return nil
	}
	return failure("remove", f.in(name), err)
}

// failure wraps an error with the operation, its path and a remedy; nil stays nil.
func failure(op, path string, err error) error {
	if errno, is := errors.AsType[unix.Errno](err); is {
		return fmt.Errorf("%w%s", safefile.Error(op, path, err), remedyOf(errno))
	}
	return safefile.Error(op, path, err)
}

// remedyOf returns what to do about an error, to append to its message, or "".
func remedyOf(errno unix.Errno) string {
	switch errno {
	case unix.ENOSPC, unix.EDQUOT:
		return "; free space or inodes on its file system"
	case unix.EROFS:
		return "; mount its file system writable, or set another dataDir"
	case unix.EACCES, unix.EPERM:
		if errno == unix.EACCES && os.Geteuid() == 0 {
			return "" // safefile.Error names the causes
		}
		return "; run as its owner, and see its mode and attributes (lsattr)"
	}
	return ""
}

// distrust returns ErrRefused with the cause and a remedy, unless the file has the format and only
// root or the user of this process owns it and can write it.
func distrust(op, path string, st *unix.Stat_t, format uint32) error {
	var problem, remedy string
	kind := st.Mode & unix.S_IFMT
	switch {
	case kind == unix.S_IFLNK:
		problem, remedy = "it is a symbolic link", "replace it with its target, or name the target"
	case kind != format && format == unix.S_IFDIR:
		problem, remedy = "it is not a directory", "move it away"
	case kind != format:
		problem, remedy = "it is not a regular file", "move it away"
	case st.Uid != 0 && int64(st.Uid) != int64(os.Geteuid()):
		self := os.Geteuid()
		problem = fmt.Sprintf("it belongs to user %d, and this process runs as user %d", st.Uid, self)
		remedy = fmt.Sprintf("check its contents, then chown it to %d or move it away", self)
	case st.Mode&0o022 != 0:
		problem = fmt.Sprintf("users other than its owner can write it (mode %04o)", st.Mode&0o7777)
		remedy = "check its contents, then chmod go-w it"
	default:
		return nil
	}
	return fmt.Errorf("%s %s: %w: %s; %s", op, shown(path), ErrRefused, problem, remedy)
}

func shown(path string) string { return policy.Printable(path) }

// ignoring returns nil for the expected errors, and any other error as it is.
func ignoring(err error, expected ...error) error {
	for _, e := range expected {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
