// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

const file = "10-net.conflist"

// pair makes a directory with a list, and returns the list's path and text and
// the text with the plugin entry.
func pair(t *testing.T) (path string, was, now []byte) {
	t.Helper()
	was = content(t, "testdata/lists/flannel.conflist")
	now = assert.Must(edited(was, []byte(entry)))(t)
	return filepath.Join(dirWith(t, map[string]string{file: string(was)}), file), was, now
}

// holdsOnly checks a file, and that nothing else is in its directory.
func holdsOnly(t *testing.T, path string, doc []byte) {
	t.Helper()
	assert.Equal(t, path, string(content(t, path)), string(doc))
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 1 {
		t.Errorf("%v beside it, %v", entries, err)
	}
}

func ownerOf(info os.FileInfo) [2]int {
	uid, gid := safefile.Owner(info)
	return [2]int{uid, gid}
}

func TestReplaceKeepsModeAndOwner(t *testing.T) {
	path, was, now := pair(t)
	assert.NoError(t, errors.Join(os.Chmod(path, 0o640), os.Chown(path, 12, 34)))
	old := unix.Umask(0o777)
	defer unix.Umask(old)
	_ = assert.Must(replace(t.Context(), path, path, was, now))(t)
	holdsOnly(t, path, now)
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o640 || ownerOf(info) != [2]int{12, 34} {
		t.Error(info.Mode(), ownerOf(info), err)
	}
}

func TestReplaceFollowsASymlink(t *testing.T) {
	path, was, now := pair(t)
	dir := t.TempDir()
	link := filepath.Join(dir, "05-link.conflist")
	assert.NoError(t, os.Symlink(path, link))
	_ = assert.Must(replace(t.Context(), link, link, was, now))(t)
	holdsOnly(t, path, now)
	holdsOnly(t, link, now)
	if to, err := os.Readlink(link); err != nil || to != path {
		t.Error("no longer a link:", to, err)
	}
	assert.NoError(t, os.Remove(path))
	_, err := replace(t.Context(), link, link, now, was)
	assert.ErrorContains(t, err, "mount the directory it points to")
}

func TestOnlyTemporaryFilesAreRemoved(t *testing.T) {
	path, was, now := pair(t)
	dir := filepath.Dir(path)
	others := []string{".ip-masq-x.tmp.conf~", ".ip-masq-.tmp", ".ip-masq-A B.tmp", "ip-masq-1.tmp", ".10-net.conflist.swp"}
	for _, name := range append(others, ".ip-masq-1abc.tmp", ".ip-masq-zz9.tmp") {
		assert.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	assert.NoError(t, os.Mkdir(filepath.Join(dir, ".ip-masq-5.tmp"), 0o700))
	_ = assert.Must(replace(t.Context(), path, path, was, now))(t)
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(others)+2 {
		t.Error(entries, err)
	}
}

func TestCreateAndRemoveFile(t *testing.T) {
	path, was, now := pair(t)
	assert.NoError(t, os.Chmod(path, 0o640))
	other := filepath.Join(filepath.Dir(path), "05.conflist")
	_ = assert.Must(replace(t.Context(), other, path, nil, now))(t)
	if info, err := os.Stat(other); err != nil || info.Mode() != 0o640 {
		t.Error(info, err)
	}
	replaceErr := func(path, model string, was, now []byte) error {
		_, err := replace(t.Context(), path, model, was, now)
		return err
	}
	for _, err := range []error{replaceErr(other, path, nil, was), replaceErr(other, path, was, now), removeFile(t.Context(), other, was)} {
		if !errors.Is(err, errChanged) {
			t.Error(err)
		}
	}
	assert.Equal(t, "the other file", string(content(t, other)), string(now))
	assert.NoError(t, removeFile(t.Context(), other, now))
	holdsOnly(t, path, was)
	// The main CNI plugin removes its file when it stops, at any time.
	for _, err := range []error{removeFile(t.Context(), other, now), replaceErr(other, other, now, was), replaceErr(path, other, was, now)} {
		if !errors.Is(err, errChanged) {
			t.Error(err)
		}
	}
}

func TestBackup(t *testing.T) {
	path, was, now := pair(t)
	dir := in(t.TempDir())
	kept := assert.Must(backup(t.Context(), dir, path, was))(t)
	info, err := os.Stat(kept)
	if err != nil || info.Mode() != 0o600 {
		t.Error(info, err)
	}
	again, err := backup(t.Context(), dir, path, was)
	if err != nil || again != kept {
		t.Error(again, err)
	}
	if same, err := os.Stat(kept); err != nil || !os.SameFile(info, same) {
		t.Error("was written again", err)
	}
	holdsOnly(t, kept, was)
	assert.NoError(t, os.WriteFile(kept, was[:5], 0o600))
	assert.Must(backup(t.Context(), dir, path, was))(t)
	holdsOnly(t, kept, was) // a damaged one is replaced

	if other, err := backup(t.Context(), dir, "/elsewhere/"+file, now); err != nil || other == kept {
		t.Error(other, err)
	}
	if latest, err := backup(t.Context(), dir, path, now); err != nil || latest != kept || string(content(t, kept)) != string(now) {
		t.Error("one backup of a file is kept, the latest:", latest, err)
	}

	unmade := func() (string, error) { return "", fs.ErrPermission }
	if _, err := backup(t.Context(), unmade, path, was); !errors.Is(err, fs.ErrPermission) {
		t.Error(err)
	}
}

// in returns an Editor's function that makes this directory.
func in(dir string) func() (string, error) {
	return func() (string, error) { return dir, os.MkdirAll(dir, 0o700) }
}

// TestReplaceLosesNoWrite: what another program writes between the look at the file and its replacement stays, also
// if that program has the file open and writes into it, or removes it.
func TestReplaceLosesNoWrite(t *testing.T) {
	const theirs = `{"name":"theirs"}`
	for name, write := range map[string]func(t *testing.T, path string) (after func() error){
		"renamed": func(t *testing.T, path string) func() error {
			t.Helper()
			assert.NoError(t, errors.Join(os.WriteFile(path+".next", []byte(theirs), 0o644), os.Rename(path+".next", path)))
			return func() error { return nil }
		},
		"written in place": func(t *testing.T, path string) func() error {
			t.Helper()
			file := assert.Must(os.OpenFile(path, os.O_WRONLY, 0))(t)
			return func() error {
				_, err := file.WriteString(theirs)
				return errors.Join(err, file.Truncate(int64(len(theirs))), file.Close())
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			path, was, now := pair(t)
			var after func() error
			err := stage(t.Context(), path, now, nil, func(d *safefile.Dir, temp, name string) error {
				after = write(t, path)
				return put(d, temp, name, was, now)
			})
			if !errors.Is(err, errChanged) {
				t.Error(err)
			}
			assert.NoError(t, after())
			holdsOnly(t, path, []byte(theirs))
		})
	}
	path, was, now := pair(t)
	err := stage(t.Context(), path, now, nil, func(d *safefile.Dir, temp, name string) error {
		return errors.Join(os.Remove(path), put(d, temp, name, was, now))
	})
	if _, missing := os.Stat(path); !errors.Is(err, errChanged) || !errors.Is(missing, fs.ErrNotExist) {
		t.Error("the file of an uninstalled main plugin returns:", err, missing)
	}
	err = stage(t.Context(), path, now, nil, func(d *safefile.Dir, temp, name string) error {
		return errors.Join(os.WriteFile(path, []byte(theirs), 0o600), put(d, temp, name, nil, now))
	})
	if !errors.Is(err, errChanged) {
		t.Error(err)
	}
	holdsOnly(t, path, []byte(theirs))
}

// TestReplaceBesideAWriter: another program renames files over the list all the time. Each of its texts stays until it
// writes the next one, at most with the plugin entry added.
func TestReplaceBesideAWriter(t *testing.T) {
	dir := dirWith(t, map[string]string{file: listNamed("n0")})
	path := filepath.Join(dir, file)
	done, written := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(written)
		for i := 1; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			network := fmt.Sprintf(`"n%d"`, i)
			if err := errors.Join(os.WriteFile(path+".next", []byte(listNamed(strings.Trim(network, `"`))), 0o644), os.Rename(path+".next", path)); err != nil {
				written <- err
				return
			}
			lost := true
			for start := time.Now(); lost && time.Since(start) < time.Second; time.Sleep(50 * time.Microsecond) { // an exchange takes two steps
				doc, err := os.ReadFile(path)
				lost = err != nil || !strings.Contains(string(doc), network)
			}
			if lost {
				written <- fmt.Errorf("text %s is lost", network)
				return
			}
		}
	}()
	inserted := 0
	for start := time.Now(); time.Since(start) < 2*time.Second && len(written) == 0; {
		c, err := Editor{Dir: dir, Entry: []byte(bareEntry)}.Insert(t.Context())
		if err != nil && !errors.Is(err, errChanged) {
			t.Fatal(err)
		}
		if c.Wrote {
			inserted++
		}
	}
	close(done)
	assert.NoError(t, <-written)
	if t.Logf("%d insertions", inserted); inserted == 0 {
		t.Error("the entry was never inserted")
	}
}

