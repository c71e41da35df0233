// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import "golang.org/x/sys/unix"

// Expr is one expression of a rule, the kernel's unit of work: an expression
// loads something into a register, compares a register, or ends the rule.
//
// The types of this package are the only implementations, as values, never as
// pointers.
type Expr interface {
	// Name is the kernel's name for the expression.
	Name() string
	encode(w *attrWriter)
}

// Register is one of the registers through which expressions hand on data. The
// four of 16 bytes have the numbers 1 to 4; each of them is four of 4 bytes with
// numbers from 8 (NFT_REG32_00), and the first of the four counts as the whole,
// under the whole one's number: so says the kernel, and what is decoded here.
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

// VerdictCode is what becomes of a packet (NF_*, NFT_*).
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
	// Payload loads Len bytes of the packet, from Offset behind the Base
	// (NFT_PAYLOAD_*). The expression of the same name that writes into the
	// packet is an Unknown.
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

	// Numgen loads a number from Offset to Offset+Modulus-1, in this machine's
	// byte order, at random or one after the other.
	Numgen struct {
		Random          bool
		Modulus, Offset uint32
		Dreg            Register
	}

	// CT loads something about the packet's connection (Key is an NFT_CT_*). What
	// asks about one direction, or sets something, is Unknown.
	CT struct {
		Key  uint32
		Dreg Register
	}

	// Byteorder turns Len bytes, Size at a time, from network into this
	// machine's order (Op NFT_BYTEORDER_NTOH) or back.
	Byteorder struct {
		Sreg, Dreg    Register
		Op, Len, Size uint32
	}

	// Immediate loads a constant.
	Immediate struct {
		Dreg Register
		Data []byte
	}

	// Verdict decides about the packet; Chain is where Jump and Goto lead. The
	// kernel calls the expression immediate, too.
	Verdict struct {
		Code  VerdictCode
		Chain string
	}

	// Masq masquerades, with source ports from those in the registers if they
	// are not 0. Flags are NF_NAT_RANGE_*.
	Masq struct {
		Flags              uint32
		ProtoMin, ProtoMax Register
	}

	// Counter counts. When written, the numbers are what it starts from.
	Counter struct{ Packets, Bytes uint64 }

	// Match is a match of xtables, with its own structure in Info; how iptables
	// on nf_tables writes what has no expression.
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

	// Unknown stands for an expression that this package does not know, or that
	// lacks the form it knows. It may do anything. It cannot be written.
	Unknown struct{ Kind string }
)

// Name implements Expr.
func (Payload) Name() string { return "payload" }

// Name implements Expr.
func (Cmp) Name() string { return "cmp" }

// Name implements Expr.
func (CmpRange) Name() string { return "range" }

// Name implements Expr.
func (Bitwise) Name() string { return "bitwise" }

// Name implements Expr.
func (Meta) Name() string { return "meta" }

// Name implements Expr.
func (Lookup) Name() string { return "lookup" }

// Name implements Expr.
func (FIB) Name() string { return "fib" }

// Name implements Expr.
func (Numgen) Name() string { return "numgen" }

// Name implements Expr.
func (CT) Name() string { return "ct" }

// Name implements Expr.
func (Byteorder) Name() string { return "byteorder" }

// Name implements Expr.
func (Immediate) Name() string { return "immediate" }

// Name implements Expr.
func (Verdict) Name() string { return "immediate" }

// Name implements Expr.
func (Masq) Name() string { return "masq" }

// Name implements Expr.
func (Counter) Name() string { return "counter" }

// Name implements Expr.
func (Match) Name() string { return "match" }

// Name implements Expr.
func (Target) Name() string { return "target" }

// Name implements Expr.
func (e Unknown) Name() string { return e.Kind }
