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
// KiB, which some 1,800 elements of IPv6 fill.
const maxRanges = 250

// Batch collects operations for one transaction, which the kernel applies completely or not at all.
// The zero Batch is empty. Packets can meet a set empty that its own batch uses: fill a new set in
// an earlier batch.
type Batch struct {
	// Generation, if not 0, is the one that the kernel must still have, or Commit returns ErrStale.
	Generation uint32

	w   attrWriter // its error is that of the first operation that cannot be encoded
	ops []operation
}

// Len returns the number of messages in the batch.
func (b *Batch) Len() int { return len(b.ops) }

// add adds a message with the names of the table and the object, and what encode writes unless nil.
func (b *Batch) add(op operation, msgType, flags, nameAttr uint16, encode func(w *attrWriter)) {
	b.ops, b.w.op = append(b.ops, op), op
	b.w.message(messageType(msgType), flags, nfgenmsg(op.family), func(w *attrWriter) {
		w.names(op, nameAttr)
		if encode != nil {
			encode(w)
		}
	})
}

// AddTable adds a table. One that exists stays as it is.
func (b *Batch) AddTable(family Family, table string) {
	b.add(operation{"add table", family, table, ""}, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, nil)
}

// DeleteTable deletes a table and everything in it.
func (b *Batch) DeleteTable(family Family, table string) {
	b.add(operation{"delete table", family, table, ""}, unix.NFT_MSG_DELTABLE, 0, 0, nil)
}

// AddChain adds a chain, a base chain if base is not nil. An existing one gets its policy.
func (b *Batch) AddChain(family Family, table, chain string, base *Base) {
	op := operation{"add chain", family, table, chain}
	b.add(op, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFTA_CHAIN_NAME, func(w *attrWriter) {
		if base == nil {
			return
		}
		w.nest(func() {
			w.u32(unix.NFTA_HOOK_HOOKNUM, base.Hook)
			w.u32(unix.NFTA_HOOK_PRIORITY, uint32(base.Priority))
		}, unix.NFTA_CHAIN_HOOK)
		w.u32(unix.NFTA_CHAIN_POLICY, uint32(base.Policy))
		w.str(unix.NFTA_CHAIN_TYPE, base.Type)
	})
}

// DeleteChain deletes a chain, which must have no rules and no jumps to it.
func (b *Batch) DeleteChain(family Family, table, chain string) {
	b.add(operation{"delete chain", family, table, chain}, unix.NFT_MSG_DELCHAIN, 0, unix.NFTA_CHAIN_NAME, nil)
}

// FlushChain deletes all rules of a chain, or of all chains of the table if the chain is "".
func (b *Batch) FlushChain(family Family, table, chain string) {
	b.add(operation{"flush chain", family, table, chain}, unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, nil)
}

// AddRule appends a rule with a comment as nft shows it, of at most 253 bytes; "" is none.
func (b *Batch) AddRule(family Family, table, chain string, exprs []Expr, comment string) {
	op := operation{"add rule to", family, table, chain}
	const flags = unix.NLM_F_CREATE | unix.NLM_F_APPEND
	b.add(op, unix.NFT_MSG_NEWRULE, flags, unix.NFTA_RULE_CHAIN, func(w *attrWriter) {
		w.expressions(exprs)
		w.comment(comment)
	})
}

// DeleteRule deletes a rule by its handle.
func (b *Batch) DeleteRule(family Family, table, chain string, handle uint64) {
	op := operation{"delete rule of", family, table, chain}
	b.add(op, unix.NFT_MSG_DELRULE, 0, unix.NFTA_RULE_CHAIN, func(w *attrWriter) {
		w.u64(unix.NFTA_RULE_HANDLE, handle)
	})
}

