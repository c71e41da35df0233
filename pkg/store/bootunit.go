// SPDX-License-Identifier: Apache-2.0

package store

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// bootUnitFile is an empty file of this boot, whose mtime is when the boot unit ran last.
const bootUnitFile = "boot-unit"

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
