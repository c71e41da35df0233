// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Tidy moves aside what the State has as damaged, under its name with
// ".damaged" behind it, where an older one is replaced. It removes temporary
// files that a process left behind when it was killed, and the attachments of
// earlier boots. Where nothing is to be done it writes nothing.
func (l *Lock) Tidy(s State) error {
	if err := l.held("tidy", l.dir.path); err != nil || l.dry {
		return err
	}
	errs := []error{l.tidyDocuments(l.root, inDataDir, s)}
	sources, err := l.root.folder(sourcesDir, false)
	if err == nil {
		err = l.tidyDocuments(sources, inSources, s)
		sources.close()
	}
	errs = append(errs, ignoring(err, os.ErrNotExist))
	return errors.Join(append(errs, l.dropEarlierBoots())...)
}

// tidyDocuments tidies the directory of the record, or that of the documents.
func (l *Lock) tidyDocuments(f *folder, of layout, s State) error {
	names, err := f.names()
	if err != nil {
		return err
	}
	damaged := map[string]bool{}
	for _, d := range s.Damaged {
		damaged[d.File] = true
	}
	var errs []error
	for _, name := range names {
		switch {
		case strings.HasSuffix(name, tempSuffix) && !l.isStaged(f, name):
			if _, err := f.recognize(of, name); err == nil {
				errs = append(errs, f.remove(name))
			}
		case damaged[f.in(name)]:
			errs = append(errs, f.moveAside(name))
		}
	}
	return errors.Join(errs...)
}

// isStaged reports whether a temporary file is one that this lock's holder has
// yet to commit.
func (l *Lock) isStaged(f *folder, name string) bool {
	for s := range l.staged {
		if s.folder.path == f.path && s.temp == name {
			return true
		}
	}
	return false
}

// moveAside renames a document that is damaged still: it was read before the
// lock was had, and somebody may have replaced it since.
func (f *folder) moveAside(name string) error {
	now, err := f.file(name)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	if !now.damaged() {
		return nil
	}
	const op = "move damaged document aside to"
	err = f.replace(op, name, name+damagedSuffix)
	if err != nil && ignoring(err, unix.EISDIR, unix.ENOTDIR, unix.ENOTEMPTY, unix.EEXIST) == nil { // a directory, which is left as it is
		return f.replace(op, name, name+"."+random()+damagedSuffix)
	}
	return err
}

// dropEarlierBoots removes all attachments but those of the running boot: their
// containers went with the kernel that they ran on.
func (l *Lock) dropEarlierBoots() error {
	boot, err := l.dir.boot()
	if err != nil {
		return err
	}
	f, err := l.root.folder(attachmentsDir, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	return f.clear(inAttachments, boot)
}
