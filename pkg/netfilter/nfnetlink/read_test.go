// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

var families = []struct {
	family  Family
	keyType uint32
}{{IPv4, TypeIPv4}, {IPv6, TypeIPv6}}

func postrouting() *Base {
	return &Base{Type: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: 101, Policy: Accept}
}

func TestTablesAndChains(t *testing.T) {
	namespace(t)
	c := dial(t)
	for _, family := range []Family{IPv4, IPv6, Inet} {
		var b Batch
		b.AddTable(family, "ip-masq")
		b.AddChain(family, "ip-masq", "postrouting", postrouting())
		b.AddChain(family, "ip-masq", "masq-X", nil)
		b.AddRule(family, "ip-masq", "postrouting", []Expr{Verdict{Code: Jump, Chain: "masq-X"}}, "")
		b.AddTable(family, "other")
		b.AddChain(family, "other", "early", &Base{Type: "filter", Hook: unix.NF_INET_LOCAL_IN, Priority: -300, Policy: Drop})
		commit(t, c, &b)
		commit(t, c, &b) // what exists is fine; the jump is there twice now

		table := must[Table](t)(c.Table(family, "ip-masq"))
		if table.Name != "ip-masq" || table.Use != 2 || table.Dormant() {
			t.Errorf("%s: table %+v", family, table)
		}
		want := []Chain{
			{Table: "ip-masq", Name: "postrouting", Use: 2, Base: postrouting()},
			{Table: "ip-masq", Name: "masq-X", Use: 2},
		}
		got := must[[]Chain](t)(c.Chains(family, "ip-masq"))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: chains (-want +got):\n%s", family, diff)
		}
		for i, chain := range got {
			if one := must[Chain](t)(c.Chain(family, "ip-masq", chain.Name)); !cmp.Equal(one, got[i]) {
				t.Errorf("%s: one by one it is %+v, in the list %+v", family, one, got[i])
			}
			if both, one, err := c.TableAndChain(family, "ip-masq", chain.Name); err != nil || both != table || !cmp.Equal(one, &got[i]) {
				t.Errorf("%s: in one request %+v and %+v, %v", family, both, one, err)
			}
		}
		if both, one, err := c.TableAndChain(family, "ip-masq", "none"); err != nil || both != table || one != nil {
			t.Errorf("%s: without the chain %+v and %+v, %v", family, both, one, err)
		}
		if _, _, err := c.TableAndChain(family, "none", "none"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: without the table %v", family, err)
		}
		early := must[Chain](t)(c.Chain(family, "other", "early"))
		if early.Base == nil || early.Base.Priority != -300 || early.Base.Policy != Drop || early.Base.Type != "filter" {
			t.Errorf("%s: early %+v", family, early)
		}
	}

	for _, family := range []Family{IPv4, IPv6, Inet} {
		tables := must[[]Table](t)(c.Tables(family))
		if len(tables) != 2 || tables[0].Name == tables[1].Name {
			t.Errorf("%s: tables %+v", family, tables)
		}
		for _, table := range tables {
			if one := must[Table](t)(c.Table(family, table.Name)); one != table {
				t.Errorf("%s: one by one it is %+v, in the list %+v", family, one, table)
			}
		}
	}

	// Deleting: a chain that is jumped to is refused, and then nothing happened.
	var b Batch
	b.DeleteTable(IPv6, "other")
	b.DeleteChain(IPv4, "ip-masq", "masq-X")
	err := c.Commit(&b)
	if !errors.Is(err, unix.EBUSY) {
		t.Errorf("delete a chain in use: %v", err)
	}
	must[Table](t)(c.Table(IPv6, "other"))

	b = Batch{}
	b.FlushChain(IPv4, "ip-masq", "postrouting")
	b.DeleteChain(IPv4, "ip-masq", "masq-X")
	b.DeleteTable(IPv6, "ip-masq")
	commit(t, c, &b)
	if got := must[[]Chain](t)(c.Chains(IPv4, "ip-masq")); len(got) != 1 || got[0].Use != 0 {
		t.Errorf("after the flush: %+v", got)
	}
	if _, err := c.Table(IPv6, "ip-masq"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the delete: %v", err)
	}
}

