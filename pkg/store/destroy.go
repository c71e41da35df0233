// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Destroy removes the dataDir with all that is ours in it. What others put there
// stays, and with it the directory. The lock ends with it: who waits for it
// finds out that it is no longer in force, and begins anew.
func (l *Lock) Destroy() error {
	const op = "remove"
	if err := l.held(op, l.dir.path); err != nil {
		return err
	}
	var errs []error
	for s := range l.staged {
		errs = append(errs, s.Discard())
	}
	ours := []string{attachmentsDir, backupsDir, sourcesDir, recordFile, recordFile + damagedSuffix, leadFile, lockFile}
	names, err := l.root.names()
	errs = append(errs, err)
	for _, name := range names {
		if !slices.Contains(ours, name) && !strings.HasSuffix(name, tempSuffix) {
			continue
		}
		if err := l.root.removeAll(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	err = unix.Rmdir(l.dir.path)
	stays := []error{unix.ENOTEMPTY, unix.EBUSY} // others' files are there, or it is mounted
	if err != nil && !slices.ContainsFunc(append(stays, unix.ENOENT), func(e error) bool { return errors.Is(err, e) }) {
		errs = append(errs, failure(op, l.dir.path, err))
	}
	return errors.Join(errs...)
}
