// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrLost is wrapped by Next's error if there were more commits than the socket holds. Nothing is known
// of some of them, so the caller has to read the rules.
var ErrLost = errors.New("change events of nf_tables were lost")

const (
	// listenBuffer is the size of the receive buffer in bytes, which the kernel doubles. A commit takes
	// 832 of them (Linux 6.18), however much it changes: 20,000 commits can wait, which takes half a
	// second to make. In a user namespace net.core.rmem_max is the limit, usually 512 commits.
	listenBuffer = 8 << 20
	// eventSize is enough for an NFT_MSG_NEWGEN, which takes 64 bytes.
	eventSize = 512
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
}

// Listener receives the kernel's announcement of each commit in one network namespace, those of
// iptables-nft included. There are none of iptables-legacy.
type Listener struct {
	file   *os.File
	raw    syscall.RawConn
	closed atomic.Bool
	in     []byte
}

// Listen returns a Listener to the commits from now on, in the network namespace of the calling thread.
// It needs CAP_NET_ADMIN over that namespace.
func Listen() (*Listener, error) {
	fd, err := openSocket("listen to nf_tables", unix.SOCK_NONBLOCK, join)
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w; it needs CAP_NET_ADMIN over the network namespace", err)
	}
	if err != nil {
		return nil, err
	}
	// The runtime's poller takes a nonblocking file, so that Close wakes Next.
	l := &Listener{file: os.NewFile(uintptr(fd), "nf_tables events"), in: make([]byte, eventSize)}
	if l.raw, err = l.file.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("listen to nf_tables: %w", err), l.file.Close())
	}
	return l, nil
}

// join attaches a filter that passes only the end of each commit, and then makes the socket a member of
// the group of nf_tables. The kernel filters before it charges the socket, so that a commit of
// thousands of rules takes no more of the buffer than one of one rule.
func join(fd int) error {
	// A classic BPF program loads numbers in network order.
	var typ [2]byte
	binary.NativeEndian.PutUint16(typ[:], messageType(unix.NFT_MSG_NEWGEN))
	const typeAt = 4 // nlmsg_type in struct nlmsghdr
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: typeAt},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(binary.BigEndian.Uint16(typ[:])), Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: eventSize}, // pass up to that many bytes
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},         // drop
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter); err != nil {
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

// Next waits for a commit and returns all since the last call, oldest first. With ErrLost it returns
// those that were not lost, and after Close os.ErrClosed. It is not safe for concurrent use.
func (l *Listener) Next() ([]Commit, error) {
	var commits []Commit
	var failure error
	err := l.raw.Read(func(fd uintptr) bool {
		commits, failure = l.receive(int(fd))
		return len(commits) > 0 || failure != nil
	})
	switch {
	case err == nil:
		err = failure
	case l.closed.Load():
		return nil, os.ErrClosed
	}
	if err != nil {
		err = fmt.Errorf("receive change events of nf_tables: %w", err)
	}
	return commits, err
}

// receive reads until the socket is empty, also after a loss: the kernel queues nothing more before.
func (l *Listener) receive(fd int) (commits []Commit, failure error) {
	for {
		n, err := unix.Read(fd, l.in)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return commits, failure
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.ENOBUFS):
			failure = ErrLost
			continue
		case err != nil:
			return commits, err
		}
		if commits, err = appendCommits(commits, l.in[:n]); err != nil {
			return commits, err
		}
	}
}

func appendCommits(commits []Commit, datagram []byte) ([]Commit, error) {
	it := messageIter{rest: datagram}
	for it.next() {
		if it.typ != messageType(unix.NFT_MSG_NEWGEN) {
			continue
		}
		var t attrTable
		var commit Commit
		if !t.decode(it.message, func(t *attrTable) { commit = decodeCommit(t) }) {
			return commits, errMalformed
		}
		commits = append(commits, commit)
	}
	if it.malformed {
		return commits, errMalformed
	}
	return commits, nil
}

func decodeCommit(t *attrTable) Commit {
	return Commit{
		Generation: t.u32(unix.NFTA_GEN_ID),
		PID:        t.optU32(unix.NFTA_GEN_PROC_PID),
		Program:    string(untilNUL(t.at[unix.NFTA_GEN_PROC_NAME])),
	}
}

// Close closes the socket and ends a Next that waits in another goroutine.
func (l *Listener) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	if err := l.file.Close(); err != nil {
		return fmt.Errorf("stop listening to nf_tables: %w", err)
	}
	return nil
}
