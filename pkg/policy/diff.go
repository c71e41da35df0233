// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// ChangeKind is the kind of a difference, by the name that metrics use.
type ChangeKind string

// The kinds of differences.
const (
	ChainChange        ChangeKind = "chain"
	JumpChange         ChangeKind = "jump"
	RuleChange         ChangeKind = "rule"
	OrderChange        ChangeKind = "order"
	ElementChange      ChangeKind = "element"
	UnrecognizedChange ChangeKind = "unrecognized"
)

// Change is one difference between the desired and the observed rules.
type Change struct {
	Kind       ChangeKind `json:"kind"`
	Family     Family     `json:"family"`
	Chain      string     `json:"chain,omitempty"` // "" for an object outside the owned chains
	Unexpected bool       `json:"unexpected"`      // observed and not desired; else desired and not observed
	Text       string     `json:"text"`
}

// String returns ipv4 IP-MASQ-AGENT: missing rule: to 10.0.0.0/8 return.
func (c Change) String() string {
	state := "missing"
	if c.Unexpected {
		state = "unexpected"
	}
	where := string(c.Family)
	if c.Chain != "" {
		where += " " + c.Chain
	}
	switch c.Kind {
	case ChainChange:
		return fmt.Sprintf("%s: %s chain", where, state)
	case JumpChange:
		what := strings.TrimSuffix(c.Text, " jump")
		if what == "jump" {
			what = "of all traffic"
		}
		return fmt.Sprintf("%s: %s jump from POSTROUTING: %s", where, state, what)
	case OrderChange:
		return fmt.Sprintf("%s: rule out of order: %s", where, c.Text)
	case UnrecognizedChange:
		return fmt.Sprintf("%s: unrecognized: %s", where, c.Text)
	default:
		return fmt.Sprintf("%s: %s %s: %s", where, state, c.Kind, c.Text)
	}
}

// Diff is the differences between the desired and the observed ruleset. Comments, and
// an order that does not matter, are no differences.
type Diff []Change

// String returns one line for each change.
func (d Diff) String() string { return d.Summary(len(d)) }

// Summary returns the first changes, and the number of the others.
func (d Diff) Summary(limit int) string {
	var lines []string
	for _, c := range d[:min(limit, len(d))] {
		lines = append(lines, c.String())
	}
	if rest := len(d) - limit; rest > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", rest))
	}
	return strings.Join(lines, "\n")
}

// Compare returns the differences between the desired and the observed ruleset.
func Compare(desired, observed Ruleset) Diff {
	var d Diff
	for i := range desired.Chains {
		c := &desired.Chains[i]
		d = append(d, CompareChain(c, observed.Find(c.Family, c.Name))...)
	}
	for _, c := range observed.Chains {
		if desired.Find(c.Family, c.Name) == nil {
			d = append(d, Change{ChainChange, c.Family, c.Name, true, ""})
		}
	}
	for _, u := range observed.Unrecognized {
		d = append(d, Change{UnrecognizedChange, u.Family, "", true, Printable(u.Text)})
	}
	return d
}

// CompareChain is Compare for one chain; observed is nil if there is none.
func CompareChain(desired, observed *Chain) Diff {
	c := comparison{family: desired.Family, chain: desired.Name}
	if observed == nil {
		c.add(ChainChange, false, "")
		for _, j := range desired.Jumps {
			c.add(JumpChange, false, j.String())
		}
		return c.diff
	}
	if observed.Owner.Differs(desired.Owner) {
		c.add(ChainChange, true, "")
	}
	c.rules(JumpChange, desired.Jumps, observed.Jumps)
	c.rules(RuleChange, desired.Rules, observed.Rules)
	return c.diff
}

type comparison struct {
	family Family
	chain  string
	diff   Diff
}

func (c *comparison) add(kind ChangeKind, unexpected bool, text string) {
	c.diff = append(c.diff, Change{kind, c.family, c.chain, unexpected, text})
}

// rules adds the rules in which the lists differ, or else those that are out of
// order. The order of jumps does not matter: all of them have the same target.
func (c *comparison) rules(kind ChangeKind, desired, observed []Rule) {
	if slices.EqualFunc(desired, observed, Rule.Equal) {
		return
	}
	missing, surplus, pairs := pair(desired, observed)
	if len(missing)+len(surplus) == 0 {
		if kind == RuleChange {
			for _, r := range outOfOrder(observed, pairs) {
				c.add(OrderChange, true, r.String())
			}
		}
		return
	}
	unexpected := make([]Rule, len(surplus))
	for i, at := range surplus {
		unexpected[i] = observed[at]
	}
	// Two rules that differ only in the elements of their sets are one rule with other
	// elements.
	sets := slices.ContainsFunc(missing, Rule.matchesSet) || slices.ContainsFunc(unexpected, Rule.matchesSet)
	for _, m := range missing {
		at := slices.IndexFunc(unexpected, func(u Rule) bool {
			return sets && (m.matchesSet() || u.matchesSet()) && m.WithoutElements().Equal(u.WithoutElements())
		})
		if at < 0 {
			c.add(kind, false, m.String())
			continue
		}
		c.elements(m, m.From, unexpected[at].From, "source")
		c.elements(m, m.To, unexpected[at].To, "destination")
		unexpected = slices.Delete(unexpected, at, at+1)
	}
	for _, u := range unexpected {
		c.add(kind, true, u.String())
	}
}

