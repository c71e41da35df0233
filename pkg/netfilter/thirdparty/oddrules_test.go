// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// randomExpr draws an expression that a kernel could list, with values of any length.
func randomExpr(t *rapid.T) nfnetlink.Expr {
	data := rapid.SliceOfN(rapid.Byte(), 0, 20)
	register := nfnetlink.Register(rapid.IntRange(0, 25).Draw(t, "register"))
	other := nfnetlink.Register(rapid.IntRange(0, 25).Draw(t, "other register"))
	number := rapid.Uint32Range(0, 40)
	switch rapid.IntRange(0, 23).Draw(t, "kind") {
	case 0:
		return nfnetlink.Payload{Base: number.Draw(t, "base"), Offset: number.Draw(t, "offset"), Len: number.Draw(t, "len"), Dreg: register}
	case 1:
		return nfnetlink.Cmp{Op: nfnetlink.CmpOp(rapid.Uint32Range(0, 6).Draw(t, "op")), Sreg: register, Data: data.Draw(t, "data")}
	case 2:
		return nfnetlink.Bitwise{Sreg: register, Dreg: other, Len: number.Draw(t, "len"), Mask: data.Draw(t, "mask"), Xor: data.Draw(t, "xor")}
	case 3:
		return nfnetlink.Meta{Key: number.Draw(t, "key"), Dreg: register}
	case 4:
		return nfnetlink.SetMeta{Key: unix.NFT_META_MARK, Sreg: register}
	case 5:
		return nfnetlink.Lookup{Set: rapid.SampledFrom([]string{"__set0", "s"}).Draw(t, "set"), Sreg: register}
	case 6:
		return nfnetlink.MapLookup{Set: "__set0", Sreg: register, Dreg: other}
	case 7:
		return nfnetlink.Range{Sreg: register, From: data.Draw(t, "from"), To: data.Draw(t, "to")}
	case 8:
		return nfnetlink.CT{Key: number.Draw(t, "key"), Dreg: register}
	case 9:
		return nfnetlink.Byteorder{Sreg: register, Dreg: other, Len: number.Draw(t, "len"), Size: number.Draw(t, "size")}
	case 10:
		return nfnetlink.FIB{Flags: number.Draw(t, "flags"), Result: number.Draw(t, "result"), Dreg: register}
	case 11:
		return nfnetlink.Immediate{Dreg: register, Data: data.Draw(t, "data")}
	case 12:
		return nfnetlink.NAT{Family: number.Draw(t, "family"), AddrMin: register, AddrMax: other}
	case 13, 14:
		name := rapid.SampledFrom([]string{"mark", "addrtype", "conntrack", "comment", "tcp"}).Draw(t, "match")
		info := rapid.SliceOfN(rapid.Byte(), 0, 160).Draw(t, "info")
		return nfnetlink.Match{Xt: name, Rev: rapid.Uint32Range(0, 3).Draw(t, "rev"), Info: info}
	case 15:
		name := rapid.SampledFrom([]string{"MARK", "SNAT", "CT", "CONNMARK", "odd"}).Draw(t, "target")
		return nfnetlink.Target{Xt: name, Rev: rapid.Uint32Range(0, 3).Draw(t, "rev"), Info: data.Draw(t, "info")}
	case 16:
		return nfnetlink.Verdict{Code: nfnetlink.VerdictCode(rapid.IntRange(-6, 4).Draw(t, "code")), Chain: "b"}
	}
	switch rapid.IntRange(0, 7).Draw(t, "another kind") {
	case 0:
		return nfnetlink.SetPayload{Base: number.Draw(t, "base"), Offset: number.Draw(t, "offset"), Len: number.Draw(t, "len"), Sreg: register}
	case 1:
		return nfnetlink.Dynset{Set: "s", Op: number.Draw(t, "op"), Key: register}
	case 2:
		return nfnetlink.MapLookup{Set: "__set0", Sreg: register, Dreg: nfnetlink.VerdictRegister}
	case 3:
		return nfnetlink.Masq{Flags: number.Draw(t, "flags"), ProtoMin: register, ProtoMax: other}
	case 4:
		return nfnetlink.Numgen{Modulus: number.Draw(t, "modulus"), Dreg: register}
	case 5:
		return nfnetlink.Lookup{Set: "__set0", Sreg: register, Not: true}
	}
	return nfnetlink.Unknown{Kind: rapid.SampledFrom([]string{"nat", "masq", "meta", "queue", "odd", "limit", nfnetlink.NoTrack}).Draw(t, "unknown")}
}

// TestOddRules judges and prints rules of any expressions, for packets of both families: it must not panic.
func TestOddRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := rapid.SampledFrom(policy.Families()).Draw(t, "family")
		backend := rapid.SampledFrom([]policy.Backend{policy.IPTables, policy.NFTables}).Draw(t, "backend")
		place := Place{Backend: backend, Family: f, Table: "nat", Chain: "a"}
		tab := newTable(place)
		for _, name := range []string{"__set0", "s"} {
			tab.sets[name] = newSet(nfnetlink.Contents{
				Set: nfnetlink.Set{Name: name, KeyLen: rapid.SampledFrom([]uint32{0, 4, 4, 4, 20, 70}).Draw(t, "key length")},
				Elements: rapid.SampledFrom([][]nfnetlink.Element{
					{{Key: []byte{10, 0, 0, 1}, Data: []byte{1}}},
					{{Key: []byte{10, 0, 0, 1}, Verdict: &nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: "b"}}},
					{{Key: []byte{10, 0, 0, 1}, KeyEnd: []byte{10, 0, 0}}, {CatchAll: true}},
				}).Draw(t, "elements"),
				Fields: rapid.SampledFrom([][]int{nil, {4}, {4, 16}}).Draw(t, "fields"),
			})
		}
		c := &chain{place: place}
		for range rapid.IntRange(1, 3).Draw(t, "rules") {
			r := &Rule{Place: place, table: tab}
			for range rapid.IntRange(1, 6).Draw(t, "expressions") {
				r.Exprs = append(r.Exprs, randomExpr(t))
			}
			c.rules = append(c.rules, r)
			if r.String() == "" {
				t.Fatal("a rule without a text")
			}
		}
		tab.chains["a"] = c
		rules := &Ruleset{family: f, hooks: []*baseChain{{table: tab, name: "a", isNAT: true, priority: 100}}}
		if len(rules.Judge(Packet{Src: f.All(), Dst: f.All()}, ownedBinds).Outcomes) == 0 {
			t.Fatal("a verdict without an outcome")
		}
	})
}

