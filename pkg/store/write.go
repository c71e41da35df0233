// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
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

// Put replaces the document of a source, and syncs it. It refuses a document that Load would not return
// unchanged, and to replace one of a newer version (ErrNewer). A damaged one is moved aside, once the new one
// is complete. If only the sync of the directory fails, it returns the error and the document is in force.
func (l *Lock) Put(c policy.Source) error {
	name := nameOf(c.ID)
	data, err := encode(document{Schema(), c})
	if err != nil {
		return fmt.Errorf("%s %s of %s: %w",
			writeDocument, shown(l.dir.DocumentPath(c.ID)), c.ID, bounded(err))
	}
	sources, err := l.makeSources()
	if err != nil {
		return err
	}
	defer sources.close()
	before, err := sources.readUnlessNewer(writeDocument, name)
	if err != nil {
		return err
	}
	temp, err := sources.stage(writeDocument, name, data, safefile.Fill)
	if err != nil {
		return err
	}
	stored := before.state()
	if len(stored.Sources) == 1 && samePolicy(stored.Sources[0], c) {
		// Without its time, the policy would look newer; no more depends on it.
		sources.copyTime(name, temp)
	}
	isDamaged := len(stored.Unreadable) > 0
	if err := sources.publish(temp, name, isDamaged); err != nil {
		return err
	}
	return sources.sync()
}

// samePolicy reports whether documents of a source differ in nothing but the subnets of its pods and where it
// comes from.
func samePolicy(a, b policy.Source) bool {
	a.PodSubnets, b.PodSubnets = nil, nil
	a.ConfDir, b.ConfDir = "", ""
	return reflect.DeepEqual(a, b)
}

// makeSources opens the directory of the documents, and creates it first if it is missing.
func (l *Lock) makeSources() (*folder, error) {
	sources, err := l.root.folder(sourcesDir, false)
	if !errors.Is(err, os.ErrNotExist) {
		return sources, err
	}
	sources, err = l.root.folder(sourcesDir, true)
	if err != nil {
		return nil, err
	}
	// The process that made the dataDir may have been killed before it synced the directory above.
	err = errors.Join(l.root.sync(), l.root.syncParent())
	if err != nil {
		sources.close()
		return nil, err
	}
	return sources, nil
}

// stage writes what is to replace a file under a temporary name, which it returns. The function that fills
// the file syncs it, if it has to survive a crash, and closes it.
func (f *folder) stage(
	op, name string, data []byte, fill func(*os.File, []byte) error,
) (temp string, err error) {
	// Errors name the final file and not the temporary one, so that the same error has the same text.
	temp = safefile.TempName(name + ".")
	file, err := f.create(op, temp, name)
	if err != nil {
		return "", err
	}
	err = failure(op, f.in(name), fill(file, data))
	if err != nil {
		return "", errors.Join(err, f.remove(temp))
	}
	return temp, nil
}

// publish replaces a file by one that was staged, and moves a damaged one aside.
func (f *folder) publish(temp, name string, isDamaged bool) error {
	var err error
	if isDamaged {
		err = f.keepDamaged(name)
	}
	if err == nil {
		err = f.replace(writeDocument, temp, name)
	}
	if err != nil {
		return errors.Join(err, f.remove(temp))
	}
	return nil
}

// keepDamaged gives a damaged document a second name, which it keeps when it is replaced. So a process that
// is killed before that leaves a damaged document and not none: without a document its rules would be
// removed.
func (f *folder) keepDamaged(name string) error {
	kept := name + damagedSuffix
	_ = f.remove(kept) // if that fails, so does what follows
	err := unix.Linkat(f.fd(), name, f.fd(), kept, 0)
	if err == nil {
		return nil
	}
	// This file system has no hard links.
	return ignoring(f.replace("move damaged document aside to", name, kept), os.ErrNotExist)
}

// readUnlessNewer reads the document of this name, the zero one if there is none. The error is an ErrNewer
// if a newer version wrote it.
func (f *folder) readUnlessNewer(op, name string) (file, error) {
	now, err := f.document(name)
	schema := schemaOf(now.data)
	if schema > Schema() {
		return now, fmt.Errorf("%s %s: %w", op, shown(f.in(name)), newerError(schema))
	}
	return now, ignoring(err, os.ErrNotExist)
}

