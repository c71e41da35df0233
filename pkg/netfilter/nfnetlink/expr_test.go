// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// everyExpr has every expression that can be written, with no field left at 0
// that is not 0 in another one of the same type.
func everyExpr() []Expr {
	return []Expr{
		Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 12, Len: 4, Dreg: Reg1},
		SetPayload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 12, Len: 4, Sreg: Reg1},
		Cmp{Op: NotEqual, Sreg: Reg2, Data: []byte{10, 0, 0, 0}},
		Bitwise{Sreg: Reg1, Dreg: Reg2, Len: 4, Mask: []byte{255, 240, 0, 0}, Xor: []byte{0, 0, 0, 0}},
		Meta{Key: unix.NFT_META_OIFNAME, Dreg: unix.NFT_REG_4},
		SetMeta{Key: unix.NFT_META_MARK, Sreg: Reg1},
		Lookup{Set: "exempt", Sreg: Reg1},
		Lookup{Set: "exempt", Sreg: unix.NFT_REG32_05, Not: true},
		MapLookup{Set: "translations", Sreg: Reg1, Dreg: Reg2},
		MapLookup{Set: "verdicts", Sreg: Reg1, Dreg: VerdictRegister},
		Range{Op: NotEqual, Sreg: Reg1, From: []byte{10, 0, 0, 1}, To: []byte{10, 0, 0, 9}},
		FIB{Flags: unix.NFTA_FIB_F_DADDR, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: Reg1},
		Numgen{Modulus: 2, Offset: 1, Dreg: Reg1},
		Numgen{Random: true, Modulus: 1 << 31, Offset: 7, Dreg: Reg2},
		CT{Key: unix.NFT_CT_STATE, Dreg: Reg1},
		CT{Key: unix.NFT_CT_DIRECTION, Dreg: Reg2},
		Byteorder{Sreg: Reg1, Dreg: Reg2, Op: unix.NFT_BYTEORDER_HTON, Len: 4, Size: 4},
		Immediate{Dreg: Reg2, Data: []byte{4, 0}},
		Verdict{Code: Return},
		Verdict{Code: Accept},
		Verdict{Code: Jump, Chain: "masq-X"},
		Masq{},
		Masq{Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED | unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, ProtoMin: Reg1, ProtoMax: Reg2},
		NAT{Type: unix.NFT_NAT_SNAT, Family: unix.NFPROTO_IPV4, AddrMin: Reg1, AddrMax: Reg2},
		NAT{Type: unix.NFT_NAT_DNAT, Family: unix.NFPROTO_IPV6, Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED, ProtoMin: Reg3, ProtoMax: unix.NFT_REG32_05},
		Dynset{Set: "self", Op: unix.NFT_DYNSET_OP_UPDATE, Key: Reg1},
		Counter{Packets: 1 << 40, Bytes: 1 << 50},
		Match{Xt: "comment", Rev: 0, Info: make([]byte, 256)},
		Target{Xt: "MASQUERADE", Rev: 1, Info: []byte{}},
	}
}

// encodeRule returns the attributes of a rule as the kernel would send them.
func encodeRule(t testing.TB, chain string, exprs []Expr, comment string) []byte {
	t.Helper()
	var w attrWriter
	w.str(unix.NFTA_RULE_TABLE, "t")
	w.str(unix.NFTA_RULE_CHAIN, chain)
	w.u64(unix.NFTA_RULE_HANDLE, 5)
	w.expressions(exprs)
	w.comment(comment)
	if w.err != nil {
		t.Fatal(w.err)
	}
	return w.b
}

func TestRuleRoundTrip(t *testing.T) {
	want := Rule{Chain: "masq-X", Handle: 5, Exprs: everyExpr(), Comment: "a comment"}
	got := assert.Must(decodeRule(encodeRule(t, want.Chain, want.Exprs, want.Comment)))(t)
	assert.Equal(t, "got", got, want)
}

// expr encodes an expression of any name and data.
func expr(name string, data func(w *attrWriter)) []byte {
	var w attrWriter
	w.str(unix.NFTA_EXPR_NAME, name)
	at := w.begin(unix.NFTA_EXPR_DATA)
	data(&w)
	w.end(at)
	return w.b
}

