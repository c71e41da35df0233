// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// leadFile is locked by whoever keeps the node right all the time.
const leadFile = "reconciler.lock"

// InstanceLock is the right to be the one reconciler of the node that runs all the time.
// It is apart from the Lock, which everybody has for moments. It is an flock(2),
// so it ends with the process.
type InstanceLock struct {
	file *os.File
	path string
}

// InstanceLock takes the lead, and creates the dataDir first where it is missing. The
// error is an ErrBusy where somebody else has it.
func (d *Dir) InstanceLock() (*InstanceLock, error) {
	const op = "take the lead by"
	root, err := d.makeDataDir()
	if err != nil {
		return nil, err
	}
	defer root.close()
	fd, _, err := root.open(op, leadFile, unix.O_RDWR)
	if errors.Is(err, os.ErrNotExist) {
		if fd, err = root.create(op, leadFile); errors.Is(err, os.ErrExist) {
			fd, _, err = root.open(op, leadFile, unix.O_RDWR)
		}
	}
	if err != nil {
		return nil, err
	}
	path := root.in(leadFile)
	_, err = uninterrupted(func() (int, error) { return 0, unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another ip-masq-reconciler runs on this node: %s: %w", shown(path), ErrBusy)
	}
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return &InstanceLock{file: os.NewFile(uintptr(fd), path), path: path}, nil
}

// Held reports whether the lead is that which others would ask for: somebody may
// have removed the whole dataDir meanwhile. Nil is not held.
func (l *InstanceLock) Held() bool {
	return l != nil && l.file != nil && isAt(int(l.file.Fd()), l.path)
}

// Release ends the lead. Twice is fine.
func (l *InstanceLock) Release() error {
	if l == nil || l.file == nil {
		return nil
	}
	err := l.file.Close()
	l.file = nil
	return err
}
