// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// maxDocument is the most bytes a document may have. A million prefixes, the
// most that cidrLimit allows, take a fifth of it.
const maxDocument = 256 << 20

// open opens a regular file of ours. Neither a FIFO nor a device makes it wait.
func (f *folder) open(op, name string, flags int) (int, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := uninterrupted(func() (int, error) {
		return unix.Openat(f.fd, name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, fileMode)
	})
	if err != nil {
		return -1, st, whyNot(op, f.fd, name, f.in(name), unix.S_IFREG, err)
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

// readAll reads a file of the given size. Documents are never written in place,
// so that is all there is, unless somebody else writes: then it is torn, which
// the decoder finds.
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

// create makes a file that is not there yet, and returns it open for writing.
func (f *folder) create(op, name string) (int, error) { return f.createFor(op, name, name) }

// createFor is create, of a file that is to become another, which errors name.
func (f *folder) createFor(op, name, shown string) (int, error) {
	fd, err := uninterrupted(func() (int, error) {
		return unix.Openat(f.fd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, fileMode)
	})
	if err != nil {
		return -1, failure(op, f.in(shown), err)
	}
	if err := unix.Fchmod(fd, fileMode); err != nil { // the umask may have taken bits away
		return -1, errors.Join(failure(op, f.in(shown), err), unix.Close(fd), f.remove(name))
	}
	return fd, nil
}

// replace renames a file over another.
func (f *folder) replace(op, from, to string) error {
	if err := unix.Renameat(f.fd, from, f.fd, to); err != nil {
		return failure(op, f.in(to), err)
	}
	return nil
}

// remove removes a file. One that is absent is fine, even where the kernel says
// first that nothing can be removed.
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
