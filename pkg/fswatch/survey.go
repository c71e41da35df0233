// SPDX-License-Identifier: Apache-2.0

package fswatch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
)

// survey is the watches for the ways to all directories as they are at one time.
// A way is resolved link by link, so that each directory that holds a name on it
// is watched, and a path here leads through no link.
type survey struct {
	watcher *fsnotify.Watcher // nil: there is none to be had
	events  <-chan fsnotify.Event
	errors  <-chan error

	ways  map[string]bool // names on the way, the directories' own last
	whole map[string]bool // directories of which every name matters
	links bool            // whatever symlinks in those lead to matters too
	// first is the path under which a directory is watched already. fsnotify
	// knows each by one path, and a mount may show it at two.
	first map[inode]string
}

type inode struct{ device, number uint64 }

// look makes the survey. It is never nil; the error tells what of it is missing.
func look(dirs []string, links bool) (*survey, error) {
	s := &survey{ways: map[string]bool{}, whole: map[string]bool{}, first: map[inode]string{}, links: links}
	if len(dirs) == 0 {
		return s, nil
	}
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return s, fmt.Errorf("watch directories: %w%s", err, advice(err))
	}
	s.watcher, s.events, s.errors = watcher, watcher.Events, watcher.Errors
	var errs []error
	for _, dir := range dirs {
		at, err := s.resolve(dir)
		if err == nil && at != "" {
			err = s.list(at)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("watch %s: %w%s", dir, err, advice(err)))
		}
	}
	return s, errors.Join(errs...)
}

// list watches what is in a directory, and where its symlinks lead.
func (s *survey) list(dir string) error {
	watched, err := s.watch(dir)
	if err != nil {
		return absence(err)
	}
	s.whole[watched] = true
	if !s.links {
		return nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return absence(err)
	}
	var errs []error
	for _, e := range entries {
		if e.Type() != fs.ModeSymlink {
			continue
		}
		// All of a loop is watched, and to mend it is to change a link.
		if _, err := s.resolve(filepath.Join(dir, e.Name())); !errors.Is(err, syscall.ELOOP) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// advice is what to do about an err that means a limit.
func advice(err error) string {
	switch {
	case errors.Is(err, unix.EMFILE):
		return "; raise the sysctl fs.inotify.max_user_instances, or the limit of open files"
	case errors.Is(err, unix.ENOSPC):
		return "; raise the sysctl fs.inotify.max_user_watches"
	}
	return ""
}

func (s *survey) close() {
	if s.watcher != nil {
		_ = s.watcher.Close() // of an inotify descriptor; there is nothing that it could fail to write
	}
}

// resolve watches the way to a directory, or to a file, as far as it goes, and
// returns the directory: "" where there is none.
func (s *survey) resolve(path string) (string, error) {
	const mostLinks = 40 // as in the kernel, path_resolution(7)
	at, links := "/", 0
	rest := strings.Split(path, "/")
	for len(rest) > 0 {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		// What is renamed or replaced after the watch stands is told, and makes
		// another survey.
		watched, err := s.watch(at)
		if err != nil {
			return "", absence(err)
		}
		s.ways[filepath.Join(watched, name)] = true
		next := filepath.Join(at, name)
		info, err := os.Lstat(next)
		switch {
		case err != nil:
			return "", absence(err)
		case info.Mode().Type() == fs.ModeSymlink:
			target, err := os.Readlink(next)
			if err != nil {
				return "", absence(err)
			}
			if links++; links > mostLinks {
				return "", &fs.PathError{Op: "resolve", Path: path, Err: syscall.ELOOP}
			}
			if filepath.IsAbs(target) {
				at = "/"
			}
			rest = append(strings.Split(target, "/"), rest...)
		case !info.IsDir():
			return "", nil // and if a directory takes its place, that is told
		default:
			at = next
		}
	}
	return at, nil
}

// absence returns nil for an error that says no more than that something is not
// there, or not what it was just before: of that the watches tell.
func absence(err error) error {
	for _, known := range []error{unix.ENOENT, unix.ENOTDIR, unix.EINVAL} {
		if errors.Is(err, known) {
			return nil
		}
	}
	return err
}

// watch watches a directory and returns the path under which events tell of it.
func (s *survey) watch(dir string) (string, error) {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return "", &fs.PathError{Op: "lstat", Path: dir, Err: err}
	}
	id := inode{st.Dev, st.Ino}
	if _, known := s.first[id]; !known {
		s.first[id] = dir
	}
	dir = s.first[id]
	if err := s.watcher.Add(dir); err != nil {
		return "", &fs.PathError{Op: "inotify", Path: dir, Err: err}
	}
	return dir, nil
}

// meaning is what an event is to those who wait.
type meaning int

const (
	nothing meaning = iota
	changed         // in one of the directories
	moved           // on the way to one: it may be another now
)

func (s *survey) meaning(e fsnotify.Event) meaning {
	path := filepath.Clean(e.Name)
	switch {
	case s.ways[path]:
		return moved
	case !s.whole[path] && !s.whole[filepath.Dir(path)]:
		return nothing
	case s.links && isLink(path):
		return moved
	}
	return changed
}

func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().Type() == fs.ModeSymlink
}
