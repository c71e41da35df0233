// SPDX-License-Identifier: Apache-2.0

package safefile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// The names of temporary files, which no runtime loads because of the end, or runs because of the dot.
const (
	TempPrefix = ".ip-masq-"
	TempSuffix = ".tmp"
)

// lockName is the file by which a process locks a directory that other users can open, and so lock, too.
const lockName = ".ip-masq.lock"

// ErrIrregular reports a directory, a FIFO, a socket, a device, or a symlink to nothing.
var ErrIrregular = errors.New("not a regular file")

var errDangling = fmt.Errorf("%w: it is a symlink to what is not there; "+
	"in a container, mount the directory it points to as well", ErrIrregular)

// Dir is an open directory that is locked.
type Dir struct {
	path string
	root *os.Root
	file *os.File // the directory itself, for operations that os.Root lacks
	lock *os.File
	// unlocked is why no lock file can be created: no other file can be now, either. Another process may have
	// the lock once there is room again, so this one changes nothing in the directory.
	unlocked error
}

// OpenLocked opens and locks a directory until Close or the end of the process, and removes temporary files
// of killed processes. It waits for the lock until ctx ends, but for wait at most. The lock is that of a
// file in the directory, which exists only while a process writes there: every user can lock a directory
// that he can open. A directory on a full or read-only file system can be opened, to find that nothing has
// to be changed.
func OpenLocked(ctx context.Context, path string, wait time.Duration) (*Dir, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, Error("open the directory", path, err)
	}
	d := &Dir{path: path, root: root}
	if err := d.lockAndClean(ctx, wait); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (d *Dir) lockAndClean(ctx context.Context, wait time.Duration) error {
	const op = "lock the directory"
	file, err := d.root.Open(".")
	if err != nil {
		return Error(op, d.path, err)
	}
	d.file = file
	ctx, cancel := context.WithTimeoutCause(ctx, wait,
		fmt.Errorf("another process holds the lock (waited %s); find it with lsof", wait))
	defer cancel()
	err = d.takeLock(ctx)
	if errors.Is(err, unix.EROFS) || errors.Is(err, unix.ENOSPC) {
		d.unlocked = err
		return nil
	}
	if err != nil {
		return Error(op, d.path, err)
	}
	return d.removeTemps()
}

// takeLock locks the directory. Close removes the file, so another process may have done that before this one
// has the lock.
func (d *Dir) takeLock(ctx context.Context) error {
	info, err := d.file.Stat()
	isPrivate := err == nil && info.Mode()&0o077 == 0
	if isPrivate {
		return Flock(ctx, d.file)
	}
	for {
		file, err := d.root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		err = Flock(ctx, file)
		if err == nil && d.isLockFile(file) {
			d.lock = file
			return nil
		}
		_ = file.Close() // nothing was written
		if err != nil {
			return err
		}
	}
}

// isLockFile reports whether an open file is the one that other processes would lock.
func (d *Dir) isLockFile(file *os.File) bool {
	open, err := file.Stat()
	if err != nil {
		return false
	}
	found, err := d.root.Lstat(lockName)
	return err == nil && os.SameFile(open, found)
}