// TestMisshapenIsUnknown takes each attribute away from each expression, and
// changes its length: what is left must be Unknown, under its name, or, where
// the attribute may be missing, an expression that differs.
func TestMisshapenIsUnknown(t *testing.T) {
	optional := map[string]map[uint16]bool{
		"numgen": {unix.NFTA_NG_OFFSET: true},
		"lookup": {unix.NFTA_LOOKUP_FLAGS: true},
		"masq":   {unix.NFTA_MASQ_FLAGS: true, unix.NFTA_MASQ_REG_PROTO_MIN: true, unix.NFTA_MASQ_REG_PROTO_MAX: true},
		"nat": {unix.NFTA_NAT_FLAGS: true, unix.NFTA_NAT_REG_ADDR_MIN: true, unix.NFTA_NAT_REG_ADDR_MAX: true,
			unix.NFTA_NAT_REG_PROTO_MIN: true, unix.NFTA_NAT_REG_PROTO_MAX: true},
	}
	bytesOfAnyLength := map[string]uint16{"match": unix.NFTA_MATCH_INFO, "target": unix.NFTA_TARGET_INFO}
	for _, e := range everyExpr() {
		var w attrWriter
		e.encode(&w)
		for typ, _, rest, ok := cutAttr(w.b); ok; typ, _, rest, ok = cutAttr(rest) {
			missing := decodeExpr(expr(e.Name(), func(w *attrWriter) { rewrite(w, e, typ, nil) }))
			if _, isMap := e.(MapLookup); isMap && typ == unix.NFTA_LOOKUP_DREG {
				continue // it is a lookup in a set then
			}
			if _, unknown := missing.(Unknown); unknown == optional[e.Name()][typ] {
				t.Errorf("%#v without attribute %d is %#v", e, typ, missing)
			}
			if cmp.Equal(e, missing) {
				t.Errorf("%#v is the same without attribute %d", e, typ)
			}
			if bytesOfAnyLength[e.Name()] == typ || isName(e, typ) {
				continue
			}
			short := decodeExpr(expr(e.Name(), func(w *attrWriter) { rewrite(w, e, typ, []byte{1, 2, 3}) }))
			assert.Equal(t, fmt.Sprintf("%#v with a short attribute %d", e, typ), short, Expr(Unknown{e.Name()}))
		}
	}
}

func isName(e Expr, typ uint16) bool {
	switch e.(type) {
	case Lookup, MapLookup:
		return typ == unix.NFTA_LOOKUP_SET
	case Dynset:
		return typ == unix.NFTA_DYNSET_SET_NAME
	case Match, Target:
		return typ == unix.NFTA_MATCH_NAME
	}
	return false
}

// rewrite writes the expression's attributes with one of them replaced, or left
// out if the replacement is nil.
func rewrite(w *attrWriter, e Expr, typ uint16, replacement []byte) {
	var from attrWriter
	e.encode(&from)
	for number, data, rest, ok := cutAttr(from.b); ok; number, data, rest, ok = cutAttr(rest) {
		switch {
		case number != typ:
			w.bytes(number, data)
		case replacement != nil:
			w.bytes(number, replacement)
		}
	}
}

