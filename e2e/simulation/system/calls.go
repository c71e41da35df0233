// SPDX-License-Identifier: Apache-2.0

package system

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// File is an open file.
type File struct {
	node    *inode
	name    string
	fd      int
	at      int
	closed  bool
	process *Process
}

// Fd is that of os.File.
func (f *File) Fd() uintptr { return uintptr(f.fd) }

// Name is that of os.File.
func (f *File) Name() string { return f.name }

func (f *File) unlock() { delete(f.node.holders, f) }

// Close is that of os.File.
func (f *File) Close() error {
	if f == nil {
		return os.ErrInvalid
	}
	return machine.close(f)
}

func (m *Machine) close(f *File) error {
	if f.closed {
		return os.ErrClosed
	}
	if len(f.node.holders) > 0 { // no other process notices the end of a file without a lock
		if err := m.step("close", f.name, false); err != nil {
			return err
		}
	}
	f.closed = true
	f.unlock()
	if f.process != nil {
		delete(f.process.files, f.fd)
	}
	return nil
}

// Write is that of os.File.
func (f *File) Write(data []byte) (int, error) {
	if err := machine.step("write", f.name, true); err != nil {
		return 0, pathError("write", f.name, err)
	}
	if machine.Full {
		data = data[:len(data)/2]
	}
	machine.Writes++
	content := f.node.data
	if need := f.at + len(data); need > len(content) {
		content = append(bytes.Clone(content), make([]byte, need-len(content))...)
	} else {
		content = bytes.Clone(content)
	}
	copy(content[f.at:], data)
	f.node.data, f.node.changed = content, time.Now()
	f.at += len(data)
	if machine.Full {
		return len(data), pathError("write", f.name, unix.ENOSPC)
	}
	return len(data), nil
}

// Read is that of os.File.
func (f *File) Read(buf []byte) (int, error) {
	if err := machine.step("read", f.name, false); err != nil {
		return 0, pathError("read", f.name, err)
	}
	if f.at >= len(f.node.data) {
		return 0, io.EOF
	}
	n := copy(buf, f.node.data[f.at:])
	f.at += n
	return n, nil
}

// Seek is that of os.File.
func (f *File) Seek(to int64, whence int) (int64, error) {
	if whence != io.SeekStart {
		return 0, unix.EINVAL
	}
	f.at = int(to)
	return to, nil
}

// Truncate is that of os.File.
func (f *File) Truncate(size int64) error {
	if int(size) == len(f.node.data) {
		return nil
	}
	if err := machine.step("truncate", f.name, true); err != nil {
		return pathError("truncate", f.name, err)
	}
	f.node.data = bytes.Clone(f.node.data[:size])
	return nil
}

// Sync is that of os.File.
func (f *File) Sync() error {
	if err := machine.step("fsync", f.name, true); err != nil {
		return pathError("sync", f.name, err)
	}
	f.node.sync()
	return nil
}

// Chmod is that of os.File.
func (f *File) Chmod(mode fs.FileMode) error { return UnixFchmod(f.fd, uint32(mode.Perm())) }

// Chown is that of os.File.
func (f *File) Chown(_, _ int) error { return nil }

// Stat is that of os.File.
func (f *File) Stat() (fs.FileInfo, error) { return f.node.info(f.name), nil }

// Readdirnames is that of os.File.
func (f *File) Readdirnames(int) ([]string, error) {
	err := machine.step("list", f.name, false)
	return f.node.names(), err
}

func (n *inode) info(name string) info {
	i := info{name: base(name)}
	n.stat(&i.st)
	return i
}

// Sys returns what os.FileInfo has on Linux.
func (i info) Sys() any { return &syscall.Stat_t{Uid: i.st.Uid, Gid: i.st.Gid, Ino: i.st.Ino} }

func base(path string) string {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			return path[i+1:]
		}
	}
	return path
}

func pathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// open opens a file by its name in a directory.
func (m *Machine) open(dir *inode, path string, flags int, mode uint32) (*File, error) {
	creates := flags&unix.O_CREAT != 0
	effect := "open"
	if creates {
		effect = "create"
	}
	if err := m.step(effect, path, false); err != nil {
		return nil, err
	}
	parent, name, n, err := m.find(dir, path, flags&unix.O_NOFOLLOW == 0)
	switch {
	case err != nil:
	case n == nil && !creates, n == nil && parent.gone, n != nil && n.gone && n.isDir() && creates:
		err = unix.ENOENT
	case n != nil && flags&unix.O_EXCL != 0 && creates:
		err = unix.EEXIST
	case n != nil && n.mode&unix.S_IFMT == unix.S_IFLNK:
		err = unix.ELOOP
	case n != nil && flags&unix.O_DIRECTORY != 0 && !n.isDir():
		err = unix.ENOTDIR
	case m.ReadOnly && (n == nil || flags&(unix.O_RDWR|unix.O_WRONLY) != 0):
		err = unix.EROFS
	case n == nil && m.Full:
		err = unix.ENOSPC
	case n == nil && m.Broken:
		err = unix.EIO
	case n == nil:
		n = m.newNode(unix.S_IFREG | mode)
		parent.put(change{name: n})
		m.Writes++
	}
	if err != nil {
		return nil, err
	}
	f := &File{node: n, name: path, process: m.Current()}
	if f.process != nil {
		f.process.last++
		f.fd = f.process.last
		f.process.files[f.fd] = f
	}
	return f, nil
}

func (m *Machine) file(fd int) *File {
	if p := m.Current(); p != nil && p.files[fd] != nil {
		return p.files[fd]
	}
	return &File{node: m.newNode(unix.S_IFREG), name: "closed file " + number(fd), closed: true}
}

// at returns the directory of a descriptor.
func (m *Machine) at(fd int) *inode {
	if fd == unix.AT_FDCWD {
		return m.root
	}
	return m.file(fd).node
}

// NewFile is that of package os.
func NewFile(fd uintptr, name string) *File {
	f := machine.file(int(fd))
	f.name = name
	return f
}

// Open is that of package os.
func Open(path string) (*File, error) { return OpenFile(path, unix.O_RDONLY, 0) }

// OpenFile is that of package os.
func OpenFile(path string, flags int, mode fs.FileMode) (*File, error) {
	f, err := machine.open(machine.root, path, flags, uint32(mode.Perm()))
	return f, pathError("open", path, err)
}

// ReadFile is that of package os.
func ReadFile(path string) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	data := bytes.Clone(f.node.data)
	return data, f.Close()
}

// ReadDir is that of package os.
func ReadDir(path string) ([]fs.DirEntry, error) {
	err := machine.step("list", path, false)
	_, _, n, findErr := machine.find(machine.root, path, true)
	switch {
	case err != nil:
	case findErr != nil:
		err = findErr
	case n == nil:
		err = unix.ENOENT
	case !n.isDir():
		err = unix.ENOTDIR
	}
	if err != nil {
		return nil, pathError("open", path, err)
	}
	var entries []fs.DirEntry
	for _, name := range n.names() {
		entries = append(entries, n.entries[name].info(name))
	}
	return entries, nil
}

// Readlink is that of package os.
func Readlink(path string) (string, error) {
	_, _, n, err := machine.find(machine.root, path, false)
	if err == nil && n == nil {
		err = unix.ENOENT
	}
	if err == nil && n.mode&unix.S_IFMT != unix.S_IFLNK {
		err = unix.EINVAL
	}
	if err != nil {
		return "", pathError("readlink", path, err)
	}
	return n.link, nil
}

func (m *Machine) stat(dir *inode, path string, follow bool, st *unix.Stat_t) error {
	if err := m.step("stat", path, false); err != nil {
		return err
	}
	_, _, n, err := m.find(dir, path, follow)
	if err == nil && n == nil {
		err = unix.ENOENT
	}
	if err == nil {
		n.stat(st)
	}
	return err
}

// Stat is that of package os.
func Stat(path string) (fs.FileInfo, error) { return statOf(path, true) }

// Lstat is that of package os.
func Lstat(path string) (fs.FileInfo, error) { return statOf(path, false) }

func statOf(path string, follow bool) (fs.FileInfo, error) {
	i := info{name: base(path)}
	if err := machine.stat(machine.root, path, follow, &i.st); err != nil {
		return nil, pathError("stat", path, err)
	}
	return i, nil
}

