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

// Limits on files, in KiB. The TOML decoder can take quadratic time.
const (
	mostConfKiB = 1024
	mostTOMLKiB = 64
)

// ReadFile reads a whole regular file of at most so many KiB. It does not wait, as it would
// for a FIFO or a device.
func ReadFile(path string, mostKiB int64) ([]byte, error) {
	doc, _, err := readFile(path, mostKiB)
	return doc, err
}

func readFile(path string, mostKiB int64) ([]byte, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open %s: %w", policy.Printable(path), Bare(err))
	}
	defer f.Close() //nolint:errcheck // nothing was written
	info, err := f.Stat()
	if err != nil {
		return nil, nil, fmt.Errorf("look at %s: %w", policy.Printable(path), Bare(err))
	}
	if !info.Mode().IsRegular() {
		return nil, info, fmt.Errorf("read %s: not a regular file", policy.Printable(path))
	}
	// The file may grow while it is read: one byte more shows it.
	doc, err := io.ReadAll(io.LimitReader(f, mostKiB<<10+1))
	if err != nil {
		return nil, info, fmt.Errorf("read %s: %w", policy.Printable(path), Bare(err))
	}
	if int64(len(doc)) > mostKiB<<10 {
		return nil, info, fmt.Errorf("read %s: larger than %d KiB", policy.Printable(path), mostKiB)
	}
	return doc, info, nil
}

// missing reports whether the error is that nothing has the path, not even a symlink.
func missing(path string, err error) bool {
	if errors.Is(err, fs.ErrNotExist) {
		_, err = os.Lstat(path)
	}
	return errors.Is(err, fs.ErrNotExist)
}

// Bare returns a file system error without the path, which it does not quote.
func Bare(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}
