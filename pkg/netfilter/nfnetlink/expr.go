// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"reflect"

	"golang.org/x/sys/unix"
)

// Expr is an expression of a rule: it loads something into a register, compares a register, or ends the
// rule. It is a value of one of the structs below.
type Expr any

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

type (
	// Payload loads Len bytes of the packet, at Offset from Base (NFT_PAYLOAD_*). The expression of the
	// same name that writes to the packet is Unknown.
	Payload struct {
		Base, Offset, Len uint32
		Dreg              Register
	}

	// Cmp ends the rule unless the register compares with Data as Op says.
	Cmp struct {
		Op   CmpOp
		Sreg Register
		Data []byte
	}

	// Bitwise is Dreg = Sreg & Mask ^ Xor. Shifts and the like are Unknown.
	Bitwise struct {
		Sreg, Dreg Register
		Len        uint32
		Mask, Xor  []byte
	}

	// Meta loads something about the packet (Key is an NFT_META_*).
	Meta struct {
		Key  uint32
		Dreg Register
	}

	// SetMeta sets something about the packet from the register.
	SetMeta struct {
		Key  uint32
		Sreg Register
	}

	// Range ends the rule unless the register is between two values, both included, or with NotEqual is not.
	Range struct {
		Op       CmpOp
		Sreg     Register
		From, To []byte
	}

	// Lookup ends the rule unless the register is in the set, or with Not.
	Lookup struct {
		Set  string
		Sreg Register
		Not  bool
	}

	// MapLookup loads the value that a map has for the register, and ends the rule if it has none. With the Dreg
	// VerdictRegister it is a verdict map: the value is a verdict.
	MapLookup struct {
		Set        string
		Sreg, Dreg Register
	}

	// FIB reads the routing tables. Flags are NFTA_FIB_F_*, Result is an NFT_FIB_RESULT_*.
	FIB struct {
		Flags, Result uint32
		Dreg          Register
	}

	// Numgen loads one of Modulus numbers from Offset on in host byte order, at random or in turn.
	Numgen struct {
		Random          bool
		Modulus, Offset uint32
		Dreg            Register
	}

	// CT loads something about the packet's connection (Key is an NFT_CT_*). With a direction, or if it
	// sets something, it is Unknown.
	CT struct {
		Key  uint32
		Dreg Register
	}

	// Byteorder converts Len bytes, Size at a time, to host order (Op NFT_BYTEORDER_NTOH) or back.
	Byteorder struct {
		Sreg, Dreg    Register
		Op, Len, Size uint32
	}

	// Immediate loads a constant.
	Immediate struct {
		Dreg Register
		Data []byte
	}

	// Verdict ends the rule; Chain is the target of Jump and Goto. It is an immediate, too.
	Verdict struct {
		Code  VerdictCode
		Chain string
	}

	// Masq masquerades, to ports in the registers unless these are 0. Flags are NF_NAT_RANGE_*.
	Masq struct {
		Flags              uint32
		ProtoMin, ProtoMax Register
	}

	// NAT translates an address (Type NFT_NAT_*) to one between those in the registers, and a port
	// likewise. Family is an NFPROTO_*. Flags are NF_NAT_RANGE_*, without the implied MAP_IPS.
	NAT struct {
		Type, Family, Flags                  uint32
		AddrMin, AddrMax, ProtoMin, ProtoMax Register
	}

	// Dynset adds the register to a set, or with Op NFT_DYNSET_OP_UPDATE renews the element's timeout. It
	// ends the rule if the set is full. One with a timeout, data or an expression of its own is Unknown.
	Dynset struct {
		Set string
		Op  uint32
		Key Register
	}

	// Counter counts, starting from these numbers when written.
	Counter struct{ Packets, Bytes uint64 }

	// Match is a match of xtables, whose own structure is Info.
	Match struct {
		Xt   string
		Rev  uint32
		Info []byte
	}

	// Target is a target of xtables.
	Target Match

	// Unknown is an expression that this package does not know in this form, and cannot write.
	Unknown struct{ Kind string }
)

// kind is a kind of expressions: the kernel's name, and the attribute of each field of the struct.
type kind struct {
	expr  Expr
	name  string
	attrs attrs
}

// attrs are the numbers of attributes, with flags.
type attrs [7]uint16

const (
	optional = 1 << 8 // it is left out if it is 0: the kernel refuses zero flags and registers
	plain    = 1 << 9 // it is the bytes themselves, not an NFTA_DATA_VALUE
)

