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

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// model is a rule of a small world of addresses: 10.0.0.0/29.
type model struct {
	from, to       netip.Prefix // invalid: any
	notFrom, notTo bool
	obscure        bool // has a match that cannot be decoded
	mark           int  // noMark and so on
	does           nfnetlink.Statement
	target         string
}

// What a rule of the model says of the mark.
const (
	noMark     = iota
	markAbsent // it matches packets without one
	markNeeded // it does not
)

func (m model) String() string {
	return fmt.Sprintf("from %v (not %v) to %v (not %v) obscure %v mark %d: %s %s", m.from, m.notFrom, m.to, m.notTo, m.obscure, m.mark, m.does, m.target)
}

// expressions writes the rule as iptables-nft does.
func (m model) expressions() []nfnetlink.Expr {
	var out []nfnetlink.Expr
	for _, side := range []struct {
		prefix netip.Prefix
		not    bool
		offset uint32
	}{{m.from, m.notFrom, 12}, {m.to, m.notTo, 16}} {
		if !side.prefix.IsValid() {
			continue
		}
		op := nfnetlink.Equal
		if side.not {
			op = nfnetlink.NotEqual
		}
		mask := []byte{0xff, 0xff, 0xff, byte(0xff << (32 - side.prefix.Bits()))}
		out = append(out, nfnetlink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: side.offset, Len: 4, Dreg: nfnetlink.Reg1},
			nfnetlink.Bitwise{Sreg: nfnetlink.Reg1, Dreg: nfnetlink.Reg1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
			nfnetlink.Cmp{Op: op, Sreg: nfnetlink.Reg1, Data: side.prefix.Addr().AsSlice()})
	}
	if m.obscure {
		out = append(out, nfnetlink.Match{Xt: "obscure"})
	}
	if m.mark != noMark {
		op := nfnetlink.Equal
		if m.mark == markNeeded {
			op = nfnetlink.NotEqual
		}
		out = append(out, nfnetlink.Meta{Key: unix.NFT_META_MARK, Dreg: nfnetlink.Reg1}, nfnetlink.Cmp{Op: op, Sreg: nfnetlink.Reg1, Data: make([]byte, 4)})
	}
	codes := map[nfnetlink.Statement]nfnetlink.VerdictCode{nfnetlink.DoAccept: nfnetlink.Accept, nfnetlink.DoReturn: nfnetlink.Return,
		nfnetlink.DoJump: nfnetlink.Jump, nfnetlink.DoGoto: nfnetlink.Goto}
	switch m.does {
	case nfnetlink.NoStatement:
		return out
	case nfnetlink.DoMasq:
		return append(out, nfnetlink.Masq{})
	}
	return append(out, nfnetlink.Verdict{Code: codes[m.does], Chain: m.target})
}

// about reports whether the rule is about an unmarked packet.
func (m model) about(src, dst netip.Addr, obscure bool) bool {
	return (!m.from.IsValid() || m.from.Contains(src) != m.notFrom) && (!m.to.IsValid() || m.to.Contains(dst) != m.notTo) &&
		(!m.obscure || obscure) && m.mark != markNeeded
}

// world is chains by name; "a" jumps to none before itself.
type world map[string][]model

func (w world) rules(chain string) (out []nfnetlink.Rule, err error) {
	for _, m := range w[chain] {
		out = append(out, nfnetlink.Rule{Chain: chain, Exprs: m.expressions()})
	}
	return out, nil
}

func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }

// names are the chains of a world.
var names = []string{"a", "b", "c"}

func randomWorld(t *rapid.T) world {
	w := world{}
	for i, name := range names {
		for range rapid.IntRange(1, 4).Draw(t, "rules of "+name) {
			m := model{obscure: rapid.IntRange(0, 5).Draw(t, "obscure") == 0, mark: rapid.SampledFrom([]int{0, 0, 0, 0, markNeeded, markAbsent}).Draw(t, "mark"),
				does: rapid.SampledFrom([]nfnetlink.Statement{nfnetlink.NoStatement, nfnetlink.DoMasq, nfnetlink.DoMasq,
					nfnetlink.DoAccept, nfnetlink.DoReturn, nfnetlink.DoJump, nfnetlink.DoGoto}).Draw(t, "does")}
			for _, side := range []*netip.Prefix{&m.from, &m.to} {
				if rapid.Bool().Draw(t, "side") {
					*side = netip.PrefixFrom(address(rapid.IntRange(0, 7).Draw(t, "address")), rapid.IntRange(29, 32).Draw(t, "length")).Masked()
				}
			}
			m.notFrom, m.notTo = rapid.Bool().Draw(t, "not from"), rapid.Bool().Draw(t, "not to")
			if m.does == nfnetlink.DoJump || m.does == nfnetlink.DoGoto {
				if i+1 == len(names) {
					m.does = nfnetlink.DoReturn
				} else {
					m.target = rapid.SampledFrom(names[i+1:]).Draw(t, "target")
				}
			}
			w[name] = append(w[name], m)
		}
	}
	return w
}