func TestOtherFormsAreUnknown(t *testing.T) {
	verdict := func(code VerdictCode, chain string) func(w *attrWriter) {
		return func(w *attrWriter) {
			w.u32(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT)
			data := w.begin(unix.NFTA_IMMEDIATE_DATA)
			verdict := w.begin(unix.NFTA_DATA_VERDICT)
			w.u32(unix.NFTA_VERDICT_CODE, uint32(code))
			w.str(unix.NFTA_VERDICT_CHAIN, chain)
			w.end(verdict)
			w.end(data)
		}
	}
	if got := decodeExpr(expr("immediate", verdict(Goto, ""))); got != (Unknown{"immediate"}) {
		t.Errorf("goto a chain without a name: %#v", got)
	}
	masq := expr("masq", func(*attrWriter) {})
	if got := decodeExpr(masq[:len(masq)-1]); got != (Unknown{"masq"}) {
		t.Errorf("cut off in its data: %#v", got)
	}
	for name, data := range map[string]func(w *attrWriter){
		"payload": func(w *attrWriter) { // loads and writes
			w.u32(unix.NFTA_PAYLOAD_SREG, 1)
			w.u32(unix.NFTA_PAYLOAD_DREG, 2)
			w.u32(unix.NFTA_PAYLOAD_BASE, 1)
			w.u32(unix.NFTA_PAYLOAD_OFFSET, 16)
			w.u32(unix.NFTA_PAYLOAD_LEN, 4)
		},
		"lookup": func(w *attrWriter) { // of what is not in a map of verdicts
			Lookup{Set: "m", Sreg: Reg1, Not: true}.encode(w)
			w.u32(unix.NFTA_LOOKUP_DREG, unix.NFT_REG_VERDICT)
		},
		"bitwise": func(w *attrWriter) { // a shift
			Bitwise{Sreg: Reg1, Dreg: Reg1, Len: 4, Mask: make([]byte, 4), Xor: make([]byte, 4)}.encode(w)
			w.u32(6, 1) // NFTA_BITWISE_OP
		},
		"numgen": func(w *attrWriter) {
			w.u32(unix.NFTA_NG_DREG, 1)
			w.u32(unix.NFTA_NG_MODULUS, 2)
			w.u32(unix.NFTA_NG_TYPE, 2)
		},
		"range": func(w *attrWriter) {
			w.u32(unix.NFTA_RANGE_SREG, 1)
			w.u32(unix.NFTA_RANGE_OP, 2)
			w.value(unix.NFTA_RANGE_FROM_DATA, []byte{1})
			w.value(unix.NFTA_RANGE_TO_DATA, []byte{2})
		},
		"immediate": func(w *attrWriter) { // a jump to nowhere
			Verdict{Code: Jump}.encode(w)
		},
		"dynset": func(w *attrWriter) { // with a counter for each element
			Dynset{Set: "s", Key: Reg1}.encode(w)
			w.bytes(unix.NFTA_DYNSET_EXPR, []byte{1})
		},
		"ct": func(w *attrWriter) { // of the packets in one direction
			CT{Key: unix.NFT_CT_STATUS, Dreg: Reg1}.encode(w)
			w.bytes(unix.NFTA_CT_DIRECTION, []byte{0})
		},
		"masq": func(w *attrWriter) { w.b = append(w.b, 9, 0, 1) }, // cut off
		"snat": func(*attrWriter) {},
		"":     func(*attrWriter) {},
	} {
		assert.Equal(t, name, decodeExpr(expr(name, data)), Expr(Unknown{name}))
	}
}

// TestNewAttributes: an unknown attribute of a newer kernel makes the expression
// unknown, unless its value is 0: then the feature is not used.
func TestNewAttributes(t *testing.T) {
	for _, e := range everyExpr() {
		for value, want := range map[uint32]Expr{0: e, 1: Unknown{e.Name()}} {
			for _, attr := range []uint16{maxAttr - 1, maxAttr + 100} {
				got := decodeExpr(expr(e.Name(), func(w *attrWriter) {
					w.u32(attr, value)
					e.encode(w)
				}))
				assert.Equal(t, fmt.Sprintf("attribute %d is %d", attr, value), got, want)
			}
		}
	}
}

// TestImpliedFlag: newer kernels list a flag of NAT to an address that older ones imply.
func TestImpliedFlag(t *testing.T) {
	want := NAT{Type: unix.NFT_NAT_SNAT, Family: unix.NFPROTO_IPV4, AddrMin: Reg1, AddrMax: Reg1}
	got := decodeExpr(expr(want.Name(), func(w *attrWriter) {
		want.encode(w)
		w.u32(unix.NFTA_NAT_FLAGS, unix.NF_NAT_RANGE_MAP_IPS)
	}))
	assert.Equal(t, "got", got, Expr(want))
}

// TestRegisterNumbers: the kernel lists the first of four registers of 4 bytes as the register of 16 bytes.
func TestRegisterNumbers(t *testing.T) {
	namespace(t)
	c := dial(t)
	var b Batch
	b.AddTable(IPv4, "t")
	b.AddChain(IPv4, "t", "c", nil)
	registers := map[Register]Register{8: Reg1, 9: 9, 12: Reg2, 16: Reg3, 20: unix.NFT_REG_4, 23: 23}
	for number := range registers {
		b.AddRule(IPv4, "t", "c", []Expr{Meta{Key: unix.NFT_META_MARK, Dreg: number}}, fmt.Sprint(number))
	}
	commit(t, c, &b)
	for _, r := range assert.Must(c.Rules(IPv4, "t", "c"))(t) {
		var number Register
		assert.Must(fmt.Sscan(r.Comment, &number))(t)
		assert.Equal(t, fmt.Sprintf("register %d", number), r.Exprs[0].(Meta).Dreg, registers[number])
	}
}