// Drop takes the document of a source out of force until CommitDrop, so that attachments can be counted again
// before that: an ADD that attaches later finds no document, and waits for the lock. It is no error if there
// is no document; one of a newer version stays (ErrNewer).
func (l *Lock) Drop(src policy.SourceID) error {
	return l.root.within(sourcesDir, func(sources *folder) error {
		l.noteDrop(src) // first, or a reader would take it for one that was not committed
		err := sources.drop(nameOf(src))
		if err != nil {
			l.forgetDrop(src)
		}
		return err
	})
}

// isDropping reports whether a process may be dropping a document that has the name of a dropped one, and
// so whether it is out of force. If no process holds the lock, one was killed that did not commit the drop:
// an ADD may rely on the document, which the next Lock restores.
func (d *Dir) isDropping(root *folder, document string) bool {
	own := d.held.Load()
	if own == nil {
		return root.isLocked(lockFile)
	}
	own.mu.Lock()
	defer own.mu.Unlock()
	for _, src := range own.dropped {
		if nameOf(src) == document {
			return true
		}
	}
	return false
}

func (f *folder) drop(name string) error {
	if _, err := f.recognize(name); err != nil {
		return err
	}
	if _, err := f.readUnlessNewer(removeDocument, name); err != nil {
		return err
	}
	return f.replace(removeDocument, name, name+droppedSuffix)
}

// CommitDrop removes a document that was dropped, and syncs the directory.
func (l *Lock) CommitDrop(src policy.SourceID) error {
	return l.root.within(sourcesDir, func(sources *folder) error {
		err := errors.Join(
			sources.remove(verificationCacheName(src)),
			sources.remove(nameOf(src)+droppedSuffix),
		)
		if err != nil {
			return err
		}
		l.forgetDrop(src)
		return sources.sync()
	})
}

// UndoDrop restores a document that was dropped, as the end of the lock does. It does nothing after
// CommitDrop.
func (l *Lock) UndoDrop(src policy.SourceID) error {
	l.forgetDrop(src)
	return l.root.within(sourcesDir, func(sources *folder) error {
		return sources.replace(writeDocument, nameOf(src)+droppedSuffix, nameOf(src))
	})
}

func (l *Lock) noteDrop(src policy.SourceID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropped = append(l.dropped, src)
}

func (l *Lock) forgetDrop(src policy.SourceID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.Index(l.dropped, src)
	if i >= 0 {
		l.dropped = slices.Delete(l.dropped, i, i+1)
	}
}

// undoDrops restores documents that a killed process had dropped and not committed. The next lock tries again
// what fails; readers find them until then (isDropping).
func (l *Lock) undoDrops() {
	_ = l.root.within(sourcesDir, (*folder).undoDrops)
}

func (f *folder) undoDrops() error {
	names, err := f.names()
	for _, name := range names {
		document, isOne := strings.CutSuffix(name, droppedSuffix)
		if !isOne || !f.isRecognized(name) {
			continue
		}
		_, err := f.recognize(document)
		switch {
		case errors.Is(err, os.ErrNotExist):
			_ = f.replace(writeDocument, name, document)
		case err == nil: // it was written again
			_ = f.remove(name)
		}
		// Another error does not tell whether the document is there, and this may be its only copy.
	}
	return err
}

// upgrade writes the documents of lower schemas again, with their times: an older version that runs beside
// this one must not write the rules that it would compute from them. The next lock tries again what fails,
// because the disk is full.
func (l *Lock) upgrade() {
	_ = l.root.within(sourcesDir, (*folder).upgrade)
}

func (f *folder) upgrade() error {
	names, err := f.documents()
	errs := []error{err}
	for _, name := range names {
		isDropped := strings.HasSuffix(name, droppedSuffix) // and could not be restored
		if !isDropped {
			errs = append(errs, f.upgradeDocument(name))
		}
	}
	return errors.Join(errs...)
}

func (f *folder) upgradeDocument(name string) error {
	start, err := f.start(name)
	if err != nil {
		return err
	}
	schema := schemaOf(start)
	isOlder := 1 <= schema && schema < Schema()
	if !isOlder {
		return nil
	}
	data, err := f.read(name)
	if err != nil {
		return err
	}
	source, err := decodeSource(data, name)
	if err != nil {
		return err
	}
	data, err = encode(document{Schema(), source})
	if err != nil {
		return err
	}
	temp, err := f.stage(writeDocument, name, data, safefile.Fill)
	if err != nil {
		return err
	}
	f.copyTime(name, temp)
	const isDamaged = false
	if err := f.publish(temp, name, isDamaged); err != nil {
		return err
	}
	return f.sync()
}