// Flock polls for the lock of an open file, or of an open namespace, until ctx ends. The error is then the
// cause of ctx.
func Flock(ctx context.Context, file interface{ Fd() uintptr }) error {
	const first, longest = time.Millisecond, 20 * time.Millisecond
	for pause := first; ; pause = min(2*pause, longest) {
		err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		// Both may be ready, and the timer of ctx a moment later: a simulated node has to do the same again.
		deadline, hasDeadline := ctx.Deadline()
		if hasDeadline && !time.Now().Before(deadline) {
			<-ctx.Done()
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

// PathOf returns the path of a file in the directory, for messages and for other programs.
func (d *Dir) PathOf(name string) string { return filepath.Join(d.path, name) }

// Lstat returns the FileInfo of a file, and does not follow symlinks.
func (d *Dir) Lstat(name string) (fs.FileInfo, error) {
	info, err := d.root.Lstat(name)
	return info, Error("stat", d.PathOf(name), err)
}

// Close closes the directory and ends its lock.
func (d *Dir) Close() error {
	var errs []error
	if d.lock != nil {
		_ = d.root.Remove(lockName)
		errs = append(errs, d.lock.Close())
	}
	if d.file != nil {
		errs = append(errs, d.file.Close())
	}
	return errors.Join(append(errs, d.root.Close())...)
}

// Sync makes additions, renames and removals durable.
func (d *Dir) Sync() error { return Error("sync the directory", d.path, d.file.Sync()) }

// IsMissing reports whether there is nothing of that name. For a file that is usually missing it is cheaper
// than ReadFile.
func IsMissing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// ReadFile reads a regular file of at most limit bytes. It follows symlinks, and waits for no writer of a
// FIFO.
func ReadFile(path string, limit int) ([]byte, fs.FileInfo, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if errors.Is(err, unix.ENXIO) { // a socket
		return nil, nil, Error("read", path, ErrIrregular)
	}
	if errors.Is(err, fs.ErrNotExist) && isSymlink(path) {
		err = errDangling
	}
	if err != nil {
		return nil, nil, Error("open", path, err)
	}
	defer func() { _ = file.Close() }()                   // nothing was written
	_ = file.SetReadDeadline(time.Now().Add(time.Second)) // of one such as /proc/kmsg, which waits for data
	info, err := file.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = ErrIrregular
	}
	if err != nil {
		return nil, nil, Error("read", path, err)
	}
	data, err := io.ReadAll(io.LimitReader(file, int64(limit)+1))
	if err != nil {
		return nil, nil, Error("read", path, err)
	}
	if len(data) > limit {
		return nil, nil, fmt.Errorf("read %s: larger than %d KiB", policy.Printable(path), limit>>10)
	}
	return data, info, nil
}

func isSymlink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().Type() == fs.ModeSymlink
}

// Owner returns the user and the group of a file.
func Owner(info fs.FileInfo) (uid, gid int) {
	s := info.Sys().(*syscall.Stat_t) // Linux has no other type
	return int(s.Uid), int(s.Gid)
}

// IsOwn reports whether a file belongs to this process's user.
func IsOwn(info fs.FileInfo) bool {
	uid, _ := Owner(info)
	return uid == os.Geteuid()
}

// TempName returns a name with the prefix that no other file has.
func TempName(prefix string) string {
	return prefix + strconv.FormatUint(rand.Uint64(), 36) + TempSuffix
}

// IsTemp reports whether a name is one that TempName returns.
func IsTemp(name, prefix string) bool {
	random, isOne := strings.CutPrefix(name, prefix)
	random, ends := strings.CutSuffix(random, TempSuffix)
	_, err := strconv.ParseUint(random, 36, 64)
	return isOne && ends && err == nil
}

func (d *Dir) removeTemps() error {
	entries, err := fs.ReadDir(d.root.FS(), ".")
	errs := []error{Error("read the directory", d.path, err)}
	for _, e := range entries {
		if IsTemp(e.Name(), TempPrefix) && e.Type().IsRegular() {
			errs = append(errs, d.Remove(e.Name()))
		}
	}
	return errors.Join(errs...)
}

// Stage writes and syncs a temporary file, and returns its name. It has mode 0600 and this process's user, or
// adjust, which may be nil, sets both. A runtime that watches the directory looks again at each write, so the
// data is written at once, after adjust.
func (d *Dir) Stage(data []byte, adjust func(*os.File) error) (string, error) {
	const mode = 0o600
	if d.unlocked != nil {
		return "", Error("create a file in", d.path, d.unlocked)
	}
	name := TempName(TempPrefix)
	file, err := d.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return "", Error("create a file in", d.path, err) // without its name: retries report the same error
	}
	err = fillAdjusted(file, data, adjust)
	if err != nil {
		return "", errors.Join(Error("write a file in", d.path, err), d.Remove(name))
	}
	return name, nil
}

func fillAdjusted(file *os.File, data []byte, adjust func(*os.File) error) error {
	if adjust == nil {
		return Fill(file, data)
	}
	if err := adjust(file); err != nil {
		return errors.Join(err, file.Close())
	}
	return Fill(file, data)
}

// Fill writes and syncs a new file, and closes it.
func Fill(file *os.File, data []byte) error {
	_, err := file.Write(data)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// Rename renames a file, and replaces one that has the new name.
func (d *Dir) Rename(from, to string) error {
	return Error("rename a file to", d.PathOf(to), d.root.Rename(from, to))
}

// Exchange exchanges two files in one step, or returns an errors.ErrUnsupported.
func (d *Dir) Exchange(a, b string) error { return d.rename(a, b, unix.RENAME_EXCHANGE) }

// RenameNew renames a file to a new name: fs.ErrExist if it is taken, or an errors.ErrUnsupported.
func (d *Dir) RenameNew(from, to string) error { return d.rename(from, to, unix.RENAME_NOREPLACE) }

func (d *Dir) rename(from, to string, flags uint) error {
	fd := int(d.file.Fd())
	err := unix.Renameat2(fd, from, fd, to, flags)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
		err = errors.ErrUnsupported
	}
	return Error("rename a file to", d.PathOf(to), err)
}

// IsWritten reports whether a program has a file open for writing, as far as leases are supported.
func IsWritten(path string) bool {
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }() // ends the lease
	_, err = unix.FcntlInt(file.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	return errors.Is(err, unix.EAGAIN)
}

// Remove removes a file or an empty directory. It is no error if there is none.
func (d *Dir) Remove(name string) error {
	err := d.unlocked
	if err == nil {
		err = d.root.Remove(name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return Error("remove", d.PathOf(name), err)
}

// Error returns an error of the os package as "operation path: cause", where the path is quoted if
// need be; nil stays nil. A denial to root names what may be behind it.
func Error(op, path string, err error) error {
	if err == nil {
		return nil
	}
	err = withoutPath(err)
	if errors.Is(err, unix.EACCES) && os.Geteuid() == 0 {
		return fmt.Errorf("%s %s: %w to root; SELinux, AppArmor or seccomp may forbid it "+
			"(ausearch -m avc, dmesg), or a container has no CAP_DAC_OVERRIDE or is rootless",
			op, policy.Printable(path), err)
	}
	return fmt.Errorf("%s %s: %w", op, policy.Printable(path), err)
}

// withoutPath returns the cause in an error of the os package.
func withoutPath(err error) error {
	of, isPath := errors.AsType[*fs.PathError](err)
	if isPath {
		return of.Err
	}
	link, isLink := errors.AsType[*os.LinkError](err)
	if isLink {
		return link.Err
	}
	return err
}
