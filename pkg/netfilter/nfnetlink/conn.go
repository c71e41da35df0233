// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

const (
	// socketBuffer, in bytes each way. With the default a commit of 6,000
	// prefixes is refused, and the answer to one of 200 rules may be lost
	// although the commit was applied.
	socketBuffer = 8 << 20
	// datagramSize is the most that the kernel puts into one answer (af_netlink.c
	// caps it there), and it takes what the reader offers as what to fill.
	datagramSize = 32 << 10
	// answerTimeout, in seconds, is never reached while all is well: the kernel
	// has answered before the request's system call returns.
	answerTimeout = 10
)

// Conn is a socket to the kernel's nf_tables in one network namespace. It is
// for one goroutine at a time.
type Conn struct {
	fd       int
	sequence uint32
	attempts int        // to read a list, listAttempts or one within Snapshot
	out      attrWriter // the request under way
	in       []byte     // the datagram under way
}

// Dial opens a socket in the network namespace of the calling thread, which it
// keeps wherever the thread goes later. It needs no privilege; all that a Conn
// does needs CAP_NET_ADMIN over the namespace.
func Dial() (*Conn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, fmt.Errorf("open nf_tables socket: %w; the kernel has no nfnetlink (try: modprobe nf_tables)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("open nf_tables socket: %w", err)
	}
	if err := setUp(fd); err != nil {
		return nil, errors.Join(fmt.Errorf("set up nf_tables socket: %w", err), unix.Close(fd))
	}
	return newConn(fd), nil
}

func newConn(fd int) *Conn {
	return &Conn{fd: fd, attempts: listAttempts, in: make([]byte, datagramSize)}
}

func setUp(fd int) error {
	if err := setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, socketBuffer); err != nil {
		return err
	}
	if err := setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, socketBuffer); err != nil {
		return err
	}
	// Say more than a number in errors, and do not send the whole request back
	// with each. Kernels before 4.12 lack the first; it is no loss but of words.
	for _, o := range []int{unix.NETLINK_EXT_ACK, unix.NETLINK_CAP_ACK} {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, o, 1); err != nil && !errors.Is(err, unix.ENOPROTOOPT) {
			return err
		}
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerTimeout}); err != nil {
		return err
	}
	// Connected to the kernel, the socket takes messages from nobody else.
	return unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
}

// setBuffer sets the size of a buffer. In a user namespace only what net.core
// allows everybody is to be had.
func setBuffer(fd, force, polite, size int) error {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size) == nil {
		return nil
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, polite, size)
}

// Close closes the socket. Soon after anybody's commit in the namespace the
// kernel takes 8 to 16 ms for that: a daemon better keeps its Conn.
func (c *Conn) Close() error {
	if c.fd < 0 {
		return nil
	}
	err := unix.Close(c.fd)
	c.fd = -1
	if err != nil {
		return fmt.Errorf("close nf_tables socket: %w", err)
	}
	return nil
}

// message is one netlink message without its header; payload begins behind it.
type message struct {
	typ, flags uint16
	sequence   uint32
	payload    []byte
}

// nfgenHeader is the size of struct nfgenmsg, which begins each payload that is
// not netlink's own: family, version, resource.
const nfgenHeader = 4

// attributes returns what follows the nfgenmsg, and the resource in it, which
// in nf_tables is the lower half of the generation.
func (m message) attributes() (attrs []byte, generation uint16, err error) {
	if len(m.payload) < nfgenHeader {
		return nil, 0, errMalformed
	}
	return m.payload[nfgenHeader:], binary.BigEndian.Uint16(m.payload[2:]), nil
}

// messageIter walks over the messages of a datagram without copying.
type messageIter struct {
	rest []byte
	message
	malformed bool
}

func (it *messageIter) next() bool {
	if len(it.rest) == 0 {
		return false
	}
	if len(it.rest) < unix.SizeofNlMsghdr {
		it.malformed = true
		return false
	}
	n := binary.NativeEndian.Uint32(it.rest)
	if n < unix.SizeofNlMsghdr || uint64(n) > uint64(len(it.rest)) {
		it.malformed = true
		return false
	}
	it.message = message{
		typ:      binary.NativeEndian.Uint16(it.rest[4:]),
		flags:    binary.NativeEndian.Uint16(it.rest[6:]),
		sequence: binary.NativeEndian.Uint32(it.rest[8:]),
		payload:  it.rest[unix.SizeofNlMsghdr:n:n],
	}
	it.rest = it.rest[min(align4(int(n)), len(it.rest)):]
	return true
}

// beginMessage writes the headers of a message, whose length endMessage and
// whose sequence number setSequence fill in, and returns its place.
func (w *attrWriter) beginMessage(typ, flags uint16, family Family, resource uint16) int {
	at := len(w.b)
	w.b = binary.NativeEndian.AppendUint32(w.b, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags|unix.NLM_F_REQUEST)
	w.b = append(w.b, 0, 0, 0, 0, 0, 0, 0, 0) // sequence number; port: the kernel's to fill
	w.b = append(w.b, byte(family), unix.NFNETLINK_V0)
	w.b = binary.BigEndian.AppendUint16(w.b, resource)
	return at
}

func (w *attrWriter) endMessage(at int) {
	binary.NativeEndian.PutUint32(w.b[at:], uint32(len(w.b)-at))
}

func setSequence(msg []byte, sequence uint32) {
	binary.NativeEndian.PutUint32(msg[8:], sequence)
}

func messageType(number uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | number }

// request begins a request; its attributes go to c.out, then get or dump.
func (c *Conn) request(number, flags uint16, family Family) {
	c.out = attrWriter{b: c.out.b[:0]}
	c.out.beginMessage(messageType(number), flags, family, 0)
}

// send sends the request under a sequence number of its own, which it returns.
func (c *Conn) send(op operation) (uint32, error) {
	if c.out.err != nil {
		return 0, fmt.Errorf("%s: %w", op, c.out.err)
	}
	c.sequence++
	c.out.endMessage(0)
	setSequence(c.out.b, c.sequence)
	return c.sequence, c.write(op, c.out.b)
}

func (c *Conn) write(op operation, b []byte) error {
	for {
		_, err := unix.Write(c.fd, b)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EMSGSIZE):
			return tooLong(op, len(b))
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("%s: send request: %w", op, err)
		}
	}
}

func tooLong(op operation, size int) error {
	return fmt.Errorf("%s: send %d bytes: %w; without CAP_NET_ADMIN outside of user namespaces"+
		" the sysctl net.core.wmem_max is the limit", op, size, unix.EMSGSIZE)
}

// receive returns the next datagram, which the following call overwrites.
func (c *Conn) receive(op operation) ([]byte, error) {
	for {
		n, err := unix.Read(c.fd, c.in)
		switch {
		case err == nil && n > 0:
			return c.in[:n], nil
		case err == nil:
			return nil, fmt.Errorf("%s: %w", op, errMalformed)
		case errors.Is(err, unix.EAGAIN):
			return nil, fmt.Errorf("%s: the kernel did not answer within %d s", op, answerTimeout)
		case !errors.Is(err, unix.EINTR):
			return nil, fmt.Errorf("%s: receive answer: %w", op, err)
		}
	}
}

// drain drops what has arrived, to make room for the next answer.
func (c *Conn) drain() {
	for {
		if _, _, err := unix.Recvfrom(c.fd, c.in, unix.MSG_DONTWAIT); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
