// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// State is what the dataDir says.
type State struct {
	Sources []policy.Source // sorted by source
	Record  Record          // zero when there is none of a usable form
	Newer   []Newer         // what a newer version wrote, the record too
	Damaged []Damaged       // what cannot be believed, the record too
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
func (s State) Find(src policy.SourceID) *policy.Source {
	for i := range s.Sources {
		if s.Sources[i].ID == src {
			return &s.Sources[i]
		}
	}
	return nil
}

// Load reads all documents and the record, as Read does, and decodes them. What
// is wrong with a single document is in the State.
func (d *Dir) Load() (State, error) {
	r, err := d.Read(policy.SourceID{})
	if err != nil {
		return State{}, err
	}
	return r.State(), nil
}

// State decodes what was read.
func (r *Reading) State() State {
	var s State
	for _, f := range r.documents {
		s.take(f, func(data []byte) error {
			c, err := decodeContribution(data, f.name)
			if err == nil {
				s.Sources = append(s.Sources, c)
			}
			return err
		})
	}
	if r.record != nil {
		s.take(*r.record, func(data []byte) (err error) {
			s.Record, err = decodeRecord(data)
			return err
		})
	}
	slices.SortFunc(s.Sources, func(a, b policy.Source) int { return a.ID.Compare(b.ID) })
	return s
}

// damaged reports whether a document, or the record, cannot be believed.
func (f *file) damaged() bool {
	r := Reading{documents: []file{*f}}
	if f.name == recordFile {
		r = Reading{record: f}
	}
	return len(r.State().Damaged) > 0
}

// take decodes one file. What is wrong with it goes into the State.
func (s *State) take(f file, decode func([]byte) error) {
	err := f.err
	if err == nil {
		err = describe(f.path, decode(f.data))
	}
	var newer *newerError
	switch {
	case errors.As(err, &newer):
		s.Newer = append(s.Newer, Newer{f.path, newer.schema})
	case err != nil:
		s.Damaged = append(s.Damaged, Damaged{f.path, err})
	}
}

// describe says which document does not decode, and what becomes of it.
func describe(path string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, ErrNewer) {
		return fmt.Errorf("%s %s: %w", readDocument, shown(path), err)
	}
	return fmt.Errorf("%s %s: %w; it is moved aside and made again from its source", readDocument, shown(path), bounded(err))
}
