// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
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

// inDir calls do with the locked directory of a file and the file's name. It waits for other processes of
// ip-masq.
func inDir(ctx context.Context, path string, do func(d *safefile.Dir, name string) error) error {
	d, err := safefile.OpenLocked(ctx, filepath.Dir(path), 10*time.Second)
	if err != nil {
		return err
	}
	return errors.Join(do(d, filepath.Base(path)), d.Close())
}

// checkUnchanged returns errChanged if the text of a file is not that one; nil is the text of a missing file.
func checkUnchanged(path string, was []byte) error {
	doc, _, err := safefile.ReadFile(path, maxSize)
	missing := errors.Is(err, fs.ErrNotExist)
	switch {
	case missing && was == nil:
		return nil
	case missing, err == nil && (was == nil || !bytes.Equal(doc, was)):
		return fmt.Errorf("%s: %w", policy.Printable(path), errChanged)
	}
	return err
}

// replace replaces a file's text, which must be was, or returns errChanged. A process that is killed leaves
// the file whole, old or new; the next use of the directory removes its temporary file. The file gets the
// mode and owner of the model. If the file system cannot exchange files, refused says so: a simultaneous
// write of another program can be lost.
func replace(ctx context.Context, path, model string, was, now []byte) (refused, err error) {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		path = to // a symlink stays one
	}
	_, info, err := safefile.ReadFile(model, maxSize)
	likeModel := func(file *os.File) error {
		uid, gid := safefile.Owner(info)
		if err := file.Chown(uid, gid); err != nil {
			return fmt.Errorf("give it to %d:%d as the original (CAP_CHOWN is needed): %w", uid, gid, err)
		}
		return file.Chmod(info.Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = errChanged
	case err == nil:
		err = stage(ctx, path, now, likeModel, func(d *safefile.Dir, temp, name string) (err error) {
			if err := checkUnchanged(path, was); err != nil {
				return err
			}
			if err = put(d, temp, name, was, now); errors.Is(err, errors.ErrUnsupported) {
				refused, err = err, d.Rename(temp, name)
			}
			return err
		})
	}
	return refused, safefile.Error("replace", path, err)
}

// put exchanges a temporary file, with the text now, for the file of that name. If that had not the text was,
// put exchanges them again until the file has what another program wrote last, and returns errChanged.
func put(d *safefile.Dir, temp, name string, was, now []byte) error {
	exchange := d.Exchange
	if was == nil {
		exchange = d.RenameNew
	}
	const maxExchanges = 100 // each needs another write of that program
	var before fs.FileInfo
	in, err := d.Lstat(temp)
	for i := 0; i < maxExchanges && err == nil; i++ {
		err = exchange(temp, name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrExist) { // removed or added by another program
			return errChanged
		}
		if err != nil || was == nil {
			return err
		}
		var out fs.FileInfo
		out, err = d.Lstat(temp)
		switch {
		case err != nil:
		case i == 0 && holds(d.PathOf(temp), was):
			return nil
		case i == 1 && os.SameFile(out, before) && holds(d.PathOf(temp), now), i > 1 && os.SameFile(out, before):
			return errChanged
		}
		before, in = in, out
	}
	return errors.Join(errChanged, err)
}

// holds reports whether a file has this text, and no program is about to write another one into it.
func holds(path string, text []byte) bool {
	return !safefile.IsWritten(path) && checkUnchanged(path, text) == nil
}

// stage writes a temporary file beside a path, and calls do with the names of both.
func stage(ctx context.Context, path string, text []byte, adjust func(*os.File) error, do func(d *safefile.Dir, temp, name string) error) error {
	return inDir(ctx, path, func(d *safefile.Dir, name string) error {
		temp, err := d.Stage(text, adjust)
		if err != nil {
			return err
		}
		return errors.Join(do(d, temp, name), d.Remove(temp), d.Sync())
	})
}

func removeFile(ctx context.Context, path string, was []byte) error {
	return safefile.Error("remove", path, inDir(ctx, path, func(d *safefile.Dir, name string) error {
		err := checkUnchanged(path, was)
		if err == nil {
			err = d.Remove(name)
		}
		return errors.Join(err, d.Sync())
	}))
}
