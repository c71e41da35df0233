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
	"strings"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// errChanged says that a file is not, or no longer, as it was read. It was left as it is.
var errChanged = errors.New("another program changed the file meanwhile")

// lockTimeout is how long to wait for another process of ip-masq that writes in a directory.
const lockTimeout = 10 * time.Second

// withDir calls do with the locked directory.
func withDir(ctx context.Context, path string, do func(*safefile.Dir) error) error {
	d, err := safefile.OpenLocked(ctx, path, lockTimeout)
	if err != nil {
		return err
	}
	return errors.Join(do(d), d.Close())
}

// RemoveTemps removes the temporary files that killed processes left in a configuration directory.
// A directory that is missing is an fs.ErrNotExist.
func RemoveTemps(dir string) error {
	return withDir(context.Background(), dir, func(*safefile.Dir) error { return nil })
}

// unchanged returns mode and owner of a file, or errChanged if its text is not that one.
func unchanged(path string, was []byte) (fs.FileInfo, error) {
	doc, info, err := safefile.ReadFile(path, maxSize)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Equal(doc, was) {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), errChanged)
	}
	return info, err
}

// replacement replaces a file's text by another one. Its steps run one after the other, and the
// process may be killed between any two: then the file is whole, old or new, and the next
// replacement in the directory removes the temporary file.
//
// The files are exchanged (RENAME_EXCHANGE), and the one that was taken out is read again: a file
// that another program put there in the last moment is put back. On file systems that cannot
// exchange files, such as NFS, a rename overwrites it.
//
// A symlink stays one: its target is replaced.
type replacement struct {
	ctx      context.Context // of waiting for the lock
	path     string
	was, now []byte

	dir          *safefile.Dir // of the file, or of the symlink's target
	target, temp string        // in dir; no temp if there is none
	exchanged    bool
}

// replace replaces a file's text, which must be was, or returns errChanged. The file keeps its mode
// and owner.
func replace(ctx context.Context, path string, was, now []byte) error {
	r := &replacement{ctx: ctx, path: path, was: was, now: now}
	if err := r.run(r.steps()); err != nil {
		return fmt.Errorf("replace %s: %w", policy.Printable(path), err)
	}
	return nil
}

func (r *replacement) steps() []func() error {
	return []func() error{r.open, r.stage, r.compare, r.exchange, r.verify, r.finish}
}

func (r *replacement) run(steps []func() error) (err error) {
	for i := 0; i < len(steps) && err == nil; i++ {
		err = steps[i]()
	}
	if r.dir == nil {
		return err
	}
	if r.temp != "" && err != nil {
		err = errors.Join(err, r.dir.Remove(r.temp))
	}
	return errors.Join(err, r.dir.Close())
}

func (r *replacement) open() error {
	if err := loadable(r.path, r.now); err != nil {
		return err
	}
	target, err := filepath.EvalSymlinks(r.path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err = os.Lstat(r.path); err == nil {
			return explainLink(r.path, fs.ErrNotExist)
		}
		return errChanged
	}
	if err != nil {
		return safefile.Error("resolve", r.path, err)
	}
	r.target = filepath.Base(target)
	r.dir, err = safefile.OpenLocked(r.ctx, filepath.Dir(target), lockTimeout)
	return err
}

func (r *replacement) stage() error {
	info, err := unchanged(r.dir.PathOf(r.target), r.was)
	if err == nil {
		r.temp, err = r.dir.Stage(r.now, withModeOf(info))
	}
	return err
}

func (r *replacement) compare() error {
	_, err := unchanged(r.dir.PathOf(r.target), r.was)
	return err
}

func (r *replacement) exchange() error {
	err := r.dir.Exchange(r.temp, r.target)
	switch {
	case err == nil:
		r.exchanged = true
	case errors.Is(err, fs.ErrNotExist):
		return errChanged
	case errors.Is(err, errors.ErrUnsupported):
		return r.rename()
	}
	return err
}

func (r *replacement) rename() error {
	err := r.dir.Rename(r.temp, r.target)
	if err == nil {
		r.temp = ""
	}
	return err
}

// verify looks at the file that was taken out, and puts it back if it is another one.
func (r *replacement) verify() error {
	if !r.exchanged {
		return nil
	}
	_, err := unchanged(r.dir.PathOf(r.temp), r.was)
	if err == nil {
		return nil
	}
	if back := r.dir.Exchange(r.temp, r.target); back != nil {
		// It may be the only copy. The error is not errChanged: a new attempt would not report it.
		kept := strings.TrimSuffix(r.temp, safefile.TempSuffix) + ".kept"
		if err := r.dir.Rename(r.temp, kept); err != nil {
			kept = r.temp
		}
		r.temp = ""
		return fmt.Errorf("another program wrote the file in the same moment; its text is in %s now: %w",
			policy.Printable(r.dir.PathOf(kept)), back)
	}
	r.exchanged = false
	return err
}