// TestReplaceWhereFilesCannotBeExchanged runs in a child process in which the kernel refuses to exchange files.
func TestReplaceWhereFilesCannotBeExchanged(t *testing.T) {
	path, was, _ := pair(t)
	out, err := child(t, path, "exchange")
	if err != nil || !strings.Contains(out, "unsupported operation") {
		t.Fatal(out, err)
	}
	holdsOnly(t, path, append(was, "1234567890"...))
}

// TestMain runs the test binary as a child of itself, whose disk is full or whose kernel cannot exchange files.
func TestMain(m *testing.M) {
	path := os.Getenv(fileVar)
	if path == "" {
		os.Exit(m.Run())
	}
	restrict := fullDisk
	if os.Getenv(faultVar) == "exchange" {
		restrict = refuseExchange
	}
	was, err := os.ReadFile(path)
	if err == nil {
		err = restrict()
	}
	var refused error
	if err == nil {
		refused, err = replace(context.Background(), path, path, was, append(was, "1234567890"...))
	}
	fmt.Fprintln(os.Stderr, refused)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const (
	fileVar  = "CONFLIST_TEST_FILE"
	faultVar = "CONFLIST_TEST_FAULT"
)

// child runs replace in a child process, and returns what it prints.
func child(t *testing.T, path, fault string) (string, error) {
	t.Helper()
	self := assert.Must(os.Executable())(t)
	c := exec.Command(self)
	c.Env = append(os.Environ(), fileVar+"="+path, faultVar+"="+fault)
	out, err := c.CombinedOutput()
	return string(out), err
}

func fullDisk() error {
	signal.Ignore(syscall.SIGXFSZ)
	return unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 10, Max: 10})
}

// refuseExchange makes renameat2(2) fail with EINVAL in this process, as some file systems do for its flags.
func refuseExchange() error {
	runtime.LockOSThread()
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the number of the system call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_RENAMEAT2, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EINVAL)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return errno
	}
	return nil
}

func TestNothingIsLeftWhereTheDiskIsFull(t *testing.T) {
	path, was, _ := pair(t)
	out, err := child(t, path, "disk")
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(out, "file too large") {
		t.Fatal(out, err)
	}
	holdsOnly(t, path, was)
}
