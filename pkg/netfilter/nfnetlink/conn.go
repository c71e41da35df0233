// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// The sizes of the socket buffers in bytes. With the default sizes the kernel refuses a commit of 6,000
	// prefixes, and can lose the answer to an applied one of 200 rules. It allocates what a message needs,
	// not the buffer.
	receiveBuffer = 8 << 20
	sendBuffer    = 1<<30 - 1 // the kernel doubles it in 32 bits
	datagramSize  = 32 << 10  // the most that the kernel puts into one answer (af_netlink.c)
	// In seconds. The kernel answers before the system call that sends the request returns.
	answerTimeout = 10
)

// ErrStale is wrapped by Commit's error if another program has committed since Batch.Generation.
const ErrStale = unix.ERESTART

// errMalformed is about an answer that does not have the form that the kernel's headers define.
var errMalformed = errors.New("the kernel's answer has an unknown form")

// Conn is a socket to the kernel's nf_tables and conntrack. It blocks, and the poller of the runtime does not
// know it: the answer is there when the request was sent. An ADD with nothing to do takes 7 % longer with a
// socket that the poller waits for (github.com/mdlayher/netlink). The first request opens it, in the network
// namespace of the calling thread, where it stays. The requests need CAP_NET_ADMIN over the namespace. It is
// not safe for concurrent use.
type Conn struct {
	routes     bool // it is a socket to rtnetlink
	fd         int
	sequence   uint32
	in         []byte     // the last datagram; nil while the socket is not open
	out        attrWriter // of the last request
	attrs      attrTable
	consistent bool // within ConsistentRead
	// consistentLimit is the time after which ConsistentRead begins no other attempt; 0 is the default. Only a
	// test sets it.
	consistentLimit time.Duration
}

// open opens the socket once.
func (c *Conn) open() (err error) {
	if c.in != nil {
		return nil
	}
	if c.routes {
		c.fd, err = openSocket("open rtnetlink socket", unix.NETLINK_ROUTE, 0, setUpRoutes)
	} else {
		c.fd, err = openSocket("open nf_tables socket", unix.NETLINK_NETFILTER, 0, setUpNetfilter)
	}
	if err == nil {
		c.in = make([]byte, datagramSize)
	}
	return err
}

func setUpNetfilter(fd int) error {
	err := setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receiveBuffer)
	if err != nil {
		return err
	}
	err = setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, sendBuffer)
	if err != nil {
		return err
	}
	// Refusals come without a copy of the request.
	err = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	err = ignore(err, unix.ENOPROTOOPT)
	if err != nil {
		return err
	}
	return limitAnswer(fd)
}

// setUpRoutes lets the kernel list only the routes of the type asked for. Before Linux 4.20 it lists all.
func setUpRoutes(fd int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	err = ignore(err, unix.ENOPROTOOPT)
	if err != nil {
		return err
	}
	return limitAnswer(fd)
}

// limitAnswer lets a receive fail after answerTimeout.
func limitAnswer(fd int) error {
	return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerTimeout})
}

// openSocket opens and connects a socket, to which no other process can then send messages.
func openSocket(purpose string, protocol, flags int, setUp func(fd int) error) (int, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|flags, protocol)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		err = fmt.Errorf("%w; the kernel has no nfnetlink", err)
	}
	if err != nil {
		return -1, fmt.Errorf("%s: %w", purpose, err)
	}
	if err = setUp(fd); err == nil {
		err = unix.Connect(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	}
	if err != nil {
		return -1, errors.Join(fmt.Errorf("%s: %w", purpose, err), unix.Close(fd))
	}
	return fd, nil
}

// setBuffer sets the size of a socket buffer, in a user namespace only up to the limit in net.core.
func setBuffer(fd, force, option, size int) error {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, size) == nil {
		return nil
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, size)
}

// Close closes the socket. Shortly after any commit in the namespace this takes 8 to 16 ms in the
// kernel, so a daemon should keep its Conn. The next request opens it again.
func (c *Conn) Close() error {
	if c.in == nil {
		return nil
	}
	c.in = nil
	return os.NewSyscallError("close netlink socket", unix.Close(c.fd))
}

// message is a netlink message without its header.
type message struct {
	typ, flags uint16
	sequence   uint32
	payload    []byte
}

// nfgenHeader is the size of struct nfgenmsg: family, version and resource.
const nfgenHeader = 4

// Offsets in struct nlmsghdr.
const flagsAt, sequenceAt = 6, 8

// cutMessage returns the first message of a datagram and those after it, or !ok and all of b if that is empty
// or malformed.
func cutMessage(b []byte) (m message, rest []byte, ok bool) {
	if len(b) < unix.SizeofNlMsghdr {
		return m, b, false
	}
	n := binary.NativeEndian.Uint32(b)
	if n < unix.SizeofNlMsghdr || uint64(n) > uint64(len(b)) {
		return m, b, false
	}
	return message{
		typ:      binary.NativeEndian.Uint16(b[4:]),
		flags:    binary.NativeEndian.Uint16(b[flagsAt:]),
		sequence: binary.NativeEndian.Uint32(b[sequenceAt:]),
		payload:  b[unix.SizeofNlMsghdr:n:n],
	}, b[min(align4(int(n)), len(b)):], true
}

