// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

// longestWait is how long another process of ours may keep a directory locked. It
// writes one small file, and syncs it.
const longestWait = 10 * time.Second

// keptSuffix ends the name of a file that nobody must remove unseen.
const keptSuffix = ".kept"

func openFolder(ctx context.Context, path string) (*safefile.Dir, error) {
	return safefile.OpenLocked(ctx, path, longestWait)
}

// like returns what gives a file the mode and the owner of another.
func like(other fs.FileInfo) func(*os.File) error {
	return func(file *os.File) error {
		info, err := file.Stat()
		if err != nil {
			return err
		}
		if wants := owner(other); owner(info) != wants {
			if err := file.Chown(wants.uid, wants.gid); err != nil {
				return fmt.Errorf("give it to %d:%d as the original (CAP_CHOWN is needed): %w", wants.uid, wants.gid, err)
			}
		}
		return file.Chmod(other.Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky))
	}
}

type ids struct{ uid, gid int }

func owner(info fs.FileInfo) ids {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return ids{int(s.Uid), int(s.Gid)}
	}
	return ids{}
}
