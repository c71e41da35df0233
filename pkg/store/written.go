// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Written tells when the document of a source was last written, by the mtime of
// its file: the zero Time where there is none.
func (d *Dir) Written(src policy.Source) (time.Time, error) {
	const op = "look at document"
	f, err := d.descend(false, sourcesDir)
	if errors.Is(err, os.ErrNotExist) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, err
	}
	defer f.close()
	var st unix.Stat_t
	err = unix.Fstatat(f.fd, nameOf(src), &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, failure(op, f.in(nameOf(src)), err)
	}
	return time.Unix(st.Mtim.Unix()), nil
}
