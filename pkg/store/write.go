// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	writeDocument  = "write document"
	removeDocument = "remove document"
)

// Staged is a change of a document that Commit puts in force and Discard undoes: a new document that is
// written and synced under a temporary name, or a document that was dropped.
type Staged struct {
	lock       *Lock
	folder     *folder
	temp, name string
	cache      string // the verification cache of a dropped document, which is removed too
}

// Stage writes the document of a source without putting it in force, so that only a rename is left when
// the rules stand. It refuses a document that Load would not return unchanged, and to replace one of a
// newer version (ErrNewer). In a dry run it returns nil.
func (l *Lock) Stage(c policy.Source) (*Staged, error) {
	name := nameOf(c.ID)
	if err := l.held(writeDocument, l.document(name)); err != nil {
		return nil, err
	}
	data, err := encodeContribution(c)
	if err != nil {
		return nil, fmt.Errorf("%s %s of %s: %w", writeDocument, shown(l.document(name)), c.ID, bounded(err))
	}
	sources, err := l.sources()
	if err != nil {
		return nil, err
	}
	s, err := l.stage(sources, name, data)
	if s == nil {
		sources.close()
	}
	if l.dry {
		l.planned += blocks(len(data))
	}
	return s, err
}

func (l *Lock) document(name string) string { return l.root.in(sourcesDir) + "/" + name }

// sources opens the directory of the documents, and creates a missing one.
func (l *Lock) sources() (*folder, error) {
	if l.root.fd < 0 {
		return missing(l.root.in(sourcesDir)), nil
	}
	f, err := l.root.folder(sourcesDir, false)
	if !errors.Is(err, os.ErrNotExist) {
		return f, err
	}
	if l.dry {
		return missing(l.root.in(sourcesDir)), nil
	}
	if f, err = l.root.folder(sourcesDir, true); err != nil {
		return nil, err
	}
	if err := l.root.sync(); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// stage writes a temporary file that is to become the named one.
func (l *Lock) stage(f *folder, name string, data []byte) (*Staged, error) {
	if err := f.newer(writeDocument, name); err != nil {
		return nil, err
	}
	if l.dry {
		return nil, l.mayStage(f, len(data))
	}
	s := &Staged{lock: l, folder: f, name: name, temp: name + "." + random() + tempSuffix}
	// Errors name the document and not the temporary file, so that the same error has the same text.
	fd, err := f.createFor(writeDocument, s.temp, name)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), s.temp)
	if _, err = file.Write(data); err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		var path *fs.PathError
		if errors.As(err, &path) {
			err = path.Err
		}
		return nil, errors.Join(failure(writeDocument, f.in(name), err), f.remove(s.temp))
	}
	l.staged[s] = true
	return s, nil
}

// random returns a part of a file name that no other file has.
func random() string { return strconv.FormatUint(rand.Uint64(), 36) }

// newer fails if a newer version wrote the file. A damaged one may be replaced.
func (f *folder) newer(op, name string) error {
	data, err := f.read(name)
	if isOurs(err) {
		return err
	}
	if err != nil {
		return nil //nolint:nilerr // absent or damaged: that is no newer one
	}
	if schema, err := schemaOf(data); err == nil && schema > Schema {
		return fmt.Errorf("%s %s: %w", op, shown(f.in(name)), &newerError{schema})
	}
	return nil
}

// Commit puts a new document in force, or removes a dropped one, and makes that durable. If only the
// latter fails, it returns the error and the document is in force. It may be called on nil.
func (s *Staged) Commit() error {
	if s == nil {
		return nil
	}
	if !s.lock.staged[s] {
		return fmt.Errorf("%s %s: it is no longer staged: it was committed or discarded, or the lock was released",
			writeDocument, shown(s.folder.in(s.name)))
	}
	var err error
	if s.cache != "" {
		err = errors.Join(s.folder.remove(s.cache), s.folder.remove(s.temp))
	} else {
		err = s.folder.replace(writeDocument, s.temp, s.name)
	}
	if err != nil {
		return err
	}
	defer s.forget()
	return s.folder.sync()
}

// Discard removes what was staged, and restores what was dropped. It does nothing after Commit, Discard
// or the release of the lock, nor on nil.
func (s *Staged) Discard() error {
	if s == nil || !s.lock.staged[s] {
		return nil
	}
	defer s.forget()
	if s.cache != "" {
		return s.folder.replace(writeDocument, s.temp, s.name)
	}
	return s.folder.remove(s.temp)
}

func (s *Staged) forget() {
	delete(s.lock.staged, s)
	if s.folder != s.lock.root {
		s.folder.close()
	}
}

// Drop takes the document of a source out of force, so that attachments can be counted again before the
// caller commits: an ADD that attaches later finds no document, and waits for the lock. It is no error if
// there is no document; one of a newer version stays (ErrNewer).
func (l *Lock) Drop(src policy.SourceID) (*Staged, error) {
	name := nameOf(src)
	if err := l.held(removeDocument, l.document(name)); err != nil {
		return nil, err
	}
	sources, err := l.root.folder(sourcesDir, false)
	if err != nil {
		return nil, ignoring(err, os.ErrNotExist)
	}
	s := &Staged{lock: l, folder: sources, name: name, temp: name + droppedSuffix, cache: verificationCacheName(src)}
	if _, err = sources.recognize(inSources, name); err == nil {
		err = sources.newer(removeDocument, name)
	}
	if err == nil {
		if err = unix.Renameat(sources.fd, name, sources.fd, s.temp); err != nil {
			err = failure(removeDocument, sources.in(name), err)
		}
	}
	if err != nil {
		sources.close()
		return nil, ignoring(err, os.ErrNotExist)
	}
	l.staged[s] = true
	return s, nil
}

