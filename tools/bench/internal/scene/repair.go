// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/fixtures"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// Listen watches nf_tables commits on the node from now on.
func (n *Node) Listen() (e *fixtures.CommitWatcher) {
	assert.NoError(n, n.Node.Do(func() (err error) {
		e, err = fixtures.WatchCommits()
		return err
	}))
	n.Cleanup(func() { assert.NoError(n, e.Close()) })
	return e
}

// Damage changes the owned rules in one commit and returns the time right before it. Changes are
// numbered.
func (n *Node) Damage(way int) (at time.Time) {
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
	n.commit(&b)
	return at
}

// Damages is the number of changes.
const Damages = 3

// DamageName returns what a change deletes.
func DamageName(way int) string { return [Damages]string{"jump", "rules", "table"}[way%Damages] }

// Repair damages the rules of ip-masq and returns the time from right before the damage to the
// kernel's event of the last commit that repairs it: the last of another program before a quiet time. The
// event of the damage is not the start, because on a busy machine the watcher receives both at once. Repair
// fails unless CHECK then succeeds.
func (n *Node) Repair(e *fixtures.CommitWatcher, way int, quiet time.Duration) time.Duration {
	const most = 30 * time.Second
	self := assert.Must(os.ReadFile("/proc/self/comm"))(n)
	count := e.Count()
	began := n.Damage(way)
	for start := time.Now(); time.Since(start) < most; time.Sleep(2 * time.Millisecond) {
		all := slices.DeleteFunc(e.Since(count), func(c fixtures.Commit) bool { return c.Program == strings.TrimSpace(string(self)) })
		if len(all) == 0 || time.Since(all[len(all)-1].At) < quiet {
			continue
		}
		n.Run(Request{Plugin: "ip-masq", Verb: "CHECK"})
		return all[len(all)-1].At.Sub(began)
	}
	n.Fatalf("damage %d was not repaired within %s: commits %v", way, most, e.Since(count))
	return 0
}

// CommitMany makes commits in a third-party table, with pauses.
func (n *Node) CommitMany(commits int, pause time.Duration) {
	const name = "bench"
	assert.NoError(n, n.Node.Do(func() error {
		var c nfnetlink.Conn
		for i := range commits {
			var b nfnetlink.Batch
			b.AddTable(nfnetlink.IPv4, name)
			if i%2 == 1 {
				b.DeleteTable(nfnetlink.IPv4, name)
			} else {
				b.AddChain(nfnetlink.IPv4, name, "chain-1", nil)
			}
			assert.NoError(n, c.Commit(&b))
			time.Sleep(pause)
		}
		return c.Close()
	}))
}

// table is the table of ip-masq on nftables.
const table = "ip-masq"

// Wipe deletes all NAT rules of the backend and waits until the kernel has freed them.
func (n *Node) Wipe() {
	const settled = 20 * time.Millisecond
	defer time.Sleep(settled)
	if n.Backend.Kind == "iptables" {
		n.Feed("*nat\nCOMMIT\n", "iptables-restore")
		return
	}
	var b nfnetlink.Batch
	b.AddTable(nfnetlink.IPv4, table) // deleting a missing table fails
	b.DeleteTable(nfnetlink.IPv4, table)
	n.commit(&b)
}

// Forget deletes the rules and the state, as before the first pod.
func (n *Node) Forget() {
	n.Wipe()
	assert.NoError(n, os.RemoveAll(n.DataDir))
}

// Peak runs a request and returns also the peak memory of its program in bytes. time(1) starts it, because the kernel
// includes the memory of the starting process, which is small there and large here.
func (n *Node) Peak(r Request) (took Took, peak int64) {
	file := filepath.Join(n.Dir, "peak")
	r.Args = []string{"--format=%M", "--output=" + file, n.Program(r.Plugin)}
	r.Plugin = "/usr/bin/time"
	took = n.Run(r)
	text := assert.Must(os.ReadFile(file))(n)
	return took, assert.Must(strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64))(n) << 10
}

// dropAll drops every incoming IPv4 packet in the network namespace of the thread, before connection
// tracking.
func dropAll() error {
	const table, chain = "drop", "prerouting"
	var b nfnetlink.Batch
	b.AddTable(nfnetlink.IPv4, table)
	b.AddChain(nfnetlink.IPv4, table, chain, &nfnetlink.Base{Type: "filter", Hook: unix.NF_INET_PRE_ROUTING, Priority: -400, Policy: nfnetlink.Drop})
	return commit(&b)
}

func commit(b *nfnetlink.Batch) error {
	var c nfnetlink.Conn
	return errors.Join(c.Commit(b), c.Close())
}

func (n *Node) commit(b *nfnetlink.Batch) {
	assert.NoError(n, n.Node.Do(func() error { return commit(b) }))
}

// Commit adds a rule to a third-party table.
func (n *Node) Commit() {
	const table, chain = "kproxy", "rules"
	var b nfnetlink.Batch
	b.AddTable(nfnetlink.IPv4, table)
	b.AddChain(nfnetlink.IPv4, table, chain, nil)
	b.AddRule(nfnetlink.IPv4, table, chain, nil, "")
	n.commit(&b)
}
