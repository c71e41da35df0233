// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

var (
	// ErrRefused tells that a directory or file cannot be trusted: it is a
	// symlink, another user's, writable by others, or of the wrong type.
	ErrRefused = errors.New("refused")
	// ErrBusy tells that another process held the lock for too long.
	ErrBusy = errors.New("another process holds it")
	// ErrNewer tells that a newer version wrote a document, which therefore
	// stays as it is.
	ErrNewer = errors.New("a newer version wrote it")
	// ErrReleased tells that a lock was used after its release.
	ErrReleased = errors.New("the lock is released")
)

// failure wraps an error with the operation, its path and what to do about it.
func failure(op, path string, err error) error {
	return fmt.Errorf("%s %s: %w%s", op, shown(path), err, remedy(err))
}

func remedy(err error) string {
	var no unix.Errno
	if !errors.As(err, &no) {
		return ""
	}
	switch no {
	case unix.ENOSPC, unix.EDQUOT:
		return "; free space or inodes on its file system"
	case unix.EROFS:
		return "; mount its file system writable, or set another dataDir"
	case unix.EACCES, unix.EPERM:
		return "; run as its owner, and see its mode and attributes (lsattr)"
	case unix.EMFILE, unix.ENFILE:
		return "; raise the limit on open files"
	case unix.EIO:
		return "; check the disk"
	case unix.ENOLCK, unix.EOPNOTSUPP:
		return "; set a dataDir on a local file system"
	default:
		return ""
	}
}

// distrust returns ErrRefused, with what is wrong and the remedy, for what only
// root or the user of this process may own and write, and is not so.
func distrust(op, path string, st *unix.Stat_t, format uint32) error {
	var problem, todo string
	self := os.Geteuid()
	switch kind := st.Mode & unix.S_IFMT; {
	case kind == unix.S_IFLNK:
		problem, todo = "it is a symbolic link", "put what it points to in its place, or name that"
	case kind != format && format == unix.S_IFDIR:
		problem, todo = "it is not a directory", "move it away"
	case kind != format:
		problem, todo = "it is not a regular file", "move it away"
	case st.Uid != 0 && int64(st.Uid) != int64(self):
		problem = fmt.Sprintf("it belongs to user %d, and this process runs as user %d", st.Uid, self)
		todo = fmt.Sprintf("look who wrote it, then chown it to %d or move it away", self)
	case st.Mode&0o022 != 0:
		problem = fmt.Sprintf("users other than its owner can write it (mode %04o)", st.Mode&0o7777)
		todo = "look who did, then chmod go-w it"
	default:
		return nil
	}
	return fmt.Errorf("%s %s: %w: %s; %s", op, shown(path), ErrRefused, problem, todo)
}

// shown writes a path into a message: as it is where it reads as one word.
func shown(path string) string {
	odd := func(r rune) bool { return r <= ' ' || r > '~' || r == '"' || r == '\\' }
	if path == "" || len(path) > 256 || strings.ContainsFunc(path, odd) {
		return policy.Quote(path)
	}
	return path
}

// bounded keeps short what an error repeats of a document.
func bounded(err error) error {
	const most = 512
	if text := err.Error(); len(text) > most {
		return errors.New(policy.Quote(text))
	}
	return err
}

// uninterrupted repeats a system call that a signal interrupts, as file systems
// over a network or in user space let happen.
func uninterrupted(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
