// SPDX-License-Identifier: Apache-2.0

package system

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing/fstest"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"
)

// call is the effect of a call on a path. It returns what the path names.
func (m *Machine) call(effect string, dir *inode, path string, writes bool) (place, error) {
	if err := m.step(effect, path, writes); err != nil {
		return place{}, err
	}
	return m.find(dir, path)
}

// callOn is call for what must exist.
func (m *Machine) callOn(effect string, dir *inode, path string, writes bool) (*inode, error) {
	at, err := m.call(effect, dir, path, writes)
	if err == nil && at.node == nil {
		err = unix.ENOENT
	}
	return at.node, err
}

func pathError(op, path string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: path, Err: err}
}

// File is an open file.
type File struct {
	node    *inode
	name    string
	fd      int
	at      int
	closed  bool
	process *Process
}

func (f *File) Fd() uintptr                     { return uintptr(f.fd) }
func (f *File) Name() string                    { return f.name }
func (f *File) Chmod(mode fs.FileMode) error    { return UnixFchmod(f.fd, uint32(mode.Perm())) }
func (f *File) Chown(_, _ int) error            { return nil }
func (f *File) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }
func (f *File) Stat() (fs.FileInfo, error)      { return f.node.info(f.name), nil }
func (f *File) unlock()                         { delete(f.node.holders, f) }

