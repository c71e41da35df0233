// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import "golang.org/x/sys/unix"

// Expr is an expression of a rule: it loads something into a register, compares a register, or ends the
// rule. The types of this package, as values, are the only implementations.
type Expr interface {
	name() string // the kernel's
	encode(w *attrWriter)
}

// Register is the number of a register. The four registers of 16 bytes have the numbers 1 to 4. Each of
// them consists of four registers of 4 bytes, with numbers from 8 (NFT_REG32_00). The kernel lists the
// first of these as the register of 16 bytes, and so does this package.
type Register uint32

// Registers of 16 bytes.
const (
	Reg1 Register = unix.NFT_REG_1
	Reg2 Register = unix.NFT_REG_2
	Reg3 Register = unix.NFT_REG_3
	Reg4 Register = unix.NFT_REG_4
)

func canonical(number uint32) Register {
	const perWhole = unix.NFT_REG_SIZE / unix.NFT_REG32_SIZE
	if n := number - unix.NFT_REG32_00; number >= unix.NFT_REG32_00 && number <= unix.NFT_REG32_15 && n%perWhole == 0 {
		return Register(unix.NFT_REG_1 + n/perWhole)
	}
	return Register(number)
}

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

// Comparisons. Order is that of bytes, the most significant first.
const (
	Equal          CmpOp = unix.NFT_CMP_EQ
	NotEqual       CmpOp = unix.NFT_CMP_NEQ
	Less           CmpOp = unix.NFT_CMP_LT
	LessOrEqual    CmpOp = unix.NFT_CMP_LTE
	Greater        CmpOp = unix.NFT_CMP_GT
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

	// CmpRange ends the rule unless the register is from From to To (or, with Not,
	// if it is), both included.
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

	// Meta loads something about the packet (Key is an NFT_META_*), or sets it
	// from the register if Set.
	Meta struct {
		Key uint32
		Reg Register
		Set bool
	}

	// Lookup ends the rule unless the register is in the set (or, with Not, if
	// it is). Looking something up in a map is Unknown.
	Lookup struct {
		Set  string
		Sreg Register
		Not  bool
	}

	// FIB asks the routing tables. Flags are NFTA_FIB_F_*, Result is an
	// NFT_FIB_RESULT_*.
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

	// Verdict ends the rule with a verdict; Chain is the target of Jump and Goto. The kernel's name for
	// it is immediate too.
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

	// Counter counts, starting from these numbers when written.
	Counter struct{ Packets, Bytes uint64 }

	// Match is a match of xtables with its own structure in Info, for which iptables-nft has no
	// expression.
	Match struct {
		Xt   string
		Rev  uint32
		Info []byte
	}

	// Target is a target of xtables, like Match.
	Target struct {
		Xt   string
		Rev  uint32
		Info []byte
	}

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
func (Counter) name() string   { return "counter" }
func (Match) name() string     { return "match" }
func (Target) name() string    { return "target" }
func (e Unknown) name() string { return e.Kind }

// ExprName returns the kernel's name for an expression.
func ExprName(e Expr) string { return e.name() }
