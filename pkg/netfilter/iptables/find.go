// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// finder looks for programs in the directories of a PATH, but only in those
// where nobody but root can put or swap one: what it finds runs with all the
// privileges of a container runtime.
type finder struct {
	path    string // as $PATH
	trusted func(uid uint32) bool
}

// newFinder reads nothing before something is looked for: most ADDs run no
// program.
func newFinder(path string) finder {
	owner := sync.OnceValue(func() func(uint32) bool {
		return trustedOwner(os.Geteuid(), "/proc/self/uid_map", "/proc/sys/kernel/overflowuid")
	})
	return finder{path: path, trusted: func(uid uint32) bool { return owner()(uid) }}
}

// notFoundError says where a program was looked for.
type notFoundError struct {
	names    []string
	searched []string
	passed   []string // directories that were not searched, and why
}

func (e *notFoundError) Error() string {
	where := "it names no directory to search"
	if len(e.searched) > 0 {
		where = "searched " + strings.Join(e.searched, ", ")
	}
	if len(e.passed) > 0 {
		where += "; passed over " + strings.Join(e.passed, ", ")
	}
	return fmt.Sprintf("find %s: not found; install iptables, or add the directory that holds it (often /usr/sbin) to PATH; %s",
		strings.Join(e.names, " or "), where)
}

func (e *notFoundError) Is(target error) bool { return target == fs.ErrNotExist }

// find returns the absolute path of the first of the names that there is: all
// of PATH is searched for the first name, then for the second.
func (f finder) find(names ...string) (string, error) {
	missing := &notFoundError{names: names}
	var dirs []string
	for _, dir := range filepath.SplitList(f.path) {
		switch info, err := f.resolve(dir); {
		case !filepath.IsAbs(dir):
			missing.passed = append(missing.passed, strconv.Quote(dir)+" (not absolute)")
		case errors.Is(err, fs.ErrNotExist):
			missing.searched = append(missing.searched, dir+" (absent)")
		case err != nil:
			missing.passed = append(missing.passed, err.Error())
		case !info.IsDir():
			missing.passed = append(missing.passed, dir+" (no directory)")
		case writableByOthers(info):
			missing.passed = append(missing.passed, dir+" (writable by others)")
		default:
			dirs = append(dirs, dir)
			missing.searched = append(missing.searched, dir)
		}
	}
	for _, name := range names {
		for _, dir := range dirs {
			path := filepath.Join(dir, name)
			switch info, err := f.resolve(path); {
			case errors.Is(err, fs.ErrNotExist):
			case err != nil:
				missing.passed = append(missing.passed, err.Error())
			case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
				missing.passed = append(missing.passed, path+" (no program)")
			case writableByOthers(info):
				missing.passed = append(missing.passed, path+" (writable by others)")
			default:
				return path, nil
			}
		}
	}
	return "", missing
}

// resolve returns what an absolute path leads to in the end. It fails where
// somebody else could make it lead elsewhere: where an untrusted user owns a
// directory or a link on the way, or the end of it, or may write in a directory
// on the way. One that is writable by all will do if it is sticky: there nobody
// can swap the entries of others.
func (f finder) resolve(path string) (fs.FileInfo, error) {
	const mostLinks = 40 // as in the kernel, path_resolution(7)
	at, links := "/", 0
	info, err := f.trustedEntry(at)
	rest := strings.Split(path, "/")
	for err == nil && len(rest) > 0 {
		name := rest[0]
		rest = rest[1:]
		switch {
		case name == "" || name == ".":
			continue
		case name == "..":
			at = filepath.Dir(at)
			info, err = f.trustedEntry(at)
			continue
		case info.IsDir() && writableByOthers(info) && info.Mode()&fs.ModeSticky == 0:
			return nil, fmt.Errorf("%s (writable by others)", at)
		}
		next := filepath.Join(at, name)
		if info, err = f.trustedEntry(next); err != nil {
			return nil, err
		}
		if info.Mode().Type() != fs.ModeSymlink {
			at = next
			continue
		}
		var target string
		if target, err = os.Readlink(next); err != nil {
			return nil, err
		}
		if links++; links > mostLinks {
			return nil, &fs.PathError{Op: "resolve", Path: path, Err: syscall.ELOOP}
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
		info, err = f.trustedEntry(at)
	}
	return info, err
}

// trustedEntry is Lstat for what only root could have put there.
func (f finder) trustedEntry(path string) (fs.FileInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || !f.trusted(st.Uid) {
		return nil, fmt.Errorf("%s (not owned by root)", path)
	}
	return info, nil
}

func writableByOthers(info fs.FileInfo) bool { return info.Mode().Perm()&0o022 != 0 }

// trustedOwner tells which users' files may be run: root's and our own. In a
// user namespace root's files on the host appear as the overflow user's, as do
// those of everybody who is not mapped; there that user is taken for root, for
// such a process has no privilege on the host that others could gain by it. In
// the first namespace that user is an ordinary one, and is not.
func trustedOwner(euid int, uidMap, overflow string) func(uint32) bool {
	nobody := int64(-1)
	if m, err := os.ReadFile(uidMap); err == nil && !mapsEverybody(m) {
		if text, err := os.ReadFile(overflow); err == nil {
			if n, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64); err == nil {
				nobody = n
			}
		}
	}
	return func(uid uint32) bool {
		return uid == 0 || int64(uid) == int64(euid) || int64(uid) == nobody
	}
}

// mapsEverybody reports whether a uid_map is that of the first user namespace.
func mapsEverybody(m []byte) bool {
	return strings.Join(strings.Fields(string(m)), " ") == "0 0 4294967295"
}