func kinds() [20]kind {
	return [...]kind{
		{Cmp{}, "cmp", attrs{unix.NFTA_CMP_OP, unix.NFTA_CMP_SREG, unix.NFTA_CMP_DATA}},
		{Payload{}, "payload", attrs{unix.NFTA_PAYLOAD_BASE, unix.NFTA_PAYLOAD_OFFSET,
			unix.NFTA_PAYLOAD_LEN, unix.NFTA_PAYLOAD_DREG}},
		{Bitwise{}, "bitwise", attrs{unix.NFTA_BITWISE_SREG, unix.NFTA_BITWISE_DREG,
			unix.NFTA_BITWISE_LEN, unix.NFTA_BITWISE_MASK, unix.NFTA_BITWISE_XOR}},
		{Meta{}, "meta", attrs{unix.NFTA_META_KEY, unix.NFTA_META_DREG}},
		{SetMeta{}, "meta", attrs{unix.NFTA_META_KEY, unix.NFTA_META_SREG}},
		{Lookup{}, "lookup", attrs{unix.NFTA_LOOKUP_SET, unix.NFTA_LOOKUP_SREG, unix.NFTA_LOOKUP_FLAGS | optional}},
		{MapLookup{}, "lookup", attrs{unix.NFTA_LOOKUP_SET, unix.NFTA_LOOKUP_SREG, unix.NFTA_LOOKUP_DREG}},
		{Range{}, "range", attrs{unix.NFTA_RANGE_OP, unix.NFTA_RANGE_SREG, unix.NFTA_RANGE_FROM_DATA, unix.NFTA_RANGE_TO_DATA}},
		{FIB{}, "fib", attrs{unix.NFTA_FIB_FLAGS, unix.NFTA_FIB_RESULT, unix.NFTA_FIB_DREG}},
		{Numgen{}, "numgen", attrs{unix.NFTA_NG_TYPE, unix.NFTA_NG_MODULUS, unix.NFTA_NG_OFFSET | optional, unix.NFTA_NG_DREG}},
		{CT{}, "ct", attrs{unix.NFTA_CT_KEY, unix.NFTA_CT_DREG}},
		{Byteorder{}, "byteorder", attrs{unix.NFTA_BYTEORDER_SREG, unix.NFTA_BYTEORDER_DREG,
			unix.NFTA_BYTEORDER_OP, unix.NFTA_BYTEORDER_LEN, unix.NFTA_BYTEORDER_SIZE}},
		{Immediate{}, "immediate", attrs{unix.NFTA_IMMEDIATE_DREG, unix.NFTA_IMMEDIATE_DATA}},
		{Verdict{}, "immediate", attrs{unix.NFTA_VERDICT_CODE, unix.NFTA_VERDICT_CHAIN | optional}},
		{Masq{}, "masq", attrs{unix.NFTA_MASQ_FLAGS | optional,
			unix.NFTA_MASQ_REG_PROTO_MIN | optional, unix.NFTA_MASQ_REG_PROTO_MAX | optional}},
		{NAT{}, "nat", attrs{unix.NFTA_NAT_TYPE, unix.NFTA_NAT_FAMILY, unix.NFTA_NAT_FLAGS | optional,
			unix.NFTA_NAT_REG_ADDR_MIN | optional, unix.NFTA_NAT_REG_ADDR_MAX | optional,
			unix.NFTA_NAT_REG_PROTO_MIN | optional, unix.NFTA_NAT_REG_PROTO_MAX | optional}},
		{Dynset{}, "dynset", attrs{unix.NFTA_DYNSET_SET_NAME, unix.NFTA_DYNSET_OP, unix.NFTA_DYNSET_SREG_KEY}},
		{Counter{}, "counter", attrs{unix.NFTA_COUNTER_PACKETS, unix.NFTA_COUNTER_BYTES}},
		{Match{}, "match", attrs{unix.NFTA_MATCH_NAME, unix.NFTA_MATCH_REV, unix.NFTA_MATCH_INFO | plain}},
		{Target{}, "target", attrs{unix.NFTA_TARGET_NAME, unix.NFTA_TARGET_REV, unix.NFTA_TARGET_INFO | plain}},
	}
}

// kindOf returns the kind of an expression, the zero value if it is Unknown.
func kindOf(e Expr) kind {
	for _, k := range kinds() {
		if reflect.TypeOf(k.expr) == reflect.TypeOf(e) {
			return k
		}
	}
	return kind{}
}

