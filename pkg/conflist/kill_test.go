// SPDX-License-Identifier: Apache-2.0

package conflist

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/config"
)

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
	case "loop":
		err = replaceForever(path)
	case "step":
		err = dieAfter(path, rest)
	case "full":
		err = replaceOnFullDisk(path)
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
	now, changed, err := Add(was, []byte(entry))
	if err == nil && !changed {
		now, _, err = Remove(was)
	}
	return was, now, err
}

func replaceForever(path string) error {
	was, now, err := both(path)
	for ready := false; err == nil; was, now = now, was {
		if err = Replace(context.Background(), path, was, now); err == nil && !ready {
			ready = true
			_, err = fmt.Println("ready")
		}
	}
	return err
}

func dieAfter(path, steps string) error {
	n, err := strconv.Atoi(steps)
	if err != nil {
		return err
	}
	r := &replacement{ctx: context.Background(), path: path}
	if r.was, r.now, err = both(path); err != nil {
		return err
	}
	die := func() error { return unix.Kill(os.Getpid(), unix.SIGKILL) }
	return r.run(append(r.steps()[:n], die))
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
	return Replace(context.Background(), path, was, now)
}

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

func TestKilledAtAnyTime(t *testing.T) {
	path, was, now := pair(t)
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() { // a runtime that never sees half a file
		for {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			doc, err := os.ReadFile(path)
			if err == nil && !bytes.Equal(doc, was) && !bytes.Equal(doc, now) {
				err = fmt.Errorf("half a file: %q", doc)
			}
			if err != nil {
				stopped <- err
				return
			}
		}
	}()
	left := 0
	for range 200 {
		cmd := child(t, "loop", path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.IntN(5000)) * time.Microsecond)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatal("the child ended by itself:", err)
		}
		rest := loadsWhole(t, path, was, now)
		if rest > 1 {
			t.Fatal(rest, "files were left: earlier ones were not swept away")
		}
		left += rest
	}
	close(stop)
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	if left == 0 {
		t.Error("no child was killed in the midst of it")
	}
	t.Log(left, "of 200 left a temporary file")
	present := content(t, path)
	other := was
	if bytes.Equal(present, was) {
		other = now
	}
	if err := Replace(t.Context(), path, present, other); err != nil {
		t.Fatal(err)
	}
	holds(t, path, other)
}

func TestKilledAfterEachStep(t *testing.T) {
	for n := range len((&replacement{}).steps()) + 1 {
		path, was, now := pair(t)
		err := child(t, "step "+strconv.Itoa(n), path).Run()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatal(err)
		}
		left := loadsWhole(t, path, was, now)
		if inForce, due := bytes.Equal(content(t, path), now), n > 4; inForce != due {
			t.Errorf("after %d steps the new text is in force: %t", n, inForce)
		}
		if due := n > 2 && n < 7; left > 0 != due {
			t.Errorf("after %d steps there are %d temporary files", n, left)
		}
		was, now, err = both(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := Replace(t.Context(), path, was, now); err != nil {
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

// TestWhatCannotBePutBackIsKept: somebody puts another file in place in the last
// moment, and then removes ours.
func TestWhatCannotBePutBackIsKept(t *testing.T) {
	const theirs = `{"name":"theirs","plugins":[{"type":"bridge"}]}`
	path, was, now := pair(t)
	r := &replacement{ctx: t.Context(), path: path, was: was, now: now}
	steps := slices.Insert(r.steps(), 5, func() error { return os.Remove(path) })
	steps = slices.Insert(steps, 4, func() error { return os.WriteFile(path, []byte(theirs), 0o600) })
	err := r.run(steps)
	if err == nil || errors.Is(err, ErrChanged) {
		t.Fatal(err)
	}
	if err := Sweep(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	entries, readErr := os.ReadDir(filepath.Dir(path))
	if readErr != nil || len(entries) != 1 {
		t.Fatal(entries, readErr)
	}
	kept := filepath.Join(filepath.Dir(path), entries[0].Name())
	if string(content(t, kept)) != theirs || !strings.Contains(err.Error(), kept) || filepath.Ext(kept) != ".kept" {
		t.Error(kept, err)
	}
}
