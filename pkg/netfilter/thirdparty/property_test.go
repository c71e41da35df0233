// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// model is a rule of a small world of addresses: 10.0.0.0/29.
type model struct {
	from, to       netip.Prefix // invalid: any
	notFrom, notTo bool
	obscure        bool // has a match that cannot be decoded
	isMarked       bool // matches the mark 1
	notMarked      bool // matches all other marks
	sets           bool // sets the mark 1
	does           nfnetlink.Statement
	target         string
}

func (m model) String() string {
	return fmt.Sprintf("from %v (not %v) to %v (not %v) obscure %v marked %v not marked %v sets %v: %s %s",
		m.from, m.notFrom, m.to, m.notTo, m.obscure, m.isMarked, m.notMarked, m.sets, m.does, m.target)
}

func operator(inverted bool) nfnetlink.CmpOp {
	if inverted {
		return nfnetlink.NotEqual
	}
	return nfnetlink.Equal
}

// expressions writes the rule as iptables-nft does.
func (m model) expressions() []nfnetlink.Expr {
	var out []nfnetlink.Expr
	side := func(prefix netip.Prefix, not bool, field nfnetlink.Field) {
		if !prefix.IsValid() {
			return
		}
		mask := []byte{0xff, 0xff, 0xff, byte(0xff << (32 - prefix.Bits()))}
		out = append(out, nfnetlink.LoadAddress(nfnetlink.IPv4, field, nfnetlink.Reg1),
			nfnetlink.Bitwise{Sreg: nfnetlink.Reg1, Dreg: nfnetlink.Reg1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
			nfnetlink.Cmp{Op: operator(not), Sreg: nfnetlink.Reg1, Data: prefix.Addr().AsSlice()})
	}
	side(m.from, m.notFrom, nfnetlink.Source)
	side(m.to, m.notTo, nfnetlink.Destination)
	if m.obscure {
		out = append(out, nfnetlink.Match{Xt: "obscure"})
	}
	if m.isMarked || m.notMarked {
		out = append(out, nfnetlink.Meta{Key: unix.NFT_META_MARK, Dreg: nfnetlink.Reg1},
			nfnetlink.Cmp{Op: operator(m.notMarked), Sreg: nfnetlink.Reg1, Data: []byte{1, 0, 0, 0}})
	}
	if m.sets {
		out = append(out, nfnetlink.Immediate{Dreg: nfnetlink.Reg1, Data: []byte{1, 0, 0, 0}},
			nfnetlink.SetMeta{Key: unix.NFT_META_MARK, Sreg: nfnetlink.Reg1})
	}
	switch m.does {
	case nfnetlink.DoMasq:
		out = append(out, nfnetlink.Masq{})
	case nfnetlink.DoAccept:
		out = append(out, nfnetlink.Verdict{Code: nfnetlink.Accept})
	case nfnetlink.DoReturn:
		out = append(out, nfnetlink.Verdict{Code: nfnetlink.Return})
	case nfnetlink.DoJump:
		out = append(out, nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: m.target})
	case nfnetlink.DoGoto:
		out = append(out, nfnetlink.Verdict{Code: nfnetlink.Goto, Chain: m.target})
	}
	return out
}

// about reports whether a packet meets the rule.
func (m model) about(src, dst netip.Addr, obscure, marked bool) bool {
	return (!m.from.IsValid() || m.from.Contains(src) != m.notFrom) && (!m.to.IsValid() || m.to.Contains(dst) != m.notTo) &&
		(!m.obscure || obscure) && (!m.isMarked || marked) && (!m.notMarked || !marked)
}

// world is chains by name; "a" is the base chain, and a chain jumps to later ones.
type world map[string][]model

func (w world) ruleset() *Ruleset {
	t := newTable(Place{Backend: policy.IPTables, Family: policy.IPv4, Table: "nat"})
	for name, rules := range w {
		c := &chain{place: Place{Backend: policy.IPTables, Family: policy.IPv4, Table: "nat", Chain: name}}
		for _, m := range rules {
			c.rules = append(c.rules, &Rule{Place: c.place, Exprs: m.expressions(), table: t})
		}
		t.chains[name] = c
	}
	return &Ruleset{family: policy.IPv4, hooks: []*baseChain{{table: t, name: "a", isNAT: true, priority: 100}}}
}

func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }

// names are the chains of a world.
func names() []string { return []string{"a", "b", "c"} }

