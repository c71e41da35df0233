// SPDX-License-Identifier: Apache-2.0

package store

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containernetworking/plugins/pkg/utils/sysctl"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// Names in a dataDir.
const (
	lockFile         = "lock"
	instanceLockFile = "reconciler.lock"
	resetLockFile    = "resets.lock"
	socketFile       = "reconciler.sock"
	recordFile       = "record.json"
	podsFile         = "pods.json"
	sourcesDir       = "sources"
	attachmentsDir   = "attachments"
	backupsDir       = "backups" // of conflists; package conflist writes them
	markerFile       = "made-by-ip-masq"

	conflistRecordFile = "conflists.json" // among the backups
	copyRecordFile     = "own-conflist.json"

	documentSuffix          = ".json"
	verificationCacheSuffix = ".verified"
	damagedSuffix           = ".damaged"
	droppedSuffix           = ".dropped"

	newDirPrefix = ".ip-masq-data." // of a directory that becomes the dataDir
)

// Dir is the dataDir of a node. It may be used by several goroutines.
type Dir struct {
	LockWait time.Duration // how long Lock and LockToRead wait at most; 10 s by contract

	path string
	boot func() (string, error)
	held atomic.Pointer[Lock] // by this process; nil if it has none
}

// Open returns the dataDir at an absolute path. It does no I/O: the directory need not exist. What writes
// to it creates it, except RecordBootUnit; readings, LockToRead, Detach and Prune do not.
func Open(path string) *Dir {
	// With a slash at the end, the kernel would follow a symlink.
	return &Dir{LockWait: 10 * time.Second, path: filepath.Clean(path), boot: sync.OnceValues(kernelBoot)}
}

// WithBoot returns the dataDir with the id of another boot than the kernel's.
func (d *Dir) WithBoot(id string) *Dir {
	boot := func() (string, error) { return id, checkBoot(id) }
	return &Dir{LockWait: d.LockWait, path: d.path, boot: boot}
}

// DocumentPath returns where the document of a source is, or would be.
func (d *Dir) DocumentPath(src policy.SourceID) string {
	return d.path + "/" + sourcesDir + "/" + nameOf(src)
}

// RecordPath returns where the record is, or would be.
func (d *Dir) RecordPath() string { return d.path + "/" + recordFile }

// IsDocument reports whether a path is that of a source's document, rather than of the record or the exempt
// pods, which any sync writes again.
func (d *Dir) IsDocument(path string) bool { return strings.HasPrefix(path, d.path+"/"+sourcesDir+"/") }

// Backups makes the directory where conflists are kept as they were before ip-masq changed them, durably, and
// returns its path. It is removed with the dataDir, and this package does not read it.
func (d *Dir) Backups() (string, error) {
	root, err := d.makeDataDir()
	if err != nil {
		return "", err
	}
	defer root.close()
	f, err := root.folder(backupsDir, true)
	if err != nil {
		return "", err
	}
	f.close()
	return f.path(), errors.Join(root.sync(), root.syncParent())
}

// ConflistRecordPath returns where package conflist records what it wrote into conflists.
func (d *Dir) ConflistRecordPath() string {
	return d.path + "/" + backupsDir + "/" + conflistRecordFile
}

// CopyRecordPath returns where an earlier version recorded the copy of a conflist that it made.
func (d *Dir) CopyRecordPath() string { return d.path + "/" + backupsDir + "/" + copyRecordFile }

// Path returns the directory's path in its shortest form (filepath.Clean).
func (d *Dir) Path() string { return d.path }

// Boot returns the id of the running boot, or "" if the kernel does not tell it; Attach and Tidy return
// the error.
func (d *Dir) Boot() string {
	id, err := d.boot()
	if err != nil {
		return ""
	}
	return id
}

// kernelBoot reads the random UUID of the boot (random(4)). It is the same in every container of a node.
func kernelBoot() (string, error) {
	// This read starts the runtime's poller, which is 2 % of an ADD with nothing to do.
	id, err := sysctl.Sysctl("kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w; mount /proc", err)
	}
	return id, checkBoot(id)
}

// checkBoot returns an error if a boot id cannot be the name of a directory.
func checkBoot(id string) error {
	if !isBoot(id) {
		return fmt.Errorf("read the boot id: %s is not a UUID", shown(id))
	}
	return nil
}

// hashName returns the file name for names from configurations. Each part is hashed with its length, so
// that different lists differ, and the domain separates sources, networks and attachments.
func hashName(domain string, parts ...string) string {
	h := sha256.New()
	for _, s := range append([]string{domain}, parts...) {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(s))))
		h.Write([]byte(s))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// dataDir opens the directory itself, and refuses one that ip-masq did not create: it has neither the marker
