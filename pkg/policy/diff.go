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
	GuardChange        ChangeKind = "guard" // of the tables ip-masq-guard
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
	lines := make([]string, len(d))
	for i, c := range d {
		lines[i] = c.String()
	}
	return strings.Join(First(limit, lines), "\n")
}

// Totals returns the chains that changes are about, and how many things are missing or unexpected.
func (d Diff) Totals() (chains []string, missing, unexpected int) {
	for _, c := range d {
		if c.Chain != "" && !slices.Contains(chains, c.Chain) {
			chains = append(chains, c.Chain)
		}
		if c.Unexpected {
			unexpected++
		}
	}
	return chains, len(d) - unexpected, unexpected
}

// Compare returns the differences between the desired and the observed ruleset.
func Compare(desired, observed Ruleset) Diff {
	there := make(map[ChainFamily]*Chain, len(observed.Chains))
	for i, c := range observed.Chains {
		there[ChainFamily{c.Name, c.Family}] = &observed.Chains[i]
	}
	var d Diff
	wanted := make(map[ChainFamily]bool, len(desired.Chains))
	for i, c := range desired.Chains {
		wanted[ChainFamily{c.Name, c.Family}] = true
		d = append(d, CompareChain(&desired.Chains[i], there[ChainFamily{c.Name, c.Family}])...)
	}
	for _, c := range observed.Chains {
		if !wanted[ChainFamily{c.Name, c.Family}] {
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
	missing, surplus, pairs := Pair(desired, observed)
	switch {
	case len(missing)+len(surplus) > 0:
		var unexpected []Rule
		for _, i := range surplus {
			unexpected = append(unexpected, observed[i])
		}
		c.report(kind, missing, unexpected)
	case kind == RuleChange:
		for _, r := range outOfOrder(observed, pairs) {
			c.add(OrderChange, true, r.String())
		}
	}
}

// report adds rules, or the elements in which the sets of two rules differ.
func (c *comparison) report(kind ChangeKind, missing, unexpected []Rule) {
	candidates := map[RuleKey][]*Rule{} // unexpected rules without a pair, by their key without elements
	if slices.ContainsFunc(missing, Rule.matchesSet) || slices.ContainsFunc(unexpected, Rule.matchesSet) {
		for i := range unexpected {
			key := unexpected[i].withoutElements().Key()
			candidates[key] = append(candidates[key], &unexpected[i])
		}
	}
	isPaired := map[*Rule]bool{}
	for _, m := range missing {
		key := m.withoutElements().Key()
		pair, rest := takeComparable(candidates[key], m)
		if pair == nil {
			c.add(kind, false, m.String())
			continue
		}
		candidates[key] = rest
		isPaired[pair] = true
		c.elements(m, m.From, pair.From, "source")
		c.elements(m, m.To, pair.To, "destination")
	}
	for i := range unexpected {
		if !isPaired[&unexpected[i]] {
			c.add(kind, true, unexpected[i].String())
		}
	}
}

// takeComparable returns the first rule whose elements can be compared with those of m, because one of the
// two matches a set, and the other rules. It returns nil if there is none.
func takeComparable(rules []*Rule, m Rule) (pair *Rule, rest []*Rule) {
	for i, r := range rules {
		if m.matchesSet() || r.matchesSet() {
			return r, slices.Delete(rules, i, i+1)
		}
	}
	return nil, rules
}

func (c *comparison) elements(r Rule, want, have Ranges, what string) {
	for _, x := range want.ElementsNotIn(have) {
		c.add(ElementChange, false, fmt.Sprintf("%s %s (%s)", what, Ranges{x}, r.Verdict))
	}
	for _, x := range have.ElementsNotIn(want) {
		c.add(ElementChange, true, fmt.Sprintf("%s %s (%s)", what, Ranges{x}, r.Verdict))
	}
}

// withoutElements returns the rule with its sets emptied.
func (r Rule) withoutElements() Rule {
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

// Pair pairs observed rules with equal desired ones. It returns the desired rules
// without a pair, the indexes of the observed rules without one, and the index of each
// observed rule's pair, or -1. Of equal observed rules the last ones are paired: an
// agent that runs beside ip-masq appends the jump that it looks for.
func Pair(desired, observed []Rule) (missing []Rule, surplus, pairs []int) {
	wanted := make(map[RuleKey][]int, len(desired))
	for i, r := range desired {
		key := r.Key()
		wanted[key] = append(wanted[key], i)
	}
	pairs = make([]int, len(observed))
	isPaired := make([]bool, len(desired))
	for i, r := range slices.Backward(observed) {
		key := r.Key()
		free := wanted[key]
		if len(free) == 0 || r.Verdict == Unrecognized {
			pairs[i] = -1
			surplus = append(surplus, i)
			continue
		}
		last := len(free) - 1
		pairs[i] = free[last]
		isPaired[free[last]] = true
		wanted[key] = free[:last]
	}
	slices.Reverse(surplus)
	for i, r := range desired {
		if !isPaired[i] {
			missing = append(missing, r)
		}
	}
	return missing, surplus, pairs
}

// outOfOrder returns the observed rules that are before a rule that has to come before
// them. Rank has the place of each observed rule in the desired order. Rules that match
// one destination prefix alone are compared with those whose prefix covers theirs; there
// are few other rules.
func outOfOrder(observed []Rule, rank []int) []Rule {
	var others, sorted []int
	prefix := make([]netip.Prefix, len(observed))
	for i, r := range observed {
		if len(r.To) == 1 && r.From == nil {
			prefix[i], _ = r.To[0].Prefix()
		}
		if prefix[i].IsValid() {
			sorted = append(sorted, i)
		} else {
			others = append(others, i)
		}
	}
	slices.SortFunc(sorted, func(i, j int) int { return cmp.Or(prefix[i].Compare(prefix[j]), i-j) })
	o := order{observed, rank, make([]bool, len(observed))}
	for k, i := range others {
		o.compare(i, others[:k])
	}
	var covering []int
	for _, i := range sorted {
		for n := len(covering); n > 0 && !prefix[covering[n-1]].Contains(prefix[i].Addr()); n-- {
			covering = covering[:n-1]
		}
		o.compare(i, covering)
		o.compare(i, others)
		covering = append(covering, i)
	}
	var out []Rule
	for i, r := range observed {
		if o.isWrong[i] {
			out = append(out, r)
		}
	}
	return out
}

// order is observed rules with their places in the desired order, and whether they come too early.
type order struct {
	observed []Rule
	rank     []int
	isWrong  []bool
}

// compare compares the order of a rule and of others with the desired one.
func (o *order) compare(i int, others []int) {
	for _, j := range others {
		first, last := min(i, j), max(i, j)
		if o.rank[first] > o.rank[last] && !o.observed[first].commutes(&o.observed[last]) {
			o.isWrong[first] = true
		}
	}
}
