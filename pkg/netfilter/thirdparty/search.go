// SPDX-License-Identifier: Apache-2.0

package thirdparty

// Search asks about all packets from a prefix to a prefix: about the whole, and about its halves where the
// answer is not the same for all of it. Rules that no packet of a prefix meets are left out before its halves
// are asked about, so a long list of rules costs little more than reading it.
type Search struct {
	// Binds tells whether an owned chain decides, as in Judge. The packets of one call of About have the same
	// answer.
	Binds func(Place) Answer
	// Ask returns the rules of a verdict that are searched for, and whether this is certain.
	Ask func(Packet, Verdict) ([]*Rule, Answer)
	// By is the addresses whose halves are asked about.
	By Addresses
	// Steps is how many rules and elements of sets may be looked at, by all searches that share it. When none
	// is left, the answers about whole prefixes count.
	Steps *int
	// AnyAnswer tells that it does not matter whether a rule is certain.
	AnyAnswer bool

	// Rules are those that were found for some of the packets.
	Rules   []*Rule
	certain map[*Rule]bool
	doubts  map[*Rule]int // how many answers were not certain
}

// IsCertain reports whether one of Rules is certain for some of the packets.
func (s *Search) IsCertain(r *Rule) bool { return s.certain[r] }

// About asks about packets, both of whose addresses are prefixes.
func (s *Search) About(r *Ruleset, p Packet) {
	v := r.Judge(p, s.Binds)
	*s.Steps -= v.steps
	rules, answer := s.Ask(p, v)
	if answer == No || s.areSettled(rules) {
		return
	}
	parts := split(p, v.Splits&s.By)
	isOne := answer == Yes && len(rules) == 1
	if isOne || parts == nil || *s.Steps <= 0 {
		for _, rule := range rules {
			s.note(rule, answer)
		}
		return
	}
	rest := r.Restrict(p, s.Steps)
	s.About(rest, parts[0])
	s.About(rest, parts[1])
}

// areSettled reports whether nothing more is asked about the rules: each is certain, or there were so many
// answers that were not that another one will not be either. A rule about 60,000 addresses and a port has as
// many.
func (s *Search) areSettled(rules []*Rule) bool {
	const enough = 32
	for _, r := range rules {
		doubts := s.doubts[r]
		isSettled := s.certain[r] || doubts >= enough || s.AnyAnswer && doubts > 0
		if !isSettled {
			return false
		}
	}
	return true
}

func (s *Search) note(r *Rule, a Answer) {
	if s.certain == nil {
		s.certain, s.doubts = map[*Rule]bool{}, map[*Rule]int{}
	}
	if !s.certain[r] && s.doubts[r] == 0 {
		s.Rules = append(s.Rules, r)
	}
	if a == Yes {
		s.certain[r] = true
	} else {
		s.doubts[r]++
	}
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

// Restrict returns the ruleset without the rules that no such packet meets, whatever its mark is then. It
// takes a step for each rule.
func (r *Ruleset) Restrict(p Packet, steps *int) *Ruleset {
	m := newMachine(r.family, p)
	rest := &Ruleset{family: r.family}
	tables := map[*table]*table{}
	for _, b := range r.hooks {
		t := tables[b.table]
		if t == nil {
			t = b.restrict(m)
			tables[b.table] = t
		}
		part := *b
		part.table = t
		rest.hooks = append(rest.hooks, &part)
	}
	*steps -= m.steps
	if m.isWritten { // so packets can meet rules that are not about their addresses
		return r
	}
	return rest
}

// restrict leaves out chains without rules, too: packets return from them.
func (t *table) restrict(m *machine) *table {
	out := *t
	out.chains = map[string]*chain{}
	for name, c := range t.chains {
		part := &chain{place: c.place, owned: c.owned}
		for _, r := range c.rules {
			m.run(r, mark{})
			if m.matches != No || m.changes {
				part.rules = append(part.rules, r)
			}
		}
		if part.owned || len(part.rules) > 0 {
			out.chains[name] = part
		}
	}
	return &out
}
