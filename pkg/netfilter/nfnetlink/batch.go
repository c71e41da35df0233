// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// maxRanges is the number of ranges, of two elements each, in one message. An attribute ends at 64
// KiB, which some 1,800 elements of IPv6 fill. Larger messages would save little: what a message has
// beside elements is less than 1 % of it.
const maxRanges = 250

// Batch collects operations for one transaction, which the kernel applies completely or not at all.
// The zero Batch is empty. If one batch creates a set, fills it and adds a rule that uses it, a
// packet can meet the rule while the set is still empty. So fill a new set in an earlier batch.
type Batch struct {
	// Generation, if not 0, is the one that the kernel must still have, or Commit returns ErrStale.
	Generation uint32

	w   attrWriter // its error is that of the first operation that cannot be encoded
	at  int        // where the last message begins in w
	ops []operation
}

// Len returns the number of messages in the batch.
func (b *Batch) Len() int { return len(b.ops) }

// begin begins a message with the names of the table and the object. The caller writes its other attributes
// and calls end.
func (b *Batch) begin(op operation, msgType, flags, nameAttr uint16) *attrWriter {
	b.ops = append(b.ops, op)
	b.w.op = op
	b.at = b.w.beginMessage(messageType(msgType), flags, nfgenmsg(op.family))
	b.w.names(op, nameAttr)
	return &b.w
}

func (b *Batch) end() { b.w.endMessage(b.at) }

// AddTable adds a table. One that exists stays as it is.
func (b *Batch) AddTable(family Family, table string) {
	b.begin(operation{"add table", family, table, ""}, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0)
	b.end()
}

// DeleteTable deletes a table and everything in it.
func (b *Batch) DeleteTable(family Family, table string) {
	b.begin(operation{"delete table", family, table, ""}, unix.NFT_MSG_DELTABLE, 0, 0)
	b.end()
}

// AddChain adds a chain, a base chain if base is not nil. If the chain exists, its policy becomes that of base, and
// nothing else changes.
func (b *Batch) AddChain(family Family, table, chain string, base *Base) {
	op := operation{"add chain", family, table, chain}
	w := b.begin(op, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME)
	if base != nil {
		hook := w.begin(unix.NFTA_CHAIN_HOOK)
		w.u32(unix.NFTA_HOOK_HOOKNUM, base.Hook)
		w.u32(unix.NFTA_HOOK_PRIORITY, uint32(base.Priority))
		w.end(hook)
		w.u32(unix.NFTA_CHAIN_POLICY, uint32(base.Policy))
		w.str(unix.NFTA_CHAIN_TYPE, base.Type)
	}
	b.end()
}

// DeleteChain deletes a chain, which must have no rules and no jumps to it.
func (b *Batch) DeleteChain(family Family, table, chain string) {
	b.begin(operation{"delete chain", family, table, chain}, unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME)
	b.end()
}

// FlushChain deletes all rules of a chain, or of all chains of the table if the chain is "".
func (b *Batch) FlushChain(family Family, table, chain string) {
	b.begin(operation{"flush chain", family, table, chain}, unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN)
	b.end()
}

// AddRule appends a rule with a comment as nft shows it, of at most 253 bytes; "" is none.
func (b *Batch) AddRule(family Family, table, chain string, exprs []Expr, comment string) {
	op := operation{"add rule to", family, table, chain}
	const flags = unix.NLM_F_CREATE | unix.NLM_F_APPEND
	w := b.begin(op, unix.NFT_MSG_NEWRULE, flags, unix.NFTA_RULE_CHAIN)
	w.expressions(exprs)
	w.comment(comment)
	b.end()
}

// DeleteRule deletes a rule by its handle.
func (b *Batch) DeleteRule(family Family, table, chain string, handle uint64) {
	op := operation{"delete rule of", family, table, chain}
	w := b.begin(op, unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN)
	w.u64(unix.NFTA_RULE_HANDLE, handle)
	b.end()
}

// AddSet adds an empty set. Other must be false: no such attributes are written. An existing set of the same form
// stays as it is.
func (b *Batch) AddSet(family Family, table string, s Set) {
	op := operation{"add set", family, table, s.Name}
	w := b.begin(op, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFTA_SET_NAME)
	w.u32(unix.NFTA_SET_FLAGS, s.Flags)
	w.u32(unix.NFTA_SET_KEY_TYPE, s.KeyType)
	w.u32(unix.NFTA_SET_KEY_LEN, s.KeyLen)
	if s.Size != 0 {
		desc := w.begin(unix.NFTA_SET_DESC)
		w.u32(unix.NFTA_SET_DESC_SIZE, s.Size)
		w.end(desc)
	}
	if s.Timeout != 0 {
		w.u64(unix.NFTA_SET_TIMEOUT, uint64(s.Timeout.Milliseconds()))
	}
	w.u32(unix.NFTA_SET_ID, uint32(len(b.ops))) // required, unique within the batch
	b.end()
}

// DeleteSet deletes a set, which no rule may use.
func (b *Batch) DeleteSet(family Family, table, set string) {
	b.begin(operation{"delete set", family, table, set}, unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME)
	b.end()
}

// AddElements adds ranges to a set. They may equal or touch its elements, but not overlap them.
func (b *Batch) AddElements(family Family, table, set string, ranges []netipx.IPRange) {
	op := operation{"add elements to set", family, table, set}
	b.elements(op, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, ranges)
}

