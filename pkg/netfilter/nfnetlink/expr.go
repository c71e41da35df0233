// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import "golang.org/x/sys/unix"

// Expr is an expression of a rule: it loads something into a register, compares a register, or ends the
// rule. It is a value of one of the structs below.
type Expr interface {
	// Name returns the name that the kernel has for such expressions. Some of the structs have one in common.
	Name() string

	// encode writes the attributes.
	encode(w *attrWriter)
}

// decodeExpr decodes what an NFTA_LIST_ELEM of a rule holds.
func decodeExpr(b []byte) Expr {
	var t, fields attrTable
	t.parse(b)
	kind := untilNUL(t.get(unix.NFTA_EXPR_NAME))
	fields.parse(t.get(unix.NFTA_EXPR_DATA))
	e := decodeKind(kind, &fields)
	// An unknown attribute may change what the expression does.
	if e == nil || t.bad || fields.bad || fields.unread != 0 {
		return Unknown{Kind: string(kind)}
	}
	return e
}

// decodeKind decodes the attributes of an expression, nil if it has no struct. It marks as bad what has
// another form.
func decodeKind(kind []byte, t *attrTable) Expr {
	switch string(kind) {
	case "cmp":
		return decodeCmp(t)
	case "payload":
		return decodePayload(t)
	case "bitwise":
		return decodeBitwise(t)
	case "meta":
		return decodeMeta(t)
	case "lookup":
		return decodeLookup(t)
	case "range":
		return decodeRange(t)
	case "fib":
		return decodeFIB(t)
	case "numgen":
		return decodeNumgen(t)
	case "ct":
		return decodeCT(t)
	case "byteorder":
		return decodeByteorder(t)
	case "immediate":
		return decodeImmediate(t)
	case "masq":
		return decodeMasq(t)
	case "nat":
		return decodeNAT(t)
	case "dynset":
		return decodeDynset(t)
	case "counter":
		return decodeCounter(t)
	case "match":
		return decodeMatch(t)
	case "target":
		return decodeTarget(t)
	}
	return nil
}

// Register is the number of a register: 1 to 4 of 16 bytes, or from 8 (NFT_REG32_00) their parts of
// 4 bytes. The kernel lists the first part as the register of 16 bytes.
type Register uint32

// Registers of 16 bytes.
const (
	Reg1 Register = unix.NFT_REG_1
	Reg2 Register = unix.NFT_REG_2
	Reg3 Register = unix.NFT_REG_3
)

// VerdictRegister is the register that ends a rule.
const VerdictRegister Register = unix.NFT_REG_VERDICT

// VerdictCode is a verdict about a packet (NF_*, NFT_*).
type VerdictCode int32

// Verdicts.
const (
	Drop     VerdictCode = 0
	Accept   VerdictCode = 1
	Continue VerdictCode = unix.NFT_CONTINUE
	Jump     VerdictCode = unix.NFT_JUMP
	Goto     VerdictCode = unix.NFT_GOTO
	Return   VerdictCode = unix.NFT_RETURN
)

// CmpOp is how Cmp compares (NFT_CMP_*).
type CmpOp uint32

// Comparisons. Bytes are compared in order, the most significant first.
const (
	Equal          CmpOp = unix.NFT_CMP_EQ
	NotEqual       CmpOp = unix.NFT_CMP_NEQ
	Less           CmpOp = unix.NFT_CMP_LT
	LessOrEqual    CmpOp = unix.NFT_CMP_LTE
	GreaterOrEqual CmpOp = unix.NFT_CMP_GTE
)

// Payload loads Len bytes of the packet, at Offset from Base (NFT_PAYLOAD_*).
type Payload struct {
	Base, Offset, Len uint32
	Dreg              Register
}

// Name returns "payload".
func (Payload) Name() string { return "payload" }

func (e Payload) encode(w *attrWriter) {
	w.u32(unix.NFTA_PAYLOAD_BASE, e.Base)
	w.u32(unix.NFTA_PAYLOAD_OFFSET, e.Offset)
	w.u32(unix.NFTA_PAYLOAD_LEN, e.Len)
	w.register(unix.NFTA_PAYLOAD_DREG, e.Dreg)
}

// SetPayload writes Len bytes of the register to the packet, at Offset from Base.
type SetPayload struct {
	Base, Offset, Len uint32
	Sreg              Register
}

// Name returns "payload".
func (SetPayload) Name() string { return "payload" }

