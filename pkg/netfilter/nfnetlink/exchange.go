// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"bytes"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// listAttempts is how often a list is read anew when a commit came in between.
const listAttempts = 50

// operation names what is being done, for the error if there is one.
type operation struct {
	verb        string
	family      Family
	table, name string
}

func (o operation) String() string {
	if o.table == "" {
		return o.verb
	}
	parts := []string{o.verb, o.family.String(), o.table}
	if o.name != "" {
		parts = append(parts, o.name)
	}
	return strings.Join(parts, " ")
}

// get sends the request and returns the attributes of the single answer, which
// has to be of the given kind. They last until the next request.
func (c *Conn) get(op operation, number uint16) ([]byte, error) {
	sequence, err := c.send(op)
	if err != nil {
		return nil, err
	}
	return c.answer(op, sequence, number)
}

// answer returns the attributes of the answer to the request with the sequence
// number, as get does.
func (c *Conn) answer(op operation, sequence uint32, number uint16) ([]byte, error) {
	for {
		datagram, err := c.receive(op)
		if err != nil {
			return nil, err
		}
		it := messageIter{rest: datagram}
		for it.next() {
			if it.sequence != sequence {
				continue // of an earlier exchange that was given up
			}
			switch it.typ {
			case messageType(number):
				attrs, _, err := it.attributes()
				if err != nil {
					return nil, fmt.Errorf("%s: %w", op, err)
				}
				return attrs, nil
			case unix.NLMSG_ERROR:
				return nil, op.refused(it.message)
			}
		}
		if it.malformed {
			return nil, fmt.Errorf("%s: %w", op, errMalformed)
		}
	}
}

// refused turns an error message into an error; never nil.
func (o operation) refused(m message) error {
	e, err := decodeError(m)
	if err == nil && e == nil {
		err = errMalformed // an acknowledgement that nobody asked for
	}
	if err != nil {
		return fmt.Errorf("%s: %w", o, err)
	}
	e.Op = o.String()
	return e
}

// list is what one reading of a dump gives.
type list[T any] struct {
	items []T
	// interrupted: the kernel says that the rules changed in between.
	interrupted bool
	// moved: the generation did, about which the kernel says nothing in some
	// lists. What changed may have nothing to do with what was read.
	moved bool
}

// dump sends the request and appends what each answer decodes to. The bytes
// that decode gets are its own to keep.
//
// A list that the kernel calls interrupted is read again, listAttempts times
// at most. One during which just the generation moved is read again as well,
// but the last attempt stands: where others commit all the time in tables of
// theirs, there would be no end otherwise.
func dump[T any](c *Conn, op operation, number uint16, decode func([]T, []byte) ([]T, error)) ([]T, error) {
	for left := c.attempts - 1; ; left-- {
		l, err := dumpOnce(c, op, number, decode)
		switch {
		case err != nil:
			return nil, err
		case !l.interrupted && (!l.moved || left == 0):
			return l.items, nil
		case left == 0:
			return nil, fmt.Errorf("%s: %w", op, ErrInterrupted)
		}
	}
}

func dumpOnce[T any](c *Conn, op operation, number uint16, decode func([]T, []byte) ([]T, error)) (list[T], error) {
	var l list[T]
	sequence, err := c.send(op)
	if err != nil {
		return l, err
	}
	var (
		failure    error // kept until the kernel is done: it takes one dump at a time
		generation uint16
		started    bool
	)
	for {
		datagram, err := c.receive(op)
		if err != nil {
			return l, err
		}
		it := messageIter{rest: bytes.Clone(datagram)}
		for it.next() {
			if it.sequence != sequence {
				continue // of an earlier exchange that was given up
			}
			l.interrupted = l.interrupted || it.flags&unix.NLM_F_DUMP_INTR != 0
			switch it.typ {
			case unix.NLMSG_ERROR:
				return l, op.refused(it.message)
			case unix.NLMSG_DONE:
				if e, err := decodeError(it.message); err == nil && e != nil {
					return l, op.refused(it.message)
				}
				return l, failure
			case messageType(number):
				attrs, g, err := it.attributes()
				if err == nil && failure == nil {
					l.items, err = decode(l.items, attrs)
				}
				if err != nil && failure == nil {
					failure = fmt.Errorf("%s: %w", op, err)
				}
				l.moved = l.moved || started && g != generation
				generation, started = g, true
			}
		}
		if it.malformed {
			return l, fmt.Errorf("%s: %w", op, errMalformed)
		}
	}
}
