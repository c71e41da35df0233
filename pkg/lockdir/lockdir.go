// SPDX-License-Identifier: Apache-2.0

package lockdir

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// How temporary files are called: nothing that a runtime would load or run, as no
// plugin's type begins with a dot.
const (
	TempPrefix = ".ip-masq-"
	TempSuffix = ".tmp"
)

// pollEvery is how often a lock is asked for that somebody else has.
const pollEvery = 10 * time.Millisecond

// Dir is a directory that is locked, by an flock(2) on itself: whoever of us
// writes there does it alone, and what temporary files there are were left by
// somebody who was killed. The lock goes with the process.
type Dir struct {
	path string
	file *os.File
}

// Open locks a directory, and removes what a killed process left in it. It waits
// for the lock for so long at most, and until ctx ends.
func Open(ctx context.Context, path string, wait time.Duration) (*Dir, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, Failure("open the directory", path, err)
	}
	d := &Dir{path: path, file: file}
	if err := d.lock(ctx, wait); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	if err := d.sweep(); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

func (d *Dir) lock(ctx context.Context, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	for {
		err := unix.Flock(int(d.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return Failure("lock the directory", d.path, err)
		case time.Now().After(deadline):
			return fmt.Errorf("lock the directory %s: another process has had it locked for %s; look for it with lsof",
				policy.Shown(d.path), wait)
		}
		select {
		case <-ctx.Done():
			return Failure("lock the directory", d.path, context.Cause(ctx))
		case <-time.After(pollEvery):
		}
	}
}

// Path returns the directory's path, as it was given to Open.
func (d *Dir) Path() string { return d.path }

// Close gives the directory up.
func (d *Dir) Close() error { return d.file.Close() }

// Sync makes what was renamed or removed last (fsync(2) of the directory).
func (d *Dir) Sync() error {
	if err := d.file.Sync(); err != nil {
		return Failure("sync the directory", d.path, err)
	}
	return nil
}

// sweep removes temporary files. What has such a name and is no regular file is
// not ours.
func (d *Dir) sweep() error {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return Failure("read the directory", d.path, err)
	}
	var errs []error
	for _, e := range entries {
		if IsTemp(e.Name()) && e.Type().IsRegular() {
			errs = append(errs, d.Remove(filepath.Join(d.path, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// IsTemp tells our temporary files by their names.
func IsTemp(name string) bool {
	random, isOurs := strings.CutPrefix(name, TempPrefix)
	random, ends := strings.CutSuffix(random, TempSuffix)
	if !isOurs || !ends {
		return false
	}
	_, err := strconv.ParseUint(random, 36, 64)
	return err == nil
}

// Remove removes a file. One that is gone is fine.
func (d *Dir) Remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Failure("remove", path, err)
	}
	return nil
}

// Stage writes a temporary file and syncs it. It is for us alone, unless fit gives
// it another mode or owner; nil is none. It is written in one piece, after that: a
// runtime that watches the directory looks again at each write.
func (d *Dir) Stage(data []byte, fit func(*os.File) error) (string, error) {
	path := filepath.Join(d.path, TempPrefix+strconv.FormatUint(rand.Uint64(), 36)+TempSuffix)
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", Failure("create", path, err)
	}
	if fit != nil {
		err = fit(file)
	}
	if err == nil {
		_, err = file.Write(data)
	}
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(Failure("write", path, err), d.Remove(path))
	}
	return path, nil
}

// ErrIrregular says that what bears a file's name is none: a directory, a FIFO, a
// socket or a device.
var ErrIrregular = errors.New("not a regular file")

// ReadFile reads the whole of a regular file of at most so many bytes. It does not wait
// for the writer of a FIFO.
func ReadFile(path string, most int) ([]byte, fs.FileInfo, error) {
	const op = "read"
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, unix.ENXIO): // a socket
		return nil, nil, Failure(op, path, ErrIrregular)
	case err != nil:
		return nil, nil, Failure("open", path, err)
	}
	defer func() { _ = f.Close() }() // only read: there is nothing to lose
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = ErrIrregular
	}
	var data []byte
	if err == nil {
		data, err = io.ReadAll(io.LimitReader(f, int64(most)+1))
	}
	switch {
	case err != nil:
		return nil, nil, Failure(op, path, err)
	case len(data) > most:
		return nil, nil, fmt.Errorf("%s %s: larger than %d KiB", op, policy.Shown(path), most>>10)
	}
	return data, info, nil
}

// Failure takes the path out of an error, which would stand there unquoted, and
// puts it behind the operation.
func Failure(op, path string, err error) error {
	var pathErr *fs.PathError
	var linkErr *os.LinkError
	switch {
	case errors.As(err, &pathErr):
		err = pathErr.Err
	case errors.As(err, &linkErr):
		err = linkErr.Err
	}
	return fmt.Errorf("%s %s: %w", op, policy.Shown(path), err)
}