func (c *comparison) elements(r Rule, want, have Ranges, what string) {
	add := func(ranges Ranges, unexpected bool) {
		for _, x := range ranges {
			c.add(ElementChange, unexpected, fmt.Sprintf("%s %s (%s)", what, Ranges{x}, r.Verdict))
		}
	}
	add(want.Minus(have), false)
	add(have.Minus(want), true)
}

// WithoutElements returns the rule with its sets emptied.
func (r Rule) WithoutElements() Rule {
	for _, set := range []*Ranges{&r.From, &r.To} {
		if *set != nil {
			*set = Ranges{}
		}
	}
	return r
}

// matchesSet reports whether the rule matches more than one range, which a rule of a
// backend without sets cannot.
func (r Rule) matchesSet() bool { return len(r.From) > 1 || len(r.To) > 1 }

// Unmatched returns the desired rules that are missing, and the indexes of the
// observed ones that are too many.
func Unmatched(desired, observed []Rule) (missing []Rule, surplus []int) {
	if slices.EqualFunc(desired, observed, Rule.Equal) {
		return nil, nil
	}
	missing, surplus, _ = pair(desired, observed)
	return missing, surplus
}

// pair pairs observed rules with equal desired ones. It returns the desired rules
// without a pair, the indexes of the observed ones without, and for each observed rule
// the index of its pair, or -1. Of equal observed rules the last ones are paired: an
// agent that runs beside ip-masq appends the jump that it looks for.
func pair(desired, observed []Rule) (missing []Rule, surplus, pairs []int) {
	wanted := make(map[RuleKey][]int, len(desired))
	for i, r := range desired {
		key := r.Key()
		wanted[key] = append(wanted[key], i)
	}
	pairs = make([]int, len(observed))
	isPaired := make([]bool, len(desired))
	for i, r := range slices.Backward(observed) {
		pairs[i] = -1
		key := r.Key()
		if free := wanted[key]; len(free) > 0 && r.Verdict != Unrecognized {
			last := len(free) - 1
			pairs[i], isPaired[free[last]] = free[last], true
			wanted[key] = free[:last]
		}
	}
	for i, at := range pairs {
		if at < 0 {
			surplus = append(surplus, i)
		}
	}
	for i, r := range desired {
		if !isPaired[i] {
			missing = append(missing, r)
		}
	}
	return missing, surplus, pairs
}

// outOfOrder returns the observed rules that are before a rule that has to come before
// them. Rank has the place of each observed rule in the desired order.
//
// It compares each rule with those that can match the same packets: a rule of one
// destination prefix with the prefixes that cover its own, which are few in sorted
// order, and every rule with those of other matches.
func outOfOrder(observed []Rule, rank []int) []Rule {
	var others, destinations []int
	for i, r := range observed {
		if r.From == nil && isPrefix(r.To) {
			destinations = append(destinations, i)
		} else {
			others = append(others, i)
		}
	}
	wrong := make([]bool, len(observed))
	compare := func(i int, with []int) {
		for _, j := range with {
			i, j := min(i, j), max(i, j)
			wrong[i] = wrong[i] || rank[i] > rank[j] && !observed[i].commutes(observed[j])
		}
	}
	for k, i := range others {
		compare(i, others[:k])
	}
	prefix := func(i int) netip.Prefix { return prefixOf(observed[i].To) }
	slices.SortFunc(destinations, func(i, j int) int { return cmp.Or(comparePrefixes(prefix(i), prefix(j)), i-j) })
	var open []int
	for _, i := range destinations {
		for len(open) > 0 && !prefix(open[len(open)-1]).Contains(prefix(i).Addr()) {
			open = open[:len(open)-1]
		}
		compare(i, open)
		compare(i, others)
		open = append(open, i)
	}
	var out []Rule
	for i, r := range observed {
		if wrong[i] {
			out = append(out, r)
		}
	}
	return out
}

func isPrefix(r Ranges) bool { return len(r) == 1 && prefixOf(r).IsValid() }

func prefixOf(r Ranges) netip.Prefix {
	p, _ := r[0].Prefix()
	return p
}