func (e SetPayload) encode(w *attrWriter) {
	w.u32(unix.NFTA_PAYLOAD_BASE, e.Base)
	w.u32(unix.NFTA_PAYLOAD_OFFSET, e.Offset)
	w.u32(unix.NFTA_PAYLOAD_LEN, e.Len)
	w.register(unix.NFTA_PAYLOAD_SREG, e.Sreg)
}

// decodePayload decodes a Payload or a SetPayload.
func decodePayload(t *attrTable) Expr {
	if t.has(unix.NFTA_PAYLOAD_SREG) {
		checksum := []uint16{
			unix.NFTA_PAYLOAD_CSUM_TYPE, unix.NFTA_PAYLOAD_CSUM_OFFSET, unix.NFTA_PAYLOAD_CSUM_FLAGS,
		}
		for _, attribute := range checksum { // which follows from what is written
			t.get(attribute)
		}
		return SetPayload{
			Base:   t.u32(unix.NFTA_PAYLOAD_BASE),
			Offset: t.u32(unix.NFTA_PAYLOAD_OFFSET),
			Len:    t.u32(unix.NFTA_PAYLOAD_LEN),
			Sreg:   t.register(unix.NFTA_PAYLOAD_SREG),
		}
	}
	return Payload{
		Base:   t.u32(unix.NFTA_PAYLOAD_BASE),
		Offset: t.u32(unix.NFTA_PAYLOAD_OFFSET),
		Len:    t.u32(unix.NFTA_PAYLOAD_LEN),
		Dreg:   t.register(unix.NFTA_PAYLOAD_DREG),
	}
}

// Cmp ends the rule unless the register compares with Data as Op says.
type Cmp struct {
	Op   CmpOp
	Sreg Register
	Data []byte
}

// Name returns "cmp".
func (Cmp) Name() string { return "cmp" }

func (e Cmp) encode(w *attrWriter) {
	w.u32(unix.NFTA_CMP_OP, uint32(e.Op))
	w.register(unix.NFTA_CMP_SREG, e.Sreg)
	w.value(unix.NFTA_CMP_DATA, e.Data)
}

func decodeCmp(t *attrTable) Expr {
	return Cmp{
		Op:   CmpOp(t.u32(unix.NFTA_CMP_OP)),
		Sreg: t.register(unix.NFTA_CMP_SREG),
		Data: t.value(unix.NFTA_CMP_DATA),
	}
}

// Bitwise is Dreg = Sreg & Mask ^ Xor. Shifts and the like are Unknown.
type Bitwise struct {
	Sreg, Dreg Register
	Len        uint32
	Mask, Xor  []byte
}

// Name returns "bitwise".
func (Bitwise) Name() string { return "bitwise" }

func (e Bitwise) encode(w *attrWriter) {
	w.register(unix.NFTA_BITWISE_SREG, e.Sreg)
	w.register(unix.NFTA_BITWISE_DREG, e.Dreg)
	w.u32(unix.NFTA_BITWISE_LEN, e.Len)
	w.value(unix.NFTA_BITWISE_MASK, e.Mask)
	w.value(unix.NFTA_BITWISE_XOR, e.Xor)
}

func decodeBitwise(t *attrTable) Expr {
	return Bitwise{
		Sreg: t.register(unix.NFTA_BITWISE_SREG),
		Dreg: t.register(unix.NFTA_BITWISE_DREG),
		Len:  t.u32(unix.NFTA_BITWISE_LEN),
		Mask: t.value(unix.NFTA_BITWISE_MASK),
		Xor:  t.value(unix.NFTA_BITWISE_XOR),
	}
}

// Meta loads something about the packet (Key is an NFT_META_*).
type Meta struct {
	Key  uint32
	Dreg Register
}

// Name returns "meta".
func (Meta) Name() string { return "meta" }

func (e Meta) encode(w *attrWriter) {
	w.u32(unix.NFTA_META_KEY, e.Key)
	w.register(unix.NFTA_META_DREG, e.Dreg)
}

// SetMeta sets something about the packet from the register.
type SetMeta struct {
	Key  uint32
	Sreg Register
}

// Name returns "meta".
func (SetMeta) Name() string { return "meta" }

func (e SetMeta) encode(w *attrWriter) {
	w.u32(unix.NFTA_META_KEY, e.Key)
	w.register(unix.NFTA_META_SREG, e.Sreg)
}

