// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"net/netip"
	"os"
	"reflect"
	"strings"
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

// TestOverwriteIsReadMeanwhile: a reader that comes between the two steps of overwrite, or after a process that
// was killed there, gets the new content, and no end of the old one. The file cannot get shorter here.
func TestOverwriteIsReadMeanwhile(t *testing.T) {
	overwritten := func(before, after []byte) []byte {
		t.Helper()
		fd := assert.Must(unix.MemfdCreate("overwritten", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING))(t)
		_, writeErr := unix.Pwrite(fd, before, 0)
		_, fcntlErr := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK)
		copied, dupErr := unix.Dup(fd)
		assert.NoError(t, errors.Join(writeErr, fcntlErr, dupErr))
		err := overwrite(os.NewFile(uintptr(fd), "overwritten"), after)
		if !errors.Is(err, unix.EPERM) {
			t.Errorf("it got shorter: %v", err)
		}
		read := make([]byte, len(before)+len(after))
		n := assert.Must(unix.Pread(copied, read, 0))(t)
		assert.NoError(t, unix.Close(copied))
		return read[:n]
	}
	addresses := func(texts ...string) (list []netip.Addr) {
		for _, text := range texts {
			list = append(list, netip.MustParseAddr(text))
		}
		return list
	}
	of := Attachment{Network: "podnet", ContainerID: "pod1", IfName: "eth0"}
	for _, after := range []Pod{
		{Attachment: of, At: 2, Namespace: "team", Name: "web", Addresses: addresses("10.0.0.24")},
		{Attachment: of, At: 2},
	} {
		before := Pod{Attachment: of, At: 1, Namespace: "team", Name: "web"}
		before.Addresses = addresses("10.0.0.1", "10.0.0.24", "fd00::2:10.0.0.7")
		got := decodePod(overwritten(before.encode(), after.encode()))
		if !reflect.DeepEqual(got, &after) {
			t.Errorf("got %+v, want %+v", got, after)
		}
	}

	published := VerificationCache{Entry: "entry", Inputs: "inputs", Generation: "1.2.30", Addresses: "addresses"}
	shorter := VerificationCache{Entry: "entry", Inputs: "inputs", Generation: "1.2.4"}
	got := decodeVerificationCache(overwritten(published.encode(), shorter.encode()))
	assert.Equal(t, "verification cache", got, shorter)

	digests := decodeDigests(overwritten([]byte("one\ntwo\nthree\n"), []byte("two\nfour\n")))
	assert.Equal(t, "digests", strings.Join(digests, " "), "two four")
}
