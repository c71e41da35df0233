// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// Ear hears every commit to nf_tables in one network namespace.
type Ear struct {
	listener *nfnetlink.Listener
	done     chan struct{}
	mu       sync.Mutex
	heard    []Heard
	failure  error
}

// Heard is a commit, and when this process was told of it.
type Heard struct {
	nfnetlink.Commit
	At time.Time
}

// Listen hears commits from now on, in the network namespace of the thread.
func Listen() (*Ear, error) {
	listener, err := nfnetlink.Listen()
	if err != nil {
		return nil, err
	}
	e := &Ear{listener: listener, done: make(chan struct{})}
	go e.run()
	return e, nil
}

func (e *Ear) run() {
	defer close(e.done)
	for {
		commits, err := e.listener.Next()
		now := time.Now()
		e.mu.Lock()
		for _, c := range commits {
			e.heard = append(e.heard, Heard{c, now})
		}
		e.failure = err
		e.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// Count is how many commits were heard.
func (e *Ear) Count() int { return len(e.Since(0)) }

// Since is what was heard after the first count of commits.
func (e *Ear) Since(count int) []Heard {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.heard[count:])
}

// Close stops listening. It fails if listening ended before.
func (e *Ear) Close() error {
	err := e.listener.Close()
	<-e.done
	if errors.Is(e.failure, os.ErrClosed) {
		return err
	}
	return errors.Join(err, e.failure)
}
