// SPDX-License-Identifier: Apache-2.0

package fswatch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(limitedVariable); dir != "" {
		if err := limited(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(sandbox.Run(m))
}

// tree is a directory in which a test makes, moves and removes things, with a
// Watcher.
type tree struct {
	*testing.T
	root string
	*Watcher
	quietFor time.Duration // after which no event is on its way any more
}

// newTree makes directories and watches those that are named next, without retries, in a tree of
// its own. A name that begins with a slash is taken as it is.
func newTree(t *testing.T, made []string, watched ...string) *tree {
	t.Helper()
	tr := &tree{T: t, root: t.TempDir()}
	for _, dir := range made {
		tr.mkdir(dir)
	}
	tr.start(watched...)
	return tr
}

func (t *tree) start(watched ...string) {
	t.Helper()
	var paths []string
	for _, dir := range watched {
		paths = append(paths, t.path(dir))
	}
	t.quietFor = timelimit.Scale(30 * time.Millisecond)
	w := newWatcher(time.Hour, paths)
	t.Watcher = w
	t.Cleanup(func() {
		assert.NoError(t, w.Close())
	})
	assert.NoError(t, w.Err())
	t.quiet("being made")
}

func (t *tree) path(name string) string {
	if filepath.IsAbs(name) || name == "" {
		return name
	}
	return filepath.Join(t.root, name)
}

func (t *tree) must(err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (t *tree) mkdir(name string)      { t.Helper(); t.must(os.MkdirAll(t.path(name), 0o755)) }
func (t *tree) write(name string)      { t.Helper(); t.must(os.WriteFile(t.path(name), []byte("x"), 0o644)) }
func (t *tree) remove(name string)     { t.Helper(); t.must(os.RemoveAll(t.path(name))) }
func (t *tree) rename(from, to string) { t.Helper(); t.must(os.Rename(t.path(from), t.path(to))) }
func (t *tree) link(to, name string)   { t.Helper(); t.must(os.Symlink(to, t.path(name))) }

// relink makes a link lead elsewhere in one step.
func (t *tree) relink(to, name string) {
	t.Helper()
	t.link(to, name+".new")
	t.rename(name+".new", name)
}

// notified fails unless the step is notified, and waits until no more notifications come.
func (t *tree) notified(what string, step func()) {
	t.Helper()
	step()
	select {
	case <-t.Changed():
	case <-time.After(timelimit.Wait):
		t.Fatalf("%s: not notified", what)
	}
	t.drain()
}

// drain waits until no more notifications come.
func (t *tree) drain() {
	t.Helper()
	for {
		select {
		case <-t.Changed():
		case <-time.After(t.quietFor):
			assert.NoError(t, t.Err())
			return
		}
	}
}

func (t *tree) quiet(what string) {
	t.Helper()
	select {
	case <-t.Changed():
		t.Errorf("%s was notified", what)
	case <-time.After(50 * time.Millisecond):
	}
}

func TestInADirectory(t *testing.T) {
	tr := newTree(t, []string{"etc/dir"}, "etc/dir")
	tr.notified("a new file", func() { tr.write("etc/dir/a") })
	tr.notified("a write in place", func() { tr.write("etc/dir/a") })
	tr.notified("a file put in its place", func() { tr.write("etc/dir/.b"); tr.rename("etc/dir/.b", "etc/dir/a") })
	tr.notified("a mode", func() { tr.must(os.Chmod(tr.path("etc/dir/a"), 0o600)) })
	tr.notified("the directory's mode", func() { tr.must(os.Chmod(tr.path("etc/dir"), 0o700)) })
	tr.notified("a file that goes", func() { tr.rename("etc/dir/a", "etc/a") })
	tr.notified("a file that comes", func() { tr.rename("etc/a", "etc/dir/a") })
	tr.notified("a removal", func() { tr.remove("etc/dir/a") })
	tr.notified("a directory in it", func() { tr.mkdir("etc/dir/sub") })
}

func TestOtherChangesAreNotNotified(t *testing.T) {
	tr := newTree(t, []string{"etc/dir/sub", "etc/other"}, "", "etc/dir", "etc/late/dir", "")
	tr.write("etc/dir/file")
	tr.drain()
	for what, step := range map[string]func(){
		"a file in the parent":           func() { tr.write("etc/passwd") },
		"its removal":                    func() { tr.write("etc/x"); tr.remove("etc/x") },
		"a directory beside":             func() { tr.mkdir("etc/beside/dir") },
		"a name that begins like it":     func() { tr.write("etc/dir2"); tr.write("etc/di") },
		"a file in a directory beside":   func() { tr.write("etc/other/dir") },
		"a file farther below":           func() { tr.write("etc/dir/sub/file") },
		"a write at the top":             func() { tr.write("dir") },
		"a reading of it":                func() { _, err := os.ReadFile(tr.path("etc/dir/file")); tr.must(err) },
		"a listing of it":                func() { _, err := os.ReadDir(tr.path("etc/dir")); tr.must(err) },
		"a look at what is not there":    func() { _, err := os.Stat(tr.path("etc/late/dir")); tr.must(ignore(err, fs.ErrNotExist)) },
		"a try to remove what is in use": func() { tr.must(ignore(os.Remove(tr.path("etc/dir")), unix.ENOTEMPTY)) },
	} {
		step()
		tr.quiet(what)
	}
}

func ignore(err, known error) error {
	if errors.Is(err, known) {
		return nil
	}
	return err
}

func TestWhatIsMissingComes(t *testing.T) {
	tr := newTree(t, nil, "a/b/c")
	tr.notified("the first of the way", func() { tr.mkdir("a") })
	tr.notified("the next", func() { tr.mkdir("a/b") })
	tr.write("a/b/x")
	tr.quiet("a name beside")
	tr.notified("the last", func() { tr.mkdir("a/b/c") })
	tr.notified("what is in it", func() { tr.write("a/b/c/x") })
	tr.notified("all gone", func() { tr.remove("a") })
	tr.notified("all at once, with what is in it", func() { tr.mkdir("a/b/c/d"); tr.write("a/b/c/x") })
	tr.notified("a write in it", func() { tr.write("a/b/c/x") })
	tr.notified("gone again", func() { tr.remove("a") })
	tr.mkdir("elsewhere/b/c")
	tr.write("elsewhere/b/c/x")
	tr.quiet("what is made elsewhere")
	tr.notified("moved there whole", func() { tr.rename("elsewhere", "a") })
	tr.notified("a write in what was moved there", func() { tr.write("a/b/c/x") })
	tr.notified("a file in its place", func() { tr.remove("a/b/c"); tr.write("a/b/c") })
	tr.notified("a directory in the file's", func() { tr.remove("a/b/c"); tr.mkdir("a/b/c") })
	tr.notified("a write in that", func() { tr.write("a/b/c/x") })
}

func TestWhatIsReplaced(t *testing.T) {
	for gone, below := range map[string]string{"a/dir": "", "a": "dir", ".": "a/dir"} {
		t.Run(gone, func(t *testing.T) {
			tr := &tree{T: t, root: t.TempDir()}
			base := tr.root
			tr.root = filepath.Join(base, "top")
			tr.mkdir("a/dir")
			tr.start("a/dir")
			for round := range 2 {
				tr.notified("moved away", func() { tr.rename(gone, filepath.Join(base, fmt.Sprint("old", round))) })
				tr.notified("made again", func() { tr.mkdir("a/dir") })
				tr.notified("a write in the new one", func() { tr.write("a/dir/x") })
				tr.write(filepath.Join(base, fmt.Sprint("old", round), below, "y"))
				tr.quiet("a write in the old one")
				tr.notified("removed", func() { tr.remove(gone) })
				tr.notified("back again", func() { tr.mkdir("a/dir") })
				tr.notified("exchanged", func() {
					other := filepath.Join(base, "other")
					tr.mkdir(filepath.Join(other, below))
					tr.must(unix.Renameat2(unix.AT_FDCWD, other, unix.AT_FDCWD, tr.path(gone), unix.RENAME_EXCHANGE))
				})
				tr.notified("a write after the exchange", func() { tr.write("a/dir/x") })
				tr.remove(filepath.Join(base, "other"))
				tr.quiet("a removal of what was exchanged")
			}
		})
	}
}

func TestLinks(t *testing.T) {
	tr := &tree{T: t, root: t.TempDir()}
	tr.mkdir("one/etc/dir")
	tr.mkdir("two/etc/dir")
	tr.mkdir("real")
	tr.link("one", "current")                 // a parent is a link
	tr.link("../../../real", "one/etc/dir/l") // and so is the directory, by a longer way
	tr.start("current/etc/dir/l/../dir", "current/etc/dir", "current/etc/dir/l")

	tr.notified("through the first link", func() { tr.write("one/etc/dir/x") })
	tr.notified("through the second", func() { tr.write("real/x") })
	tr.write("two/etc/dir/x")
	tr.quiet("where no link leads")
	tr.notified("a parent's swap", func() { tr.relink("two", "current") })
	tr.notified("what it leads to now", func() { tr.write("two/etc/dir/x") })
	tr.write("one/etc/dir/x")
	tr.write("real/x")
	tr.quiet("what it led to")
	tr.notified("a link to nowhere", func() { tr.relink("three", "current") })
	tr.notified("nowhere becomes a place", func() { tr.mkdir("three/etc/dir") })
	tr.notified("and has a file", func() { tr.write("three/etc/dir/x") })
	tr.notified("the link goes", func() { tr.remove("current") })
	tr.notified("and is a directory now", func() { tr.rename("three", "current") })
	tr.notified("which has a file", func() { tr.write("current/etc/dir/x") })
}

// TestLinkToLink replaces the second of two links, which stands in no directory of the path.
func TestLinkToLink(t *testing.T) {
	tr := &tree{T: t, root: t.TempDir()}
	tr.mkdir("one")
	tr.mkdir("two")
	tr.mkdir("versions")
	tr.link("../one", "versions/current")
	tr.link("versions/current", "dir")
	tr.start("dir")

	tr.notified("through both", func() { tr.write("one/x") })
	tr.notified("another version", func() { tr.relink("../two", "versions/current") })
	tr.notified("which has a file", func() { tr.write("two/x") })
}

func TestLoopOfLinksIsReported(t *testing.T) {
	dir := t.TempDir()
	assert.NoError(t, os.Symlink("loop", filepath.Join(dir, "loop")))
	w := newWatcher(20*time.Millisecond, []string{filepath.Join(dir, "loop")})
	if err := w.Err(); !errors.Is(err, unix.ELOOP) {
		t.Errorf("Err is %v", err)
	}
	for range 2 {
		select {
		case <-w.Changed(): // so that nothing is missed
		case <-time.After(timelimit.Wait):
			t.Error("not tried again")
		}
	}
	assert.NoError(t, w.Close())
}

// TestNothingIsMissed makes a way step by step while it is being watched.
func TestNothingIsMissed(t *testing.T) {
	for range 30 {
		root := t.TempDir()
		dir := filepath.Join(root, "a/b/c/d")
		w := New(dir)
		file := filepath.Join(dir, "file")
		go func() {
			if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(file, nil, 0o644)); err != nil {
				t.Error(err)
			}
		}()
		for deadline := time.After(timelimit.Wait); ; {
			select {
			case <-w.Changed():
			case <-deadline:
				t.Fatal("the file was never seen")
			}
			if _, err := os.Stat(file); err == nil {
				break
			}
		}
		assert.NoError(t, w.Close())
	}
}

func TestManyChangesAreOne(t *testing.T) {
	tr := newTree(t, []string{"dir"}, "dir")
	for i := range 1000 {
		tr.write(fmt.Sprint("dir/", i%10))
	}
	time.Sleep(2 * tr.quietFor)
	<-tr.Changed()
	tr.quiet("a second time")
}

func TestForward(t *testing.T) {
	w := &Watcher{retry: time.Hour, changed: make(chan struct{}, 1), closing: make(chan struct{})}
	events, failures := make(chan fsnotify.Event, 1), make(chan error, 1)
	s := &watchSet{watcher: &fsnotify.Watcher{Events: events, Errors: failures}, ways: map[string]bool{"/a": true}, whole: map[string]bool{"/a": true}}
	for _, err := range []error{fsnotify.ErrEventOverflow, fmt.Errorf("read: %w", unix.EIO)} {
		failures <- err
		if !w.forward(s) {
			t.Errorf("%v: the watches are not set again", err)
		}
	}
	events <- fsnotify.Event{Name: "/a", Op: fsnotify.Rename}
	if !w.forward(s) {
		t.Error("a rename of the directory: the watches are not set again")
	}
	if len(w.changed) > 0 {
		t.Error("delivered before the watches are set again")
	}
	close(w.closing)
	if w.forward(s) {
		t.Error("goes on when closed")
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	before, files := runtime.NumGoroutine(), openFiles(t)
	for range 20 {
		w := New(dir, filepath.Join(dir, "missing"))
		assert.NoError(t, os.Mkdir(filepath.Join(dir, "missing"), 0o755))
		assert.NoError(t, os.Remove(filepath.Join(dir, "missing")))
		assert.NoError(t, w.Close())
	}
	if !timelimit.Await(timelimit.Wait, func() bool { return runtime.NumGoroutine() <= before }) {
		t.Errorf("%d goroutines before, %d after", before, runtime.NumGoroutine())
	}
	if after := openFiles(t); after > files {
		t.Errorf("%d open files before, %d after", files, after)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries := assert.Must(os.ReadDir("/proc/self/fd"))(t)
	return len(entries)
}
