// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Destroy removes what ip-masq wrote into the dataDir, and the directory if that
// was all. The lock ends with it: a process that waits for it finds out that it is
// no longer in force, and begins anew.
func (l *Lock) Destroy() error {
	const op = "remove"
	if err := l.held(op, l.dir.path); err != nil {
		return err
	}
	var errs []error
	for s := range l.staged {
		errs = append(errs, s.Discard())
	}
	// The lock goes when nothing is left for it to protect, and then the marker.
	last := func(name string) (entry, bool) { return entry{}, name == lockFile || name == markerFile }
	if err := errors.Join(append(errs, l.root.clear(inDataDir, lockFile, markerFile))...); err != nil {
		return err
	}
	if err := l.root.clear(last); err != nil {
		return err
	}
	err := unix.Rmdir(l.dir.path)
	switch {
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY): // another program's files are there, or it is a mount point
		if _, err := l.root.recognize(inDataDir, lockFile); err == nil { // or a process that waited has a lock of its own by now
			return l.root.mark()
		}
		return nil
	case ignoring(err, unix.ENOENT) != nil:
		return failure(op, l.dir.path, err)
	}
	return nil
}
