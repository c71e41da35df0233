// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrStale is what Commit returns, wrapped, when Batch.Generation is set and
// somebody else's commit came in between. Nothing was applied; read again.
const ErrStale = unix.ERESTART

// ErrInterrupted says that a list could not be read in one piece because the
// rules kept changing while it was read. Try again later.
var ErrInterrupted = errors.New("rules kept changing while they were read")

// errMalformed should not happen: the kernel's answers have a fixed form.
var errMalformed = errors.New("the kernel's answer has an unknown form")

// Error is the kernel's refusal of an operation. It unwraps to its Errno, so
// that errors.Is knows os.ErrNotExist, os.ErrExist and os.ErrPermission.
type Error struct {
	// Op is the operation and its object, "add rule to ip ip-masq masq-X".
	Op    string
	Errno syscall.Errno
	// Message is what the kernel said beyond the number, often nothing.
	Message string

	sequence uint32 // of the message that was refused
	offset   uint32 // in that message, of the attribute at fault; 0 unknown
}

func (e *Error) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", e.Op, e.Errno.Error())
	if e.Message != "" {
		fmt.Fprintf(&b, " (%s)", e.Message)
	}
	switch e.Errno {
	case unix.EPERM:
		b.WriteString("; it needs CAP_NET_ADMIN over the network namespace")
	case unix.ERESTART:
		b.WriteString("; somebody else changed the rules in between")
	}
	return b.String()
}

// Unwrap returns the Errno.
func (e *Error) Unwrap() error { return e.Errno }

// decodeError reads a message of type NLMSG_ERROR, or NLMSG_DONE with an error
// number, from behind its header. It returns nil for an acknowledgement.
func decodeError(m message) (*Error, error) {
	const numberSize = 4
	if len(m.payload) < numberSize {
		return nil, errMalformed
	}
	number := int32(binary.NativeEndian.Uint32(m.payload))
	if number == 0 {
		return nil, nil
	}
	e := &Error{Errno: syscall.Errno(-number), sequence: m.sequence}
	if m.flags&unix.NLM_F_ACK_TLVS == 0 {
		return e, nil
	}
	rest := m.payload[numberSize:]
	if m.typ == unix.NLMSG_ERROR {
		// The header of the message at fault comes first, and the rest of it
		// unless the kernel was asked to leave it out.
		skip := unix.SizeofNlMsghdr
		if m.flags&unix.NLM_F_CAPPED == 0 && len(rest) >= skip {
			skip = int(min(binary.NativeEndian.Uint32(rest), uint32(len(rest))))
		}
		if skip = align4(skip); skip > len(rest) {
			return e, nil
		}
		rest = rest[skip:]
	}
	it := attrIter{rest: rest}
	for it.next() {
		switch {
		case it.typ == unix.NLMSGERR_ATTR_MSG:
			e.Message = string(untilNUL(it.data))
		case it.typ == unix.NLMSGERR_ATTR_OFFS && len(it.data) == 4:
			e.offset = binary.NativeEndian.Uint32(it.data)
		}
	}
	return e, nil
}
