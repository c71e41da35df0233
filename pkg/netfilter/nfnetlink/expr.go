// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import "golang.org/x/sys/unix"

// Expr is an expression of a rule: it loads something into a register, compares a register, or ends the
// rule. The types of this package, as values, are the only implementations.
type Expr interface {
	name() string // the kernel's
	// code reads or writes the expression's attributes. It returns the expression that was read.
	code(c *codec) Expr
}

// Register is the number of a register. The four registers of 16 bytes have the numbers 1 to 4. Each of
// them consists of four registers of 4 bytes, with numbers from 8 (NFT_REG32_00). The kernel lists the
// first of these as the register of 16 bytes.
type Register uint32

// Registers of 16 bytes.
const (
	Reg1 Register = unix.NFT_REG_1
	Reg2 Register = unix.NFT_REG_2
	Reg3 Register = unix.NFT_REG_3
)

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

	// CmpRange ends the rule unless the register is from From to To, both included, or if it is with Not.
	CmpRange struct {
		Not      bool
		Sreg     Register
		From, To []byte
	}

	// Bitwise is Dreg = Sreg & Mask ^ Xor. Shifts and the like are Unknown.
	Bitwise struct {
		Sreg, Dreg Register
		Len        uint32
		Mask, Xor  []byte
	}

	// Meta loads something about the packet (Key is an NFT_META_*), or sets it from the register if Set.
	Meta struct {
		Key uint32
		Reg Register
		Set bool
	}

	// Lookup ends the rule unless the register is in the set, or if it is with Not. A lookup in a map is
	// Unknown.
	Lookup struct {
		Set  string
		Sreg Register
		Not  bool
	}

	// FIB reads the routing tables. Flags are NFTA_FIB_F_*, Result is an NFT_FIB_RESULT_*.
	FIB struct {
		Flags, Result uint32
		Dreg          Register
	}

	// Numgen loads a number from Offset to Offset+Modulus-1 in host byte order, at random or
	// incrementally.
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

	// Byteorder converts Len bytes, Size at a time, from network to host order (Op NFT_BYTEORDER_NTOH)
	// or back.
	Byteorder struct {
		Sreg, Dreg    Register
		Op, Len, Size uint32
	}

	// Immediate loads a constant.
	Immediate struct {
		Dreg Register
		Data []byte
	}

	// Verdict ends the rule with a verdict; Chain is the target of Jump and Goto. The kernel calls it
	// immediate too.
	Verdict struct {
		Code  VerdictCode
		Chain string
	}

	// Masq masquerades, with a source port between those in the registers, if these are not 0. Flags are
	// NF_NAT_RANGE_*.
	Masq struct {
		Flags              uint32
		ProtoMin, ProtoMax Register
	}

	// NAT translates an address (Type NFT_NAT_*) to one between those in the registers of AddrMin and
	// AddrMax, and a port likewise. Family is an NFPROTO_*. Flags are NF_NAT_RANGE_*, without those that
	// the registers imply for an address (NF_NAT_RANGE_MAP_IPS), which newer kernels add.
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

	// Match is a match of xtables with its own structure in Info, for which iptables-nft has no
	// expression.
	Match struct {
		Xt   string
		Rev  uint32
		Info []byte
	}

	// Target is a target of xtables.
	Target Match

	// Unknown is an expression that this package does not know, or not in this form. It cannot be
	// written.
	Unknown struct{ Kind string }
)

func (Payload) name() string   { return "payload" }
func (Cmp) name() string       { return "cmp" }
func (CmpRange) name() string  { return "range" }
func (Bitwise) name() string   { return "bitwise" }
func (Meta) name() string      { return "meta" }
func (Lookup) name() string    { return "lookup" }
func (FIB) name() string       { return "fib" }
func (Numgen) name() string    { return "numgen" }
func (CT) name() string        { return "ct" }
func (Byteorder) name() string { return "byteorder" }
func (Immediate) name() string { return "immediate" }
func (Verdict) name() string   { return "immediate" }
func (Masq) name() string      { return "masq" }
func (NAT) name() string       { return "nat" }
func (Dynset) name() string    { return "dynset" }
func (Counter) name() string   { return "counter" }
func (Match) name() string     { return "match" }
func (Target) name() string    { return "target" }
func (e Unknown) name() string { return e.Kind }

// ExprName returns the kernel's name for an expression.
func ExprName(e Expr) string { return e.name() }

// decodeExpr decodes what an NFTA_LIST_ELEM of a rule holds.
func (c *codec) decodeExpr(b []byte) Expr {
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
	for _, e := range [...]Expr{
		Cmp{}, Payload{}, CmpRange{}, Bitwise{}, Meta{}, Lookup{}, FIB{}, Numgen{}, CT{}, Byteorder{}, Immediate{}, Masq{},
		NAT{}, Dynset{}, Counter{}, Match{}, Target{},
	} {
		if e.name() != string(name) {
			continue
		}
		c.parse(data)
		// An attribute that is not known may change what the expression does.
		if e = e.code(c); !c.bad && !it.malformed && c.unread == 0 {
			return e
		}
	}
	return Unknown{Kind: string(name)}
}

