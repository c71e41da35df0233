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

// ErrLost is what Next returns, wrapped, when there were more commits than the
// socket holds: of some nothing is known, so whatever is of interest has to be
// looked at.
var ErrLost = errors.New("change events of nf_tables were lost")

const (
	// listenBuffer, in bytes, of which the kernel grants twice as many. A commit
	// is charged 832 (Linux 6.18) however much it changed, so 20,000 of them may
	// wait to be read, which takes half a second to make. It is a limit: what is
	// not in the queue takes no memory. In a user namespace net.core.rmem_max is
	// the limit, as a rule 512 commits.
	listenBuffer = 8 << 20
	// eventSize is enough for any NEWGEN, which takes 64 bytes.
	eventSize = 512
)

// Commit is one change of the ruleset that the kernel announced.
type Commit struct {
	// Generation is what Conn.Generation returns since.
	Generation uint32
	// PID is of the thread that made it, as the first PID namespace counts. So it
	// is not what os.Getpid returns in a program of several threads, and matches
	// nothing that can be seen from within a container. 0 if not told.
	PID uint32
	// Program is the name of that thread, of 15 bytes at most: as a rule the
	// beginning of its program's file name. Whoever makes commits can choose it.
	Program string
}

// Listener receives what the kernel tells of each commit of anybody in one
// network namespace: iptables-nft's are among them, iptables-legacy's are not.
type Listener struct {
	file   *os.File
	raw    syscall.RawConn
	closed atomic.Bool
	in     []byte
}

// Listen returns a Listener to the commits from now on, in the network namespace
// of the calling thread. It needs CAP_NET_ADMIN over that.
//
// Of what the kernel announces only the end of each commit is let through to
// the socket. It is dropped before it is charged to the socket, so that a
// commit of thousands of rules takes as little of the buffer as one of one rule.
func Listen() (*Listener, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_NETFILTER)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, fmt.Errorf("listen to nf_tables: %w; the kernel has no nfnetlink (try: modprobe nf_tables)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("listen to nf_tables: %w", err)
	}
	if err := join(fd); err != nil {
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w; it needs CAP_NET_ADMIN over the network namespace", err)
		}
		return nil, errors.Join(fmt.Errorf("listen to nf_tables: %w", err), unix.Close(fd))
	}
	// Being nonblocking it is one for the runtime's poller, so Close wakes Next.
	l := &Listener{file: os.NewFile(uintptr(fd), "nf_tables events"), in: make([]byte, eventSize)}
	if l.raw, err = l.file.SyscallConn(); err != nil {
		return nil, errors.Join(fmt.Errorf("listen to nf_tables: %w", err), l.file.Close())
	}
	return l, nil
}

// join makes the socket a member of the group of nf_tables. The filter comes
// first: what is announced in between would be in the queue for good.
func join(fd int) error {
	// A classic BPF program sees numbers as if they were in network order.
	var typ [2]byte
	binary.NativeEndian.PutUint16(typ[:], messageType(unix.NFT_MSG_NEWGEN))
	const typeAt = 4 // nlmsg_type in struct nlmsghdr
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: typeAt},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: uint32(binary.BigEndian.Uint16(typ[:])), Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: eventSize}, // pass, up to so many bytes
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},         // drop
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: (*unix.SockFilter)(unsafe.Pointer(&program[0]))}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter); err != nil {
		return fmt.Errorf("attach filter: %w", err)
	}
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, listenBuffer) != nil {
		// In a user namespace only what net.core allows everybody is to be had.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, listenBuffer); err != nil {
			return fmt.Errorf("set receive buffer: %w", err)
		}
	}
	// Connected to the kernel, the socket takes messages from nobody else.
	if err := unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, unix.NFNLGRP_NFTABLES); err != nil {
		return fmt.Errorf("join the group: %w", err)
	}
	return nil
}

// Next waits until there was a commit and returns all that are known of since
// the last call, the oldest first. With ErrLost come those that were not lost.
// After Close the error is os.ErrClosed. It is for one goroutine at a time.
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

// receive takes all that the socket has. It does not stop where events were
// lost: the kernel queues no more before the queue is empty.
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
		attrs, _, err := it.attributes()
		if err != nil {
			return commits, err
		}
		var t attrTable
		t.parse(attrs)
		c := Commit{
			Generation: t.u32(unix.NFTA_GEN_ID),
			PID:        t.optU32(unix.NFTA_GEN_PROC_PID),
			Program:    string(untilNUL(t.at[unix.NFTA_GEN_PROC_NAME])),
		}
		if t.bad {
			return commits, errMalformed
		}
		commits = append(commits, c)
	}
	if it.malformed {
		return commits, errMalformed
	}
	return commits, nil
}

// Close ends the listening, and a Next that waits in another goroutine.
func (l *Listener) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	if err := l.file.Close(); err != nil {
		return fmt.Errorf("stop listening to nf_tables: %w", err)
	}
	return nil
}
