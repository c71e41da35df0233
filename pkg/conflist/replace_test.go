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
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/safefile"
)

const file = "10-net.conflist"

// pair makes a directory with a list, and returns the list's path and text and
// the text with the plugin entry.
func pair(t *testing.T) (path string, was, now []byte) {
	t.Helper()
	was = content(t, "testdata/lists/flannel.conflist")
	now, err := edited(was, []byte(entry))
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dirWith(t, map[string]string{file: string(was)}), file), was, now
}

// holds checks a file, and that nothing else is in its directory.
func holds(t *testing.T, path string, doc []byte) {
	t.Helper()
	if got := string(content(t, path)); got != string(doc) {
		t.Errorf("%s holds %q", path, got)
	}
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
	if err := errors.Join(os.Chmod(path, 0o640), os.Chown(path, 12, 34)); err != nil {
		t.Fatal(err)
	}
	old := unix.Umask(0o777)
	defer unix.Umask(old)
	if err := replace(t.Context(), path, path, was, now); err != nil {
		t.Fatal(err)
	}
	holds(t, path, now)
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o640 || ownerOf(info) != [2]int{12, 34} {
		t.Error(info.Mode(), ownerOf(info), err)
	}
}

func TestReplaceFollowsASymlink(t *testing.T) {
	path, was, now := pair(t)
	dir := t.TempDir()
	link := filepath.Join(dir, "05-link.conflist")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := replace(t.Context(), link, link, was, now); err != nil {
		t.Fatal(err)
	}
	holds(t, path, now)
	holds(t, link, now)
	if to, err := os.Readlink(link); err != nil || to != path {
		t.Error("no longer a link:", to, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := replace(t.Context(), link, link, now, was); err == nil || !strings.Contains(err.Error(), "mount the directory it points to") {
		t.Error(err)
	}
}

func TestOnlyTemporaryFilesAreRemoved(t *testing.T) {
	path, was, now := pair(t)
	dir := filepath.Dir(path)
	others := []string{".ip-masq-x.tmp.conf~", ".ip-masq-.tmp", ".ip-masq-A B.tmp", "ip-masq-1.tmp", ".10-net.conflist.swp"}
	for _, name := range append(others, ".ip-masq-1abc.tmp", ".ip-masq-zz9.tmp") {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, ".ip-masq-5.tmp"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := replace(t.Context(), path, path, was, now); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(others)+2 {
		t.Error(entries, err)
	}
}

func TestCreateAndRemoveFile(t *testing.T) {
	path, was, now := pair(t)
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(filepath.Dir(path), "05.conflist")
	if err := replace(t.Context(), other, path, nil, now); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(other); err != nil || info.Mode() != 0o640 {
		t.Error(info, err)
	}
	for _, err := range []error{replace(t.Context(), other, path, nil, was), replace(t.Context(), other, path, was, now), removeFile(t.Context(), other, was)} {
		if !errors.Is(err, errChanged) {
			t.Error(err)
		}
	}
	if string(content(t, other)) != string(now) {
		t.Error("was overwritten")
	}
	if err := removeFile(t.Context(), other, now); err != nil {
		t.Fatal(err)
	}
	holds(t, path, was)
	// The main CNI plugin removes its file when it stops, at any time.
	for _, err := range []error{removeFile(t.Context(), other, now), replace(t.Context(), other, other, now, was), replace(t.Context(), path, other, was, now)} {
		if !errors.Is(err, errChanged) {
			t.Error(err)
		}
	}
}

func TestBackup(t *testing.T) {
	path, was, now := pair(t)
	dir := in(t.TempDir())
	kept, err := backup(t.Context(), dir, path, was)
	if err != nil {
		t.Fatal(err)
	}
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
	holds(t, kept, was)
	if err := os.WriteFile(kept, was[:5], 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := backup(t.Context(), dir, path, was); err != nil {
		t.Fatal(err)
	}
	holds(t, kept, was) // a damaged one is replaced

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

// TestMain runs the test binary as a child of itself, whose disk is full.
func TestMain(m *testing.M) {
	path := os.Getenv(fileVar)
	if path == "" {
		os.Exit(m.Run())
	}
	if err := replaceOnFullDisk(path); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const fileVar = "CONFLIST_TEST_FILE"

func replaceOnFullDisk(path string) error {
	was, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	signal.Ignore(syscall.SIGXFSZ)
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 10, Max: 10}); err != nil {
		return err
	}
	return replace(context.Background(), path, path, was, append(was, "1234567890"...))
}

func TestNothingIsLeftWhereTheDiskIsFull(t *testing.T) {
	path, was, _ := pair(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command(self)
	child.Env = append(os.Environ(), fileVar+"="+path)
	out, err := child.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "file too large") {
		t.Fatal(string(out), err)
	}
	holds(t, path, was)
}
