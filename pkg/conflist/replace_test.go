// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
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
	if err := replace(t.Context(), path, was, now); err != nil {
		t.Fatal(err)
	}
	holds(t, path, now)
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o640 || ownerOf(info) != [2]int{12, 34} {
		t.Error(info.Mode(), ownerOf(info), err)
	}
}

// Another program writes the file between two steps: its text stays.
func TestConcurrentChangesWin(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, path string){
		"by a rename": func(t *testing.T, path string) {
			temp := filepath.Join(t.TempDir(), "x")
			if err := errors.Join(os.WriteFile(temp, []byte(theirs), 0o600), os.Rename(temp, path)); err != nil {
				t.Fatal(err)
			}
		},
		"in place": func(t *testing.T, path string) {
			if err := os.WriteFile(path, []byte(theirs), 0o600); err != nil {
				t.Fatal(err)
			}
		},
		"by a removal": func(t *testing.T, path string) {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for after := range 4 { // the last is between the comparison and the exchange
			path, was, now := pair(t)
			meanwhile := func(step int) {
				if step == after {
					change(t, path)
				}
			}
			meanwhile(0)
			err := replacement{t.Context(), was, now, meanwhile}.run(path)
			if !errors.Is(err, errChanged) {
				t.Errorf("%s after %d steps: %v", name, after, err)
			}
			if name == "by a removal" {
				if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) > 0 {
					t.Errorf("%s after %d steps: %v, %v", name, after, entries, err)
				}
				continue
			}
			holds(t, path, []byte(theirs))
		}
	}
}

func TestReplaceFollowsASymlink(t *testing.T) {
	path, was, now := pair(t)
	dir := t.TempDir()
	link := filepath.Join(dir, "05-link.conflist")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if err := replace(t.Context(), link, was, now); err != nil {
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
	if err := replace(t.Context(), link, now, was); err == nil || !strings.Contains(err.Error(), "mount the directory it points to") {
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
	if err := replace(t.Context(), path, was, now); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(others)+2 {
		t.Error(entries, err)
	}
}

func TestCreateAndremoveFile(t *testing.T) {
	path, was, now := pair(t)
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(filepath.Dir(path), "05.conflist")
	if err := create(t.Context(), other, now, path); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(other); err != nil || info.Mode() != 0o640 {
		t.Error(info, err)
	}
	for _, err := range []error{create(t.Context(), other, was, path), removeFile(t.Context(), other, was)} {
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
	if err := removeFile(t.Context(), other, now); !errors.Is(err, errChanged) {
		t.Error(err)
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

// The test binary runs itself as a child that does one of these.
const (
	jobVar  = "CONFLIST_TEST_JOB"
	fileVar = "CONFLIST_TEST_FILE"
)

func TestMain(m *testing.M) {
	path := os.Getenv(fileVar)
	job, rest, _ := strings.Cut(os.Getenv(jobVar), " ")
	var err error
	switch job {
	case "":
		os.Exit(m.Run())
	case "step":
		err = dieAfter(path, rest)
	case "full":
		err = replaceOnFullDisk(path)
	case "noexchange":
		err = replaceWithoutExchange(path, rest)
	default:
		err = errors.New("no such job")
	}
	if err == nil {
		os.Exit(0)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// both are the two texts between which children go back and forth.
func both(path string) (was, now []byte, err error) {
	was, err = os.ReadFile(path)
	if err != nil {
		return nil, nil, err
	}
	now, err = edited(was, []byte(entry))
	if err == nil && bytes.Equal(was, now) {
		now, err = edited(was, nil)
	}
	return was, now, err
}

func dieAfter(path, steps string) error {
	n, err := strconv.Atoi(steps)
	if err != nil {
		return err
	}
	was, now, err := both(path)
	if err != nil {
		return err
	}
	die := func(step int) {
		if step == n {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
		}
	}
	die(0)
	return replacement{context.Background(), was, now, die}.run(path)
}

func replaceOnFullDisk(path string) error {
	was, now, err := both(path)
	if err != nil {
		return err
	}
	signal.Ignore(syscall.SIGXFSZ)
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 10, Max: 10}); err != nil {
		return err
	}
	return replace(context.Background(), path, was, now)
}

// failSyscalls makes system calls of this process fail from now on.
func failSyscalls(err unix.Errno, calls ...uint32) error {
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}} // the number of the call
	for _, call := range calls {
		filter = append(filter, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jf: 1},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(err)})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return errno
	}
	return nil
}

func replaceWithoutExchange(path, errno string) error {
	was, now, err := both(path)
	if err == nil {
		err = failSyscalls(map[string]unix.Errno{"EINVAL": unix.EINVAL, "ENOSYS": unix.ENOSYS}[errno], unix.SYS_RENAMEAT2)
	}
	if err != nil {
		return err
	}
	return replace(context.Background(), path, was, now)
}

const theirs = `{"name":"theirs","plugins":[{"type":"bridge"}]}`

func child(t *testing.T, job, path string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), jobVar+"="+job, fileVar+"="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// loadsWhole checks that the directory is one that runtimes load, with one of
// two texts, and returns how many other files are there.
func loadsWhole(t *testing.T, path string, texts ...[]byte) int {
	t.Helper()
	dir := filepath.Dir(path)
	c, err := config.ReadConfDir(dir)
	if err != nil || c.Err() != nil || len(c.Conflists) != 1 {
		t.Fatal(c, err, c.Err())
	}
	if _, err := Find(dir, ""); err != nil {
		t.Fatal(err)
	}
	doc := content(t, path)
	if !bytes.Equal(doc, texts[0]) && !bytes.Equal(doc, texts[1]) {
		t.Fatalf("half a file: %q", doc)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries) - 1
}

func TestKilledAfterEachStep(t *testing.T) {
	for n := range 7 {
		path, was, now := pair(t)
		err := child(t, "step "+strconv.Itoa(n), path).Run()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatal(err)
		}
		left := loadsWhole(t, path, was, now)
		if inForce, due := bytes.Equal(content(t, path), now), n > 3; inForce != due {
			t.Errorf("after %d steps the new text is in force: %t", n, inForce)
		}
		if due := n > 1 && n < 6; left > 0 != due {
			t.Errorf("after %d steps there are %d temporary files", n, left)
		}
		was, now, err = both(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := replace(t.Context(), path, was, now); err != nil {
			t.Fatalf("after %d steps: %v", n, err)
		}
		holds(t, path, now)
	}
}

func TestNothingIsLeftWhereTheDiskIsFull(t *testing.T) {
	path, was, _ := pair(t)
	out, err := child(t, "full", path).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "file too large") {
		t.Fatal(string(out), err)
	}
	holds(t, path, was)
}

// TestReplaceWithoutExchange: NFS and others cannot exchange files.
func TestReplaceWithoutExchange(t *testing.T) {
	for _, errno := range []string{"EINVAL", "ENOSYS"} {
		path, _, now := pair(t)
		if out, err := child(t, "noexchange "+errno, path).CombinedOutput(); err != nil {
			t.Fatal(errno, string(out), err)
		}
		holds(t, path, now)
	}
}
