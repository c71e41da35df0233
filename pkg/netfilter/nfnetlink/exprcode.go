// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import "golang.org/x/sys/unix"

// attrBitwiseOp is NFTA_BITWISE_OP, which golang.org/x/sys/unix does not have.
// Operation 0 is mask and xor.
const attrBitwiseOp = 6

// decodeExpr decodes what an NFTA_LIST_ELEM of a rule holds.
func decodeExpr(b []byte) Expr {
	var name, data []byte
	it := attrIter{rest: b}
	for it.next() {
		switch it.typ {
		case unix.NFTA_EXPR_NAME:
			name = untilNUL(it.data)
		case unix.NFTA_EXPR_DATA:
			data = it.data
		}
	}
	var t attrTable
	t.parse(data)
	// An attribute that is not known may change what the expression does.
	if e := decodeKnown(name, &t); e != nil && !t.bad && !it.malformed && t.unread == 0 {
		return e
	}
	return Unknown{Kind: string(name)}
}

// decodeKnown returns nil for a name it does not know and for a form of the
// expression that has no type here. Missing attributes show in t.bad.
func decodeKnown(name []byte, t *attrTable) Expr {
	switch string(name) {
	case "payload":
		return Payload{
			Base:   t.u32(unix.NFTA_PAYLOAD_BASE),
			Offset: t.u32(unix.NFTA_PAYLOAD_OFFSET),
			Len:    t.u32(unix.NFTA_PAYLOAD_LEN),
			Dreg:   t.reg(unix.NFTA_PAYLOAD_DREG),
		}
	case "cmp":
		return Cmp{CmpOp(t.u32(unix.NFTA_CMP_OP)), t.reg(unix.NFTA_CMP_SREG), t.value(unix.NFTA_CMP_DATA)}
	case "range":
		op := t.u32(unix.NFTA_RANGE_OP)
		t.bad = t.bad || op > unix.NFT_RANGE_NEQ
		return CmpRange{
			Not:  op == unix.NFT_RANGE_NEQ,
			Sreg: t.reg(unix.NFTA_RANGE_SREG),
			From: t.value(unix.NFTA_RANGE_FROM_DATA),
			To:   t.value(unix.NFTA_RANGE_TO_DATA),
		}
	case "bitwise":
		if t.optU32(attrBitwiseOp) != 0 {
			return nil
		}
		return Bitwise{
			Sreg: t.reg(unix.NFTA_BITWISE_SREG),
			Dreg: t.reg(unix.NFTA_BITWISE_DREG),
			Len:  t.u32(unix.NFTA_BITWISE_LEN),
			Mask: t.value(unix.NFTA_BITWISE_MASK),
			Xor:  t.value(unix.NFTA_BITWISE_XOR),
		}
	case "meta":
		key := t.u32(unix.NFTA_META_KEY)
		if t.has(unix.NFTA_META_SREG) {
			return Meta{key, t.reg(unix.NFTA_META_SREG), true}
		}
		return Meta{key, t.reg(unix.NFTA_META_DREG), false}
	case "lookup":
		flags := t.optU32(unix.NFTA_LOOKUP_FLAGS)
		if t.has(unix.NFTA_LOOKUP_DREG) || flags&^unix.NFT_LOOKUP_F_INV != 0 {
			return nil
		}
		return Lookup{t.str(unix.NFTA_LOOKUP_SET), t.reg(unix.NFTA_LOOKUP_SREG), flags != 0}
	case "fib":
		return FIB{t.u32(unix.NFTA_FIB_FLAGS), t.u32(unix.NFTA_FIB_RESULT), t.reg(unix.NFTA_FIB_DREG)}
	case "numgen":
		kind := t.u32(unix.NFTA_NG_TYPE)
		t.bad = t.bad || kind > unix.NFT_NG_RANDOM
		return Numgen{
			Random:  kind == unix.NFT_NG_RANDOM,
			Modulus: t.u32(unix.NFTA_NG_MODULUS),
			Offset:  t.optU32(unix.NFTA_NG_OFFSET),
			Dreg:    t.reg(unix.NFTA_NG_DREG),
		}
	case "ct":
		if t.has(unix.NFTA_CT_SREG) || t.has(unix.NFTA_CT_DIRECTION) {
			return nil
		}
		return CT{t.u32(unix.NFTA_CT_KEY), t.reg(unix.NFTA_CT_DREG)}
	case "byteorder":
		return Byteorder{
			Sreg: t.reg(unix.NFTA_BYTEORDER_SREG),
			Dreg: t.reg(unix.NFTA_BYTEORDER_DREG),
			Op:   t.u32(unix.NFTA_BYTEORDER_OP),
			Len:  t.u32(unix.NFTA_BYTEORDER_LEN),
			Size: t.u32(unix.NFTA_BYTEORDER_SIZE),
		}
	case "immediate":
		return decodeImmediate(t)
	case "masq":
		return Masq{
			Flags:    t.optU32(unix.NFTA_MASQ_FLAGS),
			ProtoMin: canonical(t.optU32(unix.NFTA_MASQ_REG_PROTO_MIN)),
			ProtoMax: canonical(t.optU32(unix.NFTA_MASQ_REG_PROTO_MAX)),
		}
	case "counter":
		return Counter{Packets: t.u64(unix.NFTA_COUNTER_PACKETS), Bytes: t.u64(unix.NFTA_COUNTER_BYTES)}
	case "match":
		return Match{t.str(unix.NFTA_MATCH_NAME), t.u32(unix.NFTA_MATCH_REV), t.info(unix.NFTA_MATCH_INFO)}
	case "target":
		return Target{t.str(unix.NFTA_TARGET_NAME), t.u32(unix.NFTA_TARGET_REV), t.info(unix.NFTA_TARGET_INFO)}
	}
	return nil
}

