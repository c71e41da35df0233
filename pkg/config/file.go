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

// The directories that hold where no document says otherwise.
const (
	DefaultDataDir    = "/var/lib/cni/ip-masq"
	DefaultCNIConfDir = "/etc/cni/net.d"
)

// openWithoutWaiting opens for reading. A FIFO without a writer, or a device,
// would keep an ordinary open waiting for as long as it likes.
func OpenFile(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|flags, 0)
}

// readRegular reads the whole of a regular file of at most so many KiB. Allowed
// may refuse it, before it is read, for what fstat(2) says of it.
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
	// One byte more than is allowed: the file may grow under our eyes.
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

// closed closes what was only read: there is nothing that an error could lose.
func closed(f *os.File) { _ = f.Close() }

// bare takes the path out of an error, which would stand there unquoted.
func Bare(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}
