// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"os"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// binMode is the mode of the binary, whatever the umask.
const binMode = 0o755

// openFolder locks the directory of the plugins. Another process of ours copies
// a binary there, and runs it.
func openFolder(ctx context.Context, path string) (*safefile.Dir, error) {
	const most = 30 * time.Second
	d, err := safefile.OpenLocked(ctx, path, most)
	if err != nil && ctx.Err() != nil {
		return nil, ErrStopped
	}
	return d, err
}

func runnable(file *os.File) error { return file.Chmod(binMode) }
