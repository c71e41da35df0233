// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// errChanged says that a file is not, or no longer, as it was read. It was left as it is.
var errChanged = errors.New("another program changed the file meanwhile")

// lockTimeout is how long to wait for another process of ip-masq that writes in a directory.
const lockTimeout = 10 * time.Second

// inDir calls do with the locked directory of a file and the file's name.
func inDir(ctx context.Context, path string, do func(d *safefile.Dir, name string) error) error {
	d, err := safefile.OpenLocked(ctx, filepath.Dir(path), lockTimeout)
	if err != nil {
		return err
	}
	return errors.Join(do(d, filepath.Base(path)), d.Close())
}

// RemoveTemps removes the temporary files that killed processes left in a configuration directory.
// A directory that is missing is an fs.ErrNotExist.
func RemoveTemps(dir string) error {
	return inDir(context.Background(), dir+"/.", func(*safefile.Dir, string) error { return nil }) // OpenLocked removes them
}

// unchanged returns mode and owner of a file, or errChanged if its text is not that one.
func unchanged(path string, was []byte) (fs.FileInfo, error) {
	doc, info, err := safefile.ReadFile(path, maxSize)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Equal(doc, was) {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), errChanged)
	}
	return info, err
}

// replacement replaces a file's text by another one. The process may be killed at any instant: then
// the file is whole, old or new, and the next use of the directory removes the temporary file. The file
// keeps its mode and owner. A symlink stays one: its target is replaced.
type replacement struct {
	ctx      context.Context // of waiting for the lock
	was, now []byte
	reached  func(step int) // for tests: called after each step
}

// replace replaces a file's text, which must be was, or returns errChanged.
func replace(ctx context.Context, path string, was, now []byte) error {
	return replacement{ctx, was, now, func(int) {}}.run(path)
}

func (r replacement) run(path string) error {
	_, err := unchanged(path, r.was)
	target := ""
	if err == nil {
		target, err = filepath.EvalSymlinks(path)
	}
	if err == nil {
		err = inDir(r.ctx, target, func(d *safefile.Dir, name string) error {
			r.reached(1)
			if err := r.exchange(d, name); err != nil {
				return err
			}
			if err := d.Sync(); err != nil {
				return fmt.Errorf("the new text is in force: %w", err)
			}
			r.reached(6)
			return nil
		})
	}
	return safefile.Error("replace", path, err)
}

// exchange exchanges the file with a temporary one that has the new text (RENAME_EXCHANGE). If the file
// that it gets has another text than expected, as another program wrote it in the same moment,
// exchange restores it. File systems that cannot exchange files, such as NFS, get a plain rename.
func (r replacement) exchange(d *safefile.Dir, name string) (err error) {
	info, err := unchanged(d.PathOf(name), r.was)
	if err != nil {
		return err
	}
	temp, err := d.Stage(r.now, withModeOf(info))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Remove(temp)) }()
	r.reached(2)
	if _, err := unchanged(d.PathOf(name), r.was); err != nil {
		return err
	}
	r.reached(3)
	switch err := d.Exchange(temp, name); {
	case errors.Is(err, fs.ErrNotExist):
		return errChanged
	case errors.Is(err, errors.ErrUnsupported):
		return d.Rename(temp, name)
	case err != nil:
		return err
	}
	r.reached(4)
	if _, err = unchanged(d.PathOf(temp), r.was); errors.Is(err, errChanged) {
		if back := d.Exchange(temp, name); !errors.Is(back, fs.ErrNotExist) { // else that program has removed the file since
			err = errors.Join(err, back)
		}
	}
	r.reached(5)
	return err
}

// create writes a file that is missing, with the mode and owner of another one. If the path is
// taken the error is errChanged.
func create(ctx context.Context, path string, now []byte, model string) error {
	return safefile.Error("create", path, inDir(ctx, path, func(d *safefile.Dir, name string) error {
		_, info, err := safefile.ReadFile(model, maxSize)
		if err != nil {
			return err
		}
		temp, err := d.Stage(now, withModeOf(info))
		if err != nil {
			return err
		}
		// Unlike a rename, a link replaces nothing. containerd 1.6 notices the removal.
		if err = d.Link(temp, name); errors.Is(err, fs.ErrExist) {
			err = errChanged
		}
		return errors.Join(err, d.Remove(temp), d.Sync())
	}))
}

// removeFile removes a file whose text must be was, or returns errChanged.
func removeFile(ctx context.Context, path string, was []byte) error {
	return safefile.Error("remove", path, inDir(ctx, path, func(d *safefile.Dir, name string) error {
		_, err := unchanged(path, was)
		if err == nil {
			err = d.Remove(name)
		}
		return errors.Join(err, d.Sync())
	}))
}

// withModeOf returns a function that gives a file the mode and owner of another one.
func withModeOf(other fs.FileInfo) func(*os.File) error {
	return func(file *os.File) error {
		uid, gid := safefile.Owner(other)
		if err := file.Chown(uid, gid); err != nil {
			return fmt.Errorf("give it to %d:%d as the original (CAP_CHOWN is needed): %w", uid, gid, err)
		}
		return file.Chmod(other.Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky))
	}
}

// backup keeps the text that a file had before ip-masq changed it last, and returns the path of the
// copy (mode 0600: it may have credentials). It creates the directory, which is in the dataDir, if it
// is missing. The name of the copy is the file's with the SHA-256 of its path; no runtime loads it.
func backup(ctx context.Context, makeDir func() (string, error), path string, was []byte) (kept string, err error) {
	const maxStem = 128 // file names end at 255 bytes
	dir, err := makeDir()
	if err == nil {
		stem, sum := filepath.Base(path), sha256.Sum256([]byte(path))
		kept = filepath.Join(dir, stem[:min(len(stem), maxStem)]+"."+hex.EncodeToString(sum[:])+".bak")
		err = inDir(ctx, kept, func(d *safefile.Dir, name string) error {
			if _, err := unchanged(kept, was); err == nil {
				return nil
			}
			temp, err := d.Stage(was, nil)
			if err == nil {
				err = errors.Join(d.Rename(temp, name), d.Remove(temp), d.Sync())
			}
			return err
		})
	}
	if err != nil {
		return "", fmt.Errorf("back up %s: %w", policy.Printable(path), err)
	}
	return kept, nil
}
