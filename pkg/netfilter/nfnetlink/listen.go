// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrLost is wrapped by Next's error if there were more commits than the socket holds.
var ErrLost = errors.New("change events of nf_tables were lost")

const (
	// listenBuffer is the size of the receive buffer in bytes, which the kernel doubles. A commit takes
	// 832 of them (Linux 6.18; 1,536 on s390x), however much it changes: 20,000 commits can wait, which
	// takes half a second to make. In a user namespace net.core.rmem_max is the limit, usually 512 commits.
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
	file *os.File
	in   []byte
}

// Listen returns a Listener to the commits from now on, in the network namespace of the calling thread.
// It needs CAP_NET_ADMIN over that namespace.
func Listen() (*Listener, error) {
	fd, err := openSocket("listen to nf_tables", unix.NETLINK_NETFILTER, unix.SOCK_NONBLOCK, join)
	if errors.Is(err, unix.EPERM) {
		err = fmt.Errorf("%w; it needs CAP_NET_ADMIN over the network namespace", err)
	}
	if err != nil {
		return nil, err
	}
	// The runtime's poller takes a nonblocking file, so that Close wakes Next.
	return &Listener{os.NewFile(uintptr(fd), "nf_tables events"), make([]byte, eventSize)}, nil
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

// Next waits for a commit. Its error is ErrLost, once, if commits before the next one were lost, and
// os.ErrClosed after Close. It is not safe for concurrent use.
func (l *Listener) Next() (Commit, error) {
	n, err := l.file.Read(l.in)
	if errors.Is(err, unix.ENOBUFS) {
		err = ErrLost
	}
	var c Commit
	if err == nil {
		c, err = decodeCommit(l.in[:n])
	}
	if err != nil {
		return Commit{}, fmt.Errorf("receive change events of nf_tables: %w", err)
	}
	return c, nil
}

func decodeCommit(datagram []byte) (c Commit, err error) {
	it, t := messageIter{rest: datagram}, attrTable{}
	if !it.next() || it.typ != messageType(unix.NFT_MSG_NEWGEN) || !t.decode(it.message, func(t *attrTable) {
		c = Commit{t.u32(unix.NFTA_GEN_ID), t.optU32(unix.NFTA_GEN_PROC_PID), string(untilNUL(t.at[unix.NFTA_GEN_PROC_NAME]))}
	}) {
		return Commit{}, errMalformed
	}
	return c, nil
}

// Close closes the socket and ends a Next that waits in another goroutine.
func (l *Listener) Close() error {
	if err := l.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("stop listening to nf_tables: %w", err)
	}
	return nil
}
