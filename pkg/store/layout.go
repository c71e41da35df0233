// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// kindOf returns the type, as in st_mode, of what ip-masq writes under a name in a directory of the dataDir,
// or 0 if it writes nothing there.
func kindOf(dir, name string) uint32 {
	switch {
	case dir == "":
		return kindInDataDir(name)
	case dir == sourcesDir:
		return fileIf(isOfSources(name))
	case dir == backupsDir:
		return fileIf(isOfBackups(name))
	case dir == attachmentsDir:
		return directoryIf(isBoot(name))
	case strings.Count(dir, "/") == 1: // attachments/BOOT
		return kindOfBoot(name)
	default: // of a network
		return fileIf(isOfNetwork(name))
	}
}

// isOfNetwork reports whether a name is that of an attachment's record, of one from the runtime's cache, or
// of a temporary file for the latter.
func isOfNetwork(name string) bool {
	hash, _, _ := strings.Cut(name, ".")
	cached := hash + cachedSuffix
	isRecord := name == hash || name == cached || safefile.IsTemp(name, cached+".")
	return isHash(hash) && isRecord
}

func fileIf(is bool) uint32 {
	if is {
		return unix.S_IFREG
	}
	return 0
}

func directoryIf(is bool) uint32 {
	if is {
		return unix.S_IFDIR
	}
	return 0
}

func kindInDataDir(name string) uint32 {
	switch name {
	case sourcesDir, attachmentsDir, backupsDir:
		return unix.S_IFDIR
	case socketFile:
		return unix.S_IFSOCK
	case markerFile, lockFile, instanceLockFile, resetLockFile:
		return unix.S_IFREG
	case recordFile, recordFile + damagedSuffix, podsFile, podsFile + damagedSuffix:
		return unix.S_IFREG
	}
	return fileIf(safefile.IsTemp(name, recordFile+".") || safefile.IsTemp(name, podsFile+"."))
}

// kindOfBoot is kindOf for a name in the directory of what is valid in one boot.
func kindOfBoot(name string) uint32 {
	if name == bootUnitFile {
		return unix.S_IFREG
	}
	hash, isEntries := strings.CutSuffix(name, entriesSuffix)
	if isEntries {
		return fileIf(isHash(hash))
	}
	return directoryIf(isHash(name))
}

func isOfSources(name string) bool {
	hash, _, _ := strings.Cut(name, ".")
	if !isHash(hash) {
		return false
	}
	document := hash + documentSuffix
	switch name {
	case document, hash + verificationCacheSuffix, document + damagedSuffix, document + droppedSuffix:
		return true
	}
	return safefile.IsTemp(name, document+".")
}

// isOfBackups reports whether package conflist writes a file of this name: a copy, whose name has the SHA-256
// of the original's path, a record, or a temporary file of package safefile.
func isOfBackups(name string) bool {
	isInstallFile := name == conflistRecordFile || name == copyRecordFile || name == bootUnitDirFile
	if isInstallFile || safefile.IsTemp(name, safefile.TempPrefix) {
		return true
	}
	stem, isCopy := strings.CutSuffix(name, ".bak")
	at := strings.LastIndexByte(stem, '.')
	return isCopy && at > 0 && isHash(stem[at+1:])
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

// recognize returns the type of the entry under a name in the directory. The error is errUnknown if it is
// something else, or os.ErrNotExist.
func (f *folder) recognize(name string) (kind uint32, err error) {
	const op = "stat"
	kind = kindOf(f.below, name)
	if kind == 0 {
		return 0, failure(op, f.in(name), errUnknown)
	}
	var st unix.Stat_t
	err = unix.Fstatat(f.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if err == nil && st.Mode&unix.S_IFMT != kind {
		err = errUnknown
	}
	return kind, failure(op, f.in(name), err)
}

// isRecognized reports whether the entry under a name is ip-masq's.
func (f *folder) isRecognized(name string) bool {
	_, err := f.recognize(name)
	return err == nil
}

// clear removes the entries of ip-masq from the directory, except the spared names.
func (f *folder) clear(spared ...string) error {
	names, err := f.names() // sorted
	errs := []error{err}
	for _, name := range names {
		kind, err := f.recognize(name)
		if err != nil || slices.Contains(spared, name) {
			continue
		}
		if kind == unix.S_IFDIR {
			errs = append(errs, f.clearDirectory(name))
		} else {
			errs = append(errs, f.remove(name))
		}
	}
	return errors.Join(errs...)
}

// clearDirectory removes what is ip-masq's from a directory, and the directory if it is empty then.
func (f *folder) clearDirectory(name string) error {
	err := f.within(name, func(sub *folder) error { return sub.clear() })
	if err != nil {
		return err
	}
	// It may hold files of another program, or a new attachment: Attach takes no lock.
	err = unix.Unlinkat(f.fd(), name, unix.AT_REMOVEDIR)
	return failure("remove directory", f.in(name), ignoring(err, unix.ENOENT, unix.ENOTEMPTY))
}
