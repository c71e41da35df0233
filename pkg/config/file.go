// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Default directories.
const (
	DefaultDataDir    = "/var/lib/cni/ip-masq"
	DefaultCNIConfDir = "/etc/cni/net.d"
)

// OpenFile opens a file for reading. It does not wait, as it would for a FIFO or a device.
func OpenFile(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|flags, 0)
}

// ReadRegular reads a whole regular file of at most so many KiB. Allowed, if not nil, may
// refuse it before that.
func ReadRegular(f *os.File, mostKiB int64, allowed func(fs.FileInfo) error) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", policy.Printable(f.Name()), Bare(err))
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: not a regular file", policy.Printable(f.Name()))
	}
	if allowed != nil {
		if err := allowed(info); err != nil {
			return nil, err
		}
	}
	// The file may grow while it is read: one byte more shows it.
	most := mostKiB << 10
	doc, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", policy.Printable(f.Name()), Bare(err))
	}
	if int64(len(doc)) > most {
		return nil, fmt.Errorf("read %s: larger than %d KiB", policy.Printable(f.Name()), mostKiB)
	}
	return doc, nil
}

// mostTOML is the limit on a TOML file in KiB: the decoder can take quadratic time.
const mostTOML = 64

func readFile(path string, mostKiB int64) ([]byte, error) {
	f, err := OpenFile(path, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", policy.Printable(path), Bare(err))
	}
	defer closed(f)
	return ReadRegular(f, mostKiB, nil)
}

// missing reports whether the error is that nothing has the path, not even a symlink.
func missing(path string, err error) bool {
	if errors.Is(err, fs.ErrNotExist) {
		_, err = os.Lstat(path)
	}
	return errors.Is(err, fs.ErrNotExist)
}

// closed closes a file that was only read: its error loses nothing.
func closed(f *os.File) { _ = f.Close() }

// Bare returns a file system error without the path, which it does not quote.
func Bare(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}