// AddSet adds an empty set, which needs no attribute in Other. An existing one of the same form stays.
func (b *Batch) AddSet(family Family, table string, s Set) {
	op := operation{"add set", family, table, s.Name}
	b.add(op, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFTA_SET_NAME, func(w *attrWriter) {
		w.u32(unix.NFTA_SET_FLAGS, s.Flags)
		w.u32(unix.NFTA_SET_KEY_TYPE, s.KeyType)
		w.u32(unix.NFTA_SET_KEY_LEN, s.KeyLen)
		if s.Size != 0 {
			w.nest(func() { w.u32(unix.NFTA_SET_DESC_SIZE, s.Size) }, unix.NFTA_SET_DESC)
		}
		if s.Timeout != 0 {
			w.u64(unix.NFTA_SET_TIMEOUT, uint64(s.Timeout.Milliseconds()))
		}
		w.u32(unix.NFTA_SET_ID, uint32(len(b.ops))) // required, unique within the batch
	})
}

// DeleteSet deletes a set, which no rule may use.
func (b *Batch) DeleteSet(family Family, table, set string) {
	b.add(operation{"delete set", family, table, set}, unix.NFT_MSG_DELSET, 0, unix.NFTA_SET_NAME, nil)
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
		b.add(op, msgType, flags, unix.NFTA_SET_ELEM_LIST_SET, func(w *attrWriter) {
			w.nest(func() {
				for _, r := range some {
					if !r.IsValid() {
						w.fail("%s to %s is not a range of addresses", r.From(), r.To())
					}
					w.element(r.From(), 0)
					if end := r.To().Next(); end.IsValid() { // else the range has the highest address
						w.element(end, unix.NFT_SET_ELEM_INTERVAL_END)
					}
				}
			}, unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		})
	}
}

func (w *attrWriter) element(key netip.Addr, flags uint32) {
	k := key.As16()
	w.nest(func() {
		w.value(unix.NFTA_SET_ELEM_KEY, k[len(k)-key.BitLen()/8:])
		if flags != 0 {
			w.u32(unix.NFTA_SET_ELEM_FLAGS, flags)
		}
	}, unix.NFTA_LIST_ELEM)
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
	begin := c.sequence + 1
	if err := c.write(op, b.serialize(&c.sequence, ends)); err != nil {
		return false, err
	}
	last := begin + uint32(len(b.ops))
	var refusal *Error
	// The kernel has answered by the time that the write returns: to each operation that it refuses and, as
	// requested, to the last one. An error of the batch as a whole is an answer to its first message, and the
	// only one.
	err = c.receive(op, unix.MSG_DONTWAIT, func(m message) (bool, error) {
		if m.typ != unix.NLMSG_ERROR || m.sequence-begin > last-begin {
			return false, nil // an answer to an earlier request that failed
		}
		err := decodeError(m)
		if e, refused := errors.AsType[*Error](err); refused {
			if refusal == nil {
				refusal = e
				refusal.Op = op.String()
				if i := m.sequence - begin - 1; i < uint32(len(b.ops)) {
					refusal.Op += ": " + b.ops[i].String()
					refusal.Family = b.ops[i].family
				}
			}
			return false, nil
		}
		acknowledged = acknowledged || err == nil && m.sequence == last
		return false, err
	})
	if err == nil && refusal != nil {
		err = refusal
	}
	return acknowledged, err
}

// serialize returns the batch as the kernel expects it: between the messages that begin and, if
// ends is set, end it, with ascending sequence numbers, which it advances, and a request to
// acknowledge the last operation.
func (b *Batch) serialize(sequence *uint32, ends bool) []byte {
	header := []byte{0, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	w := attrWriter{b: make([]byte, 0, len(b.w.b)+128)}
	w.message(unix.NFNL_MSG_BATCH_BEGIN, 0, header, func(w *attrWriter) {
		w.u32(unix.NFNL_BATCH_GENID, b.Generation) // 0 is any
	})
	w.b = append(w.b, b.w.b...)
	if ends {
		w.message(unix.NFNL_MSG_BATCH_END, 0, header, nil)
	}
	for i, rest := 0, w.b; len(rest) > 0; i++ {
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
