// SPDX-License-Identifier: Apache-2.0

package fswatch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// Watcher watches directories until it is closed.
type Watcher struct {
	dirs          []string
	retry         time.Duration
	changed       chan struct{}
	closing, done chan struct{}
	mu            sync.Mutex
	err           error
}

// New watches directories, which need not exist; "" is none. It also watches the files that
// symlinks in the directories lead to, but not the content of a directory that a symlink leads to.
func New(dirs ...string) *Watcher { return newWatcher(10*time.Second, dirs) }

func newWatcher(retry time.Duration, dirs []string) *Watcher {
	w := &Watcher{
		retry: retry, changed: make(chan struct{}, 1),
		closing: make(chan struct{}), done: make(chan struct{}),
	}
	for _, dir := range dirs {
		if dir != "" {
			w.dirs = append(w.dirs, dir)
		}
	}
	go w.run(w.watch())
	return w
}

// Changed delivers when a directory or a name on the way to it may have changed: names created,
// removed or renamed, files written, modes or owners changed. Changes that were not received are
// delivered once. It is never closed.
func (w *Watcher) Changed() <-chan struct{} { return w.changed }

// Err returns why changes may go unnoticed at present, such as a lack of inotify watches, or nil.
// That is retried every ten seconds; until it succeeds, Changed delivers as often.
func (w *Watcher) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// Close stops watching. It may be called once.
func (w *Watcher) Close() error {
	close(w.closing)
	<-w.done
	return nil
}

func (w *Watcher) notify() {
	select {
	case w.changed <- struct{}{}:
	default: // not received yet
	}
}

// run sets the watches again whenever a path leads elsewhere.
func (w *Watcher) run(set *watchSet) {
	defer close(w.done)
	for w.forward(set) {
		set.close() // first, as the old watches may take what a limit allows
		set = w.watch()
		w.notify() // so that the reader also sees what changed before the new watches were set
	}
	set.close()
}

// forward forwards events until the watches must be set again, and returns false when the Watcher is closed.
func (w *Watcher) forward(set *watchSet) bool {
	const afterFailure = 50 * time.Millisecond // should reading events fail all the time
	var again <-chan time.Time
	if w.Err() != nil {
		again = time.After(w.retry)
	}
	var events <-chan fsnotify.Event
	var failures <-chan error
	if set.watcher != nil {
		events, failures = set.watcher.Events, set.watcher.Errors
	}
	for {
		select {
		case <-w.closing:
			return false
		case <-again:
			return true
		case e := <-events:
			path := filepath.Clean(e.Name)
			info, err := os.Lstat(path)
			isLink := err == nil && info.Mode().Type() == fs.ModeSymlink
			relevant := set.whole[path] || set.whole[filepath.Dir(path)]
			if set.ways[path] || relevant && isLink {
				return true
			}
			if relevant {
				w.notify()
			}
		case err := <-failures:
			if errors.Is(err, fsnotify.ErrEventOverflow) {
				return true
			}
			failures, again = nil, time.After(afterFailure)
		}
	}
}

// watchSet is the watches on the paths to all directories. Paths are resolved link by link, and a
// name on the way is looked up after its directory is watched; the paths here contain no symlinks.
type watchSet struct {
	watcher *fsnotify.Watcher // nil if there is none to be had
	ways    map[string]bool   // names on the ways to the directories, their own names included
	whole   map[string]bool   // directories in which every name counts
}

// watch sets all watches, and stores the error of those that are missing.
func (w *Watcher) watch() *watchSet {
	s := &watchSet{ways: map[string]bool{}, whole: map[string]bool{}}
	var errs []error
	for _, dir := range w.dirs {
		var err error
		if s.watcher == nil {
			s.watcher, err = fsnotify.NewWatcher()
		}
		if err != nil { // it is the same for each directory
			errs = append(errs, fmt.Errorf("watch directories: %w%s", err, remedy(err)))
			break
		}
		if err = s.addDir(dir); err != nil {
			errs = append(errs, fmt.Errorf("watch %s: %w%s", dir, err, remedy(err)))
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = errors.Join(errs...)
	return s
}

func (s *watchSet) close() {
	if s.watcher != nil {
		_ = s.watcher.Close() // nothing was written
	}
}

// addDir watches the path to a directory, all names in it, and the paths that its symlinks lead to.
func (s *watchSet) addDir(dir string) error {
	absolute, err := filepath.Abs(dir)
	if err != nil {
		return ignoreAbsence(err)
	}
	path, err := s.resolve(absolute, new(int))
	if err != nil {
		return ignoreAbsence(err)
	}
	err = s.add(path)
	if err != nil {
		return ignoreAbsence(err)
	}
	s.whole[path] = true
	entries, err := os.ReadDir(path)
	errs := []error{ignoreAbsence(err)}
	for _, e := range entries {
		if e.Type() != fs.ModeSymlink {
			continue
		}
		// All links of a loop are watched, and one of them must change to end it.
		if _, err := s.resolve(filepath.Join(path, e.Name()), new(int)); !errors.Is(err, unix.ELOOP) {
			errs = append(errs, ignoreAbsence(err))
		}
	}
	return errors.Join(errs...)
}

// resolve watches a path as far as it exists, and returns it without symlinks, which it counts.
func (s *watchSet) resolve(path string, links *int) (at string, err error) {
	const maxLinks = 40 // as in the kernel, path_resolution(7)
	at = "/"
	for name := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		// A later rename or replacement of the name is an event.
		if err := s.add(at); err != nil {
			return "", err
		}
		next := filepath.Join(at, name)
		s.ways[next] = true
		to, err := os.Readlink(next)
		if errors.Is(err, unix.EINVAL) { // no link
			at = next
			continue
		}
		if err != nil {
			return "", err
		}
		*links++
		if *links > maxLinks {
			return "", &fs.PathError{Op: "resolve", Path: path, Err: unix.ELOOP}
		}
		if !filepath.IsAbs(to) {
			to = at + "/" + to // not filepath.Join: in "link/..", the link comes first, as in the kernel
		}
		at, err = s.resolve(to, links)
		if err != nil {
			return "", err
		}
	}
	return at, nil
}

func (s *watchSet) add(dir string) error {
	if err := s.watcher.Add(dir); err != nil {
		return &fs.PathError{Op: "inotify", Path: dir, Err: err}
	}
	return nil
}

// ignoreAbsence returns nil for a name that is missing or was replaced, which the watches report.
func ignoreAbsence(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return nil
	}
	return err
}

// remedy returns what to do about an error that is a limit.
func remedy(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "; raise the sysctl fs.inotify.max_user_instances, or the limit of open files"
	case errors.Is(err, unix.ENOSPC):
		return "; raise the sysctl fs.inotify.max_user_watches"
	}
	return ""
}