// TestUndecoded has rules with expressions that are not known, before one that masquerades packets with the
// mark 5. What they may do must not be left out, also where only rules that packets can meet are kept.
func TestUndecoded(t *testing.T) {
	mark := nfnetlink.Meta{Key: unix.NFT_META_MARK, Dreg: nfnetlink.Reg1}
	isFive := nfnetlink.Cmp{Op: nfnetlink.Equal, Sreg: nfnetlink.Reg1, Data: []byte{5, 0, 0, 0}}
	elsewhere := []nfnetlink.Expr{nfnetlink.LoadAddress(nfnetlink.IPv4, nfnetlink.Destination, nfnetlink.Reg1),
		nfnetlink.Cmp{Op: nfnetlink.Equal, Sreg: nfnetlink.Reg1, Data: []byte{11, 0, 0, 1}}}
	out := nfnetlink.Meta{Key: unix.NFT_META_OIFNAME, Dreg: nfnetlink.Reg1}
	lo := []byte("lo\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
	for _, tc := range []struct {
		name  string
		exprs []nfnetlink.Expr
		want  []Fate
	}{
		{"a mark of an ipset", []nfnetlink.Expr{nfnetlink.Target{Xt: "SET", Rev: 3}}, []Fate{Masqueraded, Untouched}},
		{"a mark, before a condition that is not met", append([]nfnetlink.Expr{nfnetlink.Unknown{Kind: "meta"}}, elsewhere...), []Fate{Masqueraded, Untouched}},
		{"a mark that is known, before such a condition", append([]nfnetlink.Expr{nfnetlink.Immediate{Dreg: nfnetlink.Reg1, Data: []byte{5, 0, 0, 0}},
			nfnetlink.SetMeta{Key: unix.NFT_META_MARK, Sreg: nfnetlink.Reg1}}, elsewhere...), []Fate{Masqueraded}},
		{"behind a condition that is not met", append(elsewhere, nfnetlink.Unknown{Kind: "meta"}), []Fate{Untouched}},
		{"a new translation", []nfnetlink.Expr{nfnetlink.Unknown{Kind: "fullcone"}}, []Fate{Masqueraded, Translated, Untouched}},
		{"a new target", []nfnetlink.Expr{nfnetlink.Target{Xt: "FULLCONENAT"}}, []Fate{Masqueraded, Translated, Untouched}},
		{"translation of another form", []nfnetlink.Expr{nfnetlink.Unknown{Kind: "nat"}}, []Fate{Translated, Untouched}},
		{"a written address", append([]nfnetlink.Expr{nfnetlink.SetPayload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: 16, Len: 4, Sreg: nfnetlink.Reg1}},
			append(elsewhere, nfnetlink.Masq{})...), []Fate{Masqueraded, Translated, Untouched}},
		{"a limit", []nfnetlink.Expr{nfnetlink.Unknown{Kind: "limit"}, nfnetlink.Verdict{Code: nfnetlink.Accept}}, []Fate{Untouched}},
		{"a register that was not loaded", []nfnetlink.Expr{nfnetlink.Cmp{Op: nfnetlink.Equal, Sreg: nfnetlink.Reg2, Data: []byte{0}}, nfnetlink.Masq{}},
			[]Fate{Masqueraded, Untouched}},
		{"an unknown interface before lo", []nfnetlink.Expr{out, nfnetlink.Cmp{Op: nfnetlink.Less, Sreg: nfnetlink.Reg1, Data: lo}, nfnetlink.Masq{}},
			[]Fate{Masqueraded, Untouched}},
		{"the interface lo", []nfnetlink.Expr{out, nfnetlink.Cmp{Op: nfnetlink.Equal, Sreg: nfnetlink.Reg1, Data: lo}, nfnetlink.Masq{}}, []Fate{Untouched}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			place := Place{Backend: policy.NFTables, Family: policy.IPv4, Table: "x", Chain: "a"}
			tab := newTable(place)
			tab.chains["a"] = &chain{place: place, rules: []*Rule{{Place: place, Exprs: tc.exprs, table: tab},
				{Place: place, Exprs: []nfnetlink.Expr{mark, isFive, nfnetlink.Masq{}}, table: tab}}}
			rules := &Ruleset{family: policy.IPv4, hooks: []*baseChain{{table: tab, name: "a", isNAT: true, priority: 100}}}
			p := pod("10.9.9.9")
			p.Out, p.OutIndex = "", 0
			fates := func(r *Ruleset) []Fate {
				var all []Fate
				for _, o := range r.Judge(p, ownedBinds).Outcomes {
					all = append(all, o.Fate)
				}
				slices.Sort(all)
				return all
			}
			assert.Equal(t, "fates", fates(rules), tc.want)
			assert.Equal(t, "fates by the rules that are kept", fates(rules.Restrict(p, new(int))), tc.want)
		})
	}
}