// nor is it empty, as the kubelet and systemd create it.
func (d *Dir) dataDir() (*folder, error) {
	f, err := openFolder(unix.AT_FDCWD, d.path, d.path)
	if err != nil {
		return nil, err
	}
	if err := f.checkMarker(); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// checkMarker notes whether there is a marker, and returns why a directory without one is not a dataDir.
func (f *folder) checkMarker() error {
	f.marked = f.isRecognized(markerFile)
	if f.marked {
		return nil
	}
	names, err := f.names()
	if err != nil || len(names) == 0 {
		return err
	}
	f.marked = f.isRecognized(markerFile) // another process marks an empty one before it writes to it
	if f.marked {
		return nil
	}
	return fmt.Errorf("open directory %s: %w: ip-masq did not make it: it holds %s and no file %s; "+
		"set dataDir to a directory that does not exist or is empty, "+
		"or empty this one if no other program uses it",
		shown(f.path()), ErrRefused, shown(names[0]), markerFile)
}

func (f *folder) mark() error {
	file, err := f.openOrCreate("create", markerFile, unix.O_RDONLY)
	if err != nil {
		return err
	}
	return file.Close()
}

// makeDataDir opens the directory, and creates it first if it is missing.
func (d *Dir) makeDataDir() (*folder, error) {
	const attempts = 100
	for attempt := 1; ; attempt++ { // another process may create or remove it
		f, err := d.openMarked()
		if !errors.Is(err, os.ErrNotExist) {
			return f, err
		}
		err = d.createDataDir()
		wasChanged := errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrExist)
		if wasChanged && attempt < attempts {
			continue
		}
		if err != nil {
			return nil, err
		}
	}
}

// openMarked opens the directory, and marks it first if it is empty: with a file and without the marker it
// would be refused.
func (d *Dir) openMarked() (*folder, error) {
	f, err := d.dataDir()
	if err != nil || f.marked {
		return f, err
	}
	if err := f.mark(); err != nil {
		f.close()
		return nil, err
	}
	return f, nil
}

// createDataDir creates the directory under a temporary name, with the marker in it, and renames it: the
// dataDir is never without its marker. Then it removes the temporary directories that killed processes left.
// Those of other processes that are at it are of no use any more, either.
func (d *Dir) createDataDir() error {
	above := filepath.Dir(d.path)
	if err := os.MkdirAll(above, parentMode); err != nil {
		return failure("create directory", above, err)
	}
	temp := filepath.Join(above, safefile.TempName(newDirPrefix))
	if err := makeDirectory(unix.AT_FDCWD, temp, temp); err != nil {
		return err
	}
	f, err := openFolder(unix.AT_FDCWD, temp, temp)
	if err != nil {
		return err
	}
	defer f.close()
	err = f.mark()
	if err == nil {
		err = renameNew(temp, d.path)
	}
	if err != nil {
		return errors.Join(failure("create directory", d.path, err), f.remove(markerFile), unix.Rmdir(temp))
	}
	removeNewDirs(above)
	return nil
}

// removeNewDirs removes directories that createDataDir made and did not rename. One with other files stays.
func removeNewDirs(above string) {
	entries, _ := os.ReadDir(above) // without them nothing is removed
	for _, e := range entries {
		if !e.IsDir() || !safefile.IsTemp(e.Name(), newDirPrefix) {
			continue
		}
		path := filepath.Join(above, e.Name())
		f, err := openFolder(unix.AT_FDCWD, path, path)
		if err != nil {
			continue
		}
		if f.isNew() {
			f.removeNew(path)
		}
		f.close()
	}
}

// isNew reports whether the directory has nothing but the marker.
func (f *folder) isNew() bool {
	names, err := f.names()
	hasMarker := slices.Equal(names, []string{markerFile}) && f.isRecognized(markerFile)
	return err == nil && (len(names) == 0 || hasMarker)
}

// removeNew removes the directory, which isNew and has this path. Another process may be about to rename it
// to the dataDir, which must keep its marker. Only one of the two renames succeeds. If it is this one, the
// other process starts again.
func (f *folder) removeNew(path string) {
	taken := filepath.Join(filepath.Dir(path), safefile.TempName(newDirPrefix))
	err := unix.Rename(path, taken)
	if err != nil {
		return
	}
	_ = f.remove(markerFile)
	_ = unix.Rmdir(taken)
}

// renameNew renames a directory to a name that no other one has. File systems over a network do not support
// that; there it replaces an empty directory at most (rename(2)).
func renameNew(from, to string) error {
	err := unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
	if errors.Is(err, unix.EINVAL) {
		return unix.Rename(from, to)
	}
	return err
}

// descend opens a directory below the dataDir. With create, it creates missing directories.
func (d *Dir) descend(create bool, names ...string) (*folder, error) {
	open := d.dataDir
	if create {
		open = d.makeDataDir
	}
	f, err := open()
	for _, name := range names {
		if err != nil {
			return nil, err
		}
		parent := f
		f, err = parent.folder(name, create)
		parent.close()
	}
	return f, err
}
