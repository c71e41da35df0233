// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

const (
	lockOp         = "lock"
	readDocument   = "read document"
	writeDocument  = "write document"
	removeDocument = "remove document"
)

// Staged is a change of a document that Commit applies and Discard drops: a new document that is
// written and synced under a temporary name, or a document that was dropped.
type Staged struct {
	lock       *Lock
	folder     *folder
	temp, name string
	cache      string // the verification cache of a dropped document, which is removed too
	durable    bool   // it is synced
	damaged    bool   // the document that it replaces cannot be used
}

// Put replaces the document of a source. It refuses a document that Load would not return unchanged, and to replace one of
// a newer version (ErrNewer). A damaged one is moved aside.
func (l *Lock) Put(c policy.Source) error {
	s, err := l.Stage(c)
	if err == nil {
		err = s.Commit()
	}
	return errors.Join(err, s.Discard())
}

// Stage writes the document of a source without putting it in force, so that only a rename is left when
// the rules are written. It refuses a document that Load would not return unchanged, and to replace one of
// a newer version (ErrNewer). In a dry run it returns nil.
func (l *Lock) Stage(c policy.Source) (*Staged, error) {
	if l.err != nil {
		return nil, l.err
	}
	name := nameOf(c.ID)
	path := l.dir.DocumentPath(c.ID)
	data, err := encodeSource(c)
	if err != nil {
		return nil, fmt.Errorf("%s %s of %s: %w", writeDocument, shown(path), c.ID, bounded(err))
	}
	sources, err := l.sources(false)
	if errors.Is(err, os.ErrNotExist) {
		if l.dry {
			return nil, l.mayStage(filepath.Dir(path), data)
		}
		if sources, err = l.sources(true); err == nil {
			// The process that made the dataDir may have been killed before it synced the directory above.
			err = errors.Join(l.root.sync(), l.root.syncParent())
		}
	}
	if err != nil {
		return nil, err
	}
	s, err := l.stage(sources, name, data, true)
	if s == nil {
		sources.close()
		return nil, err
	}
	now := sources.stored(name)
	s.damaged = len(now.Damaged) > 0
	if len(now.Sources) == 1 && samePolicy(now.Sources[0], c) {
		// Without its time, the policy would look newer; no more depends on it.
		_ = sources.copyTime(name, s.temp)
	}
	return s, nil
}

// samePolicy reports whether documents of a source differ in nothing but the subnets of its pods and where it comes from.
func samePolicy(a, b policy.Source) bool {
	a.PodSubnets, b.PodSubnets = nil, nil
	a.ConfDir, b.ConfDir = "", ""
	return reflect.DeepEqual(a, b)
}

// sources opens the directory of the documents. Without a dataDir, in a dry run, there is none.
func (l *Lock) sources(create bool) (*folder, error) {
	if l.root == nil {
		return nil, os.ErrNotExist
	}
	return l.root.folder(sourcesDir, create)
}

// mayStage returns why no file with this data could be staged in a directory, beside those that were
// staged in this dry run.
func (l *Lock) mayStage(dir string, data []byte) error {
	const block = 4096
	l.planned += (len(data) + block - 1) / block * block
	return mayCreate(dir, l.planned)
}

// stage writes a temporary file that is to become the named one.
func (l *Lock) stage(f *folder, name string, data []byte, durable bool) (*Staged, error) {
	if err := f.newer(writeDocument, name); err != nil {
		return nil, err
	}
	if l.dry {
		return nil, l.mayStage(f.path(), data)
	}
	s := &Staged{lock: l, folder: f, name: name, durable: durable, temp: safefile.TempName(name + ".")}
	// Errors name the document and not the temporary file, so that the same error has the same text.
	file, err := f.create(writeDocument, s.temp, name)
	if err != nil {
		return nil, err
	}
	fill := safefile.Fill
	if !durable {
		fill = overwrite
	}
	if err = fill(file, data); err != nil {
		return nil, errors.Join(failure(writeDocument, f.in(name), err), f.remove(s.temp))
	}
	l.staged[s] = true
	return s, nil
}

// newer fails if a newer version wrote the file. A damaged one may be replaced.
func (f *folder) newer(op, name string) error {
	now, err := f.document(name)
	if schema := schemaOf(now.data); schema > Schema() {
		return fmt.Errorf("%s %s: %w", op, shown(f.in(name)), newerError(schema))
	}
	return ignoring(err, os.ErrNotExist)
}

// Commit makes a new document the current one, or removes a dropped one, and syncs the directory. If only the
// latter fails, it returns the error and the document is in force. A damaged document is moved aside, and not
// before the new one is complete. It may be called on nil.
func (s *Staged) Commit() error {
	if s == nil {
		return nil
	}
	var err error
	if s.damaged {
		err = ignoring(s.folder.moveAside(s.name), os.ErrNotExist)
	}
	switch {
	case s.cache != "":
		err = errors.Join(s.folder.remove(s.cache), s.folder.remove(s.temp))
	case err == nil:
		err = s.folder.replace(writeDocument, s.temp, s.name)
	}
	if err != nil {
		return err
	}
	defer s.forget()
	if !s.durable {
		return nil
	}
	return s.folder.sync()
}

