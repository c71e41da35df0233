// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Snapshot calls read, which uses c, until all that it read was of one
// generation, and returns that generation: that is for Batch.Generation.
//
// Without it a list of rules or elements may lack some, with nothing said: the
// kernel raises the generation first and then takes out what a commit deleted,
// and a list that is begun in between loses its place. So Snapshot also waits
// for a commit that is under way. It costs three small exchanges, and writes
// nothing.
//
// The error is what read returned, or ErrInterrupted if others commit faster
// than read reads.
func (c *Conn) Snapshot(read func() error) (uint32, error) {
	// What is interrupted is not of one generation, so all of it is read anew.
	defer func(n int) { c.attempts = n }(c.attempts)
	c.attempts = 1
	for range listAttempts {
		before, err := c.Generation()
		if err != nil {
			return 0, err
		}
		if err := c.settle(before); errors.Is(err, ErrStale) {
			continue
		} else if err != nil {
			return 0, err
		}
		failure := read()
		after, err := c.Generation()
		if err != nil {
			return 0, errors.Join(failure, err)
		}
		if after == before && !errors.Is(failure, ErrInterrupted) {
			return before, failure
		}
	}
	return 0, fmt.Errorf("read nf_tables snapshot: %w", ErrInterrupted)
}

// ConsistentRead is Snapshot where others let it be: if they commit too often, what
// read got at its last call has to do, torn or not. A difference found that way
// is read once more before anything is done about it.
func (c *Conn) ConsistentRead(read func() error) error {
	_, err := c.Snapshot(read)
	if errors.Is(err, ErrInterrupted) {
		return read()
	}
	return err
}

// settle returns when no commit is under way, or ErrStale if there was one since
// the given generation. An empty batch of that generation does it: the kernel
// takes up one batch at a time, and has said what is wrong with it by the time
// that the system call which sends it returns.
func (c *Conn) settle(generation uint32) error {
	op := operation{verb: "wait for nf_tables commits"}
	b := Batch{Generation: generation}
	b.reserve()
	first := c.sequence + 1
	c.sequence += 2
	if err := c.write(op, b.seal(first)); err != nil {
		return err
	}
	for {
		n, _, err := unix.Recvfrom(c.fd, c.in, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("%s: receive answer: %w", op, err)
		}
		it := messageIter{rest: c.in[:n]}
		for it.next() {
			if it.typ == unix.NLMSG_ERROR && it.sequence == first {
				return op.refused(it.message)
			}
		}
	}
}
