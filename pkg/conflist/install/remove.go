// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// remove takes the plugin out of the directory, and returns its path, or "" where
// there was none. What bears its name and is no regular file was not put there by
// Put, and stays, which the error says.
func remove(ctx context.Context, dir string) (_ string, err error) {
	f, err := openFolder(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	path := filepath.Join(dir, config.PluginType)
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return "", nil
	case err != nil:
		return "", safefile.Error("look at", path, err)
	case !info.Mode().IsRegular():
		return "", fmt.Errorf("%s stays: it is not a regular file, so somebody else put it there; remove it if nobody needs it", policy.Printable(path))
	}
	if err := f.Remove(config.PluginType); err != nil {
		return "", err
	}
	return path, f.Sync()
}
