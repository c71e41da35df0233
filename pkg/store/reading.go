// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// State is the content of the dataDir.
type State struct {
	Sources []policy.Source // sorted
	Record  Record          // zero if there is no usable one
	// Unreadable are the files that cannot be used, the record included. What they ask for is not known, so
	// what exists stays.
	Unreadable []FileError
}

// FileError is a file that cannot be read: torn, of another form, invalid, refused (ErrRefused) or newer
// (ErrNewer).
type FileError struct {
	File string // its path
	Err  error  // names the path, the fault and the remedy
}

// IsNewer reports whether a newer version wrote the file. Such a file stays; any other is replaced by the
// next write.
func (e FileError) IsNewer() bool { return errors.Is(e.Err, ErrNewer) }

// Newer returns the error of the first file that a newer version wrote, or nil.
func (s State) Newer() error {
	for _, f := range s.Unreadable {
		if f.IsNewer() {
			return f.Err
		}
	}
	return nil
}

// Lost returns the unreadable files that no write replaces while these sources are stored. The record and
// pods.json are not among them if they are damaged: they are made again from what is in the kernel and in the
// records of pods.
func (d *Dir) Lost(s State, stored ...policy.SourceID) []FileError {
	isStored := map[string]bool{}
	for _, id := range stored {
		isStored[d.DocumentPath(id)] = true
	}
	var lost []FileError
	for _, f := range s.Unreadable {
		if f.IsNewer() || d.IsDocument(f.File) && !isStored[f.File] {
			lost = append(lost, f)
		}
	}
	return lost
}

// HasDocument reports whether a source has a document, also one that cannot be read.
func (d *Dir) HasDocument(s State, id policy.SourceID) bool {
	if s.Find(id) != nil {
		return true
	}
	for _, f := range s.Unreadable {
		if f.File == d.DocumentPath(id) {
			return true
		}
	}
	return false
}

// Find returns the source, or nil.
func (s State) Find(src policy.SourceID) *policy.Source {
	for i := range s.Sources {
		if s.Sources[i].ID == src {
			return &s.Sources[i]
		}
	}
	return nil
}

// Reading is the documents and the record as they were read together, and not decoded yet.
type Reading struct {
	files  []file
	digest string // of the files; "" until Digest is called
	state  *State // the files decoded; nil until State is called
}

// file is a document or the record: its bytes, or why it is refused.
type file struct {
	name, path string
	data       []byte
	err        error
}

// Mentions reports whether a document or the record has one of these texts as a string.
func (r *Reading) Mentions(texts ...string) bool {
	for _, text := range texts {
		quoted := []byte(`"` + text + `"`)
		for _, f := range r.files {
			if bytes.Contains(f.data, quoted) {
				return true
			}
		}
	}
	return false
}

// Load reads and decodes all documents and the record. Errors of single files are in the State.
func (d *Dir) Load() (State, error) {
	r, err := d.Read()
	if err != nil {
		return State{}, err
	}
	return r.State(), nil
}

