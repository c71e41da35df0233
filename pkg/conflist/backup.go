// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// MostBackups is how many backups there are of one file at most: the first, which
// is how the file was before we ever touched it, and the latest others.
const MostBackups = 16

const backupSuffix = ".bak"

// errNoBackup tells the errors of Backup from those of what it is for.
var errNoBackup = errors.New("back up")

// Backup keeps the bytes of a file in a directory of its own, which it makes if
// it is missing, and the one that this is in (mode 0700; those above, of the
// system, 0755). It returns the path of the copy (mode 0600: it may have
// credentials in it). The copy's name is the file's, then a dot and the
// SHA-256 of the bytes in hex, then ".bak", which no runtime loads. What is kept
// already is not written again.
func Backup(ctx context.Context, dir, path string, was []byte) (string, error) {
	kept, err := backup(ctx, dir, path, was)
	if err != nil {
		return "", fmt.Errorf("%w %s: %w", errNoBackup, policy.Printable(path), err)
	}
	return kept, nil
}

func backup(ctx context.Context, dir, path string, was []byte) (_ string, err error) {
	for _, missing := range []struct {
		path string
		mode fs.FileMode
	}{{filepath.Dir(filepath.Dir(dir)), 0o755}, {dir, 0o700}} {
		if err := os.MkdirAll(missing.path, missing.mode); err != nil {
			return "", safefile.Error("create the directory", missing.path, err)
		}
	}
	info, err := os.Lstat(dir)
	switch {
	case err != nil:
		return "", safefile.Error("look at", dir, err)
	case !info.IsDir() || owner(info).uid != os.Geteuid() || info.Mode().Perm()&0o022 != 0:
		return "", fmt.Errorf("%s must be a directory of user %d that nobody else can write to; mend or remove it",
			policy.Printable(dir), os.Geteuid())
	}
	f, err := openFolder(ctx, dir)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()

	sum := sha256.Sum256(was)
	stem := backupStem(path)
	kept := filepath.Join(dir, stem+hex.EncodeToString(sum[:])+backupSuffix)
	if _, err := unchanged(kept, was); err == nil {
		return kept, nil
	}
	temp, err := f.Stage(was, nil)
	if err != nil {
		return "", err
	}
	if err := f.Rename(temp, filepath.Base(kept)); err != nil {
		return "", errors.Join(err, f.Remove(temp))
	}
	if err := f.Sync(); err != nil {
		return "", err
	}
	return kept, prune(f, stem, filepath.Base(kept))
}

// backupStem begins the names of a file's backups. File names end at 255 bytes.
func backupStem(path string) string {
	const most = 128
	name := filepath.Base(path)
	return name[:min(len(name), most)] + "."
}

// prune removes the backups that are too many; never the named one.
func prune(f *safefile.Dir, stem, spare string) error {
	entries, err := os.ReadDir(f.Path())
	if err != nil {
		return safefile.Error("read the directory", f.Path(), err)
	}
	type old struct {
		name string
		at   time.Time
	}
	var all []old
	for _, e := range entries {
		hash, isOne := strings.CutPrefix(e.Name(), stem)
		hash, ends := strings.CutSuffix(hash, backupSuffix)
		if sum, err := hex.DecodeString(hash); !isOne || !ends || err != nil || len(sum) != sha256.Size {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return safefile.Error("look at", filepath.Join(f.Path(), e.Name()), err)
		}
		if e.Name() != spare {
			all = append(all, old{e.Name(), info.ModTime()})
		}
	}
	slices.SortFunc(all, func(a, b old) int {
		return cmp.Or(a.at.Compare(b.at), strings.Compare(a.name, b.name))
	})
	var errs []error
	for len(all) > MostBackups-1 {
		errs = append(errs, f.Remove(all[1].name))
		all = slices.Delete(all, 1, 2)
	}
	return errors.Join(errs...)
}
