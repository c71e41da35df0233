// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// State is what the dataDir says.
type State struct {
	Contributions []policy.Contribution // sorted by source
	Record        Record                // zero when there is none of a usable form
	Newer         []Newer               // what a newer version wrote, the record too
	Damaged       []Damaged             // what cannot be believed, the record too
}

// Newer is a document that a newer version wrote. It is left untouched.
type Newer struct {
	File   string // its path
	Schema int
}

// Damaged is a document that cannot be believed: torn, of another form, not
// valid, or refused (ErrRefused).
type Damaged struct {
	File string // its path
	Err  error  // names the path, what is wrong and the remedy
}

// Find returns what the source contributes, or nil.
func (s State) Find(src policy.Source) *policy.Contribution {
	for i := range s.Contributions {
		if s.Contributions[i].Source == src {
			return &s.Contributions[i]
		}
	}
	return nil
}

// Load reads all documents and the record, without the lock. Each of them is as
// it was before or after a change that happens meanwhile. A directory that does
// not exist is the empty State. The error is about directories (ErrRefused) or
// about this process (too many open files); what is wrong with a single
// document is in the State.
func (d *Dir) Load() (State, error) {
	var s State
	root, err := d.dataDir()
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return s, err
	}
	defer root.close()
	if err := s.readSources(root); err != nil {
		return State{}, err
	}
	_, err = s.take(root, recordFile, func(data []byte) (err error) {
		s.Record, err = decodeRecord(data)
		return err
	})
	if err != nil {
		return State{}, err
	}
	slices.SortFunc(s.Contributions, func(a, b policy.Contribution) int { return a.Source.Compare(b.Source) })
	return s, nil
}

// readSources reads the documents, again if need be.
func (s *State) readSources(root *folder) error {
	const attempts = 100
	var before []string
	for range attempts {
		done, names, err := s.readOnce(root, before)
		if done || err != nil {
			return err
		}
		before = names
	}
	return fmt.Errorf("list directory %s: it keeps changing; see who writes to it", shown(root.in(sourcesDir)))
}

// readOnce lists the documents and reads them. It is not done where one vanished
// in between, nor where the directory changed so recently that the list may lack
// one, unless the list before was the same: a file that is being replaced can be
// absent from a listing (btrfs), and mtimes are as coarse as the kernel's tick.
func (s *State) readOnce(root *folder, before []string) (done bool, names []string, err error) {
	const tick = 20 * time.Millisecond // twice the longest, that of CONFIG_HZ=100
	start := time.Now()
	*s = State{}
	sources, err := root.folder(sourcesDir, false)
	if errors.Is(err, os.ErrNotExist) {
		return true, nil, nil
	}
	if err != nil {
		return false, nil, err
	}
	defer sources.close()
	names, changed, err := sources.documents()
	switch {
	case errors.Is(err, os.ErrNotExist): // removed since it was opened
		return false, nil, nil
	case err != nil:
		return false, nil, err
	case !changed.Before(start.Add(-tick)) && (before == nil || !slices.Equal(names, before)):
		return false, names, nil
	}
	gone, err := s.readDocuments(sources, names)
	return !gone, names, err
}

// documents lists the documents, and tells when the list last changed.
func (f *folder) documents() ([]string, time.Time, error) {
	names, err := f.names()
	if err != nil {
		return nil, time.Time{}, err
	}
	names = slices.DeleteFunc(names, func(n string) bool { return !strings.HasSuffix(n, documentSuffix) })
	changed, err := f.changed()
	return names, changed, err
}

// readDocuments reads the named documents, and reports whether one was gone.
func (s *State) readDocuments(sources *folder, names []string) (gone bool, err error) {
	for _, name := range names {
		gone, err = s.take(sources, name, func(data []byte) error {
			c, err := decodeContribution(data, name)
			if err == nil {
				s.Contributions = append(s.Contributions, c)
			}
			return err
		})
		if gone || err != nil {
			return gone, err
		}
	}
	return false, nil
}

// take reads one document. What is wrong with it goes into the State.
func (s *State) take(f *folder, name string, decode func([]byte) error) (gone bool, err error) {
	data, err := f.read(name)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return true, nil
	case isOurs(err):
		return false, err
	case err == nil:
		err = describe(f.in(name), decode(data))
	}
	var newer *newerError
	switch {
	case errors.As(err, &newer):
		s.Newer = append(s.Newer, Newer{f.in(name), newer.schema})
	case err != nil:
		s.Damaged = append(s.Damaged, Damaged{f.in(name), err})
	}
	return false, nil
}

// isOurs reports whether an error is about this process or the kernel's means,
// so that it says nothing about the document.
func isOurs(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// describe says which document does not decode, and what becomes of it.
func describe(path string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrNewer) {
		return fmt.Errorf("%s %s: %w", readDocument, shown(path), err)
	}
	return fmt.Errorf("%s %s: %w; it is moved aside and made again from its source, or remove it", readDocument, shown(path), bounded(err))
}
