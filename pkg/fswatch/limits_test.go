// SPDX-License-Identifier: Apache-2.0

package fswatch

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// limitedVariable makes this program run limited instead of the tests: limits of
// inotify are a user namespace's, and a process of many threads cannot enter one.
const limitedVariable = "FSWATCH_TEST_LIMITED"

func TestLimits(t *testing.T) {
	child := exec.Command("/proc/self/exe")
	child.Env = append(os.Environ(), limitedVariable+"="+t.TempDir())
	child.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER,
		Pdeathsig:   unix.SIGKILL,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if out, err := child.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// limited watches a directory with too little to watch it by, and then enough.
func limited(dir string) error {
	for _, tc := range []struct {
		sysctl string
		want   error
		says   string
	}{
		{"max_inotify_instances", unix.EMFILE, "fs.inotify.max_user_instances"},
		{"max_inotify_watches", unix.ENOSPC, "fs.inotify.max_user_watches"},
	} {
		if err := deafness("/proc/sys/user/"+tc.sysctl, dir, tc.want, tc.says); err != nil {
			return fmt.Errorf("%s: %w", tc.sysctl, err)
		}
	}
	return nil
}

func deafness(sysctl, dir string, want error, says string) error {
	before, err := os.ReadFile(sysctl)
	if err != nil {
		return err
	}
	if err := os.WriteFile(sysctl, []byte("0"), 0); err != nil {
		return err
	}
	w := newWatcher(30*time.Millisecond, []string{dir})
	if err := w.Err(); !errors.Is(err, want) || !strings.Contains(err.Error(), says) {
		return fmt.Errorf("deaf, Err is %w", err)
	}
	if err := os.WriteFile(sysctl, before, 0); err != nil {
		return err
	}
	for deadline := time.After(timelimit.Wait); w.Err() != nil; {
		select {
		case <-w.Changed():
		case <-deadline:
			return fmt.Errorf("not tried again: %w", w.Err())
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
		return err
	}
	select {
	case <-w.Changed():
	case <-time.After(timelimit.Wait):
		return errors.New("still deaf")
	}
	return w.Close()
}
