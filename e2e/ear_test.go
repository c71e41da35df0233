// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nflink"
)

// ear hears every commit to nf_tables on a node.
type ear struct {
	listener *nflink.Listener
	done     chan struct{}
	mu       sync.Mutex
	heard    []heard
	failure  error
}

// heard is a commit, and when this process was told of it.
type heard struct {
	nflink.Commit
	at time.Time
}

// listen hears commits from now until the end of the test.
func (n *node) listen(t *testing.T) *ear {
	t.Helper()
	e := &ear{done: make(chan struct{})}
	if err := n.Node.Do(func() (err error) {
		e.listener, err = nflink.Listen()
		return err
	}); err != nil {
		t.Fatal(err)
	}
	go e.run()
	t.Cleanup(func() {
		err := e.listener.Close()
		<-e.done
		if !errors.Is(e.failure, os.ErrClosed) || err != nil {
			t.Errorf("listening ended with %v, %v", e.failure, err)
		}
	})
	return e
}

func (e *ear) run() {
	defer close(e.done)
	for {
		commits, err := e.listener.Next()
		now := time.Now()
		e.mu.Lock()
		for _, c := range commits {
			e.heard = append(e.heard, heard{c, now})
		}
		e.failure = err
		e.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// since is what was heard after the first count of commits.
func (e *ear) since(count int) []heard {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.heard[count:])
}

func (e *ear) count() int { return len(e.since(0)) }

// quiet waits until nothing was heard for a while, of which there may have been
// some since a call before, and returns how many commits there were by then.
func (e *ear) quiet(t *testing.T, while time.Duration) int {
	t.Helper()
	const most = 10 * time.Second
	count, last := e.count(), time.Now()
	for start := time.Now(); time.Since(last) < while; time.Sleep(time.Millisecond) {
		if now := e.count(); now != count {
			count, last = now, time.Now()
		}
		if time.Since(start) > most {
			t.Fatalf("commits go on and on: %v", e.since(max(0, count-20)))
		}
	}
	return count
}

// figures are how long something took, each time.
type figures []time.Duration

func (f figures) median() time.Duration {
	sorted := slices.Sorted(slices.Values(f))
	return (sorted[(len(sorted)-1)/2] + sorted[len(sorted)/2]) / 2
}

func (f figures) String() string {
	return fmt.Sprintf("median %5.1f ms, worst %5.1f ms of %d", ms(f.median()), ms(slices.Max(f)), len(f))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func (f figures) slow() bool { return f.median() >= usualRepair || slices.Max(f) >= worstRepair }