// MkdirAll is that of package os.
func MkdirAll(path string, mode fs.FileMode) error {
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != '/' {
			continue
		}
		if _, _, n, err := machine.find(machine.root, path[:i], true); err == nil && n != nil {
			continue
		}
		if err := UnixMkdirat(unix.AT_FDCWD, path[:i], uint32(mode.Perm())); err != nil && !errors.Is(err, unix.EEXIST) {
			return pathError("mkdir", path[:i], err)
		}
	}
	return nil
}

// Chtimes is that of package os.
func Chtimes(path string, _, modified time.Time) error {
	return pathError("chtimes", path, machine.touch(machine.root, path, modified))
}

// UnixUtimesNanoAt is that of package unix.
func UnixUtimesNanoAt(at int, path string, times []unix.Timespec, _ int) error {
	return machine.touch(machine.at(at), path, time.Unix(times[1].Unix()))
}

func (m *Machine) touch(dir *inode, path string, modified time.Time) error {
	if err := m.step("touch", path, true); err != nil {
		return err
	}
	_, _, n, err := m.find(dir, path, true)
	if err == nil && n == nil {
		err = unix.ENOENT
	}
	if err == nil {
		n.changed = modified
	}
	return err
}

// SameFile is that of package os.
func SameFile(a, b fs.FileInfo) bool {
	x, y := a.(info), b.(info)
	return x.st.Ino == y.st.Ino
}

// Geteuid is that of package os.
func Geteuid() int { return 0 }

// RandUint64 is that of package rand.
func RandUint64() uint64 { return machine.Rand.Uint64() }

// UnixOpen is that of package unix.
func UnixOpen(path string, flags int, mode uint32) (int, error) {
	return UnixOpenat(unix.AT_FDCWD, path, flags, mode)
}

// UnixOpenat is that of package unix.
func UnixOpenat(at int, path string, flags int, mode uint32) (int, error) {
	f, err := machine.open(machine.at(at), path, flags, mode)
	if err != nil {
		return -1, err
	}
	return f.fd, nil
}

// UnixClose is that of package unix.
func UnixClose(fd int) error { return machine.close(machine.file(fd)) }

