// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// kindOf returns the type, as in st_mode, of what ip-masq writes under a name in a directory of the dataDir, or 0 if it
// writes nothing there.
func kindOf(dir, name string) uint32 {
	isFile, isDir := false, false
	switch {
	case dir == "":
		isFile = slices.Contains([]string{markerFile, lockFile, instanceLockFile, resetLockFile, recordFile, recordFile + damagedSuffix,
			podsFile, podsFile + damagedSuffix}, name) || safefile.IsTemp(name, recordFile+".") || safefile.IsTemp(name, podsFile+".")
		isDir = name == sourcesDir || name == attachmentsDir || name == backupsDir
		if name == socketFile {
			return unix.S_IFSOCK
		}
	case dir == sourcesDir:
		hash, _, _ := strings.Cut(name, ".")
		document := hash + documentSuffix
		files := []string{document, hash + verificationCacheSuffix, document + damagedSuffix, document + droppedSuffix}
		isFile = isHash(hash) && (slices.Contains(files, name) || safefile.IsTemp(name, document+"."))
	case dir == backupsDir:
		// Package conflist uses it: copies whose names have the SHA-256 of the original's path, its records, and temporary
		// files of package safefile.
		stem, isCopy := strings.CutSuffix(name, ".bak")
		at := strings.LastIndexByte(stem, '.')
		isCopy = isCopy && at > 0 && isHash(stem[at+1:])
		isFile = isCopy || name == conflistRecordFile || name == copyRecordFile || safefile.IsTemp(name, safefile.TempPrefix)
	case dir == attachmentsDir:
		isDir = isBoot(name)
	case strings.Count(dir, "/") == 1: // of a boot
		hash, isEntries := strings.CutSuffix(name, entriesSuffix)
		isFile, isDir = isEntries && isHash(hash) || name == bootUnitFile, isHash(name)
	default: // of a network
		isFile = isHash(strings.TrimSuffix(name, cachedSuffix))
	}
	switch {
	case isFile:
		return unix.S_IFREG
	case isDir:
		return unix.S_IFDIR
	}
	return 0
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

// recognize returns the type of the entry under a name in the directory. The error is errUnknown if it is something else, or
// os.ErrNotExist.
func (f *folder) recognize(name string) (kind uint32, err error) {
	kind, err = kindOf(strings.TrimPrefix(f.path()[f.root:], "/"), name), errUnknown
	if kind != 0 {
		var st unix.Stat_t
		err = unix.Fstatat(f.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err == nil && st.Mode&unix.S_IFMT != kind {
			err = errUnknown
		}
	}
	return kind, failure("stat", f.in(name), err)
}

// clear removes the entries of ip-masq from the directory, except the spared names.
func (f *folder) clear(spared ...string) error {
	names, err := f.names() // sorted
	errs := []error{err}
	for _, name := range names {
		kind, err := f.recognize(name)
		switch {
		case err != nil || slices.Contains(spared, name):
		case kind != unix.S_IFDIR:
			errs = append(errs, f.remove(name))
		default:
			if err = f.within(name, func(sub *folder) error { return sub.clear() }); err == nil {
				// It may hold files of another program, or a new attachment: Attach takes no lock.
				err = unix.Unlinkat(f.fd(), name, unix.AT_REMOVEDIR)
				err = failure("remove directory", f.in(name), ignoring(err, unix.ENOENT, unix.ENOTEMPTY))
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