// DeleteElements deletes ranges from a set, whose elements they must be.
func (b *Batch) DeleteElements(family Family, table, set string, ranges []netipx.IPRange) {
	b.elements(operation{"delete elements of set", family, table, set}, unix.NFT_MSG_DELSETELEM, 0, ranges)
}

func (b *Batch) elements(op operation, msgType, flags uint16, ranges []netipx.IPRange) {
	for some := range slices.Chunk(ranges, maxRanges) {
		w := b.begin(op, msgType, flags, unix.NFTA_SET_ELEM_LIST_SET)
		list := w.begin(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for _, r := range some {
			w.rangeElements(r)
		}
		w.end(list)
		b.end()
	}
}

// rangeElements writes the element that begins a range and, unless the range has the highest address, the one
// behind it.
func (w *attrWriter) rangeElements(r netipx.IPRange) {
	if !r.IsValid() {
		w.fail("%s to %s is not a range of addresses", r.From(), r.To())
	}
	w.element(r.From(), 0)
	behind := r.To().Next()
	if behind.IsValid() {
		w.element(behind, unix.NFT_SET_ELEM_INTERVAL_END)
	}
}

func (w *attrWriter) element(key netip.Addr, flags uint32) {
	k := key.As16()
	element := w.begin(unix.NFTA_LIST_ELEM)
	w.value(unix.NFTA_SET_ELEM_KEY, k[len(k)-key.BitLen()/8:])
	if flags != 0 {
		w.u32(unix.NFTA_SET_ELEM_FLAGS, flags)
	}
	w.end(element)
}

// Commit applies the batch, which can be committed again. If it returns an *Error, nothing was
// applied, and the error names the first operation that was refused. An empty batch is not sent.
func (c *Conn) Commit(b *Batch) error {
	if len(b.ops) == 0 {
		return nil
	}
	op := operation{verb: "commit nf_tables batch"}
	acknowledged, err := c.transact(op, b, true)
	if err == nil && !acknowledged {
		err = fmt.Errorf("%s: the kernel did not answer; it may have been applied", op)
	}
	return err
}

// Check returns the *Error that Commit would return, and changes nothing, as `nft --check`: the
// kernel does each operation of a batch without an end, and takes all of them back.
func (c *Conn) Check(b *Batch) error {
	if len(b.ops) == 0 {
		return nil
	}
	_, err := c.transact(operation{verb: "check nf_tables batch"}, b, false)
	return err
}

// transact sends a batch, with or without its end, and returns the first refusal. It reports
// whether the kernel acknowledged the last operation.
func (c *Conn) transact(op operation, b *Batch, ends bool) (acknowledged bool, err error) {
	if b.w.err != nil {
		return false, fmt.Errorf("%s: %w", op, b.w.err)
	}
	first := c.sequence + 1 // begins the batch
	if err := c.write(op, b.serialize(&c.sequence, ends)); err != nil {
		return false, err
	}
	last := first + uint32(len(b.ops)) // the last operation
	var refusal *Error
	// The kernel has answered by the time that the write returns: to each operation that it refuses and, as
	// requested, to the last one. An error of the batch as a whole is an answer to its first message, and the
	// only one.
	for m, err := range c.answers(op, unix.MSG_DONTWAIT) {
		if err != nil {
			return acknowledged, err
		}
		// Sequence numbers wrap. An answer can be one to an earlier request that failed.
		isAnswer := m.typ == unix.NLMSG_ERROR && m.sequence-first <= last-first
		if !isAnswer {
			continue
		}
		err = decodeError(m)
		refused, isRefusal := errors.AsType[*Error](err)
		if err != nil && !isRefusal {
			return acknowledged, op.wrap(err)
		}
		if isRefusal && refusal == nil {
			refusal = b.refusal(op, refused, m.sequence-first)
		}
		if !isRefusal && m.sequence == last {
			acknowledged = true
		}
	}
	if refusal != nil {
		return acknowledged, refusal
	}
	return acknowledged, nil
}

// refusal names the operation of the batch that the kernel refused. Its message is the given one; the first
// begins the batch.
func (b *Batch) refusal(op operation, refused *Error, message uint32) *Error {
	refused.Op = op.String()
	if message > 0 && message <= uint32(len(b.ops)) {
		of := b.ops[message-1]
		refused.Op += ": " + of.String()
		refused.Family = of.family
	}
	return refused
}

// serialize returns the batch as the kernel expects it: between the messages that begin and, if
// ends is set, end it, with ascending sequence numbers, which it advances, and a request to
// acknowledge the last operation.
func (b *Batch) serialize(sequence *uint32, ends bool) []byte {
	header := []byte{0, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	w := attrWriter{b: make([]byte, 0, len(b.w.b)+128)}
	at := w.beginMessage(unix.NFNL_MSG_BATCH_BEGIN, 0, header)
	w.u32(unix.NFNL_BATCH_GENID, b.Generation) // 0 is any
	w.endMessage(at)
	w.b = append(w.b, b.w.b...)
	if ends {
		at = w.beginMessage(unix.NFNL_MSG_BATCH_END, 0, header)
		w.endMessage(at)
	}
	rest := w.b
	for i := 0; len(rest) > 0; i++ {
		*sequence++
		binary.NativeEndian.PutUint32(rest[sequenceAt:], *sequence)
		if i > 0 && i == len(b.ops) {
			flags := binary.NativeEndian.Uint16(rest[flagsAt:])
			binary.NativeEndian.PutUint16(rest[flagsAt:], flags|unix.NLM_F_ACK)
		}
		rest = rest[binary.NativeEndian.Uint32(rest):]
	}
	return w.b
}