func (w world) lines() (lines []string) {
	for _, name := range names {
		for _, m := range w[name] {
			lines = append(lines, name+": "+m.String())
		}
	}
	return lines
}

// scan follows all packets from the chain "a".
func (w world) scan(t *rapid.T, owned func(Place) bool) []Rule {
	walk := walk{table: table{rules: w.rules}, base: &Place{Family: policy.IPv4}, owned: owned}
	assert.Must(walk.chain("a", []Packets{{}}, condition{}, nil))(t)
	return walk.found
}

// TestWalk holds what is said of rules to what becomes of each packet: of one
// that is masqueraded some rule says so, and what an exact rule says of a source
// is so, whether the undecoded matches hold or not.
func TestWalk(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := randomWorld(t)
		rules := w.scan(t, func(Place) bool { return false })
		for i := range 64 {
			src, dst := address(i/8), address(i%8)
			from := policy.RangesOf(netip.PrefixFrom(src, 32))
			says := func(r Rule) bool { return r.Action == Masquerades && r.Destinations(from).Contains(dst) }
			for _, obscure := range []bool{false, true} {
				masqueraded := w.fate("a", "", src, dst, obscure, false) == "translated"
				sure := slices.ContainsFunc(rules, func(r Rule) bool { return r.Exact && says(r) })
				maybe := slices.ContainsFunc(rules, says)
				if sure && !masqueraded || masqueraded && !maybe {
					lines := w.lines()
					for _, r := range rules {
						lines = append(lines, fmt.Sprintf("%s; reached by %+v", r.Text, r.reached))
					}
					t.Fatalf("%v to %v (obscure %v): masqueraded %v, sure %v, maybe %v\n%s", src, dst, obscure, masqueraded, sure, maybe, strings.Join(lines, "\n"))
				}
			}
		}
	})
}

// fate decides as the kernel does what becomes of a packet, where a chain binds that is not ""; of one that goes on
// behind what keeps it from there, what would have become of it.
func (w world) fate(chain, binds string, src, dst netip.Addr, obscure, pass bool) string {
	for _, m := range w[chain] {
		keeps := m.does == nfnetlink.DoAccept || chain == "a" && m.does == nfnetlink.DoReturn
		if !m.about(src, dst, obscure) || m.does == nfnetlink.NoStatement || pass && keeps {
			continue
		}
		switch m.does {
		case nfnetlink.DoMasq:
			return "translated"
		case nfnetlink.DoAccept:
			return "kept"
		case nfnetlink.DoReturn:
			return ""
		}
		if m.target == binds {
			return "bound"
		}
		if f := w.fate(m.target, binds, src, dst, obscure, pass); f != "" || m.does == nfnetlink.DoGoto && (chain != "a" || !pass) {
			return f
		}
	}
	return ""
}

// TestTrace holds what is said of traffic to what becomes of each packet: where no
// rule is named, no third-party rule decides; and what is sure is so.
func TestTrace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := randomWorld(t)
		dst := address(rapid.IntRange(0, 7).Draw(t, "dst"))
		rules := w.scan(t, func(p Place) bool { return p.Chain == "c" })
		follow := func(from policy.Ranges) []Hit {
			return Traffic{To: dst, From: from}.trace(rules, func(Place) bool { return true })
		}
		all := follow(policy.RangesOf(netip.MustParsePrefix("10.0.0.0/29")))
		for i := range 8 {
			hits := follow(policy.RangesOf(netip.PrefixFrom(address(i), 32)))
			for _, obscure := range []bool{false, true} {
				fate := w.fate("a", "c", address(i), dst, obscure, false)
				decided := fate == "translated" || fate != "bound" && w.fate("a", "c", address(i), dst, obscure, true) == "bound"
				sure := slices.ContainsFunc(append(slices.Clone(hits), all...), func(h Hit) bool { return h.Sure })
				if decided && (len(hits) == 0 || len(all) == 0) || sure && fate == "bound" {
					t.Fatalf("%v to %v (obscure %v): %q, sure %v, %d and %d hits\n%s", address(i), dst, obscure, fate, sure, len(hits), len(all), strings.Join(w.lines(), "\n"))
				}
			}
		}
	})
}
