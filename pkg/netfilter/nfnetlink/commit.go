// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Fit makes room for the batch in the socket. It fails where that cannot be had, or
// where an operation cannot be expressed: what Commit would notice after batches
// before this one were applied.
func (c *Conn) Fit(b *Batch) error {
	op := operation{verb: "commit nf_tables batch"}
	if b.err != nil {
		return fmt.Errorf("%s: %w", op, b.err)
	}
	const overhead = 2*beginSize + 32 // of what begins and ends a batch, and of the kernel's
	size := len(b.w.b) + overhead
	if size > socketBuffer {
		if err := setBuffer(c.fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, size); err != nil {
			return fmt.Errorf("%s: make room for %d bytes: %w", op, size, err)
		}
	}
	room, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if size > room {
		return tooLong(op, size)
	}
	return nil
}

// Commit applies the batch as one transaction. If it returns an *Error nothing
// was applied, and the error names the operation that was refused, the first if
// several were; of set elements also which one, where the kernel says so.
// Without an answer of the kernel it is not known whether the batch was applied.
//
// An empty batch is none. The batch stays as it is and may be committed again,
// with another Generation for instance.
func (c *Conn) Commit(b *Batch) error {
	if b.err != nil {
		return fmt.Errorf("commit nf_tables batch: %w", b.err)
	}
	if len(b.ops) == 0 {
		return nil
	}
	op := operation{verb: "commit nf_tables batch"}
	msgs := b.seal(c.sequence + 1)
	first := c.sequence + 2 // the sequence number of ops[0]
	c.sequence += uint32(len(b.ops)) + 2
	if err := c.write(op, msgs); err != nil {
		return err
	}
	last := first + uint32(len(b.ops)) - 1

	// The kernel answers in the order of the batch: to each operation that it
	// refused, and at last to the last one, of which alone an answer was asked.
	// What is wrong with the batch as a whole it says about its first message,
	// and then no more.
	var failure *Error
	overrun := false
	for {
		datagram, err := c.receive(op)
		if errors.Is(err, unix.ENOBUFS) && !overrun {
			overrun = true // so many refusals that some were dropped, not the first
			continue
		}
		if err != nil {
			return err
		}
		it := messageIter{rest: datagram}
		for it.next() {
			if it.typ != unix.NLMSG_ERROR || it.sequence-(first-1) > last-(first-1) {
				continue // of an earlier exchange that was given up
			}
			e, err := decodeError(it.message)
			if err != nil {
				return fmt.Errorf("%s: %w", op, err)
			}
			if failure == nil && e != nil {
				failure = e
			}
			if it.sequence == last || it.sequence == first-1 || overrun && failure != nil {
				if overrun {
					c.drain()
				}
				return b.outcome(op, failure, first)
			}
		}
		if it.malformed {
			return fmt.Errorf("%s: %w", op, errMalformed)
		}
	}
}

// outcome says what the answer, nil if there was no refusal, means.
func (b *Batch) outcome(op operation, failure *Error, first uint32) error {
	if failure == nil {
		return nil
	}
	failure.Op = op.String()
	if i := failure.sequence - first; i < uint32(len(b.ops)) {
		refused := b.ops[i]
		failure.Op += ": " + refused.String()
		if key, ok := elementAt(b.message(int(i)), failure.offset); ok {
			failure.Op += " (" + key.String() + ")"
		}
	}
	return failure
}

// message returns the message of an operation.
func (b *Batch) message(i int) []byte {
	msg := b.w.b[b.ops[i].at:]
	return msg[:binary.NativeEndian.Uint32(msg)]
}

// seal returns the batch as the kernel wants it: numbered from sequence on, with
// a message before and one behind, and a request to answer the last operation.
func (b *Batch) seal(sequence uint32) []byte {
	start := generationSize
	if b.Generation != 0 {
		start = 0
	}
	begin := attrWriter{b: b.w.b[start:start]}
	at := begin.beginMessage(unix.NFNL_MSG_BATCH_BEGIN, 0, 0, unix.NFNL_SUBSYS_NFTABLES)
	if b.Generation != 0 {
		begin.u32(unix.NFNL_BATCH_GENID, b.Generation)
	}
	begin.endMessage(at)
	setSequence(begin.b, sequence)

	for i, op := range b.ops {
		sequence++
		setSequence(b.w.b[op.at:], sequence)
		flags := binary.NativeEndian.Uint16(b.w.b[op.at+6:]) &^ unix.NLM_F_ACK
		if i == len(b.ops)-1 {
			flags |= unix.NLM_F_ACK
		}
		binary.NativeEndian.PutUint16(b.w.b[op.at+6:], flags)
	}
	end := attrWriter{b: b.w.b}
	at = end.beginMessage(unix.NFNL_MSG_BATCH_END, 0, 0, unix.NFNL_SUBSYS_NFTABLES)
	end.endMessage(at)
	setSequence(end.b[at:], sequence+1)
	return end.b[start:]
}
