// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrLost is wrapped by Next's error if there were more commits than the socket holds.
var ErrLost = errors.New("change events of nf_tables were lost")

const (
	// listenBuffer is the size of the receive buffer in bytes, which the kernel doubles. A commit that touched
	// nothing watched takes 832 of them (Linux 6.18; 1,536 on s390x), however much it changed: 20,000 commits
	// can wait, which takes half a second to make. In a user namespace net.core.rmem_max is the limit, usually
	// 512 commits.
	listenBuffer = 8 << 20
	// Since Linux 5.13 a datagram has as many announcements as fit into NLMSG_GOODSIZE, which is below 8 KiB;
	// before, it has one, and none is larger.
	eventSize = 16 << 10
)

// Commit is a commit to the ruleset that the kernel announced.
type Commit struct {
	Generation uint32 // that Conn.Generation returns since
	// PID is the id of the thread that made the commit, in the initial PID namespace, or 0. It differs
	// from os.Getpid in a program with several threads and from what is visible in a container.
	PID uint32
	// Program is the name of that thread, usually the first 15 bytes of its program's file name. The
	// program can choose it.
	Program string
	// Touched tells that watched objects may have changed since the commit that Next returned before.
	Touched bool
}

// Watched are the objects whose changes Commit.Touched is about, in the families ip and ip6.
type Watched struct {
	Tables []string // with everything in them
	// Shared is a table that other programs use, too. In it the table itself and some chains are watched.
	Shared string
	Chains *atomic.Pointer[SharedChains]
}

// SharedChains are the chains that are watched in the shared table. Nil is all that the Listener receives.
type SharedChains struct {
	Names []string
	// Existing are those that exist. A chain that is renamed is announced by its new name only, so after each
	// commit the Listener looks whether they still do.
	Existing map[Family][]string
}

// Listener receives the kernel's announcement of each commit in one network namespace, those of
// iptables-nft included. There are none of iptables-legacy.
type Listener struct {
	Began uint32 // a generation since which no commit is missed

	file    *os.File
	raw     syscall.RawConn
	mu      sync.Mutex // while conn is in use
	conn    *Conn
	watched Watched
	in      []byte
	last    uint32 // generation of the last commit
	touched bool   // by the messages since then
	loss    loss
}

// loss is what may be incomplete after the kernel reported lost messages.
type loss int

const (
	lossNone loss = iota
	lossNow       // the kernel drops messages, without further reports, until the queue is empty
	lossPast      // the queue was empty: only the commit under way can be incomplete
)

// Listen returns a Listener to the commits from now on, in the network namespace of the calling thread.
// It needs CAP_NET_ADMIN over that namespace.
func Listen(w Watched) (*Listener, error) {
	fd, err := openSocket("listen to nf_tables", unix.NETLINK_NETFILTER, unix.SOCK_NONBLOCK, func(fd int) error { return join(fd, &w) })
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w; it needs CAP_NET_ADMIN over the network namespace", err)
	}
	if err != nil {
		return nil, err
	}
	// The runtime's poller takes a nonblocking file, so that Close wakes Next.
	l := &Listener{file: os.NewFile(uintptr(fd), "nf_tables events"), watched: w, in: make([]byte, eventSize)}
	if l.raw, err = l.file.SyscallConn(); err == nil {
		l.conn, err = Dial()
	}
	if err == nil {
		l.Began, err = l.conn.Generation()
	}
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	l.last = l.Began
	return l, nil
}

// join attaches the filter, and then makes the socket a member of the group of nf_tables. The kernel filters
// before it charges the socket, so that a commit of thousands of third-party rules takes no more of the
// buffer than one of one rule.
func join(fd int, w *Watched) error {
	if err := w.attachFilter(fd); err != nil {
		return fmt.Errorf("attach filter: %w", err)
	}
	if err := setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, listenBuffer); err != nil {
		return fmt.Errorf("set receive buffer: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES); err != nil {
		return fmt.Errorf("join the group: %w", err)
	}
	return nil
}