// decodeMeta decodes a Meta or a SetMeta.
func decodeMeta(t *attrTable) Expr {
	key := t.u32(unix.NFTA_META_KEY)
	if t.has(unix.NFTA_META_SREG) {
		return SetMeta{Key: key, Sreg: t.register(unix.NFTA_META_SREG)}
	}
	return Meta{Key: key, Dreg: t.register(unix.NFTA_META_DREG)}
}

// Range ends the rule unless the register is between two values, both included, or with NotEqual is not.
type Range struct {
	Op       CmpOp
	Sreg     Register
	From, To []byte
}

// Name returns "range".
func (Range) Name() string { return "range" }

func (e Range) encode(w *attrWriter) {
	w.u32(unix.NFTA_RANGE_OP, uint32(e.Op))
	w.register(unix.NFTA_RANGE_SREG, e.Sreg)
	w.value(unix.NFTA_RANGE_FROM_DATA, e.From)
	w.value(unix.NFTA_RANGE_TO_DATA, e.To)
}

func decodeRange(t *attrTable) Expr {
	e := Range{
		Op:   CmpOp(t.u32(unix.NFTA_RANGE_OP)),
		Sreg: t.register(unix.NFTA_RANGE_SREG),
		From: t.value(unix.NFTA_RANGE_FROM_DATA),
		To:   t.value(unix.NFTA_RANGE_TO_DATA),
	}
	isKnown := e.Op == Equal || e.Op == NotEqual
	if !isKnown || len(e.From) != len(e.To) {
		t.bad = true
	}
	return e
}

// Lookup ends the rule unless the register is in the set, or with Not.
type Lookup struct {
	Set  string
	Sreg Register
	Not  bool
}

// Name returns "lookup".
func (Lookup) Name() string { return "lookup" }

