// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ErrLost is wrapped by the error of Next if there were more commits than the socket holds.
var ErrLost = errors.New("change events of nf_tables were lost")

// listenBuffer is in bytes, which the kernel doubles. A commit of one rule takes 1.7 kB of them,
// one of 5,000 rules 3.6 MB (Linux 6.18). In a user namespace net.core.rmem_max is the limit.
const listenBuffer = 8 << 20

// Commit is a commit to the ruleset that the kernel announced.
type Commit struct {
	Generation uint32 // what Conn.Generation returns after it
	// PID is the id of the thread that made the commit, in the initial PID namespace, or 0. It differs
	// from os.Getpid in a program with several threads and from what is visible in a container.
	PID uint32
	// Program is that thread's name, which the program chooses, mostly 15 bytes of its file name.
	Program string
	// Touched tells that watched objects may have changed since the commit that Next returned before. The
	// kernel announces each object that a commit changes. Announcements that are lost or unknown, and a gap
	// in the generations, count as changes of watched objects.
	Touched bool
}

// Watched are the objects whose changes Commit.Touched is about, in the families ip and ip6.
type Watched struct {
	Tables []string // with everything in them
	// Shared is a table that other programs use, too. In it the table itself and the chains of these names
	// are watched: all chains if Chains or *Chains.Load() is nil.
	Shared string
	Chains *atomic.Pointer[[]string]
}

// Listener receives the kernel's announcement of each commit in one network namespace, those of
// iptables-nft included. There are none of iptables-legacy.
type Listener struct {
	Began uint32 // a generation since which no commit is missed

	file    *os.File
	watched Watched
	in      []byte
	last    uint32 // generation of the last commit
	touched bool   // by the messages since then
}

// Listen listens in the calling thread's network namespace from now on. It needs CAP_NET_ADMIN.
func Listen(w Watched) (*Listener, error) {
	file, err := openEvents("listen to nf_tables", unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, err
	}
	var conn Conn
	began, err := conn.Generation()
	if err := errors.Join(err, conn.Close()); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &Listener{Began: began, file: file, watched: w, in: make([]byte, datagramSize), last: began}, nil
}

// openEvents opens a nonblocking socket to announcements of groups, so that Close ends a Read.
func openEvents(purpose string, protocol int, groups ...int) (*os.File, error) {
	fd, err := openSocket(purpose, protocol, unix.SOCK_NONBLOCK, func(fd int) error {
		if err := setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, listenBuffer); err != nil {
			return fmt.Errorf("set receive buffer: %w", err)
		}
		for _, group := range groups {
			err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group)
			if err != nil {
				return fmt.Errorf("join the group: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "netlink events"), nil
}

// Next waits for a commit. Its error is ErrLost if commits were lost, after which another Listener is
// needed, and os.ErrClosed after Close. It is not safe for concurrent use.
func (l *Listener) Next() (Commit, error) {
	for {
		n, err := l.file.Read(l.in)
		if errors.Is(err, unix.ENOBUFS) {
			err = ErrLost
		}
		if err != nil {
			return Commit{}, fmt.Errorf("receive change events of nf_tables: %w", err)
		}
		m, rest, ok := cutMessage(l.in[:n])
		for ; ok; m, rest, ok = cutMessage(rest) {
			isLast := m.typ == messageType(unix.NFT_MSG_NEWGEN)
			if isLast { // a datagram by itself, after those of the commit's objects
				return l.commit(m)
			}
			if l.touches(m) {
				l.touched = true
			}
		}
		isCut := n == len(l.in)
		if len(rest) > 0 || isCut {
			l.touched = true
		}
	}
}

// commit returns the commit that a message ends.
func (l *Listener) commit(m message) (c Commit, err error) {
	attrs := m.payload[min(nfgenHeader, len(m.payload)):]
	var t attrTable
	err = t.decode(attrs, func(t *attrTable) {
		c.Generation = t.u32(unix.NFTA_GEN_ID)
		c.PID = t.optU32(unix.NFTA_GEN_PROC_PID)
		c.Program = string(untilNUL(t.at[unix.NFTA_GEN_PROC_NAME]))
	})
	if err != nil {
		return Commit{}, fmt.Errorf("receive change events of nf_tables: %w", err)
	}
	isNext := c.Generation == l.last+1
	c.Touched = l.touched || !isNext
	l.last, l.touched = c.Generation, false
	return c, nil
}

// touches reports whether a message is about a watched object, or may be.
func (l *Listener) touches(m message) bool {
	if len(m.payload) < nfgenHeader {
		return true
	}
	attrs := m.payload[nfgenHeader:]
	table := nested(attrs, unix.NFTA_TABLE_NAME) // the number that it has in the messages of every object
	if table == nil {
		return true
	}
	family, name := Family(m.payload[0]), string(untilNUL(table))
	if family != IPv4 && family != IPv6 {
		return false
	}
	if slices.Contains(l.watched.Tables, name) {
		return true
	}
	return name == l.watched.Shared && l.watched.touchesShared(m.typ, attrs)
}

// touchesShared reports whether a message about the shared table is about a watched chain, or may be. A chain
// that is renamed is announced as a new one, by its new name only. So every new chain counts, as it may be a
// watched one that another program renames, but those of kube-proxy, which adds tens of thousands: a watched
// chain that gets such a name is missed until the next full read.
func (w *Watched) touchesShared(typ uint16, attrs []byte) bool {
	var chain []byte
	switch typ & 0xff {
	case unix.NFT_MSG_NEWCHAIN:
		return !bytes.HasPrefix(nested(attrs, unix.NFTA_CHAIN_NAME), []byte("KUBE-"))
	case unix.NFT_MSG_DELCHAIN:
		chain = nested(attrs, unix.NFTA_CHAIN_NAME)
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		chain = nested(attrs, unix.NFTA_RULE_CHAIN)
	}
	if chain == nil || w.Chains == nil {
		return true
	}
	watched := w.Chains.Load()
	return watched == nil || slices.Contains(*watched, string(untilNUL(chain)))
}

// Close closes the socket and ends a Next that waits in another goroutine.
func (l *Listener) Close() error {
	if err := l.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
