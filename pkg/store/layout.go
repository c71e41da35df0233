// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// entry describes a file or directory that ip-masq writes.
type entry struct {
	holds  layout // of a directory; nil for a file
	socket bool   // it is a socket rather than a regular file
}

// layout returns the entry that ip-masq writes under a name in one directory, or false if it writes none.
type layout func(name string) (entry, bool)

// inDataDir is the layout of the dataDir itself.
func inDataDir(name string) (entry, bool) {
	switch name {
	case markerFile, lockFile, instanceLockFile, resetLockFile, recordFile, recordFile + damagedSuffix, podsFile, podsFile + damagedSuffix:
		return entry{}, true
	case socketFile:
		return entry{socket: true}, true
	case sourcesDir:
		return entry{holds: inSources}, true
	case attachmentsDir:
		return entry{holds: inAttachments}, true
	case backupsDir:
		return entry{holds: inBackups}, true
	}
	return entry{}, safefile.IsTemp(name, recordFile+".") || safefile.IsTemp(name, podsFile+".")
}

func inSources(name string) (entry, bool) {
	hash, _, _ := strings.Cut(name, ".")
	if !isHash(hash) {
		return entry{}, false
	}
	switch document := hash + documentSuffix; name {
	case document, hash + verificationCacheSuffix, document + damagedSuffix, document + droppedSuffix:
		return entry{}, true
	default:
		return entry{}, safefile.IsTemp(name, document+".")
	}
}

func inAttachments(name string) (entry, bool) { return entry{holds: inBoot}, isBoot(name) }

func inBoot(name string) (entry, bool) {
	if hash, isEntries := strings.CutSuffix(name, entriesSuffix); isEntries {
		return entry{}, isHash(hash)
	}
	return entry{holds: inNetwork}, isHash(name)
}

func inNetwork(name string) (entry, bool) {
	return entry{}, isHash(strings.TrimSuffix(name, cachedSuffix))
}

// inBackups is the layout that package conflist uses: copies whose names have the SHA-256 of the
// original's path, its records, and temporary files of package safefile.
func inBackups(name string) (entry, bool) {
	stem, isCopy := strings.CutSuffix(name, ".bak")
	at := strings.LastIndexByte(stem, '.')
	isCopy = isCopy && at > 0 && isHash(stem[at+1:])
	return entry{}, isCopy || name == conflistRecordFile || name == ownConflistFile || safefile.IsTemp(name, safefile.TempPrefix)
}

// isHash reports whether a name is one that hashName returns.
func isHash(name string) bool {
	return len(name) == 64 && strings.Trim(name, "0123456789abcdef") == ""
}

// isBoot reports whether a name is the UUID of a boot.
func isBoot(name string) bool {
	return len(name) == 36 && strings.Count(name, "-") == 4 && strings.Trim(name, "0123456789abcdef-") == ""
}

// errUnknown is about an entry of a directory that ip-masq does not write.
var errUnknown = errors.New("it is not ip-masq's")

// recognize returns the entry under a name in the directory. The error is errUnknown if it is
// something else, or os.ErrNotExist.
func (f *folder) recognize(l layout, name string) (entry, error) {
	e, known := l(name)
	kind := uint32(unix.S_IFREG)
	switch {
	case e.holds != nil:
		kind = unix.S_IFDIR
	case e.socket:
		kind = unix.S_IFSOCK
	}
	err := errUnknown
	if known {
		var st unix.Stat_t
		err = unix.Fstatat(f.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && st.Mode&unix.S_IFMT != kind {
			err = errUnknown
		}
	}
	return e, failure("stat", f.in(name), err)
}

// clear removes the entries of ip-masq from the directory, except the spared names.
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
	if err := f.within(name, func(sub *folder) error { return sub.clear(e.holds) }); err != nil {
		return err
	}
	// It may hold files of another program, or a new attachment: Attach takes no lock.
	err := unix.Unlinkat(f.fd(), name, unix.AT_REMOVEDIR)
	return failure("remove directory", f.in(name), ignoring(err, unix.ENOENT, unix.ENOTEMPTY))
}