func decodeImmediate(t *attrTable) Expr {
	dreg := t.reg(unix.NFTA_IMMEDIATE_DREG)
	var data attrTable
	data.parse(t.get(unix.NFTA_IMMEDIATE_DATA))
	t.bad = t.bad || data.bad
	if dreg != unix.NFT_REG_VERDICT {
		return Immediate{dreg, t.value(unix.NFTA_IMMEDIATE_DATA)}
	}
	var verdict attrTable
	verdict.parse(data.at[unix.NFTA_DATA_VERDICT])
	v := Verdict{Code: VerdictCode(int32(verdict.u32(unix.NFTA_VERDICT_CODE)))}
	if verdict.has(unix.NFTA_VERDICT_CHAIN) {
		v.Chain = verdict.str(unix.NFTA_VERDICT_CHAIN)
	}
	t.bad = t.bad || verdict.bad || v.Chain == "" && (v.Code == Jump || v.Code == Goto)
	return v
}

func (t *attrTable) reg(typ uint16) Register { return canonical(t.u32(typ)) }

// info returns bytes that must be there, if only none.
func (t *attrTable) info(typ uint16) []byte {
	t.bad = t.bad || !t.has(typ)
	return t.get(typ)
}

func (w *attrWriter) reg(typ uint16, r Register) { w.u32(typ, uint32(r)) }

func (e Payload) encode(w *attrWriter) {
	w.reg(unix.NFTA_PAYLOAD_DREG, e.Dreg)
	w.u32(unix.NFTA_PAYLOAD_BASE, e.Base)
	w.u32(unix.NFTA_PAYLOAD_OFFSET, e.Offset)
	w.u32(unix.NFTA_PAYLOAD_LEN, e.Len)
}

func (e Cmp) encode(w *attrWriter) {
	w.reg(unix.NFTA_CMP_SREG, e.Sreg)
	w.u32(unix.NFTA_CMP_OP, uint32(e.Op))
	w.value(unix.NFTA_CMP_DATA, e.Data)
}

func (e CmpRange) encode(w *attrWriter) {
	op := uint32(unix.NFT_RANGE_EQ)
	if e.Not {
		op = unix.NFT_RANGE_NEQ
	}
	w.reg(unix.NFTA_RANGE_SREG, e.Sreg)
	w.u32(unix.NFTA_RANGE_OP, op)
	w.value(unix.NFTA_RANGE_FROM_DATA, e.From)
	w.value(unix.NFTA_RANGE_TO_DATA, e.To)
}

func (e Bitwise) encode(w *attrWriter) {
	w.reg(unix.NFTA_BITWISE_SREG, e.Sreg)
	w.reg(unix.NFTA_BITWISE_DREG, e.Dreg)
	w.u32(unix.NFTA_BITWISE_LEN, e.Len)
	w.value(unix.NFTA_BITWISE_MASK, e.Mask)
	w.value(unix.NFTA_BITWISE_XOR, e.Xor)
}

