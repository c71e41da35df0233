// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

func postrouting() *Base {
	return &Base{Type: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: 101, Policy: Accept}
}

// TestRules has the kernel keep every expression in rules that it accepts.
func TestRules(t *testing.T) {
	namespace(t)
	c := dial(t)
	mask := []byte{255, 240, 0, 0}
	rules := [][]Expr{
		{Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 12, Len: 4, Dreg: Reg1},
			Bitwise{Sreg: Reg1, Dreg: Reg1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
			Cmp{Op: Equal, Sreg: Reg1, Data: []byte{172, 16, 0, 0}}, Counter{Packets: 3, Bytes: 252}, Verdict{Code: Return}},
		{Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 16, Len: 4, Dreg: unix.NFT_REG32_01}, Lookup{Set: "exempt", Sreg: unix.NFT_REG32_01, Not: true}},
		{Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 16, Len: 4, Dreg: Reg1}, Lookup{Set: "exempt", Sreg: Reg1}},
		{Meta{Key: unix.NFT_META_OIFNAME, Dreg: Reg2}, Cmp{Op: NotEqual, Sreg: Reg2, Data: padded([]byte("eth0"), 16)}},
		{Meta{Key: unix.NFT_META_MARK, Dreg: Reg1}, Cmp{Op: Less, Sreg: Reg1, Data: []byte{0, 0, 0, 9}}},
		{Immediate{Dreg: Reg1, Data: []byte{0, 0, 64, 0}}, SetMeta{Key: unix.NFT_META_MARK, Sreg: Reg1}},
		{FIB{Flags: unix.NFTA_FIB_F_DADDR, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: Reg1},
			Cmp{Op: NotEqual, Sreg: Reg1, Data: native(t, uint32(unix.RTN_LOCAL))}, Verdict{Code: Jump, Chain: "masq"}},
		{Numgen{Random: true, Modulus: 1 << 31, Offset: 5, Dreg: Reg1},
			Byteorder{Sreg: Reg1, Dreg: Reg1, Op: unix.NFT_BYTEORDER_HTON, Len: 4, Size: 4},
			Cmp{Op: Less, Sreg: Reg1, Data: []byte{9, 9, 9, 9}}},
		{Meta{Key: unix.NFT_META_L4PROTO, Dreg: Reg1}, Cmp{Op: NotEqual, Sreg: Reg1, Data: []byte{6}}, Verdict{Code: Accept}},
		{Numgen{Modulus: 2, Dreg: Reg1}, Cmp{Op: Equal, Sreg: Reg1, Data: make([]byte, 4)}, Verdict{Code: Goto, Chain: "masq"}},
	}
	masq := [][]Expr{
		{Masq{}},
		{Masq{Flags: unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY}},
		{Meta{Key: unix.NFT_META_L4PROTO, Dreg: Reg1}, Cmp{Op: Equal, Sreg: Reg1, Data: []byte{6}},
			Immediate{Dreg: Reg1, Data: []byte{4, 0}}, Immediate{Dreg: Reg2, Data: []byte{117, 47}},
			Masq{Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED | unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, ProtoMin: Reg1, ProtoMax: Reg2}},
	}
	var b Batch
	b.AddTable(IPv4, "t")
	b.AddSet(IPv4, "t", AddressRanges(IPv4, "exempt"))
	b.AddChain(IPv4, "t", "post", postrouting())
	b.AddChain(IPv4, "t", "masq", nil)
	var want []Rule
	add := func(chain string, exprs []Expr) {
		comment := fmt.Sprint("rule ", len(want))
		b.AddRule(IPv4, "t", chain, exprs, comment)
		want = append(want, Rule{Chain: chain, Exprs: exprs, Comment: comment})
	}
	for _, exprs := range rules {
		add("post", exprs)
	}
	for _, exprs := range masq {
		add("masq", exprs)
	}
	b.AddRule(IPv4, "t", "masq", []Expr{Counter{}}, "")
	want = append(want, Rule{Chain: "masq", Exprs: []Expr{Counter{}}})
	commit(t, c, &b)

	places := cmpopts.IgnoreFields(Rule{}, "Handle")
	all := assert.Must(c.Rules(IPv4, "t", ""))(t)
	assert.Equal(t, "objects", all, want, places)
	post := assert.Must(c.Rules(IPv4, "t", "post"))(t)
	assert.Equal(t, "of one chain", post, all[:len(rules)])
	b = Batch{}
	b.DeleteRule(IPv4, "t", "post", post[1].Handle)
	b.FlushChain(IPv4, "t", "masq")
	commit(t, c, &b)
	left := append([]Rule{post[0]}, post[2:]...)
	assert.Equal(t, "after deleting", assert.Must(c.Rules(IPv4, "t", ""))(t), left, places)
	b = Batch{}
	b.FlushChain(IPv4, "t", "")
	commit(t, c, &b)
	if got := assert.Must(c.Rules(IPv4, "t", ""))(t); len(got) != 0 {
		t.Errorf("after flushing all: %v", got)
	}
}

// TestWithoutPrivilege gives up the thread's capabilities; the thread ends with
// the test.
func TestWithoutPrivilege(t *testing.T) {
	namespace(t)
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	assert.NoError(t, unix.Capset(&header, &none[0]))
	c := dial(t)
	var b Batch
	b.AddTable(IPv4, "t")
	_, read := c.Table(IPv4, "t")
	_, list := c.Rules(IPv4, "t", "")
	for what, err := range map[string]error{"read": read, "list": list, "commit": c.Commit(&b)} {
		if !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestCancelledDump: after a dump that was not read to its end, the Conn can be used.
func TestCancelledDump(t *testing.T) {
	namespace(t)
	c := dial(t)
	ranges := many(IPv4, 5000) // in several datagrams
	var b Batch
	b.AddTable(IPv4, "t")
	b.AddSet(IPv4, "t", AddressRanges(IPv4, "s"))
	b.AddElements(IPv4, "t", "s", ranges)
	commit(t, c, &b)

	var found []element
	op := operation{"list elements of", IPv4, "t", "s"}
	const get, nameAttr = unix.NFT_MSG_GETSETELEM, unix.NFTA_SET_ELEM_LIST_SET
	add := func(t *attrTable) { found = decodeElements(found, t) }
	dump := c.get(op, get, unix.NLM_F_DUMP, nameAttr, add)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := c.query(cancelled, dump)
	if !errors.Is(err, context.Canceled) || len(found) > 0 {
		t.Errorf("a cancelled dump: %d elements, %v", len(found), err)
	}
	_, err = c.query(t.Context(), dump)
	if err != nil || len(found) != 2*len(ranges) {
		t.Errorf("%d elements, want %d: %v", len(found), 2*len(ranges), err)
	}
}
