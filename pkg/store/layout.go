// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"errors"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// entry is what ip-masq writes under a name: a regular file, or a directory.
type entry struct {
	holds  layout // of a directory; nil for a file
	hollow bool   // the file is always empty
	// proves reports whether the file shows that ip-masq made the directory; nil
	// where the name is one that other programs use too.
	proves func(f *folder, name string) bool
}

// layout returns what ip-masq writes under a name in one directory, and false
// where it writes nothing of that name.
type layout func(name string) (entry, bool)

// inDataDir is the layout of the dataDir itself.
func inDataDir(name string) (entry, bool) {
	switch name {
	case lockFile, recordFile + damagedSuffix:
		return entry{}, true
	case markerFile, leadFile:
		return entry{proves: byName}, true
	case recordFile:
		return entry{proves: byContents}, true
	case sourcesDir:
		return entry{holds: inSources}, true
	case attachmentsDir:
		return entry{holds: inAttachments}, true
	case backupsDir:
		return entry{holds: inBackups}, true
	}
	return entry{}, isTemp(name, recordFile+".")
}

func inSources(name string) (entry, bool) {
	hash, _, _ := strings.Cut(name, ".")
	if !isHash(hash) {
		return entry{}, false
	}
	switch document := hash + documentSuffix; name {
	case document:
		return entry{proves: byContents}, true
	case hash + verificationCacheSuffix, document + damagedSuffix, document + droppedSuffix:
		return entry{}, true
	default:
		return entry{}, isTemp(name, document+".")
	}
}

func inAttachments(name string) (entry, bool) { return entry{holds: inBoot}, isBoot(name) }

func inBoot(name string) (entry, bool) { return entry{holds: inNetwork}, isHash(name) }

func inNetwork(name string) (entry, bool) {
	return entry{hollow: true, proves: byName}, isHash(name)
}

// inBackups is the layout that package conflist gives the directory: copies that
// are named after their SHA-256, and temporary files of package safefile.
func inBackups(name string) (entry, bool) {
	stem, isCopy := strings.CutSuffix(name, ".bak")
	at := strings.LastIndexByte(stem, '.')
	isCopy = isCopy && at > 0 && isHash(stem[at+1:])
	return entry{proves: byName}, isCopy || isTemp(name, ".ip-masq-")
}

func byName(*folder, string) bool { return true }

// byContents reports whether a document, or the record, parses, here or in a newer version.
func byContents(f *folder, name string) bool {
	now, err := f.file(name)
	return err == nil && !now.damaged()
}

// isHash reports whether a name is one that hashName returns.
func isHash(name string) bool {
	return len(name) == 64 && strings.Trim(name, "0123456789abcdef") == ""
}

// isBoot reports whether a name is the UUID of a boot.
func isBoot(name string) bool {
	return len(name) == 36 && strings.Count(name, "-") == 4 && strings.Trim(name, "0123456789abcdef-") == ""
}

// isTemp reports whether a name is that of a temporary file with the prefix.
func isTemp(name, prefix string) bool {
	random, isOne := strings.CutPrefix(name, prefix)
	random, ends := strings.CutSuffix(random, tempSuffix)
	return isOne && ends && random != "" && strings.Trim(random, "0123456789abcdefghijklmnopqrstuvwxyz") == ""
}

// errUnknown is about an entry of a directory that ip-masq does not write.
var errUnknown = errors.New("it is not ip-masq's")

// recognize returns what ip-masq writes under a name in the directory. The error
// is errUnknown where something else stands there, or that nothing does.
func (f *folder) recognize(l layout, name string) (entry, error) {
	e, known := l(name)
	if !known {
		return e, failure("look at", f.in(name), errUnknown)
	}
	var st unix.Stat_t
	if err := unix.Fstatat(f.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return e, failure("look at", f.in(name), err)
	}
	kind := uint32(unix.S_IFREG)
	if e.holds != nil {
		kind = unix.S_IFDIR
	}
	if st.Mode&unix.S_IFMT != kind || e.hollow && st.Size > 0 {
		return e, failure("look at", f.in(name), errUnknown)
	}
	return e, nil
}

// finding is what judge found in a directory. Of several entries it names the first by
// their paths, whatever the order in which the directory lists them.
type finding struct {
	first   string // "" where it is empty
	unknown string // that ip-masq does not write
	proven  bool   // one of its files proves that ip-masq made it
}

// judge goes through the directory and those in it. It keeps no list of the entries:
// there may be many.
func (f *folder) judge(l layout, found *finding) error {
	return f.each(func(name string) error {
		first := func(path string) string { return min(cmp.Or(path, f.in(name)), f.in(name)) }
		found.first = first(found.first)
		e, err := f.recognize(l, name)
		switch {
		case errors.Is(err, errUnknown):
			found.unknown, err = first(found.unknown), nil
		case err == nil && e.holds != nil:
			var sub *folder
			if sub, err = f.folder(name, false); err == nil {
				err = sub.judge(e.holds, found)
				sub.close()
			}
		case err == nil:
			found.proven = found.proven || e.proves != nil && e.proves(f, name)
		}
		return ignoring(err, os.ErrNotExist) // removed meanwhile
	})
}

// clear removes what ip-masq wrote into the directory, but for the names that are
// spared, and leaves everything else as it is.
func (f *folder) clear(l layout, spared ...string) error {
	names, err := f.names() // sorted
	errs := []error{err}
	for _, name := range names {
		if e, err := f.recognize(l, name); err == nil && !slices.Contains(spared, name) {
			errs = append(errs, f.clearEntry(e, name))
		}
	}
	return errors.Join(errs...)
}

func (f *folder) clearEntry(e entry, name string) error {
	if e.holds == nil {
		return f.remove(name)
	}
	sub, err := f.folder(name, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer sub.close()
	if err := sub.clear(e.holds); err != nil {
		return err
	}
	// One that is not empty holds what another program wrote, or an attachment
	// that was made meanwhile: Attach takes no lock.
	err = unix.Unlinkat(f.fd, name, unix.AT_REMOVEDIR)
	if ignoring(err, unix.ENOENT, unix.ENOTEMPTY) != nil {
		return failure("remove directory", f.in(name), err)
	}
	return nil
}

// ignoring returns nil in place of some errors.
func ignoring(err error, expected ...error) error {
	for _, e := range expected {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}
