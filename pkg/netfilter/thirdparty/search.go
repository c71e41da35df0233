// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
)

// Search asks about all packets from a prefix to a prefix: about the whole, and about its halves where the
// answer is not the same for all of it. Rules that no packet of a prefix meets are left out before its halves
// are asked about, so a long list of rules costs little more than reading it.
type Search struct {
	// Binds tells whether an owned chain decides, as in Judge. Packets of one search have the same answer.
	Binds func(Place) Answer
	// Ask returns the rules of a verdict that are searched for, and whether this is certain.
	Ask func(Packet, Verdict) ([]*Rule, Answer)
	// By is the addresses whose halves are asked about.
	By Addresses
	// Questions is how many may be asked. When none is left, the answers about whole prefixes count.
	Questions int

	// Rules are those that were found for some of the packets.
	Rules   []*Rule
	certain map[*Rule]bool
}

// IsCertain reports whether one of Rules is certain for some of the packets.
func (s *Search) IsCertain(r *Rule) bool { return s.certain[r] }

// About asks about packets, both of whose addresses are prefixes.
func (s *Search) About(r *Ruleset, p Packet) {
	s.Questions--
	v := r.Judge(p, s.Binds)
	rules, answer := s.Ask(p, v)
	parts := split(p, v.Splits&s.By)
	isOne := answer == Yes && len(rules) == 1
	isFinal := isOne || parts == nil || s.Questions <= 0
	switch {
	case answer == No || s.knows(rules):
	case isFinal:
		for _, rule := range rules {
			s.note(rule, answer)
		}
	default:
		rest := r.Restrict(p)
		s.About(rest, parts[0])
		s.About(rest, parts[1])
	}
}

// knows reports whether all of the rules are certain already.
func (s *Search) knows(rules []*Rule) bool {
	for _, r := range rules {
		if !s.certain[r] {
			return false
		}
	}
	return true
}

func (s *Search) note(r *Rule, a Answer) {
	if s.certain == nil {
		s.certain = map[*Rule]bool{}
	}
	if _, known := s.certain[r]; !known {
		s.Rules = append(s.Rules, r)
	}
	s.certain[r] = s.certain[r] || a == Yes
}

// split returns two packets that have the halves of the destination or source, nil if that is one address.
func split(p Packet, by Addresses) []Packet {
	low, high := p, p
	switch {
	case by&Destination != 0 && !p.Dst.IsSingleIP():
		parts := halves(p.Dst)
		low.Dst, high.Dst = parts[0], parts[1]
	case by&Source != 0 && !p.Src.IsSingleIP():
		parts := halves(p.Src)
		low.Src, high.Src = parts[0], parts[1]
	default:
		return nil
	}
	return []Packet{low, high}
}

// Restrict returns the ruleset without the rules that no such packet meets, whatever its mark is then.
func (r *Ruleset) Restrict(p Packet) *Ruleset {
	m := newMachine(r.family, p)
	out := &Ruleset{family: r.family}
	tables := map[*table]*table{}
	for _, b := range r.hooks {
		t := tables[b.table]
		if t == nil {
			t = b.restrict(m)
			tables[b.table] = t
		}
		part := *b
		part.table = t
		out.hooks = append(out.hooks, &part)
	}
	return out
}

// restrict leaves out chains without rules, too: packets return from them.
func (t *table) restrict(m *machine) *table {
	out := *t
	out.chains = map[string]*chain{}
	for name, c := range t.chains {
		part := &chain{place: c.place, owned: c.owned}
		for _, r := range c.rules {
			m.run(r, mark{})
			if m.matches != No || r.setsMark() {
				part.rules = append(part.rules, r)
			}
		}
		if part.owned || len(part.rules) > 0 {
			out.chains[name] = part
		}
	}
	return &out
}

// setsMark reports whether the rule may change the mark before its last condition.
func (r *Rule) setsMark() bool {
	for _, e := range r.Exprs {
		if _, is := e.(nfnetlink.SetMeta); is {
			return true
		}
	}
	return false
}