// Next waits for a commit. Its error is ErrLost, once, if commits before the next one were lost, and
// os.ErrClosed after Close. It is not safe for concurrent use.
func (l *Listener) Next() (Commit, error) {
	for {
		datagram, err := l.receive()
		if errors.Is(err, unix.ENOBUFS) {
			l.loss, err = lossNow, ErrLost
		}
		if err != nil {
			return Commit{}, fmt.Errorf("receive change events of nf_tables: %w", err)
		}
		it := messageIter{rest: datagram}
		for it.next() {
			if it.typ == messageType(unix.NFT_MSG_NEWGEN) { // a datagram by itself, after those of the commit's objects
				return l.commit(it.message)
			}
			l.touched = l.touched || l.watched.touches(it.message)
		}
		l.touched = l.touched || it.malformed || len(datagram) == len(l.in)
	}
}

// receive waits for a datagram, which is valid until the next call.
func (l *Listener) receive() (datagram []byte, err error) {
	closed := l.raw.Read(func(fd uintptr) bool {
		var n int
		for n, err = unix.Read(int(fd), l.in); errors.Is(err, unix.EINTR); {
			n, err = unix.Read(int(fd), l.in)
		}
		datagram = l.in[:max(n, 0)]
		if !errors.Is(err, unix.EAGAIN) {
			return true
		}
		if l.loss == lossNow {
			l.loss = lossPast
		}
		return false
	})
	if closed != nil && !errors.Is(closed, os.ErrDeadlineExceeded) {
		closed = os.ErrClosed
	}
	return datagram, cmp.Or(closed, err)
}

// commit returns the commit that a message ends.
func (l *Listener) commit(m message) (c Commit, err error) {
	t := attrTable{}
	if !t.decode(m, func(t *attrTable) {
		c = Commit{t.u32(unix.NFTA_GEN_ID), t.optU32(unix.NFTA_GEN_PROC_PID), string(untilNUL(t.at[unix.NFTA_GEN_PROC_NAME])), false}
	}) {
		return Commit{}, fmt.Errorf("receive change events of nf_tables: %w", errMalformed)
	}
	c.Touched = l.touched || l.loss != lossNone || c.Generation != l.last+1 || !l.chainsExist()
	l.last, l.touched = c.Generation, false
	if l.loss == lossPast {
		l.loss = lossNone
	}
	return c, nil
}

func (l *Listener) chainsExist() bool {
	chains := l.watched.sharedChains()
	if chains == nil {
		return true
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for family, names := range chains.Existing {
		for _, name := range names {
			if _, err := l.conn.Chain(family, l.watched.Shared, name); err != nil {
				return false
			}
		}
	}
	return true
}

func (w *Watched) sharedChains() *SharedChains {
	if w.Chains == nil {
		return nil
	}
	return w.Chains.Load()
}

// touches reports whether a message is about a watched object, or may be.
func (w *Watched) touches(m message) bool {
	if len(m.payload) < nfgenHeader {
		return true
	}
	attrs := m.payload[nfgenHeader:]
	table := nested(attrs, unix.NFTA_TABLE_NAME) // the number that it has in the messages of every object
	switch family, name := Family(m.payload[0]), string(untilNUL(table)); {
	case table == nil:
		return true
	case family != IPv4 && family != IPv6:
		return false
	case slices.Contains(w.Tables, name):
		return true
	case name != w.Shared:
		return false
	}
	var chain []byte
	switch m.typ & 0xff {
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		chain = nested(attrs, unix.NFTA_RULE_CHAIN)
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		chain = nested(attrs, unix.NFTA_CHAIN_NAME)
	}
	chains := w.sharedChains()
	return chain == nil || chains == nil || slices.Contains(chains.Names, string(untilNUL(chain)))
}

// Close closes the socket and ends a Next that waits in another goroutine.
func (l *Listener) Close() error {
	err := l.file.Close()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		err = errors.Join(err, l.conn.Close())
	}
	if err != nil {
		return fmt.Errorf("stop listening to nf_tables: %w", err)
	}
	return nil
}
