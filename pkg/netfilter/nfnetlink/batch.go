// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

const (
	// maxElements is how many set elements go into one message. An attribute ends
	// at 64 KiB, which some 1,800 elements of IPv6 fill.
	maxElements = 500
	// beginSize is the size of the message that begins a batch, with the number
	// of the generation, which is generationSize of it.
	beginSize      = unix.SizeofNlMsghdr + nfgenHeader + generationSize
	generationSize = attrHeader + 4
)

// Batch collects operations for one transaction. The zero Batch is empty and
// ready for use. An operation that cannot be expressed makes Commit fail.
//
// The kernel applies a batch whole or not at all, but packets may meet what it
// makes before its parts are complete: rules that look into a set made by the
// same batch find it empty for a moment. Fill a new set in an earlier batch.
type Batch struct {
	// Generation, if it is not 0, is the number that Conn.Generation must still
	// have for the batch to be applied; Commit returns ErrStale otherwise.
	Generation uint32

	w    attrWriter
	ops  []batchOp
	sets uint32 // made so far
	err  error  // of the first operation that cannot be expressed
}

// batchOp is one message of a batch.
type batchOp struct {
	operation
	at int // where in the batch the message begins
}

// Len returns the number of messages in the batch.
func (b *Batch) Len() int { return len(b.ops) }

// begin begins the message of an operation, for end to end.
func (b *Batch) begin(op operation, number, flags uint16) {
	b.reserve()
	b.ops = append(b.ops, batchOp{op, b.w.beginMessage(messageType(number), flags, op.family, 0)})
}

// reserve leaves room for the message that begins the batch, which seal writes.
func (b *Batch) reserve() {
	if len(b.w.b) == 0 {
		b.w.b = make([]byte, beginSize, 4096)
	}
}

func (b *Batch) end() {
	last := b.ops[len(b.ops)-1]
	b.w.endMessage(last.at)
	if b.w.err != nil && b.err == nil {
		b.err = fmt.Errorf("%s: %w", last.operation, b.w.err)
	}
	b.w.err = nil
}

// AddTable adds a table. One that exists stays as it is.
func (b *Batch) AddTable(family Family, table string) {
	b.begin(operation{"add table", family, table, ""}, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE)
	b.w.str(unix.NFTA_TABLE_NAME, table)
	b.w.u32(unix.NFTA_TABLE_FLAGS, 0)
	b.end()
}

// DeleteTable deletes a table and all in it.
func (b *Batch) DeleteTable(family Family, table string) {
	b.begin(operation{"delete table", family, table, ""}, unix.NFT_MSG_DELTABLE, 0)
	b.w.str(unix.NFTA_TABLE_NAME, table)
	b.end()
}

// AddChain adds a chain, a base chain if base is not nil. One that exists in
// the same form stays; a base chain's policy becomes the one given.
func (b *Batch) AddChain(family Family, table, chain string, base *Base) {
	b.begin(operation{"add chain", family, table, chain}, unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE)
	b.w.str(unix.NFTA_CHAIN_TABLE, table)
	b.w.str(unix.NFTA_CHAIN_NAME, chain)
	if base != nil {
		hook := b.w.open(unix.NFTA_CHAIN_HOOK)
		b.w.u32(unix.NFTA_HOOK_HOOKNUM, base.Hook)
		b.w.u32(unix.NFTA_HOOK_PRIORITY, uint32(base.Priority))
		b.w.close(hook)
		b.w.u32(unix.NFTA_CHAIN_POLICY, uint32(base.Policy))
		b.w.str(unix.NFTA_CHAIN_TYPE, base.Type)
	}
	b.end()
}

// DeleteChain deletes a chain, which must have no rules and no jumps to it.
func (b *Batch) DeleteChain(family Family, table, chain string) {
	b.begin(operation{"delete chain", family, table, chain}, unix.NFT_MSG_DELCHAIN, 0)
	b.w.str(unix.NFTA_CHAIN_TABLE, table)
	b.w.str(unix.NFTA_CHAIN_NAME, chain)
	b.end()
}

// FlushChain deletes all rules of a chain, or of all chains of the table if the
// chain is "".
func (b *Batch) FlushChain(family Family, table, chain string) {
	b.begin(operation{"flush chain", family, table, chain}, unix.NFT_MSG_DELRULE, 0)
	b.w.str(unix.NFTA_RULE_TABLE, table)
	if chain != "" {
		b.w.str(unix.NFTA_RULE_CHAIN, chain)
	}
	b.end()
}

// AddRule adds a rule at the end of a chain. The comment, of 253 bytes at most,
// is what nft shows as the rule's; "" is none.
func (b *Batch) AddRule(family Family, table, chain string, exprs []Expr, comment string) {
	b.begin(operation{"add rule to", family, table, chain}, unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND)
	b.w.str(unix.NFTA_RULE_TABLE, table)
	b.w.str(unix.NFTA_RULE_CHAIN, chain)
	b.w.expressions(exprs)
	b.w.comment(comment)
	b.end()
}