// codec writes attributes to w or, if that is nil, reads them from attrTable. It sets bad if an
// expression has a form for which there is no type.
type codec struct {
	attrTable
	w *attrWriter
}

func number[T ~uint32](c *codec, typ uint16, v *T) {
	if c.w == nil {
		*v = T(c.u32(typ))
	} else {
		c.w.u32(typ, uint32(*v))
	}
}

// optional is number for an attribute that is left out if it is 0.
func optional[T ~uint32](c *codec, typ uint16, v *T) {
	if c.has(typ) || *v != 0 {
		number(c, typ, v)
	}
}

// flag is a number that is 0 or 1.
func (c *codec) flag(typ uint16, v *bool) {
	n := uint32(0)
	if *v {
		n = 1
	}
	number(c, typ, &n)
	*v, c.bad = n == 1, c.bad || n > 1
}

func (c *codec) number64(typ uint16, v *uint64) {
	if c.w == nil {
		*v = c.u64(typ)
	} else {
		c.w.u64(typ, *v)
	}
}

func (c *codec) text(typ uint16, v *string) {
	if c.w == nil {
		*v = c.str(typ)
	} else {
		c.w.str(typ, *v)
	}
}

// data is an NFTA_DATA_VALUE nested in typ.
func (c *codec) data(typ uint16, v *[]byte) {
	if c.w == nil {
		*v = nested(c.get(typ), unix.NFTA_DATA_VALUE)
		c.bad = c.bad || *v == nil
	} else {
		c.w.value(typ, *v)
	}
}

func (e Payload) code(c *codec) Expr {
	number(c, unix.NFTA_PAYLOAD_DREG, &e.Dreg)
	number(c, unix.NFTA_PAYLOAD_BASE, &e.Base)
	number(c, unix.NFTA_PAYLOAD_OFFSET, &e.Offset)
	number(c, unix.NFTA_PAYLOAD_LEN, &e.Len)
	return e
}

func (e Cmp) code(c *codec) Expr {
	number(c, unix.NFTA_CMP_SREG, &e.Sreg)
	number(c, unix.NFTA_CMP_OP, &e.Op)
	c.data(unix.NFTA_CMP_DATA, &e.Data)
	return e
}

func (e CmpRange) code(c *codec) Expr {
	number(c, unix.NFTA_RANGE_SREG, &e.Sreg)
	c.flag(unix.NFTA_RANGE_OP, &e.Not)
	c.data(unix.NFTA_RANGE_FROM_DATA, &e.From)
	c.data(unix.NFTA_RANGE_TO_DATA, &e.To)
	return e
}

func (e Bitwise) code(c *codec) Expr {
	const op = 6 // NFTA_BITWISE_OP, which golang.org/x/sys/unix does not have; 0 is mask and xor
	c.bad = c.bad || c.optU32(op) != 0
	number(c, unix.NFTA_BITWISE_SREG, &e.Sreg)
	number(c, unix.NFTA_BITWISE_DREG, &e.Dreg)
	number(c, unix.NFTA_BITWISE_LEN, &e.Len)
	c.data(unix.NFTA_BITWISE_MASK, &e.Mask)
	c.data(unix.NFTA_BITWISE_XOR, &e.Xor)
	return e
}

func (e Meta) code(c *codec) Expr {
	number(c, unix.NFTA_META_KEY, &e.Key)
	if e.Set = e.Set || c.has(unix.NFTA_META_SREG); e.Set {
		number(c, unix.NFTA_META_SREG, &e.Reg)
	} else {
		number(c, unix.NFTA_META_DREG, &e.Reg)
	}
	return e
}

func (e Lookup) code(c *codec) Expr {
	c.text(unix.NFTA_LOOKUP_SET, &e.Set)
	number(c, unix.NFTA_LOOKUP_SREG, &e.Sreg)
	if e.Not || c.has(unix.NFTA_LOOKUP_FLAGS) {
		c.flag(unix.NFTA_LOOKUP_FLAGS, &e.Not)
	}
	c.bad = c.bad || c.has(unix.NFTA_LOOKUP_DREG)
	return e
}

func (e FIB) code(c *codec) Expr {
	number(c, unix.NFTA_FIB_DREG, &e.Dreg)
	number(c, unix.NFTA_FIB_RESULT, &e.Result)
	number(c, unix.NFTA_FIB_FLAGS, &e.Flags)
	return e
}

func (e Numgen) code(c *codec) Expr {
	number(c, unix.NFTA_NG_DREG, &e.Dreg)
	number(c, unix.NFTA_NG_MODULUS, &e.Modulus)
	c.flag(unix.NFTA_NG_TYPE, &e.Random)
	optional(c, unix.NFTA_NG_OFFSET, &e.Offset)
	return e
}

