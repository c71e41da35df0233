// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// A FIFO that takes the place of a file between its check and its opening is refused, not waited for.
func TestFIFOInPlaceOfACheckedFile(t *testing.T) {
	dir := t.TempDir()
	file, fifo := dir+"/file", dir+"/fifo"
	assert.NoError(t, errors.Join(os.WriteFile(file, nil, 0o600), unix.Mkfifo(fifo, 0o600)))
	until := time.Now().Add(500 * time.Millisecond)
	done := make(chan error, 2)
	go func() {
		for time.Now().Before(until) {
			if err := unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, fifo, unix.RENAME_EXCHANGE); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	go func() {
		for time.Now().Before(until) {
			opened, _, err := openTrusted("open", unix.AT_FDCWD, file, file, unix.O_RDONLY, unix.S_IFREG)
			if err == nil {
				err = opened.Close()
			}
			if err != nil && !errors.Is(err, ErrRefused) {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for range 2 {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(timelimit.Wait):
			t.Fatal("the FIFO is waited for")
		}
	}
}