// DeleteRule deletes a rule by its handle.
func (b *Batch) DeleteRule(family Family, table, chain string, handle uint64) {
	b.begin(operation{"delete rule of", family, table, chain}, unix.NFT_MSG_DELRULE, 0)
	b.w.str(unix.NFTA_RULE_TABLE, table)
	b.w.str(unix.NFTA_RULE_CHAIN, chain)
	b.w.u64(unix.NFTA_RULE_HANDLE, handle)
	b.end()
}

// AddSet adds an empty set of ranges of addresses. The key type is TypeIPv4 or
// TypeIPv6. One that exists in the same form stays.
func (b *Batch) AddSet(family Family, table, set string, keyType uint32) {
	b.begin(operation{"add set", family, table, set}, unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE)
	length := uint32(4)
	switch keyType {
	case TypeIPv4:
	case TypeIPv6:
		length = 16
	default:
		b.w.fail("key type %d is not one of addresses", keyType)
	}
	b.sets++
	b.w.str(unix.NFTA_SET_TABLE, table)
	b.w.str(unix.NFTA_SET_NAME, set)
	b.w.u32(unix.NFTA_SET_FLAGS, unix.NFT_SET_INTERVAL)
	b.w.u32(unix.NFTA_SET_KEY_TYPE, keyType)
	b.w.u32(unix.NFTA_SET_KEY_LEN, length)
	b.w.u32(unix.NFTA_SET_ID, b.sets) // must be there, and means something in this batch only
	b.end()
}

// DeleteSet deletes a set, which no rule may use.
func (b *Batch) DeleteSet(family Family, table, set string) {
	b.begin(operation{"delete set", family, table, set}, unix.NFT_MSG_DELSET, 0)
	b.w.str(unix.NFTA_SET_TABLE, table)
	b.w.str(unix.NFTA_SET_NAME, set)
	b.end()
}

// AddElements adds ranges to a set. They may touch but not overlap each other or
// what the set has; a range that the set has already is no error.
func (b *Batch) AddElements(family Family, table, set string, ranges []Range) {
	b.elements(operation{"add elements to set", family, table, set}, unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, ranges)
}

// DeleteElements deletes ranges from a set, which must have just these.
func (b *Batch) DeleteElements(family Family, table, set string, ranges []Range) {
	b.elements(operation{"delete elements of set", family, table, set}, unix.NFT_MSG_DELSETELEM, 0, ranges)
}

func (b *Batch) elements(op operation, number, flags uint16, ranges []Range) {
	const perMessage = maxElements / 2
	for len(ranges) > 0 {
		n := min(len(ranges), perMessage)
		b.begin(op, number, flags)
		b.w.str(unix.NFTA_SET_ELEM_LIST_TABLE, op.table)
		b.w.str(unix.NFTA_SET_ELEM_LIST_SET, op.name)
		all := b.w.open(unix.NFTA_SET_ELEM_LIST_ELEMENTS)
		for _, r := range ranges[:n] {
			b.w.addrRange(r)
		}
		b.w.close(all)
		b.end()
		ranges = ranges[n:]
	}
}

// addrRange writes the element that begins a range and, unless the range lasts
// up to the highest address, the one behind its end.
func (w *attrWriter) addrRange(r Range) {
	if !r.First.IsValid() || r.First.BitLen() != r.Last.BitLen() || r.Last.Less(r.First) || r.First.Zone()+r.Last.Zone() != "" {
		w.fail("%s to %s is not a range of addresses", r.First, r.Last)
		return
	}
	w.element(r.First, 0)
	if end := r.Last.Next(); end.IsValid() {
		w.element(end, unix.NFT_SET_ELEM_INTERVAL_END)
	}
}

func (w *attrWriter) element(key netip.Addr, flags uint32) {
	at := w.open(unix.NFTA_LIST_ELEM)
	data := w.open(unix.NFTA_SET_ELEM_KEY)
	if key.Is4() {
		k := key.As4()
		w.bytes(unix.NFTA_DATA_VALUE, k[:])
	} else {
		k := key.As16()
		w.bytes(unix.NFTA_DATA_VALUE, k[:])
	}
	w.close(data)
	if flags != 0 {
		w.u32(unix.NFTA_SET_ELEM_FLAGS, flags)
	}
	w.close(at)
}

// elementAt returns the address in the attribute at an offset of a message, if
// it is an element of a set: the first or the last one of a range.
func elementAt(msg []byte, offset uint32) (netip.Addr, bool) {
	if uint64(offset) >= uint64(len(msg)) {
		return netip.Addr{}, false
	}
	it := attrIter{rest: msg[offset:]}
	if !it.next() {
		return netip.Addr{}, false
	}
	e, _, ok := decodeElement(it.data)
	if !ok || e.size != 4 && e.size != 16 {
		return netip.Addr{}, false
	}
	if e.end {
		return e.addr().Prev(), true
	}
	return e.addr(), true
}