func TestDormant(t *testing.T) {
	namespace(t)
	c := dial(t)
	var b Batch
	op := operation{verb: "add dormant table", family: IPv4, table: "t"}
	b.add(op, unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, 0, func(w *attrWriter) {
		w.u32(unix.NFTA_TABLE_FLAGS, unix.NFT_TABLE_F_DORMANT)
	})
	commit(t, c, &b)
	if table := must[Table](t)(c.Table(IPv4, "t")); !table.Dormant() {
		t.Errorf("got %+v", table)
	}
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
		{Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 16, Len: 4, Dreg: Reg32(1)}, Lookup{Set: "exempt", Sreg: Reg32(1), Not: true}},
		{Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 16, Len: 4, Dreg: Reg1}, Lookup{Set: "exempt", Sreg: Reg1}},
		{Meta{Key: unix.NFT_META_OIFNAME, Reg: Reg2}, Cmp{Op: NotEqual, Sreg: Reg2, Data: padded([]byte("eth0"), 16)}},
		{Meta{Key: unix.NFT_META_MARK, Reg: Reg1}, Cmp{Op: Less, Sreg: Reg1, Data: []byte{0, 0, 0, 9}}},
		{Immediate{Dreg: Reg1, Data: []byte{0, 0, 64, 0}}, Meta{Key: unix.NFT_META_MARK, Reg: Reg1, Set: true}},
		{FIB{Flags: unix.NFTA_FIB_F_DADDR, Result: unix.NFT_FIB_RESULT_ADDRTYPE, Dreg: Reg1},
			Cmp{Op: NotEqual, Sreg: Reg1, Data: native(t, uint32(unix.RTN_LOCAL))}, Verdict{Code: Jump, Chain: "masq"}},
		{Numgen{Random: true, Modulus: 1 << 31, Offset: 5, Dreg: Reg1},
			Byteorder{Sreg: Reg1, Dreg: Reg1, Op: unix.NFT_BYTEORDER_HTON, Len: 4, Size: 4},
			CmpRange{Sreg: Reg1, From: []byte{0, 0, 0, 0}, To: []byte{9, 9, 9, 9}}},
		{Meta{Key: unix.NFT_META_L4PROTO, Reg: Reg1}, CmpRange{Not: true, Sreg: Reg1, From: []byte{6}, To: []byte{17}}, Verdict{Code: Accept}},
		{Numgen{Modulus: 2, Dreg: Reg1}, Cmp{Op: Equal, Sreg: Reg1, Data: make([]byte, 4)}, Verdict{Code: Goto, Chain: "masq"}},
	}
	masq := [][]Expr{
		{Masq{}},
		{Masq{Flags: unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY}},
		{Meta{Key: unix.NFT_META_L4PROTO, Reg: Reg1}, Cmp{Op: Equal, Sreg: Reg1, Data: []byte{6}},
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
	all := must[[]Rule](t)(c.Rules(IPv4, "t", ""))
	if diff := cmp.Diff(want, all, places); diff != "" {
		t.Fatalf("(-want +got):\n%s", diff)
	}
	post := must[[]Rule](t)(c.Rules(IPv4, "t", "post"))
	if diff := cmp.Diff(all[:len(rules)], post); diff != "" {
		t.Errorf("of one chain (-want +got):\n%s", diff)
	}
	b = Batch{}
	b.DeleteRule(IPv4, "t", "post", post[1].Handle)
	b.FlushChain(IPv4, "t", "masq")
	commit(t, c, &b)
	left := append([]Rule{post[0]}, post[2:]...)
	if diff := cmp.Diff(left, must[[]Rule](t)(c.Rules(IPv4, "t", "")), places); diff != "" {
		t.Errorf("after deleting (-want +got):\n%s", diff)
	}
	b = Batch{}
	b.FlushChain(IPv4, "t", "")
	commit(t, c, &b)
	if got := must[[]Rule](t)(c.Rules(IPv4, "t", "")); len(got) != 0 {
		t.Errorf("after flushing all: %v", got)
	}
}

// TestXtablesRules has the kernel take and give back xtables' structures, in the
// rule that the agents' users know.
func TestXtablesRules(t *testing.T) {
	namespace(t)
	c := dial(t)
	ports := []byte{0x04, 0x00, 0x75, 0x2f}
	for _, f := range []struct {
		family Family
		target []byte
	}{{IPv4, masquerade4(t, unix.NF_NAT_RANGE_PROTO_SPECIFIED|unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, ports...)}, {IPv6, masquerade6(t, unix.NF_NAT_RANGE_PROTO_SPECIFIED|unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, ports...)}} {
		exprs := []Expr{
			Match{Xt: "addrtype", Rev: 1, Info: native(t, uint16(0), uint16(1<<unix.RTN_LOCAL), uint32(2))},
			Match{Xt: "comment", Info: padded([]byte("ip-masq"), 256)},
			Match{Xt: "statistic", Info: padded(native(t, uint16(0), uint16(0), uint32(1<<30)), 24)},
			Counter{},
			Target{Xt: "MASQUERADE", Info: f.target},
		}
		var b Batch
		b.AddTable(f.family, "nat")
		b.AddChain(f.family, "nat", "POSTROUTING", &Base{Type: "nat", Hook: unix.NF_INET_POST_ROUTING, Priority: 100, Policy: Accept})
		b.AddRule(f.family, "nat", "POSTROUTING", exprs, "")
		commit(t, c, &b)
		got := must[[]Rule](t)(c.Rules(f.family, "nat", "POSTROUTING"))
		if len(got) != 1 || !cmp.Equal(exprs, got[0].Exprs) {
			t.Fatalf("%s: got %+v", f.family, got)
		}
		want := Decoded{
			Statement: DoMasq, To: Translation{unix.NF_NAT_RANGE_PROTO_SPECIFIED | unix.NF_NAT_RANGE_PROTO_RANDOM_FULLY, netip.Addr{}, 1024, 29999}, Comment: "ip-masq",
			Conditions: []Condition{{Field: DestinationLocal, Not: true}, {Field: Probability, Value: 1 << 30}},
		}
		if diff := cmp.Diff(want, Decode(f.family, got[0], nil), cmpopts.EquateComparable(netipx.IPRange{}, netip.Addr{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", f.family, diff)
		}
	}
}

func TestMissingObjects(t *testing.T) {
	namespace(t)
	c := dial(t)
	var b Batch
	b.AddTable(IPv4, "t")
	commit(t, c, &b)
	for want, read := range map[string]func() error{
		"read table ip none":            func() error { _, err := c.Table(IPv4, "none"); return err },
		"read table ip6 t":              func() error { _, err := c.Table(IPv6, "t"); return err },
		"read chain ip none c":          func() error { _, err := c.Chain(IPv4, "none", "c"); return err },
		"read chain ip t c":             func() error { _, err := c.Chain(IPv4, "t", "c"); return err },
		"read set ip none s":            func() error { _, err := c.Set(IPv4, "none", "s"); return err },
		"read set ip t s":               func() error { _, err := c.Set(IPv4, "t", "s"); return err },
		"list sets of ip none":          func() error { _, err := c.Sets(IPv4, "none"); return err },
		"list elements of ip t s":       func() error { _, err := c.elements(IPv4, "t", "s"); return err },
		"list elements of inet table s": func() error { _, err := c.elements(Inet, "table", "s"); return err },
	} {
		err := read()
		if e, ok := errors.AsType[*Error](err); !errors.Is(err, os.ErrNotExist) || !ok || e.Op != want {
			t.Errorf("%s: %v", want, err)
		}
	}
	if rules := must[[]Rule](t)(c.Rules(IPv4, "none", "none")); len(rules) != 0 {
		t.Errorf("rules %v", rules)
	}
	if chains := must[[]Chain](t)(c.Chains(IPv4, "none")); len(chains) != 0 {
		t.Errorf("chains %v", chains)
	}
	if sets := must[[]Set](t)(c.Sets(IPv4, "t")); len(sets) != 0 {
		t.Errorf("sets %v", sets)
	}
}

// TestWithoutPrivilege gives up the thread's capabilities; the thread ends with
// the test.
func TestWithoutPrivilege(t *testing.T) {
	namespace(t)
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		t.Fatal(err)
	}
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
