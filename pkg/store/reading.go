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

// Reading is the files of the dataDir as they were read together, and not
// decoded yet.
type Reading struct {
	documents []file
	record    *file // nil where there is none
	verified  VerificationCache
}

// file is a document or the record: its bytes, or why they cannot be believed.
type file struct {
	name, path string
	data       []byte
	err        error
}

// Read reads all documents and the record, without the lock, and the verification cache of
// one source. Each of them is as it was before or after a change that happens
// meanwhile. A directory that does not exist is the empty Reading. The error is
// about directories (ErrRefused) or about this process (too many open files).
func (d *Dir) Read(verified policy.SourceID) (*Reading, error) {
	r := &Reading{}
	root, err := d.dataDir()
	if err != nil {
		return r, ignoring(err, os.ErrNotExist)
	}
	defer root.close()
	if err := r.readSources(root, verified); err != nil {
		return nil, err
	}
	r.record, err = root.file(recordFile)
	return r, ignoring(err, os.ErrNotExist)
}

// readSources reads the documents, again if need be.
func (r *Reading) readSources(root *folder, verified policy.SourceID) error {
	const attempts = 100
	var before []string
	for range attempts {
		done, names, err := r.readOnce(root, before, verified)
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
func (r *Reading) readOnce(root *folder, before []string, verified policy.SourceID) (done bool, names []string, err error) {
	const tick = 20 * time.Millisecond // twice the longest, that of CONFIG_HZ=100
	start := time.Now()
	*r = Reading{}
	sources, err := root.folder(sourcesDir, false)
	if err != nil {
		return errors.Is(err, os.ErrNotExist), nil, ignoring(err, os.ErrNotExist)
	}
	defer sources.close()
	names, changed, err := sources.documents()
	switch {
	case err != nil: // it may be removed since it was opened
		return false, nil, ignoring(err, os.ErrNotExist)
	case !changed.Before(start.Add(-tick)) && (before == nil || !slices.Equal(names, before)):
		return false, names, nil
	}
	for _, name := range names {
		f, err := sources.file(name)
		if err != nil {
			return false, names, ignoring(err, os.ErrNotExist)
		}
		r.documents = append(r.documents, *f)
		if name == nameOf(verified) {
			r.verified = sources.verificationCache(verified)
		}
	}
	return true, names, nil
}

// documents lists the documents, and tells when the list last changed.
func (f *folder) documents() ([]string, time.Time, error) {
	names, err := f.names()
	if err != nil {
		return nil, time.Time{}, err
	}
	names = slices.DeleteFunc(names, func(n string) bool {
		hash, isOne := strings.CutSuffix(n, documentSuffix)
		return !isOne || !isHash(hash)
	})
	changed, err := f.changed()
	return names, changed, err
}

// file reads one document. What is wrong with it goes into the file; the error
// is that there is none, or about this process.
func (f *folder) file(name string) (*file, error) {
	data, err := f.read(name)
	if errors.Is(err, os.ErrNotExist) || isOurs(err) {
		return nil, err
	}
	return &file{name, f.in(name), data, err}, nil
}

// isOurs reports whether an error is about this process or the kernel's means,
// so that it says nothing about the document.
func isOurs(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}