func randomWorld(t *rapid.T) world {
	w := world{}
	for i, name := range names() {
		for range rapid.IntRange(1, 4).Draw(t, "rules of "+name) {
			m := model{
				obscure:  rapid.IntRange(0, 5).Draw(t, "obscure") == 0,
				isMarked: rapid.IntRange(0, 5).Draw(t, "marked") == 0, sets: rapid.IntRange(0, 4).Draw(t, "sets") == 0,
				notFrom: rapid.Bool().Draw(t, "not from"), notTo: rapid.Bool().Draw(t, "not to"),
				does: rapid.SampledFrom([]nfnetlink.Statement{nfnetlink.NoStatement, nfnetlink.DoMasq, nfnetlink.DoMasq,
					nfnetlink.DoAccept, nfnetlink.DoReturn, nfnetlink.DoJump, nfnetlink.DoGoto}).Draw(t, "does"),
			}
			m.notMarked = !m.isMarked && rapid.IntRange(0, 5).Draw(t, "not marked") == 0
			for _, side := range []*netip.Prefix{&m.from, &m.to} {
				if rapid.Bool().Draw(t, "side") {
					*side = netip.PrefixFrom(address(rapid.IntRange(0, 7).Draw(t, "address")), rapid.IntRange(29, 32).Draw(t, "length")).Masked()
				}
			}
			jumps := m.does == nfnetlink.DoJump || m.does == nfnetlink.DoGoto
			switch {
			case jumps && i+1 == len(names()):
				m.does = nfnetlink.DoReturn
			case jumps:
				m.target = rapid.SampledFrom(names()[i+1:]).Draw(t, "target")
			}
			w[name] = append(w[name], m)
		}
	}
	return w
}

func (w world) lines() string {
	var lines []string
	for _, name := range names() {
		for _, m := range w[name] {
			lines = append(lines, name+": "+m.String())
		}
	}
	return strings.Join(lines, "\n")
}

// fate decides as the kernel does what becomes of a packet; "" of one that comes back from a chain.
func (w world) fate(chain string, src, dst netip.Addr, obscure bool, marked *bool) Fate {
	for _, m := range w[chain] {
		if !m.about(src, dst, obscure, *marked) {
			continue
		}
		*marked = *marked || m.sets
		switch m.does {
		case nfnetlink.DoMasq:
			return Masqueraded
		case nfnetlink.DoAccept:
			return Untouched
		case nfnetlink.DoReturn:
			return ""
		case nfnetlink.DoJump, nfnetlink.DoGoto:
			if f := w.fate(m.target, src, dst, obscure, marked); f != "" || m.does == nfnetlink.DoGoto {
				return f
			}
		}
	}
	return ""
}

// TestJudge holds verdicts to what becomes of each packet, whether the undecoded matches hold or not: its
// fate is among the outcomes, also of all packets with a prefix, and where everything is known there is no
// other outcome.
func TestJudge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := randomWorld(t)
		rules := w.ruleset()
		has := func(p Packet, f Fate) (has, others bool) {
			for _, o := range rules.Judge(p, ownedBinds).Outcomes {
				has, others = has || o.Fate == f, others || o.Fate != f
			}
			return has, others
		}
		allKnown := !slices.ContainsFunc(slices.Concat(w["a"], w["b"], w["c"]), func(m model) bool { return m.obscure })
		bits := rapid.IntRange(29, 32).Draw(t, "bits of a prefix")
		for i := range 64 {
			src, dst := address(i/8), address(i%8)
			p := Packet{Src: netip.PrefixFrom(src, 32), Dst: netip.PrefixFrom(dst, 32)}
			wide := Packet{Src: netip.PrefixFrom(src, bits).Masked(), Dst: netip.PrefixFrom(dst, 29).Masked()}
			for _, obscure := range []bool{false, true} {
				fate := w.fate("a", src, dst, obscure, new(bool))
				if fate == "" {
					fate = Untouched
				}
				is, others := has(p, fate)
				isInWide, _ := has(wide, fate)
				if !is || !isInWide || allKnown && others {
					t.Fatalf("%v to %v (obscure %v): %s, verdict %+v, of the prefix %+v\n%s",
						src, dst, obscure, fate, rules.Judge(p, ownedBinds), rules.Judge(wide, ownedBinds), w.lines())
				}
			}
		}
	})
}

// TestSearchIsComplete holds a search to what becomes of each packet: a packet that is masqueraded for
// certain is masqueraded by a rule that the search found, and what it found for certain masquerades some
// packet.
func TestSearchIsComplete(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := randomWorld(t)
		rules := w.ruleset()
		steps := 1_000_000
		s := Search{
			Binds: ownedBinds, By: Source | Destination, Steps: &steps,
			Ask: func(p Packet, v Verdict) ([]*Rule, Answer) {
				return v.Against(func(o Outcome) Answer { return o.TranslatesExempt(p) })
			},
		}
		all := netip.PrefixFrom(address(0), 29)
		s.About(rules, Packet{Src: all, Dst: all})
		certain, possible := map[*Rule]bool{}, map[*Rule]bool{}
		for i := range 64 {
			p := Packet{Src: netip.PrefixFrom(address(i/8), 32), Dst: netip.PrefixFrom(address(i%8), 32)}
			found, answer := rules.Judge(p, ownedBinds).Against(func(o Outcome) Answer { return o.TranslatesExempt(p) })
			for _, r := range found {
				certain[r] = certain[r] || answer == Yes
				possible[r] = true
			}
		}
		for r := range possible {
			if !slices.Contains(s.Rules, r) || s.IsCertain(r) != certain[r] {
				t.Fatalf("rule %s: certain %v, found %v as certain %v\n%s", r, certain[r], slices.Contains(s.Rules, r), s.IsCertain(r), w.lines())
			}
		}
		if len(possible) != len(s.Rules) {
			t.Fatalf("%d rules translate packets, %d were found\n%s", len(possible), len(s.Rules), w.lines())
		}
	})
}
