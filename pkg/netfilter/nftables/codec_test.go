// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

func TestCodec(t *testing.T) { rapid.Check(t, codecProperty) }
func FuzzCodec(f *testing.F) { f.Fuzz(rapid.MakeFuzz(codecProperty)) }

// codecProperty: a rule is decoded as it was encoded. With an expression that is missing, doubled, inverted,
// of another program or elsewhere it is never decoded as that rule.
func codecProperty(t *rapid.T) {
	f := rapid.SampledFrom(policy.Families()).Draw(t, "family")
	rules := desired(drawPolicy().Draw(t, "policy"))
	var all []policy.Rule
	for _, c := range rules.Chains {
		if c.Family == f {
			all = append(append(all, c.Jumps...), c.Rules...)
		}
	}
	if len(all) == 0 {
		return
	}
	want := rapid.SampledFrom(all).Draw(t, "rule")
	ranges := want.To
	if want.From != nil {
		ranges = want.From
	}
	decoded := func(exprs []nfnetlink.Expr) policy.Rule {
		return decode(f, rule{exprs: exprs}, map[string]policy.Ranges{"set": ranges, "other": {}}).Rule
	}
	table := newTable(tableName)
	table.add("c", "", statements(f, want, "set", "masq-A")...)
	exprs := table.chains["c"].rules[0].exprs
	if read := decoded(exprs); !read.Equal(want) {
		t.Fatalf("%s is read as %s", want, read)
	}
	for i, e := range exprs {
		c, is := e.(nfnetlink.Cmp)
		if !is || c.Op != nfnetlink.Equal && c.Op != nfnetlink.NotEqual {
			continue
		}
		c.Op = nfnetlink.NotEqual - c.Op
		inverted := slices.Clone(exprs)
		inverted[i] = c
		if decoded(inverted).Equal(want) {
			t.Fatalf("%v is still read as %s", inverted, want)
		}
	}
	mutilated := mutilate(t, exprs)
	if decoded(mutilated).Equal(want) && !sameMeaning(exprs, mutilated) {
		t.Fatalf("%v is still read as %s", mutilated, want)
	}
}

func mutilate(t *rapid.T, exprs []nfnetlink.Expr) []nfnetlink.Expr {
	out := slices.Clone(exprs)
	at := rapid.IntRange(0, len(out)-1).Draw(t, "at")
	other := []nfnetlink.Expr{
		nfnetlink.Unknown{Kind: "limit"}, nfnetlink.Verdict{Code: nfnetlink.Accept}, nfnetlink.Verdict{Code: nfnetlink.Return},
		nfnetlink.Meta{Key: 3, Dreg: nfnetlink.Reg1}, nfnetlink.Cmp{Op: nfnetlink.Equal, Sreg: nfnetlink.Reg1, Data: []byte{1}},
		nfnetlink.Lookup{Set: "set", Sreg: nfnetlink.Reg1, Not: true}, nfnetlink.Lookup{Set: "other", Sreg: nfnetlink.Reg1},
		nfnetlink.Masq{Flags: 4}, nfnetlink.Match{Xt: "mark"},
	}
	switch rapid.SampledFrom([]string{"drop", "double", "insert", "replace"}).Draw(t, "how") {
	case "drop":
		return slices.Delete(out, at, at+1)
	case "double":
		return slices.Insert(out, at, out[at])
	case "insert":
		return slices.Insert(out, at, rapid.SampledFrom(other).Draw(t, "other"))
	default:
		out[at] = rapid.SampledFrom(other).Draw(t, "other")
		return out
	}
}

// sameMeaning reports whether the two differ in counters alone: one more or less
// makes no difference to a packet.
func sameMeaning(a, b []nfnetlink.Expr) bool {
	without := func(exprs []nfnetlink.Expr) []nfnetlink.Expr {
		return slices.DeleteFunc(slices.Clone(exprs), func(e nfnetlink.Expr) bool { _, counts := e.(nfnetlink.Counter); return counts })
	}
	return slices.EqualFunc(without(a), without(b), func(x, y nfnetlink.Expr) bool { return reflect.DeepEqual(x, y) })
}
