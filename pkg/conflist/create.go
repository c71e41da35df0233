// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// Create writes a file that is not there yet, with the mode and the owner of
// another: the list that FromConf made, like the configuration it was made of.
// It refuses a text that no runtime would load from a file of that name. Where
// the path is taken, by whatever, the error is ErrChanged.
//
// There is the whole file or none, whatever happens.
func Create(ctx context.Context, path string, now []byte, model string) error {
	err := create(ctx, path, now, model)
	if err != nil {
		return fmt.Errorf("create %s: %w", policy.Printable(path), err)
	}
	return nil
}

func create(ctx context.Context, path string, now []byte, model string) (err error) {
	if err := loads(path, now); err != nil {
		return fmt.Errorf("the new text: %w", err)
	}
	f, err := openFolder(ctx, filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, info, err := readWithInfo(model)
	if err != nil {
		return err
	}
	temp, err := f.Stage(now, like(info))
	if err != nil {
		return err
	}
	// A link, unlike a rename, replaces nothing. What containerd 1.6 goes by is not
	// its event but that of the removal.
	if err = f.Link(temp, filepath.Base(path)); errors.Is(err, fs.ErrExist) {
		err = ErrChanged
	}
	if err = errors.Join(err, f.Remove(temp)); err != nil {
		return err
	}
	return f.Sync()
}

// Delete removes a file whose text the caller states: a list that FromConf made.
// It gives up with ErrChanged where the file has another one, or is gone.
func Delete(ctx context.Context, path string, was []byte) error {
	err := remove(ctx, path, was)
	if err != nil {
		return fmt.Errorf("remove %s: %w", policy.Printable(path), err)
	}
	return nil
}

func remove(ctx context.Context, path string, was []byte) (err error) {
	f, err := openFolder(ctx, filepath.Dir(path))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := unchanged(path, was); err != nil {
		return err
	}
	if err := f.Remove(filepath.Base(path)); err != nil {
		return err
	}
	return f.Sync()
}