// undoDrops restores what a killed process had dropped and not committed: an ADD may rely on it. What
// fails here fails again when the documents are read.
func (l *Lock) undoDrops() {
	sources, err := l.root.folder(sourcesDir, false)
	if err != nil {
		return
	}
	defer sources.close()
	names, _ := sources.names()
	for _, name := range names {
		document, isOne := strings.CutSuffix(name, droppedSuffix)
		if _, err := sources.recognize(inSources, name); !isOne || err != nil {
			continue
		}
		if _, err := sources.recognize(inSources, document); errors.Is(err, os.ErrNotExist) {
			_ = sources.replace(writeDocument, name, document)
		} else {
			_ = sources.remove(name) // the document was written again
		}
	}
}

// PutRecord replaces the record, unless the stored one is equal. One of a newer version stays (ErrNewer).
func (l *Lock) PutRecord(r Record) error {
	path := l.root.in(recordFile)
	if err := l.held(writeDocument, path); err != nil {
		return err
	}
	if data, err := l.root.read(recordFile); err == nil {
		if stored, err := decodeRecord(data); err == nil && stored.Equal(r) {
			return nil
		}
	}
	data, err := encodeRecord(r)
	if err != nil {
		return fmt.Errorf("%s %s: %w", writeDocument, shown(path), err)
	}
	s, err := l.stage(l.root, recordFile, data)
	if err != nil {
		return err
	}
	if err := s.Commit(); err != nil {
		return errors.Join(err, s.Discard())
	}
	return nil
}

// Written returns when the document of a source was last written, by its mtime: the zero Time if there
// is none.
func (d *Dir) Written(src policy.SourceID) (time.Time, error) {
	f, err := d.descend(false, sourcesDir)
	if err != nil {
		return time.Time{}, ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	var st unix.Stat_t
	if err := unix.Fstatat(f.fd, nameOf(src), &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return time.Time{}, ignoring(failure("look at document", f.in(nameOf(src)), err), unix.ENOENT)
	}
	return time.Unix(st.Mtim.Unix()), nil
}

// Tidy renames the damaged files of the State to their name with ".damaged", replacing an earlier one.
// It removes temporary files of killed processes, and the attachments of earlier boots. If there is
// nothing to do, it writes nothing.
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
	boot, err := l.dir.boot()
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	attachments, err := l.root.folder(attachmentsDir, false)
	if err == nil {
		err = attachments.clear(inAttachments, boot)
		attachments.close()
	}
	return errors.Join(append(errs, ignoring(err, os.ErrNotExist))...)
}

// tidyDocuments tidies the directory of the record, or that of the documents.
func (l *Lock) tidyDocuments(f *folder, of layout, s State) error {
	names, err := f.names()
	if err != nil {
		return err
	}
	keep, damaged := map[string]bool{}, map[string]bool{}
	for s := range l.staged {
		keep[s.folder.in(s.temp)] = true
	}
	for _, d := range s.Damaged {
		damaged[d.File] = true
	}
	var errs []error
	for _, name := range names {
		switch {
		case strings.HasSuffix(name, tempSuffix) && !keep[f.in(name)]:
			if _, err := f.recognize(of, name); err == nil {
				errs = append(errs, f.remove(name))
			}
		case damaged[f.in(name)]:
			errs = append(errs, f.moveAside(name))
		}
	}
	return errors.Join(errs...)
}

// moveAside renames a document if it is still damaged: another process may have replaced it before the
// lock was taken.
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
	if err != nil && ignoring(err, unix.EISDIR, unix.ENOTDIR, unix.ENOTEMPTY, unix.EEXIST) == nil { // a directory stays
		return f.replace(op, name, name+"."+random()+damagedSuffix)
	}
	return err
}

// Destroy removes what ip-masq wrote into the dataDir, and the directory if it is empty then. The lock
// ends: a process that waits for it notices that the file is gone, and starts again.
func (l *Lock) Destroy() error {
	const op = "remove"
	if err := l.held(op, l.dir.path); err != nil {
		return err
	}
	var errs []error
	for s := range l.staged {
		errs = append(errs, s.Discard())
	}
	// The lock is removed when nothing is left to protect, the marker last.
	last := func(name string) (entry, bool) { return entry{}, name == lockFile || name == markerFile }
	if err := errors.Join(append(errs, l.root.clear(inDataDir, lockFile, markerFile))...); err != nil {
		return err
	}
	if err := l.root.clear(last); err != nil {
		return err
	}
	err := unix.Rmdir(l.dir.path)
	switch {
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EBUSY): // files of another program, or a mount point
		if _, err := l.root.recognize(inDataDir, lockFile); err == nil { // a process that waited has locked a new file
			return l.root.mark()
		}
		return nil
	case ignoring(err, unix.ENOENT) != nil:
		return failure(op, l.dir.path, err)
	}
	return nil
}