// beginMessage begins a message with the header of a subsystem, which endMessage ends. The sequence number is
// 0, as is the port, which the kernel fills in.
func (w *attrWriter) beginMessage(typ, flags uint16, header []byte) (at int) {
	at = len(w.b)
	w.b = binary.NativeEndian.AppendUint32(w.b, 0)
	w.b = binary.NativeEndian.AppendUint16(w.b, typ)
	w.b = binary.NativeEndian.AppendUint16(w.b, flags|unix.NLM_F_REQUEST)
	w.b = append(w.b, make([]byte, 8)...)
	w.b = append(w.b, header...)
	return at
}

func (w *attrWriter) endMessage(at int) { binary.NativeEndian.PutUint32(w.b[at:], uint32(len(w.b)-at)) }

func messageType(number uint16) uint16 { return unix.NFNL_SUBSYS_NFTABLES<<8 | number }

// operation is what a message does, for error texts, and the object that it is about.
type operation struct {
	verb        string
	family      Family
	table, name string
}

func (o operation) String() string {
	if o.table == "" {
		return o.verb
	}
	return strings.TrimSuffix(strings.Join([]string{o.verb, o.family.String(), o.table, o.name}, " "), " ")
}

// names writes the names of the table, whose attribute has one number for all objects, and object.
func (w *attrWriter) names(op operation, nameAttr uint16) {
	if op.table != "" {
		w.str(unix.NFTA_TABLE_NAME, op.table)
	}
	if op.name != "" {
		w.str(nameAttr, op.name)
	}
}

// wrap adds the operation to an error, if there is one. It sets that of an *Error.
func (o operation) wrap(err error) error {
	if err == nil {
		return nil
	}
	refused, ok := errors.AsType[*Error](err)
	if ok {
		refused.Op = o.String()
		return refused
	}
	return fmt.Errorf("%s: %w", o, err)
}

// request is one message to the kernel. handle is called with each answer.
type request struct {
	op         operation
	typ, flags uint16
	header     []byte            // that precedes the attributes, as in the answers
	encode     func(*attrWriter) // writes the attributes; nil writes none
	// handle is called with each answer. The bytes are valid during the call only.
	handle func(header, attrs []byte) error
}

// get returns a request NFT_MSG_GET* about an object, whose name has the attribute nameAttr.
func (c *Conn) get(op operation, number, flags, nameAttr uint16, decode func(*attrTable)) request {
	return request{
		op: op, typ: messageType(number), flags: flags, header: nfgenmsg(op.family),
		encode: func(w *attrWriter) { w.names(op, nameAttr) },
		handle: func(_, attrs []byte) error { return c.attrs.decode(attrs, decode) },
	}
}

// nfgenmsg returns the header of a request to a subsystem of nfnetlink.
func nfgenmsg(family Family) []byte { return []byte{byte(family), unix.NFNETLINK_V0, 0, 0} }

// query sends a request and handles the answers: one, or with NLM_F_DUMP those up to NLMSG_DONE. It reports
// whether the kernel calls a dump interrupted. If the answers cannot be received, or ctx ends, it closes the
// socket: the kernel has one dump for a socket at a time, and would refuse the next one.
func (c *Conn) query(ctx context.Context, r request) (interrupted bool, err error) {
	if err := c.send(r); err != nil {
		return false, err
	}
	var failure error // kept until the kernel is done, which handles one dump at a time
	for m, err := range c.answers(r.op, 0) {
		if err == nil {
			err = r.op.wrap(ctx.Err())
		}
		if err != nil {
			_ = c.Close() // the next request opens another one
			return interrupted, err
		}
		if m.sequence != c.sequence { // an answer to an earlier request that failed
			continue
		}
		if m.flags&unix.NLM_F_DUMP_INTR != 0 {
			interrupted = true
		}
		if m.typ == unix.NLMSG_ERROR || m.typ == unix.NLMSG_DONE {
			return interrupted, r.explain(cmp.Or(r.end(m), failure))
		}
		if failure == nil {
			failure = r.answer(m)
		}
		isOnlyAnswer := r.flags&unix.NLM_F_DUMP == 0
		if isOnlyAnswer {
			break
		}
	}
	return interrupted, r.op.wrap(failure)
}

// send encodes and sends a request.
func (c *Conn) send(r request) error {
	c.out = attrWriter{b: c.out.b[:0], op: r.op}
	w := &c.out
	at := w.beginMessage(r.typ, r.flags, r.header)
	if r.encode != nil {
		r.encode(w)
	}
	w.endMessage(at)
	if w.err != nil {
		return w.err
	}
	c.sequence++
	binary.NativeEndian.PutUint32(w.b[sequenceAt:], c.sequence)
	return c.write(r.op, w.b)
}

// answer handles an answer that is neither an error nor the end of a dump.
func (r *request) answer(m message) error {
	if len(m.payload) < len(r.header) {
		return errMalformed
	}
	return r.handle(m.payload[:len(r.header)], m.payload[len(r.header):])
}

