// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// backup keeps the text that a file had before ip-masq changed it last (mode 0600: it may have credentials),
// and returns the path of the copy: the file's name with the SHA-256 of its path. No runtime loads it.
func backup(
	ctx context.Context, makeDir func() (string, error), path string, was []byte,
) (kept string, err error) {
	dir, err := makeDir()
	if err == nil {
		kept = backupPath(dir, path)
		if checkUnchanged(kept, was) != nil {
			err = stage(ctx, kept, was, nil, (*safefile.Dir).Rename)
		}
	}
	if err != nil {
		return "", fmt.Errorf("back up %s: %w", policy.Printable(path), err)
	}
	return kept, nil
}

// backupBeside keeps the text beside the file, under a name that has the text's digest and that no runtime
// loads: what is there under it is this text.
func backupBeside(ctx context.Context, path string, was []byte) (kept string, err error) {
	const digits = 16
	kept = path + "." + config.DigestOf(was)[:digits] + ".bak"
	err = stage(ctx, kept, was, nil, func(d *safefile.Dir, temp, name string) error {
		err := d.RenameNew(temp, name)
		if errors.Is(err, errors.ErrUnsupported) {
			return d.Rename(temp, name)
		}
		return err
	})
	if errors.Is(err, fs.ErrExist) {
		err = checkUnchanged(kept, was)
	}
	if err != nil {
		return "", fmt.Errorf("back up %s beside it: %w", policy.Printable(path), err)
	}
	return kept, nil
}

func backupPath(dir, path string) string {
	const maxStem = 128 // file names end at 255 bytes
	stem := filepath.Base(path)
	return filepath.Join(dir, stem[:min(len(stem), maxStem)]+"."+config.DigestOf([]byte(path))+".bak")
}