func (e CT) code(c *codec) Expr {
	number(c, unix.NFTA_CT_DREG, &e.Dreg)
	number(c, unix.NFTA_CT_KEY, &e.Key)
	c.bad = c.bad || c.has(unix.NFTA_CT_DIRECTION)
	return e
}

func (e Byteorder) code(c *codec) Expr {
	number(c, unix.NFTA_BYTEORDER_SREG, &e.Sreg)
	number(c, unix.NFTA_BYTEORDER_DREG, &e.Dreg)
	number(c, unix.NFTA_BYTEORDER_OP, &e.Op)
	number(c, unix.NFTA_BYTEORDER_LEN, &e.Len)
	number(c, unix.NFTA_BYTEORDER_SIZE, &e.Size)
	return e
}

func (e Immediate) code(c *codec) Expr {
	number(c, unix.NFTA_IMMEDIATE_DREG, &e.Dreg)
	if e.Dreg == unix.NFT_REG_VERDICT {
		return Verdict{}.code(c)
	}
	c.data(unix.NFTA_IMMEDIATE_DATA, &e.Data)
	return e
}

func (e Verdict) code(c *codec) Expr {
	if w := c.w; w != nil {
		w.u32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
		data := w.open(unix.NFTA_IMMEDIATE_DATA)
		verdict := w.open(unix.NFTA_DATA_VERDICT)
		w.u32(unix.NFTA_VERDICT_CODE, uint32(e.Code))
		if e.Chain != "" {
			w.str(unix.NFTA_VERDICT_CHAIN, e.Chain)
		}
		w.close(verdict)
		w.close(data)
		return e
	}
	var t attrTable
	t.parse(nested(c.get(unix.NFTA_IMMEDIATE_DATA), unix.NFTA_DATA_VERDICT))
	e.Code = VerdictCode(int32(t.u32(unix.NFTA_VERDICT_CODE)))
	e.Chain = string(untilNUL(t.get(unix.NFTA_VERDICT_CHAIN)))
	c.bad = c.bad || t.bad || e.Chain == "" && (e.Code == Jump || e.Code == Goto)
	return e
}

// code leaves out what is 0, because the kernel refuses zero flags and registers.
func (e Masq) code(c *codec) Expr {
	optional(c, unix.NFTA_MASQ_FLAGS, &e.Flags)
	optional(c, unix.NFTA_MASQ_REG_PROTO_MIN, &e.ProtoMin)
	optional(c, unix.NFTA_MASQ_REG_PROTO_MAX, &e.ProtoMax)
	return e
}

func (e NAT) code(c *codec) Expr {
	number(c, unix.NFTA_NAT_TYPE, &e.Type)
	number(c, unix.NFTA_NAT_FAMILY, &e.Family)
	optional(c, unix.NFTA_NAT_FLAGS, &e.Flags)
	optional(c, unix.NFTA_NAT_REG_ADDR_MIN, &e.AddrMin)
	optional(c, unix.NFTA_NAT_REG_ADDR_MAX, &e.AddrMax)
	optional(c, unix.NFTA_NAT_REG_PROTO_MIN, &e.ProtoMin)
	optional(c, unix.NFTA_NAT_REG_PROTO_MAX, &e.ProtoMax)
	if e.AddrMin != 0 {
		e.Flags &^= unix.NF_NAT_RANGE_MAP_IPS
	}
	return e
}

func (e Dynset) code(c *codec) Expr {
	c.text(unix.NFTA_DYNSET_SET_NAME, &e.Set)
	number(c, unix.NFTA_DYNSET_OP, &e.Op)
	number(c, unix.NFTA_DYNSET_SREG_KEY, &e.Key)
	return e
}

func (e Counter) code(c *codec) Expr {
	c.number64(unix.NFTA_COUNTER_BYTES, &e.Bytes)
	c.number64(unix.NFTA_COUNTER_PACKETS, &e.Packets)
	return e
}

func (e Match) code(c *codec) Expr {
	c.text(unix.NFTA_MATCH_NAME, &e.Xt)
	number(c, unix.NFTA_MATCH_REV, &e.Rev)
	if c.w == nil {
		c.bad = c.bad || !c.has(unix.NFTA_MATCH_INFO) // an empty one is fine
		e.Info = c.get(unix.NFTA_MATCH_INFO)
	} else {
		c.w.bytes(unix.NFTA_MATCH_INFO, e.Info)
	}
	return e
}

// code works for both, as NFTA_TARGET_* have the numbers of NFTA_MATCH_*.
func (e Target) code(c *codec) Expr { return Target(Match(e).code(c).(Match)) }

func (e Unknown) code(c *codec) Expr {
	c.w.fail("expression %q is not known well enough to be written", e.Kind)
	return e
}
