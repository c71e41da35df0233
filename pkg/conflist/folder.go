// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How temporary files are called: nothing that a runtime would load.
const (
	tempPrefix = ".ip-masq-"
	tempSuffix = ".tmp"
	keptSuffix = ".kept" // of one that nobody must remove unseen
)

// How long another process of ours may keep a directory locked. It writes one
// small file, and syncs it.
const (
	longestWait = 10 * time.Second
	pollEvery   = 10 * time.Millisecond
)

// folder is a directory that is locked, by an flock(2) on itself: whoever of us
// writes there does it alone, and what temporary files there are were left by
// somebody who was killed. The lock goes with the process.
type folder struct {
	path string
	file *os.File
}

// openFolder locks a directory, and removes what a killed process left in it. It
// waits for the lock until ctx ends at most.
func openFolder(ctx context.Context, path string) (*folder, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, failure("open the directory", path, err)
	}
	f := &folder{path: path, file: file}
	if err := f.lock(ctx); err != nil {
		return nil, errors.Join(err, f.close())
	}
	if err := f.sweep(); err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

func (f *folder) lock(ctx context.Context) error {
	deadline := time.Now().Add(longestWait)
	for {
		err := unix.Flock(int(f.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return failure("lock the directory", f.path, err)
		case time.Now().After(deadline):
			return fmt.Errorf("lock the directory %s: another process has had it locked for %s; look for it with lsof",
				shown(f.path), longestWait)
		}
		select {
		case <-ctx.Done():
			return failure("lock the directory", f.path, context.Cause(ctx))
		case <-time.After(pollEvery):
		}
	}
}

func (f *folder) close() error { return f.file.Close() }

func (f *folder) sync() error {
	if err := f.file.Sync(); err != nil {
		return failure("sync the directory", f.path, err)
	}
	return nil
}

// sweep removes temporary files. What has such a name and is no regular file is
// not ours.
func (f *folder) sweep() error {
	entries, err := os.ReadDir(f.path)
	if err != nil {
		return failure("read the directory", f.path, err)
	}
	var errs []error
	for _, e := range entries {
		if isTemp(e.Name()) && e.Type().IsRegular() {
			errs = append(errs, f.remove(filepath.Join(f.path, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// isTemp tells our temporary files by their names.
func isTemp(name string) bool {
	random, isOurs := strings.CutPrefix(name, tempPrefix)
	random, ends := strings.CutSuffix(random, tempSuffix)
	if !isOurs || !ends {
		return false
	}
	_, err := strconv.ParseUint(random, 36, 64)
	return err == nil
}

// remove removes a file. One that is gone is fine.
func (f *folder) remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return failure("remove", path, err)
	}
	return nil
}

// stage writes a temporary file and syncs it. It has the mode and the owner of
// the other file, or, where that is nil, is for us alone. It is written in one
// piece: a runtime that watches the directory looks again at each write.
func (f *folder) stage(data []byte, like fs.FileInfo) (string, error) {
	path := filepath.Join(f.path, tempPrefix+strconv.FormatUint(rand.Uint64(), 36)+tempSuffix)
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", failure("create", path, err)
	}
	err = assume(file, like)
	if err == nil {
		_, err = file.Write(data)
	}
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(failure("write", path, err), f.remove(path))
	}
	return path, nil
}

// assume gives a file the mode and the owner of another.
func assume(file *os.File, like fs.FileInfo) error {
	if like == nil {
		return nil
	}
	info, err := file.Stat()
	if err != nil {
		return err
	}
	has, wants := owner(info), owner(like)
	if has != wants {
		if err := file.Chown(wants.uid, wants.gid); err != nil {
			return fmt.Errorf("give it to %d:%d as the original (CAP_CHOWN is needed): %w", wants.uid, wants.gid, err)
		}
	}
	return file.Chmod(like.Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky))
}

type ids struct{ uid, gid int }

func owner(info fs.FileInfo) ids {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return ids{int(s.Uid), int(s.Gid)}
	}
	return ids{}
}
