// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// readFile reads the whole of a regular file of at most mostBytes.
func readFile(path string) ([]byte, error) {
	doc, _, err := readWithInfo(path)
	return doc, err
}

func readWithInfo(path string) ([]byte, fs.FileInfo, error) {
	return safefile.ReadFile(path, mostBytes)
}

// absent explains why a path could not be opened that was said not to be there:
// nil if so, or that it is a symlink to nowhere. Otherwise it is there by now.
func absent(path string, otherwise error) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && info.Mode().Type() == fs.ModeSymlink {
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s: it is a symlink to what is not there; in a container, mount the directory it points to as well", policy.Printable(path))
		}
	}
	return otherwise
}

// unchanged returns what a file has besides its text, or ErrChanged if it is gone
// or its text is another one.
func unchanged(path string, was []byte) (fs.FileInfo, error) {
	doc, info, err := readWithInfo(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !bytes.Equal(doc, was) {
		return nil, fmt.Errorf("%s: %w", policy.Printable(path), ErrChanged)
	}
	return info, err
}
