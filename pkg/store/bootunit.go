// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// bootUnitFile is a file of this boot, whose mtime is when the boot unit ran last. Its content is written
// for the mtime alone.
const bootUnitFile = "boot-unit"

// bootUnitDirFile has the directory into which install wrote the boot unit.
const bootUnitDirFile = "boot-unit-dir"

// RecordBootUnitDir records the directory into which install wrote the boot unit, so that status and
// uninstall find it.
func (d *Dir) RecordBootUnitDir(ctx context.Context, dir string) error {
	backups, err := d.Backups()
	if err != nil {
		return err
	}
	f, err := safefile.OpenLocked(ctx, backups, d.LockWait)
	if err != nil {
		return err
	}
	temp, err := f.Stage([]byte(dir+"\n"), nil)
	if err == nil {
		err = errors.Join(f.Rename(temp, bootUnitDirFile), f.Sync())
	}
	return errors.Join(err, f.Close())
}

// BootUnitDir returns the directory on record, "" if there is none that can be read.
func (d *Dir) BootUnitDir() string {
	const maxPath = 4096
	text, _, err := safefile.ReadFile(filepath.Join(d.path, backupsDir, bootUnitDirFile), maxPath)
	dir, isWhole := strings.CutSuffix(string(text), "\n")
	if err != nil || !isWhole || !filepath.IsAbs(dir) {
		return ""
	}
	return dir
}

// RecordBootUnit records that the boot unit runs. It creates no dataDir: without documents there is nothing
// to restore.
func (d *Dir) RecordBootUnit() error {
	const op = "record the boot unit"
	if safefile.IsMissing(d.path) {
		return nil
	}
	f, err := d.ofBoot(true)
	if err != nil {
		return err
	}
	defer f.close()
	file, err := f.openOrCreate(op, bootUnitFile, unix.O_WRONLY)
	if err != nil {
		return err
	}
	return failure(op, f.in(bootUnitFile), overwrite(file, []byte("\n")))
}

// BootUnitRan returns when the boot unit ran last in this boot; zero if it did not, or the record cannot be
// read.
func (d *Dir) BootUnitRan() time.Time {
	f, err := d.ofBoot(false)
	if err != nil {
		return time.Time{}
	}
	defer f.close()
	var st unix.Stat_t
	if unix.Fstatat(f.fd(), bootUnitFile, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
		return time.Time{}
	}
	return time.Unix(st.Mtim.Unix())
}