// UnixRead is that of package unix.
func UnixRead(fd int, buf []byte) (int, error) {
	n, err := machine.file(fd).Read(buf)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// UnixFsync is that of package unix.
func UnixFsync(fd int) error {
	f := machine.file(fd)
	if err := machine.step("fsync", f.name, true); err != nil {
		return err
	}
	f.node.sync()
	return nil
}

// UnixFstat is that of package unix.
func UnixFstat(fd int, st *unix.Stat_t) error {
	machine.file(fd).node.stat(st)
	return nil
}

// UnixFstatat is that of package unix.
func UnixFstatat(at int, path string, st *unix.Stat_t, flags int) error {
	return machine.stat(machine.at(at), path, flags&unix.AT_SYMLINK_NOFOLLOW == 0, st)
}

// UnixLstat is that of package unix.
func UnixLstat(path string, st *unix.Stat_t) error {
	return machine.stat(machine.root, path, false, st)
}

// UnixFchmod is that of package unix.
func UnixFchmod(fd int, mode uint32) error {
	n := machine.file(fd).node
	n.mode = n.mode&unix.S_IFMT | mode
	return nil
}

// UnixFcntlInt is that of package unix.
func UnixFcntlInt(uintptr, int, int) (int, error) { return 0, nil }

// UnixMkdirat is that of package unix.
func UnixMkdirat(at int, path string, mode uint32) error {
	m := machine
	dir := m.at(at)
	if err := m.step("mkdir", path, true); err != nil {
		return err
	}
	parent, name, n, err := m.find(dir, path, false)
	switch {
	case err != nil:
		return err
	case n != nil:
		return unix.EEXIST
	case parent.gone:
		return unix.ENOENT
	case m.Full:
		return unix.ENOSPC
	}
	m.Writes++
	parent.put(change{name: m.newNode(unix.S_IFDIR | mode)})
	return nil
}

// UnixRename is that of package unix.
func UnixRename(from, to string) error {
	return machine.rename(machine.root, from, machine.root, to, 0)
}

// UnixRenameat is that of package unix.
func UnixRenameat(fromAt int, from string, toAt int, to string) error {
	return machine.rename(machine.at(fromAt), from, machine.at(toAt), to, 0)
}

// UnixRenameat2 is that of package unix.
func UnixRenameat2(fromAt int, from string, toAt int, to string, flags uint) error {
	return machine.rename(machine.at(fromAt), from, machine.at(toAt), to, flags)
}

func (m *Machine) rename(fromDir *inode, from string, toDir *inode, to string, flags uint) error {
	if err := m.step("rename", from+" to "+base(to), true); err != nil {
		return err
	}
	source, name, n, err := m.find(fromDir, from, false)
	if err != nil {
		return err
	}
	target, newName, old, err := m.find(toDir, to, false)
	switch {
	case err != nil:
		return err
	case n == nil, target.gone, old == nil && flags&unix.RENAME_EXCHANGE != 0:
		return unix.ENOENT
	case old != nil && flags&unix.RENAME_NOREPLACE != 0:
		return unix.EEXIST
	case flags&unix.RENAME_EXCHANGE != 0:
		m.Writes++
		source.put(change{name: old})
		target.put(change{newName: n})
		return nil
	case old != nil && old.isDir() && !n.isDir():
		return unix.EISDIR
	case old != nil && len(old.entries) > 0:
		return unix.ENOTEMPTY
	}
	m.Writes++
	if old != nil {
		old.gone = old != n
	}
	if source == target {
		target.put(change{name: nil, newName: n})
		return nil
	}
	source.put(change{name: nil})
	target.put(change{newName: n})
	return nil
}

// UnixUnlinkat is that of package unix.
func UnixUnlinkat(at int, path string, flags int) error {
	return machine.unlink(machine.at(at), path, flags&unix.AT_REMOVEDIR != 0)
}

// UnixRmdir is that of package unix.
func UnixRmdir(path string) error { return machine.unlink(machine.root, path, true) }

func (m *Machine) unlink(dir *inode, path string, isDir bool) error {
	if err := m.step("remove", path, false); err != nil {
		return err
	}
	parent, name, n, err := m.find(dir, path, false)
	switch {
	case err != nil:
		return err
	case n == nil:
		return unix.ENOENT
	case m.ReadOnly:
		return unix.EROFS
	case m.Broken:
		return unix.EIO
	case isDir && !n.isDir():
		return unix.ENOTDIR
	case !isDir && n.isDir():
		return unix.EISDIR
	case len(n.entries) > 0:
		return unix.ENOTEMPTY
	}
	m.Writes++
	n.gone = true
	parent.put(change{name: nil})
	return nil
}

// UnixFlock is that of package unix.
func UnixFlock(fd, how int) error {
	f := machine.file(fd)
	if err := machine.step("flock", f.name, false); err != nil {
		return err
	}
	for other, exclusive := range f.node.holders {
		if other != f && (exclusive || how&unix.LOCK_EX != 0) {
			return unix.EWOULDBLOCK
		}
	}
	if how&unix.LOCK_UN != 0 {
		f.unlock()
	} else {
		f.node.holders[f] = how&unix.LOCK_EX != 0
	}
	return nil
}

// UnixFaccessat is that of package unix.
func UnixFaccessat(at int, path string, mode uint32, _ int) error {
	var st unix.Stat_t
	if err := machine.stat(machine.at(at), path, true, &st); err != nil {
		return err
	}
	if machine.ReadOnly && mode&unix.W_OK != 0 {
		return unix.EROFS
	}
	return nil
}

// UnixStatfs is that of package unix.
func UnixStatfs(path string, st *unix.Statfs_t) error {
	*st = unix.Statfs_t{Bsize: 4096, Blocks: 1 << 20, Bfree: 1 << 19, Bavail: 1 << 19, Files: 1 << 20, Ffree: 1 << 19}
	if machine.Full {
		st.Bfree, st.Bavail, st.Ffree = 0, 0, 0
	}
	return machine.step("statfs", path, false)
}

// UnixClockGettime is that of package unix, for the clock of the boot.
func UnixClockGettime(_ int32, t *unix.Timespec) error {
	machine.ticks++ // no two calls are at the same time
	*t = unix.NsecToTimespec(int64(time.Since(machine.booted) + machine.ticks))
	return nil
}

// UnixSyscall is that of package unix. It does nothing.
func UnixSyscall(_, _, _, _ uintptr) (uintptr, uintptr, unix.Errno) { return 0, 0, 0 }
