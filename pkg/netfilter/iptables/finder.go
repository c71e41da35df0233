// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// finder looks for programs that only root can write: they run with all privileges of a runtime.
type finder struct {
	path    string // as $PATH
	trusted func(uid uint32) bool
}

func newFinder(path string) finder { return finder{path: path, trusted: isTrusted} }

// isTrusted reports whether a user is root, the user of this process, or the owner of the root
// directory: in a user namespace the host's root appears as another user.
func isTrusted(uid uint32) bool {
	if uid == 0 || int64(uid) == int64(os.Geteuid()) {
		return true
	}
	var top unix.Stat_t
	err := unix.Stat("/", &top)
	return err == nil && uid == top.Uid
}

// find returns the absolute path of the first of the names that exists anywhere in PATH.
func (f finder) find(names ...string) (string, error) {
	var skipped []string
	for _, name := range names {
		for _, dir := range filepath.SplitList(f.path) {
			path := filepath.Join(dir, name)
			err := f.check(path)
			if err == nil {
				return path, nil
			}
			if !errors.Is(err, fs.ErrNotExist) {
				skipped = append(skipped, "; passed over "+err.Error())
			}
		}
	}
	slices.Sort(skipped)
	return "", fmt.Errorf("find %s: %w in PATH %q; install iptables, use the image whose tag ends in "+
		"-iptables, or add the directory that holds it (often /usr/sbin) to PATH%s",
		strings.Join(names, " or "), fs.ErrNotExist, f.path, strings.Join(slices.Compact(skipped), ""))
}

// check returns why a program is not run.
func (f finder) check(path string) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%s (not absolute)", path)
	}
	info, err := f.resolve(path)
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() || info.Mode()&0o111 == 0 {
		return fmt.Errorf("%s (not an executable file)", path)
	}
	if writableByOthers(info) {
		return fmt.Errorf("%s (writable by others)", path)
	}
	return nil
}

// resolve returns the file that an absolute path leads to after all symbolic links. It fails if
// another user owns the file, or a directory or link on the way, or can write such a directory. In a
// sticky directory only its owner can replace an entry, so it is safe on the way. The program itself
// must not lie in one: anybody could have made a file there.
func (f finder) resolve(path string) (fs.FileInfo, error) {
	const maxLinks = 40 // as in the kernel, path_resolution(7)
	at := "/"           // has no links in it
	info, err := f.lstat(at)
	if err != nil {
		return nil, err
	}
	links := 0
	for rest := strings.Split(path, "/"); len(rest) > 0; {
		isLast := len(rest) == 1
		isSticky := info.Mode()&fs.ModeSticky != 0
		isSafe := isSticky && !isLast
		if writableByOthers(info) && !isSafe {
			return nil, fmt.Errorf("%s (writable by others)", at)
		}
		next := filepath.Join(at, rest[0])
		rest = rest[1:]
		info, err = f.lstat(next)
		if err != nil {
			return nil, err
		}
		if info.Mode().Type() != fs.ModeSymlink {
			at = next
			continue
		}
		target, err := os.Readlink(next)
		if err != nil {
			return nil, err
		}
		links++
		if links > maxLinks {
			return nil, &fs.PathError{Op: "resolve", Path: path, Err: syscall.ELOOP}
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
		info, err = f.lstat(at)
		if err != nil {
			return nil, err
		}
	}
	return info, nil
}

// lstat fails for a file that a user who is not trusted owns.
func (f finder) lstat(path string) (fs.FileInfo, error) {
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
