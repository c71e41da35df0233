// SPDX-License-Identifier: Apache-2.0

package store

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Written tells when the document of a source was last written, by the mtime of
// its file: the zero Time where there is none.
func (d *Dir) Written(src policy.SourceID) (time.Time, error) {
	const op = "look at document"
	f, err := d.descend(false, sourcesDir)
	if err != nil {
		return time.Time{}, ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	var st unix.Stat_t
	if err := unix.Fstatat(f.fd, nameOf(src), &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return time.Time{}, ignoring(failure(op, f.in(nameOf(src)), err), unix.ENOENT)
	}
	return time.Unix(st.Mtim.Unix()), nil
}
