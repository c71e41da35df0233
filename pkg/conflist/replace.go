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
	"time"

	"golang.org/x/sys/unix"

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
	if err = endExchanges(d); err == nil {
		err = do(d, filepath.Base(path))
	}
	return errors.Join(err, d.Close())
}

// RemoveTemps removes the temporary files that killed processes left in a configuration directory.
// A directory that is missing is an fs.ErrNotExist.
func RemoveTemps(dir string) error {
	return inDir(context.Background(), dir+"/.", func(*safefile.Dir, string) error { return nil }) // inDir removes them
}

const (
	exchangeSuffix = ".exchange"
	keptSuffix     = ".kept"
	digestLen      = 16 // characters
)

func digest(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:digestLen/2])
}

// exchangeName returns the name of a temporary file that is about to be exchanged with the named one. If this process
// is killed, the next one sees by the digests of both texts whether the file got the text of another program.
func exchangeName(name string, was, now []byte) string {
	return safefile.TempPrefix + digest(was) + digest(now) + name + exchangeSuffix
}

// endExchanges ends the exchanges of processes that were killed.
func endExchanges(d *safefile.Dir) error {
	entries, err := os.ReadDir(d.Path())
	errs := []error{err}
	for _, e := range entries {
		rest, isOne := strings.CutSuffix(strings.TrimPrefix(e.Name(), safefile.TempPrefix), exchangeSuffix)
		if isOne && len(rest) > 2*digestLen && e.Type().IsRegular() {
			_, err := endExchange(d, e.Name(), rest[2*digestLen:], rest[:digestLen], rest[digestLen:2*digestLen])
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// endExchange removes the temporary file of an exchange. If that got a text other than the expected one, as another
// program wrote the file at the same instant, endExchange restores it, or keeps it where a third text is in place.
func endExchange(d *safefile.Dir, temp, name, was, now string) (changed bool, err error) {
	digestOf := func(name string) string {
		text, _, err := safefile.ReadFile(d.PathOf(name), maxSize)
		if err != nil {
			return ""
		}
		return digest(text)
	}
	present := digestOf(name)
	if got := digestOf(temp); got == was || got == now || present == was { // the last was never exchanged, and is half a text
		return false, d.Remove(temp)
	}
	back := errors.New("the file has a third text")
	if present == now {
		if back = d.Exchange(temp, name); back == nil {
			return true, d.Remove(temp)
		}
	}
	kept := temp + keptSuffix
	failed := d.Rename(temp, kept)
	if failed != nil {
		kept = temp
	}
	// It is not errChanged: a new attempt would not report it.
	return false, fmt.Errorf("another program wrote the file in the same moment; its text is in %s now: %w",
		policy.Printable(d.PathOf(kept)), errors.Join(back, failed))
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
// the file is whole, old or new, and the next use of the directory removes the temporary file, or
// restores another program's text that it got. The file keeps its mode and owner. A symlink stays one:
// its target is replaced.
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
			if err := errors.Join(d.Sync(), notifyWatchers(r.ctx, path, d.Path())); err != nil {
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
	temp, err := d.StageAs(exchangeName(name, r.was, r.now), r.now, withModeOf(info))
	if errors.Is(err, unix.ENAMETOOLONG) {
		temp, err = d.Stage(r.now, withModeOf(info))
	}
	if err != nil {
		return err
	}
	exchanged := false
	defer func() {
		if !exchanged {
			err = errors.Join(err, d.Remove(temp))
		}
	}()
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
	exchanged = true
	r.reached(4)
	changed, err := endExchange(d, temp, name, digest(r.was), digest(r.now))
	if err == nil && changed {
		err = errChanged
	}
	r.reached(5)
	return err
}

// notifyWatchers creates and removes a file in the directory of a symlink to another directory:
// runtimes watch this directory, not that of the target.
func notifyWatchers(ctx context.Context, link, target string) error {
	dir, err := filepath.EvalSymlinks(filepath.Dir(link))
	if err != nil || dir == target {
		return err
	}
	return inDir(ctx, dir+"/.", func(d *safefile.Dir, _ string) error {
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
