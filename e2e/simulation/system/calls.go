// SPDX-License-Identifier: Apache-2.0

package system

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
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

func (f *File) Fd() uintptr  { return uintptr(f.fd) }
func (f *File) Name() string { return f.name }
func (f *File) unlock()      { delete(f.node.holders, f) }

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

func (f *File) Seek(to int64, whence int) (int64, error) {
	if whence != io.SeekStart {
		return 0, unix.EINVAL
	}
	f.at = int(to)
	return to, nil
}

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

func (f *File) Sync() error {
	if err := machine.step("fsync", f.name, true); err != nil {
		return pathError("sync", f.name, err)
	}
	f.node.sync()
	return nil
}

func (f *File) Chmod(mode fs.FileMode) error { return UnixFchmod(f.fd, uint32(mode.Perm())) }
func (f *File) Chown(_, _ int) error         { return nil }
func (f *File) Stat() (fs.FileInfo, error)   { return f.node.info(f.name), nil }

func (f *File) Readdirnames(int) ([]string, error) {
	err := machine.step("list", f.name, false)
	return f.node.names(), err
}

func (n *inode) info(name string) info {
	i := info{name: filepath.Base(name)}
	n.stat(&i.st)
	return i
}

// Sys returns what os.FileInfo has on Linux.
func (i info) Sys() any { return &syscall.Stat_t{Uid: i.st.Uid, Gid: i.st.Gid, Ino: i.st.Ino} }

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
	parent, name, n, err := m.find(dir, path)
	switch {
	case err != nil:
	case n == nil && !creates, n == nil && parent.gone, n != nil && n.gone && n.isDir() && creates:
		err = unix.ENOENT
	case n != nil && flags&unix.O_EXCL != 0 && creates:
		err = unix.EEXIST
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
	return &File{node: m.newNode(unix.S_IFREG), name: "closed file " + strconv.Itoa(fd), closed: true}
}

// at returns the directory of a descriptor.
func (m *Machine) at(fd int) *inode {
	if fd == unix.AT_FDCWD {
		return m.root
	}
	return m.file(fd).node
}

func NewFile(fd uintptr, name string) *File {
	f := machine.file(int(fd))
	f.name = name
	return f
}

func Open(path string) (*File, error) { return OpenFile(path, unix.O_RDONLY, 0) }

func OpenFile(path string, flags int, mode fs.FileMode) (*File, error) {
	f, err := machine.open(machine.root, path, flags, uint32(mode.Perm()))
	return f, pathError("open", path, err)
}

func ReadFile(path string) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	data := bytes.Clone(f.node.data)
	return data, f.Close()
}

func ReadDir(path string) ([]fs.DirEntry, error) {
	err := machine.step("list", path, false)
	_, _, n, findErr := machine.find(machine.root, path)
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

func Readlink(path string) (string, error) { return "", pathError("readlink", path, unix.EINVAL) }

func (m *Machine) stat(dir *inode, path string, st *unix.Stat_t) error {
	if err := m.step("stat", path, false); err != nil {
		return err
	}
	_, _, n, err := m.find(dir, path)
	if err == nil && n == nil {
		err = unix.ENOENT
	}
	if err == nil {
		n.stat(st)
	}
	return err
}

func Lstat(path string) (fs.FileInfo, error) { return Stat(path) }

func Stat(path string) (fs.FileInfo, error) {
	i := info{name: filepath.Base(path)}
	if err := machine.stat(machine.root, path, &i.st); err != nil {
		return nil, pathError("stat", path, err)
	}
	return i, nil
}

func MkdirAll(path string, mode fs.FileMode) error {
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != '/' {
			continue
		}
		if _, _, n, err := machine.find(machine.root, path[:i]); err == nil && n != nil {
			continue
		}
		if err := UnixMkdirat(unix.AT_FDCWD, path[:i], uint32(mode.Perm())); err != nil && !errors.Is(err, unix.EEXIST) {
			return pathError("mkdir", path[:i], err)
		}
	}
	return nil
}

func Chtimes(path string, _, modified time.Time) error {
	return pathError("chtimes", path, machine.touch(machine.root, path, modified))
}

func UnixUtimesNanoAt(at int, path string, times []unix.Timespec, _ int) error {
	return machine.touch(machine.at(at), path, time.Unix(times[1].Unix()))
}

