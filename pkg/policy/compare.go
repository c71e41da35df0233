// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"slices"
	"strings"
)

// ChangeKind is the sort of a difference, as metrics name it.
type ChangeKind string

// The sorts of differences.
const (
	ChainChange        ChangeKind = "chain"
	JumpChange         ChangeKind = "jump"
	RuleChange         ChangeKind = "rule"
	OrderChange        ChangeKind = "order"
	ElementChange      ChangeKind = "element"
	UnrecognizedChange ChangeKind = "unrecognized"
)

// Change is one difference between the rules that should be there and those
// that are.
type Change struct {
	Kind       ChangeKind
	Family     Family
	Chain      string // "" for an object outside our chains
	Unexpected bool   // it is there and should not be; else it is missing
	Text       string
}

// String writes ipv4 IP-MASQ-AGENT: missing rule: to 10.0.0.0/8 return.
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

// Diff is how an observed ruleset differs from the desired one. It is empty
// when they mean the same: comments, and an order that has no meaning, do not
// make a difference.
type Diff []Change

// String writes one line a change.
func (d Diff) String() string { return d.Summary(len(d)) }

// Summary writes the first changes, and how many more there are.
func (d Diff) Summary(most int) string {
	var lines []string
	for _, c := range d[:min(most, len(d))] {
		lines = append(lines, c.String())
	}
	if rest := len(d) - most; rest > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", rest))
	}
	return strings.Join(lines, "\n")
}

// Compare returns what is missing from the observed ruleset, and what is in it
// that should not be.
func Compare(desired, observed Ruleset) Diff {
	var d Diff
	there, wanted := observed.finder(), desired.finder()
	for i := range desired.Chains {
		want := &desired.Chains[i]
		d = append(d, CompareChain(want, there(want.Family, want.Name))...)
	}
	for _, c := range observed.Chains {
		if wanted(c.Family, c.Name) == nil {
			d = append(d, Change{ChainChange, c.Family, c.Name, true, ""})
		}
	}
	for _, a := range observed.Unrecognized {
		d = append(d, Change{UnrecognizedChange, a.Family, "", true, onOneLine(a.Text)})
	}
	return d
}

// CompareChain is Compare for one chain; observed is nil where it is missing.
func CompareChain(desired, observed *Chain) Diff {
	if observed == nil {
		d := Diff{{ChainChange, desired.Family, desired.Name, false, ""}}
		for _, j := range desired.Jumps {
			d = append(d, Change{JumpChange, desired.Family, desired.Name, false, j.String()})
		}
		return d
	}
	c := comparison{family: desired.Family, chain: desired.Name}
	if observed.Owner.Differs(desired.Owner) {
		c.diff = append(c.diff, Change{ChainChange, desired.Family, desired.Name, true, ""})
	}
	c.jumps(desired.Jumps, observed.Jumps)
	c.rules(desired.Rules, observed.Rules)
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

// jumps compares without regard to order: all of them lead to the same place.
func (c *comparison) jumps(desired, observed []Rule) {
	missing, unexpected := difference(desired, observed)
	c.report(JumpChange, missing, unexpected)
}

func (c *comparison) rules(desired, observed []Rule) {
	if slices.EqualFunc(desired, observed, Rule.Equal) {
		return
	}
	missing, unexpected := difference(desired, observed)
	if len(missing)+len(unexpected) > 0 {
		c.report(RuleChange, missing, unexpected)
		return
	}
	for _, r := range outOfOrder(desired, observed) {
		c.add(OrderChange, true, r.String())
	}
}

// report names rules, or the elements in which the sets of two rules differ.
func (c *comparison) report(kind ChangeKind, missing, unexpected []Rule) {
	like := map[string][]int{} // the places of unexpected rules that differ in elements alone
	if slices.ContainsFunc(missing, Rule.matchesSet) || slices.ContainsFunc(unexpected, Rule.matchesSet) {
		for i, u := range unexpected {
			like[u.withoutElements().key()] = append(like[u.withoutElements().key()], i)
		}
	}
	paired := map[int]bool{}
	for _, m := range missing {
		key := m.withoutElements().key()
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
	for _, side := range []struct {
		ranges     Ranges
		unexpected bool
	}{{want.Minus(have), false}, {have.Minus(want), true}} {
		for _, x := range side.ranges {
			c.add(ElementChange, side.unexpected, fmt.Sprintf("%s %s (%s)", what, Ranges{x}, r.Verdict))
		}
	}
}

// withoutElements returns the rule with empty sets in the place of those that it
// matches.
func (r Rule) withoutElements() Rule {
	for _, set := range []*Ranges{&r.From, &r.To} {
		if *set != nil {
			*set = Ranges{}
		}
	}
	return r
}

// matchesSet reports whether the rule takes more than one range: a rule that a
// backend without sets cannot have.
func (r Rule) matchesSet() bool { return len(r.From) > 1 || len(r.To) > 1 }

// difference returns the rules that only one of the lists has, each as often
// as it has it more than the other.
func difference(desired, observed []Rule) (missing, unexpected []Rule) {
	if slices.EqualFunc(desired, observed, Rule.Equal) {
		return nil, nil
	}
	missing, surplus := Unmatched(desired, observed)
	for _, i := range surplus {
		unexpected = append(unexpected, observed[i])
	}
	return missing, unexpected
}

// Unmatched returns the desired rules that are missing, and the places of the
// observed ones that are too many. Of several that are equal the last one stays:
// an agent that runs beside ip-masq appends the jump that it looks for.
func Unmatched(desired, observed []Rule) (missing []Rule, surplus []int) {
	wanted := make(map[string]int, len(desired))
	for _, r := range desired {
		wanted[r.key()]++
	}
	for i, r := range slices.Backward(observed) {
		if k := r.key(); r.Verdict != Unrecognized && wanted[k] > 0 {
			wanted[k]--
		} else {
			surplus = append(surplus, i)
		}
	}
	slices.Reverse(surplus)
	for _, r := range desired {
		if k := r.key(); wanted[k] > 0 {
			wanted[k]--
			missing = append(missing, r)
		}
	}
	return missing, surplus
}
