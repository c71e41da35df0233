// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import "golang.org/x/sys/unix"

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