func (m *Machine) touch(dir *inode, path string, modified time.Time) error {
	if err := m.step("touch", path, true); err != nil {
		return err
	}
	_, _, n, err := m.find(dir, path)
	if err == nil && n == nil {
		err = unix.ENOENT
	}
	if err == nil {
		n.changed = modified
	}
	return err
}

func SameFile(a, b fs.FileInfo) bool {
	x, y := a.(info), b.(info)
	return x.st.Ino == y.st.Ino
}

func Geteuid() int       { return 0 }
func RandUint64() uint64 { return machine.Rand.Uint64() }

func UnixOpen(path string, flags int, mode uint32) (int, error) {
	return UnixOpenat(unix.AT_FDCWD, path, flags, mode)
}

func UnixOpenat(at int, path string, flags int, mode uint32) (int, error) {
	f, err := machine.open(machine.at(at), path, flags, mode)
	if err != nil {
		return -1, err
	}
	return f.fd, nil
}

func UnixClose(fd int) error { return machine.close(machine.file(fd)) }

func UnixRead(fd int, buf []byte) (int, error) {
	n, err := machine.file(fd).Read(buf)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

func UnixFsync(fd int) error { return machine.file(fd).Sync() }

func UnixFstat(fd int, st *unix.Stat_t) error {
	machine.file(fd).node.stat(st)
	return nil
}

func UnixFstatat(at int, path string, st *unix.Stat_t, _ int) error {
	return machine.stat(machine.at(at), path, st)
}

func UnixLstat(path string, st *unix.Stat_t) error {
	return machine.stat(machine.root, path, st)
}

func UnixFchmod(fd int, mode uint32) error {
	n := machine.file(fd).node
	n.mode = n.mode&unix.S_IFMT | mode
	return nil
}

func UnixFcntlInt(uintptr, int, int) (int, error) { return 0, nil }

func UnixMkdirat(at int, path string, mode uint32) error {
	m := machine
	dir := m.at(at)
	if err := m.step("mkdir", path, true); err != nil {
		return err
	}
	parent, name, n, err := m.find(dir, path)
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

func UnixRename(from, to string) error {
	return machine.rename(machine.root, from, machine.root, to, 0)
}

func UnixRenameat(fromAt int, from string, toAt int, to string) error {
	return machine.rename(machine.at(fromAt), from, machine.at(toAt), to, 0)
}

func UnixRenameat2(fromAt int, from string, toAt int, to string, flags uint) error {
	return machine.rename(machine.at(fromAt), from, machine.at(toAt), to, flags)
}

func UnixLinkat(fromAt int, from string, toAt int, to string, _ int) error {
	return machine.rename(machine.at(fromAt), from, machine.at(toAt), to, link)
}

const link = 1 << 31 // of the flags of rename: the former name stays

func (m *Machine) rename(fromDir *inode, from string, toDir *inode, to string, flags uint) error {
	effect := "rename"
	if flags&link != 0 {
		effect = "link"
	}
	if err := m.step(effect, from+" to "+filepath.Base(to), true); err != nil {
		return err
	}
	source, name, n, err := m.find(fromDir, from)
	if err != nil {
		return err
	}
	target, newName, old, err := m.find(toDir, to)
	switch {
	case err != nil:
		return err
	case n == nil, target.gone, old == nil && flags&unix.RENAME_EXCHANGE != 0:
		return unix.ENOENT
	case old != nil && flags&(unix.RENAME_NOREPLACE|link) != 0:
		return unix.EEXIST
	case flags&link != 0:
		m.Writes++
		target.put(change{newName: n})
		return nil
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

func UnixUnlinkat(at int, path string, flags int) error {
	return machine.unlink(machine.at(at), path, flags&unix.AT_REMOVEDIR != 0)
}

func UnixRmdir(path string) error { return machine.unlink(machine.root, path, true) }

func (m *Machine) unlink(dir *inode, path string, isDir bool) error {
	if err := m.step("remove", path, false); err != nil {
		return err
	}
	parent, name, n, err := m.find(dir, path)
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

func UnixFaccessat(at int, path string, mode uint32, _ int) error {
	var st unix.Stat_t
	if err := machine.stat(machine.at(at), path, &st); err != nil {
		return err
	}
	if machine.ReadOnly && mode&unix.W_OK != 0 {
		return unix.EROFS
	}
	return nil
}

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