func (e Lookup) encode(w *attrWriter) {
	w.str(unix.NFTA_LOOKUP_SET, e.Set)
	w.register(unix.NFTA_LOOKUP_SREG, e.Sreg)
	if e.Not {
		w.u32(unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
	}
}

// MapLookup loads the value that a map has for the register, and ends the rule if it has none. With the Dreg
// VerdictRegister it is a verdict map: the value is a verdict.
type MapLookup struct {
	Set        string
	Sreg, Dreg Register
}

// Name returns "lookup".
func (MapLookup) Name() string { return "lookup" }

func (e MapLookup) encode(w *attrWriter) {
	w.str(unix.NFTA_LOOKUP_SET, e.Set)
	w.register(unix.NFTA_LOOKUP_SREG, e.Sreg)
	w.register(unix.NFTA_LOOKUP_DREG, e.Dreg)
}

// decodeLookup decodes a Lookup or a MapLookup, which has a register for the value, also if that is 0.
func decodeLookup(t *attrTable) Expr {
	set, sreg := t.str(unix.NFTA_LOOKUP_SET), t.register(unix.NFTA_LOOKUP_SREG)
	if t.has(unix.NFTA_LOOKUP_DREG) {
		return MapLookup{Set: set, Sreg: sreg, Dreg: t.register(unix.NFTA_LOOKUP_DREG)}
	}
	flags := t.optU32(unix.NFTA_LOOKUP_FLAGS)
	if flags > unix.NFT_LOOKUP_F_INV {
		t.bad = true
	}
	return Lookup{Set: set, Sreg: sreg, Not: flags == unix.NFT_LOOKUP_F_INV}
}

// FIB reads the routing tables. Flags are NFTA_FIB_F_*, Result is an NFT_FIB_RESULT_*.
type FIB struct {
	Flags, Result uint32
	Dreg          Register
}

// Name returns "fib".
func (FIB) Name() string { return "fib" }

func (e FIB) encode(w *attrWriter) {
	w.u32(unix.NFTA_FIB_FLAGS, e.Flags)
	w.u32(unix.NFTA_FIB_RESULT, e.Result)
	w.register(unix.NFTA_FIB_DREG, e.Dreg)
}

func decodeFIB(t *attrTable) Expr {
	return FIB{
		Flags:  t.u32(unix.NFTA_FIB_FLAGS),
		Result: t.u32(unix.NFTA_FIB_RESULT),
		Dreg:   t.register(unix.NFTA_FIB_DREG),
	}
}

// Numgen loads one of Modulus numbers from Offset on in host byte order, at random or in turn.
type Numgen struct {
	Random          bool
	Modulus, Offset uint32
	Dreg            Register
}

// Name returns "numgen".
func (Numgen) Name() string { return "numgen" }

func (e Numgen) encode(w *attrWriter) {
	kind := uint32(unix.NFT_NG_INCREMENTAL)
	if e.Random {
		kind = unix.NFT_NG_RANDOM
	}
	w.u32(unix.NFTA_NG_TYPE, kind)
	w.u32(unix.NFTA_NG_MODULUS, e.Modulus)
	w.optU32(unix.NFTA_NG_OFFSET, e.Offset)
	w.register(unix.NFTA_NG_DREG, e.Dreg)
}

func decodeNumgen(t *attrTable) Expr {
	kind := t.u32(unix.NFTA_NG_TYPE)
	if kind > unix.NFT_NG_RANDOM {
		t.bad = true
	}
	return Numgen{
		Random:  kind == unix.NFT_NG_RANDOM,
		Modulus: t.u32(unix.NFTA_NG_MODULUS),
		Offset:  t.optU32(unix.NFTA_NG_OFFSET),
		Dreg:    t.register(unix.NFTA_NG_DREG),
	}
}

// CT loads something about the packet's connection (Key is an NFT_CT_*). With a direction, or if it sets
// something, it is Unknown.
type CT struct {
	Key  uint32
	Dreg Register
}

// Name returns "ct".
func (CT) Name() string { return "ct" }

func (e CT) encode(w *attrWriter) {
	w.u32(unix.NFTA_CT_KEY, e.Key)
	w.register(unix.NFTA_CT_DREG, e.Dreg)
}

func decodeCT(t *attrTable) Expr {
	if t.has(unix.NFTA_CT_DIRECTION) { // 0 is a direction, too
		t.bad = true
	}
	return CT{Key: t.u32(unix.NFTA_CT_KEY), Dreg: t.register(unix.NFTA_CT_DREG)}
}

// Byteorder converts Len bytes, Size at a time, to host order (Op NFT_BYTEORDER_NTOH) or back.
type Byteorder struct {
	Sreg, Dreg    Register
	Op, Len, Size uint32
}

// Name returns "byteorder".
func (Byteorder) Name() string { return "byteorder" }

func (e Byteorder) encode(w *attrWriter) {
	w.register(unix.NFTA_BYTEORDER_SREG, e.Sreg)
	w.register(unix.NFTA_BYTEORDER_DREG, e.Dreg)
	w.u32(unix.NFTA_BYTEORDER_OP, e.Op)
	w.u32(unix.NFTA_BYTEORDER_LEN, e.Len)
	w.u32(unix.NFTA_BYTEORDER_SIZE, e.Size)
}

func decodeByteorder(t *attrTable) Expr {
	return Byteorder{
		Sreg: t.register(unix.NFTA_BYTEORDER_SREG),
		Dreg: t.register(unix.NFTA_BYTEORDER_DREG),
		Op:   t.u32(unix.NFTA_BYTEORDER_OP),
		Len:  t.u32(unix.NFTA_BYTEORDER_LEN),
		Size: t.u32(unix.NFTA_BYTEORDER_SIZE),
	}
}

// Immediate loads a constant.
type Immediate struct {
	Dreg Register
	Data []byte
}

// Name returns "immediate".
func (Immediate) Name() string { return "immediate" }

func (e Immediate) encode(w *attrWriter) {
	w.register(unix.NFTA_IMMEDIATE_DREG, e.Dreg)
	w.value(unix.NFTA_IMMEDIATE_DATA, e.Data)
}

// Verdict ends the rule; Chain is the target of Jump and Goto.
type Verdict struct {
	Code  VerdictCode
	Chain string
}

// Statement returns what the verdict does, and whether that is known. One that is to continue with the next
// expression has NoStatement.
func (e Verdict) Statement() (s Statement, isKnown bool) {
	switch e.Code {
	case Accept:
		return DoAccept, true
	case Drop:
		return DoDrop, true
	case Return:
		return DoReturn, true
	case Jump:
		return DoJump, true
	case Goto:
		return DoGoto, true
	case Continue:
		return NoStatement, true
	}
	return NoStatement, false
}

// Name returns "immediate": the kernel loads a verdict as a constant.
func (Verdict) Name() string { return "immediate" }

func (e Verdict) encode(w *attrWriter) {
	w.register(unix.NFTA_IMMEDIATE_DREG, VerdictRegister)
	data := w.begin(unix.NFTA_IMMEDIATE_DATA)
	verdict := w.begin(unix.NFTA_DATA_VERDICT)
	w.u32(unix.NFTA_VERDICT_CODE, uint32(e.Code))
	if e.Chain != "" {
		w.str(unix.NFTA_VERDICT_CHAIN, e.Chain)
	}
	w.end(verdict)
	w.end(data)
}

// decodeImmediate decodes an Immediate or a Verdict.
func decodeImmediate(t *attrTable) Expr {
	dreg := t.register(unix.NFTA_IMMEDIATE_DREG)
	if dreg != VerdictRegister {
		return Immediate{Dreg: dreg, Data: t.value(unix.NFTA_IMMEDIATE_DATA)}
	}
	v := decodeVerdict(nested(t.get(unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT))
	if v == nil {
		return nil
	}
	needsChain := v.Code == Jump || v.Code == Goto
	if needsChain && v.Chain == "" {
		t.bad = true
	}
	return *v
}

// decodeVerdict decodes an NFTA_DATA_VERDICT, nil if it is none.
func decodeVerdict(data []byte) *Verdict {
	var t attrTable
	t.parse(data)
	v := Verdict{Code: VerdictCode(int32(t.u32(unix.NFTA_VERDICT_CODE)))}
	if t.has(unix.NFTA_VERDICT_CHAIN) {
		v.Chain = t.str(unix.NFTA_VERDICT_CHAIN)
	}
	if t.bad {
		return nil
	}
	return &v
}

// Masq masquerades, to ports in the registers unless these are 0. Flags are NF_NAT_RANGE_*.
type Masq struct {
	Flags              uint32
	ProtoMin, ProtoMax Register
}

// Name returns "masq".
func (Masq) Name() string { return "masq" }

func (e Masq) encode(w *attrWriter) {
	w.optU32(unix.NFTA_MASQ_FLAGS, e.Flags)
	w.optRegister(unix.NFTA_MASQ_REG_PROTO_MIN, e.ProtoMin)
	w.optRegister(unix.NFTA_MASQ_REG_PROTO_MAX, e.ProtoMax)
}

func decodeMasq(t *attrTable) Expr {
	return Masq{
		Flags:    t.optU32(unix.NFTA_MASQ_FLAGS),
		ProtoMin: t.optRegister(unix.NFTA_MASQ_REG_PROTO_MIN),
		ProtoMax: t.optRegister(unix.NFTA_MASQ_REG_PROTO_MAX),
	}
}

// NAT translates an address (Type NFT_NAT_*) to one between those in the registers, and a port likewise.
// Family is an NFPROTO_*. Flags are NF_NAT_RANGE_*, without the implied MAP_IPS.
type NAT struct {
	Type, Family, Flags                  uint32
	AddrMin, AddrMax, ProtoMin, ProtoMax Register
}

// Name returns "nat".
func (NAT) Name() string { return "nat" }

func (e NAT) encode(w *attrWriter) {
	w.u32(unix.NFTA_NAT_TYPE, e.Type)
	w.u32(unix.NFTA_NAT_FAMILY, e.Family)
	w.optU32(unix.NFTA_NAT_FLAGS, e.Flags)
	w.optRegister(unix.NFTA_NAT_REG_ADDR_MIN, e.AddrMin)
	w.optRegister(unix.NFTA_NAT_REG_ADDR_MAX, e.AddrMax)
	w.optRegister(unix.NFTA_NAT_REG_PROTO_MIN, e.ProtoMin)
	w.optRegister(unix.NFTA_NAT_REG_PROTO_MAX, e.ProtoMax)
}

func decodeNAT(t *attrTable) Expr {
	e := NAT{
		Type:     t.u32(unix.NFTA_NAT_TYPE),
		Family:   t.u32(unix.NFTA_NAT_FAMILY),
		Flags:    t.optU32(unix.NFTA_NAT_FLAGS),
		AddrMin:  t.optRegister(unix.NFTA_NAT_REG_ADDR_MIN),
		AddrMax:  t.optRegister(unix.NFTA_NAT_REG_ADDR_MAX),
		ProtoMin: t.optRegister(unix.NFTA_NAT_REG_PROTO_MIN),
		ProtoMax: t.optRegister(unix.NFTA_NAT_REG_PROTO_MAX),
	}
	if e.AddrMin != 0 { // newer kernels list the flag that older ones imply
		e.Flags &^= unix.NF_NAT_RANGE_MAP_IPS
	}
	return e
}

// Dynset adds the register to a set, or with Op NFT_DYNSET_OP_UPDATE renews the element's timeout. It ends
// the rule if the set is full. One with a timeout, data or an expression of its own is Unknown.
type Dynset struct {
	Set string
	Op  uint32
	Key Register
}

// Name returns "dynset".
func (Dynset) Name() string { return "dynset" }

func (e Dynset) encode(w *attrWriter) {
	w.str(unix.NFTA_DYNSET_SET_NAME, e.Set)
	w.u32(unix.NFTA_DYNSET_OP, e.Op)
	w.register(unix.NFTA_DYNSET_SREG_KEY, e.Key)
}

func decodeDynset(t *attrTable) Expr {
	return Dynset{
		Set: t.str(unix.NFTA_DYNSET_SET_NAME),
		Op:  t.u32(unix.NFTA_DYNSET_OP),
		Key: t.register(unix.NFTA_DYNSET_SREG_KEY),
	}
}

// Counter counts, starting from these numbers when written.
type Counter struct{ Packets, Bytes uint64 }

// Name returns "counter".
func (Counter) Name() string { return "counter" }

func (e Counter) encode(w *attrWriter) {
	w.u64(unix.NFTA_COUNTER_PACKETS, e.Packets)
	w.u64(unix.NFTA_COUNTER_BYTES, e.Bytes)
}

func decodeCounter(t *attrTable) Expr {
	return Counter{Packets: t.u64(unix.NFTA_COUNTER_PACKETS), Bytes: t.u64(unix.NFTA_COUNTER_BYTES)}
}

// Match is a match of xtables, whose own structure is Info.
type Match struct {
	Xt   string
	Rev  uint32
	Info []byte
}

// Name returns "match".
func (Match) Name() string { return "match" }

func (e Match) encode(w *attrWriter) {
	w.str(unix.NFTA_MATCH_NAME, e.Xt)
	w.u32(unix.NFTA_MATCH_REV, e.Rev)
	w.bytes(unix.NFTA_MATCH_INFO, e.Info)
}

func decodeMatch(t *attrTable) Expr {
	return Match{
		Xt:   t.str(unix.NFTA_MATCH_NAME),
		Rev:  t.u32(unix.NFTA_MATCH_REV),
		Info: t.required(unix.NFTA_MATCH_INFO),
	}
}

// Target is a target of xtables.
type Target Match

// Name returns "target".
func (Target) Name() string { return "target" }

func (e Target) encode(w *attrWriter) {
	w.str(unix.NFTA_TARGET_NAME, e.Xt)
	w.u32(unix.NFTA_TARGET_REV, e.Rev)
	w.bytes(unix.NFTA_TARGET_INFO, e.Info)
}

func decodeTarget(t *attrTable) Expr {
	return Target{
		Xt:   t.str(unix.NFTA_TARGET_NAME),
		Rev:  t.u32(unix.NFTA_TARGET_REV),
		Info: t.required(unix.NFTA_TARGET_INFO),
	}
}

// Unknown is an expression that this package does not know in this form, and cannot write.
type Unknown struct{ Kind string }

// Name returns the kind.
func (e Unknown) Name() string { return e.Kind }

func (e Unknown) encode(w *attrWriter) {
	w.fail("expression %q is not known well enough to be written", e.Kind)
}

// Getters and writers of what attributes of expressions hold. Those of opt leave out a 0, which the kernel
// refuses in flags and registers.

func (t *attrTable) register(typ uint16) Register { return Register(t.u32(typ)) }

func (t *attrTable) optRegister(typ uint16) Register { return Register(t.optU32(typ)) }

// required returns the bytes of an attribute that has to be there.
func (t *attrTable) required(typ uint16) []byte {
	data := t.get(typ)
	if data == nil {
		t.bad = true
	}
	return data
}

// value returns the NFTA_DATA_VALUE that is nested in an attribute.
func (t *attrTable) value(typ uint16) []byte {
	data := nested(t.get(typ), unix.NFTA_DATA_VALUE)
	if data == nil {
		t.bad = true
	}
	return data
}

func (w *attrWriter) register(typ uint16, r Register) { w.u32(typ, uint32(r)) }

func (w *attrWriter) optRegister(typ uint16, r Register) { w.optU32(typ, uint32(r)) }

func (w *attrWriter) optU32(typ uint16, v uint32) {
	if v != 0 {
		w.u32(typ, v)
	}
}

// value writes an NFTA_DATA_VALUE nested in typ.
func (w *attrWriter) value(typ uint16, v []byte) {
	data := w.begin(typ)
	w.bytes(unix.NFTA_DATA_VALUE, v)
	w.end(data)
}
