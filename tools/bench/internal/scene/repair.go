// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// Listen watches nf_tables commits on the node from now on.
func (n *Node) Listen() (e *fixtures.CommitWatcher, err error) {
	err = n.Node.Do(func() (err error) {
		e, err = fixtures.WatchCommits()
		return err
	})
	return e, err
}

// Damage changes the owned rules in one commit and returns the time right before it. Changes are
// numbered.
func (n *Node) Damage(way int) (at time.Time, err error) {
	const postrouting = "postrouting"
	var b nfnetlink.Batch
	name, base, chain := table, postrouting, "masq-"+Chain
	if n.Backend.Kind == "iptables" {
		name, base, chain = "nat", "POSTROUTING", Chain
	}
	switch way % Damages {
	case 0:
		b.FlushChain(nfnetlink.IPv4, name, base)
	case 1:
		b.FlushChain(nfnetlink.IPv4, name, chain)
	default:
		b.DeleteTable(nfnetlink.IPv4, name)
	}
	at = time.Now()
	return at, n.Node.Do(func() error { return commit(&b) })
}

// Damages is the number of changes.
const Damages = 3

// DamageName returns what a change deletes.
func DamageName(way int) string { return [Damages]string{"jump", "rules", "table"}[way%Damages] }

// Repair damages the rules of ip-masq and returns the time from right before the damage to the
// kernel's event of the last commit that repairs it: the last of another program before a quiet time. The
// event of the damage is not the start, because on a busy machine the watcher receives both at once. Repair
// returns an error unless CHECK then succeeds.
func (n *Node) Repair(e *fixtures.CommitWatcher, way int, quiet time.Duration) (time.Duration, error) {
	const most = 30 * time.Second
	self, err := os.ReadFile("/proc/self/comm")
	if err != nil {
		return 0, err
	}
	count := e.Count()
	began, err := n.Damage(way)
	if err != nil {
		return 0, err
	}
	for start := time.Now(); time.Since(start) < most; time.Sleep(2 * time.Millisecond) {
		all := slices.DeleteFunc(e.Since(count), func(c fixtures.Commit) bool { return c.Program == strings.TrimSpace(string(self)) })
		if len(all) == 0 || time.Since(all[len(all)-1].At) < quiet {
			continue
		}
		if _, err := n.Run(Request{Plugin: "ip-masq", Verb: "CHECK", Container: n.NextPod()}); err != nil {
			return 0, fmt.Errorf("after a repair: %w", err)
		}
		return all[len(all)-1].At.Sub(began), nil
	}
	return 0, fmt.Errorf("damage %d was not repaired within %s: commits %v", way, most, e.Since(count))
}

// CommitMany makes commits in a third-party table, with pauses.
func (n *Node) CommitMany(commits int, pause time.Duration) error {
	const name = "bench"
	return n.Node.Do(func() (err error) {
		var c nfnetlink.Conn
		defer func() { err = errors.Join(err, c.Close()) }()
		for i := range commits {
			var b nfnetlink.Batch
			b.AddTable(nfnetlink.IPv4, name)
			if i%2 == 1 {
				b.DeleteTable(nfnetlink.IPv4, name)
			} else {
				b.AddChain(nfnetlink.IPv4, name, "chain-1", nil)
			}
			if err := c.Commit(&b); err != nil {
				return fmt.Errorf("commit %d: %w", i, err)
			}
			time.Sleep(pause)
		}
		return nil
	})
}
