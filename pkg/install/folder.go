// SPDX-License-Identifier: Apache-2.0

package install

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
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// How temporary files are called: no plugin's type begins with a dot.
const (
	tempPrefix = ".ip-masq-"
	tempSuffix = ".tmp"
)

// binMode is the mode of the binary, whatever the umask.
const binMode = 0o755

// folder is the directory of the plugins, locked by an flock(2) on itself: what
// temporary files of ours are in it were left by somebody who was killed. The
// lock goes with the process.
type folder struct {
	path string
	file *os.File
}

// openFolder locks the directory, and removes what was left in it.
func openFolder(ctx context.Context, path string) (*folder, error) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, failure("open the directory", path, err)
	}
	f := &folder{path: path, file: file}
	err = f.lock(ctx)
	if err == nil {
		err = f.sweep()
	}
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

func (f *folder) lock(ctx context.Context) error {
	const most, pause = 30 * time.Second, 20 * time.Millisecond
	limit, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for {
		err := unix.Flock(int(f.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return failure("lock the directory", f.path, err)
		}
		select {
		case <-limit.Done():
			if ctx.Err() != nil {
				return ErrStopped
			}
			return fmt.Errorf("lock the directory %s: another process has it locked; look for it with lsof", shown(f.path))
		case <-time.After(pause):
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

func isTemp(name string) bool {
	random, isOurs := strings.CutPrefix(name, tempPrefix)
	random, ends := strings.CutSuffix(random, tempSuffix)
	_, err := strconv.ParseUint(random, 36, 64)
	return isOurs && ends && err == nil
}

// remove removes a file. One that is gone is fine.
func (f *folder) remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return failure("remove", path, err)
	}
	return nil
}

// stage writes a temporary file that can be run, and syncs it.
func (f *folder) stage(data []byte) (string, error) {
	path := filepath.Join(f.path, tempPrefix+strconv.FormatUint(rand.Uint64(), 36)+tempSuffix)
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", failure("create", path, err)
	}
	_, err = file.Write(data)
	if err == nil {
		err = file.Chmod(binMode)
	}
	if err == nil {
		err = file.Sync()
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(failure("write", path, err), f.remove(path))
	}
	return path, nil
}

// failure takes the path out of an error, which would stand there unquoted, and
// puts it behind the operation.
func failure(op, path string, err error) error {
	var pathErr *fs.PathError
	var linkErr *os.LinkError
	switch {
	case errors.As(err, &pathErr):
		err = pathErr.Err
	case errors.As(err, &linkErr):
		err = linkErr.Err
	}
	return fmt.Errorf("%s %s: %w", op, shown(path), err)
}

// shown makes a text fit for a message, and leaves it as it is where it is that
// already: one line that can be printed, and not long.
func shown(s string) string {
	const most = 256 // bytes, as in policy.Quote
	unprintable := func(r rune) bool { return !strconv.IsPrint(r) }
	if len(s) > most || !utf8.ValidString(s) || strings.ContainsFunc(s, unprintable) {
		return policy.Quote(s)
	}
	return s
}
