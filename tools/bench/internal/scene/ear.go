// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nflink"
)

// Ear hears every commit to nf_tables on a node.
type Ear struct {
	listener *nflink.Listener
	done     chan struct{}
	mu       sync.Mutex
	heard    []Heard
	failure  error
}

// Heard is a commit, and when this process was told of it.
type Heard struct {
	nflink.Commit
	At time.Time
}

// Listen hears commits from now on.
func (n *Node) Listen() (*Ear, error) {
	e := &Ear{done: make(chan struct{})}
	if err := n.Node.Do(func() (err error) {
		e.listener, err = nflink.Listen()
		return err
	}); err != nil {
		return nil, err
	}
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

// Since is what was heard after the first count of commits.
func (e *Ear) Since(count int) []Heard {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]Heard(nil), e.heard[count:]...)
}

// Close stops listening.
func (e *Ear) Close() error {
	err := e.listener.Close()
	<-e.done
	if errors.Is(e.failure, os.ErrClosed) {
		return err
	}
	return errors.Join(err, e.failure)
}

// Damage is a way to spoil our rules by one commit. The ways are numbered.
func (n *Node) Damage(way int) error {
	const postrouting = "postrouting"
	var b nflink.Batch
	name, base, chain := table, postrouting, "masq-"+Chain
	if n.Form.Backend == "iptables" {
		name, base, chain = "nat", "POSTROUTING", Chain
	}
	switch way % Damages {
	case 0:
		b.FlushChain(nflink.IPv4, name, base)
	case 1:
		b.FlushChain(nflink.IPv4, name, chain)
	default:
		b.DeleteTable(nflink.IPv4, name)
	}
	return n.Node.Do(func() error { return commit(&b) })
}

// Damages is how many ways there are: the jump goes, the rules go, the table goes.
const Damages = 3

// Repair damages our rules and returns how long it took from the kernel's word
// of that to its word of the last commit that repaired it. It fails unless the
// rules are right after that.
func (e *Ear) Repair(n *Node, way int) (time.Duration, error) {
	const quiet, most = 80 * time.Millisecond, 10 * time.Second
	count := len(e.Since(0))
	if err := n.Damage(way); err != nil {
		return 0, err
	}
	for start := time.Now(); time.Since(start) < most; time.Sleep(2 * time.Millisecond) {
		all := e.Since(count)
		if len(all) < 2 || time.Since(all[len(all)-1].At) < quiet {
			continue
		}
		if _, err := n.Run(Request{Plugin: "ip-masq", Verb: "CHECK", Container: n.NextPod()}); err != nil {
			return 0, fmt.Errorf("after a repair: %w", err)
		}
		return all[len(all)-1].At.Sub(all[0].At), nil
	}
	return 0, fmt.Errorf("damage %d was not repaired within %s: heard %v", way, most, e.Since(count))
}

// Crowd makes so many commits of others, in a table of their own, and returns
// what one took.
func (n *Node) Crowd(commits int) (each time.Duration, err error) {
	const crowd = "crowd"
	err = n.Node.Do(func() (err error) {
		c, err := nflink.Dial()
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, c.Close()) }()
		start := time.Now()
		for i := range commits {
			var b nflink.Batch
			b.AddTable(nflink.IPv4, crowd)
			if i%2 == 1 {
				b.DeleteTable(nflink.IPv4, crowd)
			} else {
				b.AddChain(nflink.IPv4, crowd, "members", nil)
			}
			if err := c.Commit(&b); err != nil {
				return fmt.Errorf("commit %d: %w", i, err)
			}
		}
		each = time.Since(start) / time.Duration(commits)
		return nil
	})
	return each, err
}
