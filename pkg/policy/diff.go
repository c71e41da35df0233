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

// Compare returns what the observed ruleset lacks, and what it has too much.
func Compare(desired, observed Ruleset) Diff {
	type id struct {
		family Family
		name   string
	}
	there := make(map[id]*Chain, len(observed.Chains))
	for i, c := range observed.Chains {
		there[id{c.Family, c.Name}] = &observed.Chains[i]
	}
	var d Diff
	wanted := make(map[id]bool, len(desired.Chains))
	for i, c := range desired.Chains {
		wanted[id{c.Family, c.Name}] = true
		d = append(d, CompareChain(&desired.Chains[i], there[id{c.Family, c.Name}])...)
	}
	for _, c := range observed.Chains {
		if !wanted[id{c.Family, c.Name}] {
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
	missing, pairs := pair(desired, observed)
	var unexpected []Rule
	for i, at := range pairs {
		if at < 0 {
			unexpected = append(unexpected, observed[i])
		}
	}
	switch {
	case len(missing)+len(unexpected) > 0:
		c.report(kind, missing, unexpected)
	case kind == RuleChange:
		for _, r := range outOfOrder(observed, pairs) {
			c.add(OrderChange, true, r.String())
		}
	}
}

// report adds rules, or the elements in which the sets of two rules differ.
func (c *comparison) report(kind ChangeKind, missing, unexpected []Rule) {
	like := map[RuleKey][]int{} // unexpected rules, by what they are but for the elements
	if slices.ContainsFunc(missing, Rule.matchesSet) || slices.ContainsFunc(unexpected, Rule.matchesSet) {
		for i, u := range unexpected {
			key := u.WithoutElements().Key()
			like[key] = append(like[key], i)
		}
	}
	paired := map[int]bool{}
	for _, m := range missing {
		key := m.WithoutElements().Key()
		at := slices.IndexFunc(like[key], func(i int) bool { return m.matchesSet() || unexpected[i].matchesSet() })
		if at < 0 {
			c.add(kind, false, m.String())
			continue
		}
		i := like[key][at]
		like[key] = slices.Delete(like[key], at, at+1)
		paired[i] = true
		c.elements(m, m.From, unexpected[i].From, "source")
		c.elements(m, m.To, unexpected[i].To, "destination")
	}
	for i, u := range unexpected {
		if !paired[i] {
			c.add(kind, true, u.String())
		}
	}
}

func (c *comparison) elements(r Rule, want, have Ranges, what string) {
	for _, x := range want.Minus(have) {
		c.add(ElementChange, false, fmt.Sprintf("%s %s (%s)", what, Ranges{x}, r.Verdict))
	}
	for _, x := range have.Minus(want) {
		c.add(ElementChange, true, fmt.Sprintf("%s %s (%s)", what, Ranges{x}, r.Verdict))
	}
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
	missing, pairs := pair(desired, observed)
	for i, at := range pairs {
		if at < 0 {
			surplus = append(surplus, i)
		}
	}
	return missing, surplus
}

// pair pairs observed rules with equal desired ones. It returns the desired rules
// without a pair, and for each observed rule the index of its pair, or -1. Of equal
// observed rules the last ones are paired: an agent that runs beside ip-masq appends
// the jump that it looks for.
func pair(desired, observed []Rule) (missing []Rule, pairs []int) {
	wanted := make(map[RuleKey][]int, len(desired))
	for i, r := range desired {
		wanted[r.Key()] = append(wanted[r.Key()], i)
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
	for i, r := range desired {
		if !isPaired[i] {
			missing = append(missing, r)
		}
	}
	return missing, pairs
}

// outOfOrder returns the observed rules that are before a rule that has to come before
// them. Rank has the place of each observed rule in the desired order.
//
// It compares each rule with those that can match the same packets. Rules of one
// source or destination prefix are sorted, so that this takes the prefixes around
// theirs only, and rules of more or other matches, of which there are few.
func outOfOrder(observed []Rule, rank []int) []Rule {
	var others, sources, destinations []int
	for i, r := range observed {
		switch {
		case isPrefix(r.From) && r.To == nil:
			sources = append(sources, i)
		case isPrefix(r.To) && r.From == nil:
			destinations = append(destinations, i)
		default:
			others = append(others, i)
		}
	}
	wrong := make([]bool, len(observed))
	compare := func(i, j int) {
		i, j = min(i, j), max(i, j)
		wrong[i] = wrong[i] || rank[i] > rank[j] && !observed[i].commutes(observed[j])
	}
	// compareAll compares each rule of the list with those of the list whose prefix
	// covers its own, and with every rule of all.
	compareAll := func(all, list []int, match func(int) netip.Prefix) {
		slices.SortFunc(list, func(i, j int) int { return cmp.Or(comparePrefixes(match(i), match(j)), i-j) })
		var open []int
		for _, i := range list {
			for len(open) > 0 && !match(open[len(open)-1]).Contains(match(i).Addr()) {
				open = open[:len(open)-1]
			}
			for _, j := range open {
				compare(i, j)
			}
			for _, j := range all {
				compare(i, j)
			}
			open = append(open, i)
		}
	}
	for k, i := range others {
		for _, j := range others[:k] {
			compare(i, j)
		}
	}
	compareAll(others, sources, func(i int) netip.Prefix { return prefixOf(observed[i].From) })
	compareAll(append(others, sources...), destinations, func(i int) netip.Prefix { return prefixOf(observed[i].To) })
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
