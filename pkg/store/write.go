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

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

const (
	writeDocument  = "write document"
	removeDocument = "remove document"
)

// Staged is a change of a document that Commit makes final and Discard undoes: one
// that is written and synced beside the one in force, or one that is dropped.
type Staged struct {
	lock       *Lock
	folder     *folder
	temp, name string
	cache      string // of a document that is dropped: its verification cache, which is removed too
}

// Stage writes the document of a contribution without putting it in force, so
// that nothing but a rename is left once the rules stand. It refuses one that
// Load would not read back as it is, and to replace what a newer version wrote
// (ErrNewer). In a dry run it returns nil.
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

// sources opens the directory of the documents, and makes it first where it is
// missing.
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
	// Errors name the document: the same ones have the same text each time.
	fd, err := f.createFor(writeDocument, s.temp, name)
	if err != nil {
		return nil, err
	}
	if err := write(os.NewFile(uintptr(fd), s.temp), data); err != nil {
		return nil, errors.Join(failure(writeDocument, f.in(name), bare(err)), f.remove(s.temp))
	}
	l.staged[s] = true
	return s, nil
}

// random returns what tells names of files from each other.
func random() string { return strconv.FormatUint(rand.Uint64(), 36) }

// bare takes the name of a temporary file out of an error.
func bare(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

func write(file *os.File, data []byte) error {
	_, err := file.Write(data)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// newer fails where a newer version wrote the file. What is damaged may be
// replaced.
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

// Commit puts the document in force, or removes the one that is dropped, and makes
// that durable. Where only the latter fails the error says so, and the document is
// in force. It may be called on nil.
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

// Discard removes what was staged, and puts back what was dropped. It does nothing
// after Commit, after another Discard or after the release of the lock, and may be
// called on nil.
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

// Drop takes the document of a source out of force, so that attachments can be
// counted again before the caller commits: an ADD that attaches later finds no
// document, and waits for the lock. One that is absent is fine; one that a newer
// version wrote stays (ErrNewer).
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

// undoDrops puts back what a process dropped that was killed before it committed:
// an ADD may rely on it. What fails here fails again when the documents are read.
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
			_ = sources.remove(name) // it was written anew
		}
	}
}

// PutRecord replaces the record, unless it is stored already as it is. One that
// a newer version wrote stays (ErrNewer).
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
