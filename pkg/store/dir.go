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
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// What a dataDir holds.
const (
	lockFile       = "lock"
	recordFile     = "record.json"
	sourcesDir     = "sources"
	attachmentsDir = "attachments"
	backupsDir     = "backups" // of the runtimes' files; conflist writes it

	documentSuffix = ".json"
	sealSuffix     = ".seal"
	damagedSuffix  = ".damaged"
	tempSuffix     = ".tmp"
)

// Dir is the dataDir of a node. It may be used by several goroutines.
type Dir struct {
	path string
	boot func() (string, error)
}

// Option changes what Open returns.
type Option func(*Dir)

// WithBoot takes id for that of the running boot, in place of the kernel's.
func WithBoot(id string) Option {
	return func(d *Dir) {
		d.boot = func() (string, error) { return id, checkBoot(id) }
	}
}

// Open returns the dataDir at an absolute path. It does no I/O: the directory
// need not exist, and only Attach and Lock create it.
func Open(path string, opts ...Option) *Dir {
	// A slash at the end would make the kernel follow a symlink.
	d := &Dir{path: filepath.Clean(path), boot: sync.OnceValues(kernelBoot)}
	for _, o := range opts {
		o(d)
	}
	return d
}

// DocumentPath returns where the document of a source is, or would be.
func (d *Dir) DocumentPath(src policy.Source) string {
	return d.path + "/" + sourcesDir + "/" + nameOf(src)
}

// RecordPath returns where the record is, or would be.
func (d *Dir) RecordPath() string { return d.path + "/" + recordFile }

// BackupsPath returns where the runtimes' files are kept as they were before we
// changed them. The directory goes with the dataDir, and nothing here reads it.
func (d *Dir) BackupsPath() string { return d.path + "/" + backupsDir }

// Path returns the directory's path in its shortest form (filepath.Clean).
func (d *Dir) Path() string { return d.path }

// Boot returns the id of the running boot, or "" where the kernel does not tell
// it; Attach and Tidy then say why.
func (d *Dir) Boot() string {
	id, err := d.boot()
	if err != nil {
		return ""
	}
	return id
}

// kernelBoot reads the random UUID that the kernel makes at each boot
// (random(4)). It is the same in every container of a node.
func kernelBoot() (string, error) {
	const file = "/proc/sys/kernel/random/boot_id"
	// Not os.ReadFile: it would start the runtime's poller for this one read.
	fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("read the boot id from %s: %w; mount /proc", file, err)
	}
	defer func() { _ = unix.Close(fd) }()
	buf := make([]byte, 100)
	n, err := unix.Read(fd, buf)
	if err != nil {
		return "", fmt.Errorf("read the boot id from %s: %w", file, err)
	}
	id := strings.TrimSpace(string(buf[:n]))
	return id, checkBoot(id)
}

// checkBoot holds boot ids to what can safely name a directory.
func checkBoot(id string) error {
	odd := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-'
	}
	if id == "" || len(id) > 64 || strings.ContainsFunc(id, odd) {
		return fmt.Errorf("read the boot id: it is %s, where a UUID was expected", shown(id))
	}
	return nil
}

// hashName returns the file name for names from outside. Each part goes in with
// its length, so that no two lists of parts make the same text, and the domain
// keeps sources, networks and attachments apart.
func hashName(domain string, parts ...string) string {
	h := sha256.New()
	add := func(s string) {
		h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(s))))
		h.Write([]byte(s))
	}
	add(domain)
	for _, p := range parts {
		add(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// dataDir opens the directory itself.
func (d *Dir) dataDir() (*folder, error) { return openFolder(unix.AT_FDCWD, d.path, d.path) }

// makeDataDir opens the directory, and creates it first where it is missing.
// Directories above it get the mode that system directories have.
func (d *Dir) makeDataDir() (*folder, error) {
	f, err := d.dataDir()
	if !errors.Is(err, os.ErrNotExist) {
		return f, err
	}
	if err := makeParents(filepath.Dir(d.path)); err != nil {
		return nil, err
	}
	return makeFolder(unix.AT_FDCWD, d.path, d.path)
}

// descend opens a directory below the dataDir. With create, what is missing on
// the way there is made.
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