// ExprName returns the kernel's name for an expression.
func ExprName(e Expr) string {
	if unknown, is := e.(Unknown); is {
		return unknown.Kind
	}
	return kindOf(e).name
}

// decodeExpr decodes what an NFTA_LIST_ELEM of a rule holds.
func decodeExpr(b []byte) Expr {
	var t attrTable
	t.parse(b)
	name := untilNUL(t.get(unix.NFTA_EXPR_NAME))
	for _, k := range kinds() {
		if k.name == string(name) {
			if e, ok := k.decode(t.get(unix.NFTA_EXPR_DATA)); ok && !t.bad {
				return e
			}
		}
	}
	return Unknown{Kind: string(name)}
}

// decode decodes an expression of this kind. An unknown attribute may change what it does.
func (k *kind) decode(data []byte) (Expr, bool) {
	var t, verdict attrTable
	t.parse(data)
	fields := &t
	if k.expr == (Verdict{}) {
		t.bad = t.u32(unix.NFTA_IMMEDIATE_DREG) != unix.NFT_REG_VERDICT || t.bad
		verdict.parse(nested(t.get(unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT))
		fields = &verdict
	}
	v := reflect.New(reflect.TypeOf(k.expr)).Elem()
	for i := range v.NumField() {
		fields.field(k.attrs[i], v.Field(i))
	}
	e, ok := v.Interface(), !t.bad && t.unread == 0 && !fields.bad
	switch typed := e.(type) {
	case Verdict:
		ok = ok && (typed.Chain != "" || typed.Code != Jump && typed.Code != Goto)
	case CT:
		ok = ok && !t.has(unix.NFTA_CT_DIRECTION) // 0 is a direction
	case Lookup:
		ok = ok && !t.has(unix.NFTA_LOOKUP_DREG) // of a map; 0 is the register of a verdict
	case Range:
		ok = ok && (typed.Op == Equal || typed.Op == NotEqual) && len(typed.From) == len(typed.To)
	case NAT:
		if typed.AddrMin != 0 {
			typed.Flags &^= unix.NF_NAT_RANGE_MAP_IPS
			e = typed
		}
	}
	return e, ok
}

func (t *attrTable) field(attr uint16, v reflect.Value) {
	typ := attr &^ (optional | plain)
	switch k := v.Kind(); {
	case attr&optional != 0 && !t.has(typ):
	case k == reflect.Uint32:
		v.SetUint(uint64(t.u32(typ)))
	case k == reflect.Int32:
		v.SetInt(int64(int32(t.u32(typ))))
	case k == reflect.Uint64:
		v.SetUint(t.u64(typ))
	case k == reflect.Bool:
		n := t.u32(typ)
		v.SetBool(n == 1)
		t.bad = t.bad || n > 1
	case k == reflect.String:
		v.SetString(t.str(typ))
	default:
		data := t.get(typ)
		if attr&plain == 0 {
			data = nested(data, unix.NFTA_DATA_VALUE)
		}
		v.SetBytes(data)
		t.bad = t.bad || data == nil
	}
}

func (w *attrWriter) expr(e Expr) {
	k, v := kindOf(e), reflect.ValueOf(e)
	fields := func() {
		for i := range v.NumField() {
			w.field(k.attrs[i], v.Field(i))
		}
	}
	switch k.expr {
	case nil:
		w.fail("expression %q is not known well enough to be written", ExprName(e))
	case Verdict{}:
		w.u32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		w.nest(fields, unix.NFTA_IMMEDIATE_DATA, unix.NFTA_DATA_VERDICT)
	default:
		fields()
	}
}

func (w *attrWriter) field(attr uint16, v reflect.Value) {
	typ := attr &^ (optional | plain)
	switch k := v.Kind(); {
	case attr&optional != 0 && v.IsZero():
	case k == reflect.Uint32:
		w.u32(typ, uint32(v.Uint()))
	case k == reflect.Int32:
		w.u32(typ, uint32(v.Int()))
	case k == reflect.Uint64:
		w.u64(typ, v.Uint())
	case k == reflect.Bool:
		var is uint32
		if v.Bool() {
			is = 1
		}
		w.u32(typ, is)
	case k == reflect.String:
		w.str(typ, v.String())
	case attr&plain != 0:
		w.bytes(typ, v.Bytes())
	default:
		w.value(typ, v.Bytes())
	}
}
