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

// lockWait is how long a change waits for other processes of ip-masq that change files of the directory.
const lockWait = 10 * time.Second

// inDir calls do with the locked directory of a file and the file's name.
func inDir(ctx context.Context, path string, do func(d *safefile.Dir, name string) error) error {
	d, err := safefile.OpenLocked(ctx, filepath.Dir(path), lockWait)
	if err != nil {
		return err
	}
	return errors.Join(do(d, filepath.Base(path)), d.Close())
}

// checkUnchanged returns errChanged if the text of a file is not that one; nil is the text of a missing file.
func checkUnchanged(path string, was []byte) error {
	doc, _, err := safefile.ReadFile(path, maxSize)
	isMissing := errors.Is(err, fs.ErrNotExist)
	if err != nil && !isMissing {
		return err
	}
	wasMissing := was == nil
	isUnchanged := isMissing == wasMissing && bytes.Equal(doc, was)
	if !isUnchanged {
		return fmt.Errorf("%s: %w", policy.Printable(path), errChanged)
	}
	return nil
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
	if errors.Is(err, fs.ErrNotExist) {
		return nil, safefile.Error("replace", path, errChanged)
	}
	if err != nil {
		return nil, safefile.Error("replace", path, err)
	}
	likeModel := func(file *os.File) error { return giveTo(file, info) }
	err = stage(ctx, path, now, likeModel, func(d *safefile.Dir, temp, name string) error {
		if err := checkUnchanged(path, was); err != nil {
			return err
		}
		err := put(d, temp, name, was, now)
		if errors.Is(err, errors.ErrUnsupported) {
			refused = err
			return d.Rename(temp, name)
		}
		return err
	})
	return refused, safefile.Error("replace", path, err)
}

// giveTo gives a file the owner and the mode of another one.
func giveTo(file *os.File, like fs.FileInfo) error {
	uid, gid := safefile.Owner(like)
	if err := file.Chown(uid, gid); err != nil {
		return fmt.Errorf("give it to %d:%d as the original (CAP_CHOWN is needed): %w", uid, gid, err)
	}
	return file.Chmod(like.Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky))
}

// put exchanges a temporary file, with the text now, for the file of that name. A rename would lose what
// another program wrote since the file was read; an exchange shows it. If the file had not the text was, put
// exchanges them again until the file has what another program wrote last, and returns errChanged.
func put(d *safefile.Dir, temp, name string, was, now []byte) error {
	if was == nil {
		return asChanged(d.RenameNew(temp, name))
	}
	ours, err := d.Lstat(temp)
	if err != nil {
		return errors.Join(errChanged, err)
	}
	if err := asChanged(d.Exchange(temp, name)); err != nil {
		return err
	}
	if holds(d.PathOf(temp), was) {
		return nil
	}
	return putBack(d, temp, name, ours, now)
}

// putBack exchanges the temporary file, which another program wrote, for ours, and goes on while the file
// that comes out is not the one that went in last: then the other program has written again, and what it
// wrote last has to stay. In the first round ours comes out. If the other program has opened it and written
// into it, it has to go in again, too.
func putBack(d *safefile.Dir, temp, name string, ours fs.FileInfo, now []byte) error {
	const maxExchanges = 100 // each needs another write of that program
	last := ours
	for i := range maxExchanges {
		next, err := d.Lstat(temp)
		if err != nil {
			return errors.Join(errChanged, err)
		}
		if err := asChanged(d.Exchange(temp, name)); err != nil {
			return err
		}
		out, err := d.Lstat(temp)
		if err != nil {
			return errors.Join(errChanged, err)
		}
		isUntouched := i > 0 || holds(d.PathOf(temp), now)
		if os.SameFile(out, last) && isUntouched {
			return errChanged
		}
		last = next
	}
	return errChanged
}

// asChanged returns errChanged if another program has removed the file, or added one of the name.
func asChanged(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrExist) {
		return errChanged
	}
	return err
}

// holds reports whether a file has this text, and no program is about to write another one into it.
func holds(path string, text []byte) bool {
	return !safefile.IsWritten(path) && checkUnchanged(path, text) == nil
}

// stage writes a temporary file beside a path, and calls do with the names of both.
func stage(
	ctx context.Context, path string, text []byte, adjust func(*os.File) error,
	do func(d *safefile.Dir, temp, name string) error,
) error {
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