func (e Meta) encode(w *attrWriter) {
	w.u32(unix.NFTA_META_KEY, e.Key)
	if e.Set {
		w.reg(unix.NFTA_META_SREG, e.Reg)
	} else {
		w.reg(unix.NFTA_META_DREG, e.Reg)
	}
}

func (e Lookup) encode(w *attrWriter) {
	w.str(unix.NFTA_LOOKUP_SET, e.Set)
	w.reg(unix.NFTA_LOOKUP_SREG, e.Sreg)
	if e.Not {
		w.u32(unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
	}
}

func (e FIB) encode(w *attrWriter) {
	w.reg(unix.NFTA_FIB_DREG, e.Dreg)
	w.u32(unix.NFTA_FIB_RESULT, e.Result)
	w.u32(unix.NFTA_FIB_FLAGS, e.Flags)
}

func (e Numgen) encode(w *attrWriter) {
	kind := uint32(unix.NFT_NG_INCREMENTAL)
	if e.Random {
		kind = unix.NFT_NG_RANDOM
	}
	w.reg(unix.NFTA_NG_DREG, e.Dreg)
	w.u32(unix.NFTA_NG_MODULUS, e.Modulus)
	w.u32(unix.NFTA_NG_TYPE, kind)
	w.u32(unix.NFTA_NG_OFFSET, e.Offset)
}

func (e CT) encode(w *attrWriter) {
	w.reg(unix.NFTA_CT_DREG, e.Dreg)
	w.u32(unix.NFTA_CT_KEY, e.Key)
}

func (e Byteorder) encode(w *attrWriter) {
	w.reg(unix.NFTA_BYTEORDER_SREG, e.Sreg)
	w.reg(unix.NFTA_BYTEORDER_DREG, e.Dreg)
	w.u32(unix.NFTA_BYTEORDER_OP, e.Op)
	w.u32(unix.NFTA_BYTEORDER_LEN, e.Len)
	w.u32(unix.NFTA_BYTEORDER_SIZE, e.Size)
}

func (e Immediate) encode(w *attrWriter) {
	w.reg(unix.NFTA_IMMEDIATE_DREG, e.Dreg)
	w.value(unix.NFTA_IMMEDIATE_DATA, e.Data)
}

func (e Verdict) encode(w *attrWriter) {
	w.u32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
	data := w.open(unix.NFTA_IMMEDIATE_DATA)
	verdict := w.open(unix.NFTA_DATA_VERDICT)
	w.u32(unix.NFTA_VERDICT_CODE, uint32(e.Code))
	if e.Chain != "" {
		w.str(unix.NFTA_VERDICT_CHAIN, e.Chain)
	}
	w.close(verdict)
	w.close(data)
}

// encode omits what is 0, because the kernel refuses zero flags and registers.
func (e Masq) encode(w *attrWriter) {
	if e.Flags != 0 {
		w.u32(unix.NFTA_MASQ_FLAGS, e.Flags)
	}
	if e.ProtoMin != 0 {
		w.reg(unix.NFTA_MASQ_REG_PROTO_MIN, e.ProtoMin)
	}
	if e.ProtoMax != 0 {
		w.reg(unix.NFTA_MASQ_REG_PROTO_MAX, e.ProtoMax)
	}
}

func (e Counter) encode(w *attrWriter) {
	w.u64(unix.NFTA_COUNTER_BYTES, e.Bytes)
	w.u64(unix.NFTA_COUNTER_PACKETS, e.Packets)
}

func (e Match) encode(w *attrWriter) {
	w.str(unix.NFTA_MATCH_NAME, e.Xt)
	w.u32(unix.NFTA_MATCH_REV, e.Rev)
	w.bytes(unix.NFTA_MATCH_INFO, e.Info)
}

func (e Target) encode(w *attrWriter) {
	w.str(unix.NFTA_TARGET_NAME, e.Xt)
	w.u32(unix.NFTA_TARGET_REV, e.Rev)
	w.bytes(unix.NFTA_TARGET_INFO, e.Info)
}

func (e Unknown) encode(w *attrWriter) {
	w.fail("expression %q is not known well enough to be written", e.Kind)
}