func (f *File) Close() error {
	switch {
	case f == nil:
		return os.ErrInvalid
	case f.closed:
		return os.ErrClosed
	case len(f.node.holders) > 0: // no other process notices the end of a file without a lock
		if err := machine.step("close", f.name, false); err != nil {
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

// call is the effect of a call on the file.
func (f *File) call(effect string, writes bool, do func() error) error {
	err := machine.step(effect, f.name, writes)
	if err == nil {
		err = do()
	}
	return pathError(effect, f.name, err)
}

func (f *File) Write(data []byte) (n int, err error) {
	err = f.call("write", true, func() (err error) {
		if machine.Disk == "full" {
			data, err = data[:len(data)/2], unix.ENOSPC
		}
		machine.Writes++
		content := make([]byte, max(len(f.node.data), f.at+len(data)))
		copy(content, f.node.data)
		n = copy(content[f.at:], data)
		f.node.data, f.node.changed, f.at = content, time.Now(), f.at+n
		return err
	})
	return n, err
}

func (f *File) Read(buf []byte) (n int, err error) {
	err = f.call("read", false, func() error {
		n = copy(buf, f.node.data[min(f.at, len(f.node.data)):])
		f.at += n
		return nil
	})
	if err == nil && n == 0 {
		err = io.EOF
	}
	return n, err
}

func (f *File) ReadAt(buf []byte, at int64) (n int, err error) {
	err = f.call("read", false, func() error {
		n = copy(buf, f.node.data[min(int(at), len(f.node.data)):])
		return nil
	})
	if err == nil && n < len(buf) {
		err = io.EOF
	}
	return n, err
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
	return f.call("truncate", true, func() error {
		f.node.data = bytes.Clone(f.node.data[:size])
		return nil
	})
}

func (f *File) Sync() error {
	return f.call("fsync", true, func() error {
		f.node.sync()
		return nil
	})
}

func (f *File) Readdirnames(int) ([]string, error) {
	err := machine.step("list", f.name, false)
	return f.node.names(), err
}

// info returns what os.FileInfo has on Linux.
func (n *inode) info(name string) fs.FileInfo {
	name = filepath.Base(name)
	file := &fstest.MapFile{Data: n.data, Mode: fs.FileMode(n.mode & 0o777), ModTime: n.changed, Sys: &syscall.Stat_t{Ino: n.number}}
	if n.isDir() {
		file.Mode |= fs.ModeDir
	}
	i, err := fstest.MapFS{name: file}.Stat(name)
	if err != nil {
		panic(err)
	}
	return i
}

// open opens a file by its name in a directory.
func (m *Machine) open(dir *inode, path string, flags int, mode uint32) (*File, error) {
	creates, effect := flags&unix.O_CREAT != 0, "open"
	if creates {
		effect = "create"
	}
	at, err := m.call(effect, dir, path, false)
	n := at.node
	switch {
	case err != nil:
	case n == nil && (!creates || at.dir.gone), n != nil && n.gone && n.isDir() && creates:
		err = unix.ENOENT
	case n != nil && flags&unix.O_EXCL != 0 && creates:
		err = unix.EEXIST
	case n != nil && flags&unix.O_DIRECTORY != 0 && !n.isDir():
		err = unix.ENOTDIR
	case m.Disk == "read-only" && (n == nil || flags&(unix.O_RDWR|unix.O_WRONLY) != 0):
		err = unix.EROFS
	case n == nil && m.Disk == "full":
		err = unix.ENOSPC
	case n == nil && m.Disk == "broken":
		err = unix.EIO
	case n == nil:
		n = m.newNode(unix.S_IFREG | mode)
		at.dir.put(change{at.name: n})
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

func ReadDir(path string) (entries []fs.DirEntry, err error) {
	n, err := machine.callOn("list", machine.root, path, false)
	if err == nil && !n.isDir() {
		err = unix.ENOTDIR
	}
	if err != nil {
		return nil, pathError("open", path, err)
	}
	for _, name := range n.names() {
		entries = append(entries, fs.FileInfoToDirEntry(n.entries[name].info(name)))
	}
	return entries, nil
}

func Readlink(path string) (string, error) { return "", pathError("readlink", path, unix.EINVAL) }

func Lstat(path string) (fs.FileInfo, error) { return Stat(path) }

func Stat(path string) (fs.FileInfo, error) { return machine.stat(machine.root, path) }

func (m *Machine) stat(dir *inode, path string) (fs.FileInfo, error) {
	n, err := m.callOn("stat", dir, path, false)
	if err != nil {
		return nil, pathError("stat", path, err)
	}
	return n.info(path), nil
}

func MkdirAll(path string, mode fs.FileMode) error {
	for i := 1; i <= len(path); i++ {
		if i < len(path) && path[i] != '/' {
			continue
		}
		if at, err := machine.find(machine.root, path[:i]); err == nil && at.node != nil {
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
	n, err := m.callOn("touch", dir, path, true)
	if err == nil {
		n.changed = modified
	}
	return err
}

func SameFile(a, b fs.FileInfo) bool {
	return a.Sys().(*syscall.Stat_t).Ino == b.Sys().(*syscall.Stat_t).Ino
}

func Geteuid() int       { return 0 }
func RandUint64() uint64 { return machine.Rand.Uint64() }

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

func (r *Root) Close() error                           { return nil }
func (r *Root) Open(name string) (*File, error)        { return r.OpenFile(name, unix.O_RDONLY, 0) }
func (r *Root) Lstat(name string) (fs.FileInfo, error) { return machine.stat(r.dir, name) }
func (r *Root) FS() fs.FS                              { return rootFS{path: r.path} }

func (r *Root) OpenFile(name string, flags int, mode fs.FileMode) (*File, error) {
	f, err := machine.open(r.dir, name, flags, uint32(mode.Perm()))
	return f, pathError("openat", name, err)
}

func (r *Root) Rename(from, to string) error {
	return pathError("renameat", from, machine.rename(r.dir, from, r.dir, to, 0))
}

func (r *Root) Remove(name string) error {
	return pathError("unlinkat", name, machine.unlink(r.dir, name, false))
}

// rootFS implements fs.ReadDirFS, whose other method nobody calls.
type rootFS struct {
	fs.FS
	path string
}

func (r rootFS) ReadDir(string) ([]fs.DirEntry, error) { return ReadDir(r.path) }

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

func UnixClose(fd int) error { return machine.file(fd).Close() }

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

func UnixLstat(path string, st *unix.Stat_t) error { return UnixFstatat(unix.AT_FDCWD, path, st, 0) }

func UnixFstatat(at int, path string, st *unix.Stat_t, _ int) error {
	n, err := machine.callOn("stat", machine.at(at), path, false)
	if err == nil {
		n.stat(st)
	}
	return err
}

func UnixFchmod(fd int, mode uint32) error {
	n := machine.file(fd).node
	n.mode = n.mode&unix.S_IFMT | mode
	return nil
}

func UnixFcntlInt(uintptr, int, int) (int, error) { return 0, nil }

func UnixMkdirat(at int, path string, mode uint32) error {
	m := machine
	p, err := m.call("mkdir", m.at(at), path, true)
	switch {
	case err != nil:
		return err
	case p.node != nil:
		return unix.EEXIST
	case p.dir.gone:
		return unix.ENOENT
	case m.Disk == "full":
		return unix.ENOSPC
	}
	m.Writes++
	p.dir.put(change{p.name: m.newNode(unix.S_IFDIR | mode)})
	return nil
}

func UnixRename(from, to string) error {
	return machine.rename(machine.root, from, machine.root, to, 0)
}

func UnixRenameat(fromAt int, from string, toAt int, to string) error {
	return UnixRenameat2(fromAt, from, toAt, to, 0)
}

func UnixRenameat2(fromAt int, from string, toAt int, to string, flags uint) error {
	return machine.rename(machine.at(fromAt), from, machine.at(toAt), to, flags)
}

func UnixLinkat(fromAt int, from string, toAt int, to string, _ int) error {
	return machine.rename(machine.at(fromAt), from, machine.at(toAt), to, link)
}

const link = 1 << 31 // of the flags of rename: the former name stays

func (m *Machine) rename(fromDir *inode, from string, toDir *inode, to string, flags uint) error {
	effect, links, exchanges := "rename", flags&link != 0, flags&unix.RENAME_EXCHANGE != 0
	if links {
		effect = "link"
	}
	if err := m.step(effect, from+" to "+filepath.Base(to), true); err != nil {
		return err
	}
	source, err := m.find(fromDir, from)
	target, errTo := m.find(toDir, to)
	n, old, former := source.node, target.node, (*inode)(nil)
	switch {
	case err != nil || errTo != nil:
		return cmp.Or(err, errTo)
	case n == nil, target.dir.gone, old == nil && exchanges:
		return unix.ENOENT
	case old != nil && (links || flags&unix.RENAME_NOREPLACE != 0):
		return unix.EEXIST
	case links:
		former = n
	case exchanges:
		former = old
	case old != nil && old.isDir() && !n.isDir():
		return unix.EISDIR
	case old != nil && len(old.entries) > 0:
		return unix.ENOTEMPTY
	case old != nil:
		old.gone = old != n
	}
	m.Writes++
	if source.dir == target.dir && !exchanges {
		target.dir.put(change{source.name: former, target.name: n})
		return nil
	}
	source.dir.put(change{source.name: former})
	target.dir.put(change{target.name: n})
	return nil
}

func UnixUnlinkat(at int, path string, flags int) error {
	return machine.unlink(machine.at(at), path, flags&unix.AT_REMOVEDIR != 0)
}

func UnixRmdir(path string) error { return machine.unlink(machine.root, path, true) }

func (m *Machine) unlink(dir *inode, path string, isDir bool) error {
	at, err := m.call("remove", dir, path, false)
	n := at.node
	switch {
	case err != nil:
		return err
	case n == nil:
		return unix.ENOENT
	case m.Disk == "read-only":
		return unix.EROFS
	case m.Disk == "broken":
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
	at.dir.put(change{at.name: nil})
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
	_, err := machine.callOn("stat", machine.at(at), path, false)
	if err == nil && machine.Disk == "read-only" && mode&unix.W_OK != 0 {
		err = unix.EROFS
	}
	return err
}

func UnixStatfs(path string, st *unix.Statfs_t) error {
	*st = unix.Statfs_t{Bsize: 4096, Blocks: 1 << 20, Bfree: 1 << 19, Bavail: 1 << 19, Files: 1 << 20, Ffree: 1 << 19}
	if machine.Disk == "full" {
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

// SysctlSysctl reads a file below /proc/sys.
func SysctlSysctl(name string, _ ...string) (string, error) {
	data, err := ReadFile(filepath.Join("/proc/sys", name))
	return strings.TrimSuffix(string(data), "\n"), err
}

// NsGetCurrentNS opens the only network namespace of the node.
func NsGetCurrentNS() (ns.NetNS, error) {
	file, err := Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	return namespace{file}, nil
}

// NsIsNSorErr is that of package ns: each file below /run/netns is a network namespace.
func NsIsNSorErr(path string) error {
	_, err := Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return ns.NSPathNotExistErr{}
	case err != nil:
		return err
	case filepath.Dir(path) != "/run/netns":
		return ns.NSPathNotNSErr{}
	}
	return nil
}

// namespace is a network namespace that no process enters.
type namespace struct{ *File }

func (n namespace) Path() string                  { return n.Name() }
func (n namespace) Set() error                    { return unix.ENOTSUP }
func (n namespace) Do(func(ns.NetNS) error) error { return unix.ENOTSUP }