// Discard removes a staged document, and restores a dropped one. It does nothing after Commit, Discard
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
	sources, err := l.sources(false)
	if err != nil {
		return nil, ignoring(err, os.ErrNotExist)
	}
	s := &Staged{lock: l, folder: sources, name: name, durable: true, temp: name + droppedSuffix, cache: verificationCacheName(src)}
	if _, err = sources.recognize(inSources, name); err == nil {
		err = sources.newer(removeDocument, name)
	}
	if err == nil {
		err = sources.replace(removeDocument, name, s.temp)
	}
	if err != nil {
		sources.close()
		return nil, ignoring(err, os.ErrNotExist)
	}
	l.staged[s] = true
	return s, nil
}

// undoDrops restores documents that a killed process had dropped and not committed: an ADD may rely on
// them. An error here returns when the documents are read.
func (l *Lock) undoDrops() {
	_ = l.root.within(sourcesDir, func(sources *folder) error {
		names, err := sources.names()
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
		return err
	})
}

// PutRecord replaces the record and the exempt pods, each unless the stored one is equal. One of a newer version stays
// (ErrNewer). The pods are not synced.
func (l *Lock) PutRecord(r Record) error {
	record, err := encodeRecord(r)
	if err != nil {
		return fmt.Errorf("%s %s: %w", writeDocument, shown(l.dir.RecordPath()), err)
	}
	pods, err := encodePods(r)
	if err = cmp.Or(err, l.err); err != nil {
		return err
	}
	err = l.put(recordFile, record, func(stored []byte) bool {
		before, err := decodeRecord(stored)
		return err != nil || !before.sameAfterCrash(r)
	})
	if err != nil {
		return err
	}
	if len(r.Namespaces) == 0 && (l.root == nil || !l.root.has(podsFile)) {
		return nil
	}
	return l.put(podsFile, pods, func([]byte) bool { return false })
}

// put replaces a file of the dataDir, unless the stored one is equal. The function returns whether it has to survive a crash.
func (l *Lock) put(name string, data []byte, durable func(stored []byte) bool) error {
	if l.root == nil { // in a dry run
		return l.mayStage(l.dir.path, data)
	}
	stored, err := l.root.read(name)
	if err == nil && bytes.Equal(stored, data) {
		return nil
	}
	s, err := l.stage(l.root, name, data, durable(stored))
	if err == nil {
		err = s.Commit()
	}
	return errors.Join(err, s.Discard())
}

// Written returns when the policy of a source last changed: the mtime of its document, which learned subnets keep. It is
// the zero Time if there is none.
func (d *Dir) Written(src policy.SourceID) (time.Time, error) {
	info, err := os.Lstat(d.DocumentPath(src))
	if err != nil {
		return time.Time{}, failure("stat document", d.DocumentPath(src), ignoring(err, os.ErrNotExist))
	}
	return info.ModTime(), nil
}

// Tidy removes temporary files, which killed processes left, and the attachments of earlier boots, and moves a
// damaged record aside. If there is nothing to do, it writes nothing. Callers stage after it.
func (l *Lock) Tidy(s State) error {
	if mayWrite := !l.dry && l.err == nil; !mayWrite {
		return nil
	}
	boot, err := l.dir.boot()
	errs := []error{err, l.root.tidy(inDataDir), l.root.within(sourcesDir, func(f *folder) error { return f.tidy(inSources) })}
	for _, name := range []string{recordFile, podsFile} {
		if len(s.Damaged) > 0 && len(l.root.stored(name).Damaged) > 0 {
			errs = append(errs, l.root.moveAside(name))
		}
	}
	if err == nil {
		errs = append(errs, l.root.within(attachmentsDir, func(f *folder) error { return f.clear(inAttachments, boot) }))
	}
	return errors.Join(errs...)
}

// tidy removes temporary files from the directory of the record, or from that of the documents.
func (f *folder) tidy(of layout) error {
	names, err := f.names()
	errs := []error{err}
	for _, name := range names {
		if _, err := f.recognize(of, name); err == nil && strings.HasSuffix(name, safefile.TempSuffix) {
			errs = append(errs, f.remove(name))
		}
	}
	return errors.Join(errs...)
}

// moveAside renames a document to its name with ".damaged", replacing an earlier one.
func (f *folder) moveAside(name string) error {
	const op = "move damaged document aside to"
	err := f.replace(op, name, name+damagedSuffix)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTDIR) { // an earlier one, which stays
		return f.replace(op, name, safefile.TempName(name+".")+damagedSuffix)
	}
	return err
}

// Destroy removes the files of ip-masq in the dataDir, and the directory if it is empty then. The lock
// ends: a process that waits for it notices that the file is gone, and starts again.
func (l *Lock) Destroy() error {
	const op = "remove"
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
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EBUSY) { // files of another program, or a mount point
		names, err := l.root.names()
		for _, name := range names { // a process that waited has locked a new file, or an ADD has attached
			if _, errName := l.root.recognize(inDataDir, name); errName == nil {
				return l.root.mark()
			}
		}
		return err
	}
	return failure(op, l.dir.path, ignoring(err, unix.ENOENT))
}

// has reports whether there is an entry of this name.
func (f *folder) has(name string) bool {
	var st unix.Stat_t
	return unix.Fstatat(f.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil
}