// PutRecord replaces the record and the exempt pods, each unless the stored one is equal. One of a newer
// version stays (ErrNewer). The pods are not synced, nor is a record in which nothing has changed that a new
// boot does not drop.
func (l *Lock) PutRecord(r Record) error {
	record, err := encode(recordDocument{Schema(), r})
	if err != nil {
		return fmt.Errorf("%s %s: %w", writeDocument, shown(l.dir.RecordPath()), err)
	}
	pods, err := encode(podsDocument{Schema(), r.Boot, r.ExemptPods})
	if err != nil {
		return fmt.Errorf("%s %s: %w", writeDocument, shown(l.root.in(podsFile)), err)
	}
	if err := l.root.putRecord(r, record); err != nil {
		return err
	}
	isWanted := len(r.Namespaces) > 0 || l.root.has(podsFile)
	if !isWanted {
		return nil
	}
	return l.root.putPods(pods)
}

// putRecord replaces the file of the record by an encoded one.
func (f *folder) putRecord(r Record, encoded []byte) error {
	stored, err := f.read(recordFile)
	isStored := err == nil && bytes.Equal(stored, encoded)
	if isStored {
		return nil
	}
	before, err := decode[recordDocument](stored)
	survivesCrash := err == nil && before.sameAfterCrash(r)
	if survivesCrash {
		return f.replaceFile(recordFile, encoded, fillUnsynced)
	}
	err = f.replaceFile(recordFile, encoded, safefile.Fill)
	if err != nil {
		return err
	}
	return f.sync()
}

func (f *folder) putPods(encoded []byte) error {
	stored, err := f.read(podsFile)
	isStored := err == nil && bytes.Equal(stored, encoded)
	if isStored {
		return nil
	}
	return f.replaceFile(podsFile, encoded, fillUnsynced)
}

// replaceFile replaces a file of the directory of the record by a rename.
func (f *folder) replaceFile(name string, data []byte, fill func(*os.File, []byte) error) error {
	before, err := f.readUnlessNewer(writeDocument, name)
	if err != nil {
		return err
	}
	temp, err := f.stage(writeDocument, name, data, fill)
	if err != nil {
		return err
	}
	isDamaged := len(before.state().Unreadable) > 0
	return f.publish(temp, name, isDamaged)
}

// Written returns when the policy of a source last changed: the mtime of its document, which learned subnets
// keep. It is the zero Time if there is none.
func (d *Dir) Written(src policy.SourceID) (time.Time, error) {
	info, err := os.Lstat(d.DocumentPath(src))
	if err != nil {
		return time.Time{}, failure("stat document", d.DocumentPath(src), ignoring(err, os.ErrNotExist))
	}
	return info.ModTime(), nil
}

// Tidy removes temporary files, which killed processes left, and the attachments of earlier boots. If there
// is nothing to do, it writes nothing.
func (l *Lock) Tidy() error {
	boot, err := l.dir.boot()
	errs := []error{err, l.root.tidy(), l.root.within(sourcesDir, (*folder).tidy)}
	if err == nil {
		errs = append(errs, l.root.within(attachmentsDir, func(f *folder) error { return f.clear(boot) }))
	}
	return errors.Join(errs...)
}

// tidy removes temporary files from the directory of the record, or from that of the documents.
func (f *folder) tidy() error {
	names, err := f.names()
	errs := []error{err}
	for _, name := range names {
		if strings.HasSuffix(name, safefile.TempSuffix) && f.isRecognized(name) {
			errs = append(errs, f.remove(name))
		}
	}
	return errors.Join(errs...)
}

// Destroy removes the files of ip-masq in the dataDir, and the directory if it is empty then. The lock
// ends: a process that waits for it notices that the file is gone, and starts again.
func (l *Lock) Destroy() error {
	// The lock is removed when nothing is left to protect, the marker last.
	if err := l.root.clear(lockFile, markerFile); err != nil {
		return err
	}
	if err := errors.Join(l.root.remove(lockFile), l.root.remove(markerFile)); err != nil {
		return err
	}
	err := unix.Rmdir(l.dir.path)
	// It holds files of another program, or is a mount point.
	isInUse := errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EBUSY)
	if !isInUse {
		return failure("remove", l.dir.path, ignoring(err, unix.ENOENT))
	}
	names, err := l.root.names()
	for _, name := range names {
		if l.root.isRecognized(name) { // a process that waited has locked a new file, or an ADD has attached
			return l.root.mark()
		}
	}
	return err
}

// has reports whether there is an entry of this name, or may be.
func (f *folder) has(name string) bool {
	var st unix.Stat_t
	return !errors.Is(unix.Fstatat(f.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW), unix.ENOENT)
}