// Read reads all documents and the record without the lock, each as it is before or after a concurrent
// change. A directory that does not exist is the empty Reading. The error is about directories
// (ErrRefused) or about this process (too many open files).
func (d *Dir) Read() (*Reading, error) {
	root, err := d.dataDir()
	if err != nil {
		return &Reading{}, ignoring(err, os.ErrNotExist)
	}
	defer root.close()
	files, err := d.readSources(root)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{recordFile, podsFile} {
		f, err := root.document(name)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	return &Reading{files: files}, nil
}

// ReadAgain reads as Read does. If nothing has changed, it returns the earlier reading, which may be decoded
// already.
func (d *Dir) ReadAgain(before *Reading) (*Reading, error) {
	r, err := d.Read()
	if err != nil {
		return nil, err
	}
	if slices.EqualFunc(r.files, before.files, file.equal) {
		return before, nil
	}
	return r, nil
}

func (f file) equal(g file) bool {
	return f.name == g.name && f.err == nil && g.err == nil && bytes.Equal(f.data, g.data)
}

// errChanging reports that a list of documents may lack one.
var errChanging = errors.New("it keeps changing")

// readSources reads the documents. It lists them again if one vanishes meanwhile, or if the directory
// changed so recently that the list may lack one, until two lists are equal: a file that is being
// replaced can be absent from a list (btrfs), and mtimes are as coarse as the kernel's tick.
func (d *Dir) readSources(root *folder) ([]file, error) {
	const attempts = 100
	before := []string{""} // equal to no list
	for range attempts {
		files, names, err := d.tryReadSources(root, before)
		isChanging := errors.Is(err, errChanging) || errors.Is(err, os.ErrNotExist)
		if !isChanging {
			return files, err
		}
		before = names
	}
	return nil, fmt.Errorf("list directory %s: %w; find the program that writes to it",
		shown(root.in(sourcesDir)), errChanging)
}

// tryReadSources reads the documents, and returns the names of their files: errChanging unless the list was
// complete, or is the one before.
func (d *Dir) tryReadSources(root *folder, before []string) (files []file, names []string, err error) {
	const tick = 20 * time.Millisecond // twice the longest, that of CONFIG_HZ=100
	start := time.Now()
	sources, err := root.folder(sourcesDir, false)
	if err != nil {
		return nil, nil, ignoring(err, os.ErrNotExist)
	}
	defer sources.close()
	names, err = sources.documents()
	if err != nil {
		return nil, nil, err
	}
	changed, err := sources.changed()
	if err != nil {
		return nil, nil, err
	}
	isComplete := changed.Before(start.Add(-tick)) || slices.Equal(names, before)
	if !isComplete {
		return nil, names, errChanging
	}
	for _, name := range names {
		document, isDropped := strings.CutSuffix(name, droppedSuffix)
		isWrittenAgain := isDropped && slices.Contains(names, document)
		if isWrittenAgain {
			continue
		}
		if isDropped && d.isDropping(root, document) {
			continue
		}
		one, err := sources.document(name)
		if err != nil {
			return nil, names, err
		}
		one.name, one.path = document, sources.in(document)
		files = append(files, one)
	}
	return files, names, nil
}

// documents returns the names of the documents in their directory, also of dropped ones, sorted.
func (f *folder) documents() ([]string, error) {
	names, err := f.names()
	var documents []string
	for _, name := range names {
		hash, isOne := strings.CutSuffix(strings.TrimSuffix(name, droppedSuffix), documentSuffix)
		if isOne && isHash(hash) {
			documents = append(documents, name)
		}
	}
	return documents, err
}

// document reads a document or the record. The error is that there is none, or that this process or the
// kernel lacks means, which says nothing about the document. Any other is in the file.
func (f *folder) document(name string) (file, error) {
	data, err := f.read(name)
	for _, e := range []error{os.ErrNotExist, unix.EMFILE, unix.ENFILE, unix.ENOMEM} {
		if errors.Is(err, e) {
			return file{}, err
		}
	}
	return file{name, f.in(name), data, err}, nil
}

// State decodes the files, once.
func (r *Reading) State() State {
	if r.state == nil {
		var s State
		for _, f := range r.files {
			s.add(f)
		}
		slices.SortFunc(s.Sources, func(a, b policy.Source) int { return a.ID.Compare(b.ID) })
		r.state = &s
	}
	return *r.state
}

// state returns what a file holds, nothing for the zero one.
func (f file) state() State {
	var s State
	if f.name != "" {
		s.add(f)
	}
	return s
}

// add adds what a file holds. The record comes before the exempt pods, which are of its boot.
func (s *State) add(f file) {
	err := f.err
	if err == nil {
		err = s.decodeNamed(f)
	}
	if err != nil {
		s.Unreadable = append(s.Unreadable, FileError{f.path, err})
	}
}

// decodeNamed adds what a file says. The error names the file and the remedy.
func (s *State) decodeNamed(f file) error {
	err := s.decode(f)
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrNewer) {
		return fmt.Errorf("document %s: %w", shown(f.path), err)
	}
	return fmt.Errorf("%s %s: %w; it is moved aside when it is written again from its source",
		readDocument, shown(f.path), bounded(err))
}

func (s *State) decode(f file) error {
	switch f.name {
	case recordFile:
		record, err := decode[recordDocument](f.data)
		if err != nil {
			return err
		}
		s.Record = record.Record
	case podsFile:
		pods, err := decode[podsDocument](f.data)
		if err != nil {
			return err
		}
		if pods.Boot == s.Record.Boot {
			s.Record.ExemptPods = pods.ExemptPods
		}
	default:
		source, err := decodeSource(f.data, f.name)
		if err != nil {
			return err
		}
		s.Sources = append(s.Sources, source)
	}
	return nil
}

// bounded returns an error of limited length for one that may repeat parts of a document.
func bounded(err error) error {
	const limit = 512
	if text := err.Error(); len(text) > limit {
		return errors.New(policy.Quote(text))
	}
	return err
}