func (r *replacement) finish() error {
	var err error
	if r.temp != "" {
		err = r.dir.Remove(r.temp)
		r.temp = ""
	}
	if err = errors.Join(err, r.dir.Sync(), r.announce()); err != nil {
		return fmt.Errorf("the new text is in force: %w", err)
	}
	return nil
}

// announce creates and removes a file in the directory of a symlink: runtimes watch this directory,
// not that of the target.
func (r *replacement) announce() error {
	dir, err := filepath.EvalSymlinks(filepath.Dir(r.path))
	if err != nil || dir == r.dir.Path() {
		return err
	}
	return withDir(r.ctx, dir, func(d *safefile.Dir) error {
		temp, err := d.Stage(nil, nil)
		if err == nil {
			err = d.Remove(temp)
		}
		return err
	})
}

// create writes a file that is missing, with the mode and owner of another one. If the path is
// taken the error is errChanged.
func create(ctx context.Context, path string, now []byte, model string) error {
	err := loadable(path, now)
	if err == nil {
		err = withDir(ctx, filepath.Dir(path), func(d *safefile.Dir) error {
			_, info, err := safefile.ReadFile(model, maxSize)
			if err != nil {
				return err
			}
			temp, err := d.Stage(now, withModeOf(info))
			if err != nil {
				return err
			}
			// Unlike a rename, a link replaces nothing. containerd 1.6 notices the removal.
			if err = d.Link(temp, filepath.Base(path)); errors.Is(err, fs.ErrExist) {
				err = errChanged
			}
			return errors.Join(err, d.Remove(temp), d.Sync())
		})
	}
	if err != nil {
		return fmt.Errorf("create %s: %w", policy.Printable(path), err)
	}
	return nil
}

// removeFile removes a file whose text must be was, or returns errChanged.
func removeFile(ctx context.Context, path string, was []byte) error {
	err := withDir(ctx, filepath.Dir(path), func(d *safefile.Dir) error {
		_, err := unchanged(path, was)
		if err == nil {
			err = d.Remove(filepath.Base(path))
		}
		return errors.Join(err, d.Sync())
	})
	if err != nil {
		return fmt.Errorf("remove %s: %w", policy.Printable(path), err)
	}
	return nil
}

// withModeOf returns a function that gives a file the mode and owner of another one.
func withModeOf(other fs.FileInfo) func(*os.File) error {
	return func(file *os.File) error {
		info, err := file.Stat()
		if err != nil {
			return err
		}
		have, want := owner(info), owner(other)
		if have != want {
			if err := file.Chown(want.uid, want.gid); err != nil {
				return fmt.Errorf("give it to %d:%d as the original (CAP_CHOWN is needed): %w", want.uid, want.gid, err)
			}
		}
		return file.Chmod(other.Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky))
	}
}

type ids struct{ uid, gid int }

func owner(info fs.FileInfo) ids {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return ids{int(s.Uid), int(s.Gid)}
	}
	return ids{}
}

// backup keeps the text that a file had before ip-masq changed it last, and returns the path of the
// copy (mode 0600: it may have credentials). It creates the directory if it is missing. The name of
// the copy is the file's with the SHA-256 of its path; no runtime loads it.
func backup(ctx context.Context, dir, path string, was []byte) (string, error) {
	kept, err := storeBackup(ctx, dir, path, was)
	if err != nil {
		return "", fmt.Errorf("back up %s: %w", policy.Printable(path), err)
	}
	return kept, nil
}

func storeBackup(ctx context.Context, dir, path string, was []byte) (string, error) {
	if err := os.MkdirAll(filepath.Dir(filepath.Dir(dir)), 0o755); err != nil {
		return "", safefile.Error("create the directories above", dir, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", safefile.Error("create the directory", dir, err)
	}
	info, err := os.Lstat(dir)
	switch {
	case err != nil:
		return "", safefile.Error("look at", dir, err)
	case !info.IsDir() || owner(info).uid != os.Geteuid() || info.Mode().Perm()&0o022 != 0:
		return "", fmt.Errorf("%s must be a directory of user %d that no other user can write to; mend or remove it",
			policy.Printable(dir), os.Geteuid())
	}
	const maxStem = 128 // file names end at 255 bytes
	stem, sum := filepath.Base(path), sha256.Sum256([]byte(path))
	name := stem[:min(len(stem), maxStem)] + "." + hex.EncodeToString(sum[:]) + ".bak"
	return filepath.Join(dir, name), withDir(ctx, dir, func(d *safefile.Dir) error {
		if _, err := unchanged(d.PathOf(name), was); err == nil {
			return nil
		}
		temp, err := d.Stage(was, nil)
		if err != nil {
			return err
		}
		if err := d.Rename(temp, name); err != nil {
			return errors.Join(err, d.Remove(temp))
		}
		return d.Sync()
	})
}