// end decodes the message that ends the answers.
func (r *request) end(m message) error {
	err := decodeError(m)
	asked := m.typ == unix.NLMSG_DONE || r.flags&unix.NLM_F_ACK != 0
	if err == nil && !asked { // an acknowledgement
		return errMalformed
	}
	return err
}

// explain adds to an error, if there is one, what failed and what the kernel lacks.
func (r *request) explain(err error) error {
	err = r.op.wrap(err)
	if errors.Is(err, unix.EINVAL) && r.typ>>8 == unix.NFNL_SUBSYS_CTNETLINK {
		return fmt.Errorf("%w; the kernel has no ctnetlink (module nf_conntrack_netlink)", err)
	}
	return err
}

// queryAll repeats a query that the kernel calls interrupted: what exists all the time is handled at least
// once.
func (c *Conn) queryAll(ctx context.Context, r request) error {
	const attempts = 3
	for n := 1; ; n++ {
		interrupted, err := c.query(ctx, r)
		if err != nil || !interrupted {
			return err
		}
		if n == attempts {
			return fmt.Errorf("%s: interrupted %d times", r.op, n)
		}
	}
}

// write sends b in one system call.
func (c *Conn) write(op operation, b []byte) error {
	if err := c.open(); err != nil {
		return err
	}
	for {
		_, err := unix.Write(c.fd, b)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EMSGSIZE):
			return fmt.Errorf("%s: send %d bytes: %w; without CAP_NET_ADMIN outside of user namespaces"+
				" the sysctl net.core.wmem_max is the limit", op, len(b), err)
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("%s: send request: %w", op, err)
		}
	}
}

// answers yields each message that arrives, with the flag MSG_DONTWAIT until nothing more is there. The bytes
// of a message are valid until the next one. An error ends it.
func (c *Conn) answers(op operation, flags int) iter.Seq2[message, error] {
	return func(yield func(message, error) bool) {
		for {
			datagram, err := c.receive(op, flags)
			if err != nil {
				yield(message{}, err)
				return
			}
			if datagram == nil {
				return
			}
			m, rest, ok := cutMessage(datagram)
			for ; ok; m, rest, ok = cutMessage(rest) {
				if !yield(m, nil) {
					return
				}
			}
			if len(rest) > 0 {
				yield(message{}, op.wrap(errMalformed))
				return
			}
		}
	}
}

// receive returns the next datagram, which is valid until the next call, or with the flag MSG_DONTWAIT nil if
// there is none.
func (c *Conn) receive(op operation, flags int) ([]byte, error) {
	poll := flags&unix.MSG_DONTWAIT != 0
	for {
		n, _, err := unix.Recvfrom(c.fd, c.in, flags)
		isLost := poll && errors.Is(err, unix.ENOBUFS) // some of many refusals
		switch {
		case err == nil && n == 0:
			return nil, op.wrap(errMalformed)
		case err == nil:
			return c.in[:n], nil
		case errors.Is(err, unix.EINTR), isLost:
			continue
		case errors.Is(err, unix.EAGAIN) && poll:
			return nil, nil
		case errors.Is(err, unix.EAGAIN):
			return nil, fmt.Errorf("%s: the kernel did not answer within %d s", op, answerTimeout)
		default:
			return nil, fmt.Errorf("%s: receive answer: %w", op, err)
		}
	}
}

// Error is the kernel's refusal of an operation. It unwraps to its Errno.
type Error struct {
	Op     string // the operation and its object, "add rule to ip ip-masq masq-X"
	Family Family // of the object; 0 if the refusal is not about one of a batch's operations
	Errno  syscall.Errno
}

func (e *Error) Error() string {
	text := e.Op + ": " + e.Errno.Error()
	switch e.Errno {
	case unix.EPERM:
		text += "; it needs CAP_NET_ADMIN over the network namespace"
	case unix.ERESTART:
		text += "; another program changed the rules in between"
	}
	return text
}

// Unwrap returns the Errno.
func (e *Error) Unwrap() error { return e.Errno }

// Unsupported reports whether an error is that of a kernel without nf_tables or the family. A kernel without the
// subsystem answers a message with EINVAL, and a batch with EOPNOTSUPP.
func Unsupported(err error) bool {
	return isOneOf(err, unix.EPROTONOSUPPORT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EINVAL)
}

func ignore(err error, numbers ...unix.Errno) error {
	if isOneOf(err, numbers...) {
		return nil
	}
	return err
}

func isOneOf(err error, numbers ...unix.Errno) bool {
	for _, n := range numbers {
		if errors.Is(err, n) {
			return true
		}
	}
	return false
}

// decodeError decodes a message NLMSG_ERROR or NLMSG_DONE: an *Error, or nil if it acknowledges.
func decodeError(m message) error {
	if len(m.payload) < 4 { // the number
		return errMalformed
	}
	number := int32(binary.NativeEndian.Uint32(m.payload))
	if number == 0 {
		return nil
	}
	return &Error{Errno: syscall.Errno(-number)}
}
