// SPDX-License-Identifier: Apache-2.0

package fswatch

import (
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
)

// retryInterval is how often what could not be watched is tried again.
const retryInterval = 10 * time.Second

// Watcher watches directories until it is closed.
type Watcher struct {
	dirs    []string
	follow  bool
	retry   time.Duration
	changed chan struct{}
	closing chan struct{}
	close   func()
	done    chan struct{}

	mu  sync.Mutex
	err error
}

// New watches the directories, whether they are there or not; "" is none. It
// does not fail for lack of watches (the sysctls fs.inotify.max_user_instances
// and max_user_watches are the limits): then Err tells, until it has them.
// The error is about a relative path that cannot be made absolute.
func New(dirs ...string) (*Watcher, error) { return newWatcher(retryInterval, false, dirs) }

// NewFollowing is New, and watches what symlinks in the directories lead to as
// well: a file is told of when it changes in its own directory. What is in a
// directory that a symlink leads to is not.
func NewFollowing(dirs ...string) (*Watcher, error) { return newWatcher(retryInterval, true, dirs) }

func newWatcher(retry time.Duration, follow bool, dirs []string) (*Watcher, error) {
	w := &Watcher{
		follow:  follow,
		retry:   retry,
		changed: make(chan struct{}, 1),
		closing: make(chan struct{}),
		done:    make(chan struct{}),
	}
	w.close = sync.OnceFunc(func() { close(w.closing) })
	for _, dir := range dirs {
		if dir == "" {
			continue
		}
		path, err := filepath.Abs(dir)
		if err != nil {
			return nil, fmt.Errorf("watch %s: %w; give an absolute path", dir, err)
		}
		w.dirs = append(w.dirs, path)
	}
	s, err := look(w.dirs, w.follow)
	w.fail(err)
	go w.run(s)
	return w, nil
}

// Changed delivers when something may have changed in one of the directories or
// on the way to it: a name made, removed or renamed, a file written, a mode or
// an owner. Changes that nobody has fetched yet are one. It is never closed.
func (w *Watcher) Changed() <-chan struct{} { return w.changed }

// Err returns why changes may pass unnoticed at present, or nil. What fails is
// tried again every ten seconds, and until it works Changed delivers as often.
func (w *Watcher) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

func (w *Watcher) fail(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.err = err
}

// Close ends the watching. When it returns nothing is delivered any more.
func (w *Watcher) Close() error {
	w.close()
	<-w.done
	select {
	case <-w.changed:
	default:
	}
	return nil
}

func (w *Watcher) tell() {
	select {
	case w.changed <- struct{}{}:
	default: // told already, and not fetched
	}
}

// run goes through the ways to the directories, and again whenever one of them
// is another.
func (w *Watcher) run(s *survey) {
	defer close(w.done)
	for w.listen(s) {
		// The old watches are gone before the new ones stand: there may be no more
		// to be had. What passes in between is seen by who looks when told.
		s.close()
		var err error
		s, err = look(w.dirs, w.follow)
		w.fail(err)
		w.tell()
	}
	s.close()
}

// listen passes on what the kernel tells until another survey is due, and
// returns false when the Watcher is closed.
func (w *Watcher) listen(s *survey) bool {
	// That the kernel's words cannot be read should not happen; if it does it
	// must not happen all the time.
	const afterFailure = 50 * time.Millisecond
	var again <-chan time.Time
	if w.Err() != nil {
		again = time.After(w.retry)
	}
	failures := s.errors
	for {
		select {
		case <-w.closing:
			return false
		case <-again:
			return true
		case e := <-s.events:
			switch s.meaning(e) {
			case moved:
				return true
			case changed:
				w.tell()
			}
		case err := <-failures:
			if errors.Is(err, fsnotify.ErrEventOverflow) {
				return true
			}
			failures, again = nil, time.After(afterFailure)
		}
	}
}
