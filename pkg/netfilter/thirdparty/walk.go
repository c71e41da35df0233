// SPDX-License-Identifier: Apache-2.0

package thirdparty

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// chains is where the chains of one table are read.
type chains interface {
	lookups
	rules(chain string) ([]nfnetlink.Rule, error)
}

// position is where a rule stands among all that packets meet at the hook.
type position struct {
	family   policy.Family
	priority int32
	base     int // the base chain, by its number in the scan
	rule     int // by its number in the walk
}

// before tells the order of two positions of one family.
func (p position) before(q position) Order {
	switch {
	case p.priority < q.priority, p.priority == q.priority && p.base == q.base && p.rule < q.rule:
		return Before
	case p.priority == q.priority && p.base != q.base:
		return UnknownOrder
	}
	return After
}

// mostSteps is how many rules are followed in one base chain, those of a chain
// once for each way that leads there.
const mostSteps = 100_000

var errTooMany = errors.New("too many rules are reached by too many ways")

// walk goes through a base chain as packets do.
type walk struct {
	chains
	place Place // of the base chain
	at    position
	owned func(Place) bool

	accepted []condition // what no rule of the base chain sees any more
	steps    int
	found    []Rule
	founds   []position
	met      []position // where owned chains begin
}

// chain follows a chain. Returned are the exits from the chains on the way to it
// that keep packets from going on there.
func (w *walk) chain(name string, way condition, returned []condition, stack []string) error {
	const deepest = 64 // the kernel allows fewer
	if slices.Contains(stack, name) || len(stack) > deepest {
		return fmt.Errorf("chain %s is reached from itself", policy.Quote(name))
	}
	rules, place, owned, err := read(w.chains, w.place, name, w.owned)
	if err != nil {
		return err
	}
	if owned {
		w.met = append(w.met, w.at)
		return nil
	}
	returned = slices.Clip(returned)
	for _, d := range rules {
		if w.steps++; w.steps > mostSteps {
			return errTooMany
		}
		w.at.rule++
		d.condition = way.and(d.condition)
		if d.never {
			continue
		}
		switch d.effect {
		case masquerades:
			w.report(place, d, returned)
			// What is masqueraded is not spared, whatever of it could be read.
			if len(d.unread) == 0 && d.mark == noMark {
				w.accept(d.condition, returned)
			}
		case accepts, drops:
			w.accept(d.condition, returned)
		case returns:
			returned = append(returned, d.condition)
		case jumps, goes:
			if err := w.chain(d.target, d.condition, returned, append(slices.Clip(stack), name)); err != nil {
				return err
			}
			if d.effect == goes {
				returned = append(returned, d.condition)
			}
		}
	}
	return nil
}

// read decodes the rules of a chain, unless it is owned, by its name or by the
// comment in it.
func read(c chains, base Place, name string, owned func(Place) bool) (rules []decoded, at Place, is bool, err error) {
	at = base
	at.Chain = name
	if owned(at) {
		return nil, at, true, nil
	}
	undecoded, err := c.rules(name)
	if err != nil {
		return nil, at, false, err
	}
	for _, r := range undecoded {
		d := decode(at.Family, r, c)
		rules = append(rules, d)
		if at.Owner == (policy.Owner{}) {
			at.Owner = policy.ParseOwner(d.comment)
		}
	}
	return rules, at, at.Owner != (policy.Owner{}) && owned(at), nil
}

// accept notes that no rule sees the packets any more, but for those that left
// the chain before: by their addresses these are taken off.
func (w *walk) accept(c condition, returned []condition) {
	const most = 64 // pieces, each of which every later rule is held to
	pieces := []condition{c}
	for _, e := range coalesce(returned) {
		var rest []condition
		for _, p := range pieces {
			rest = append(rest, p.without(e, w.place.Family)...)
		}
		pieces = rest
		if len(pieces) > most {
			c.refuse(spares)
			pieces = []condition{c}
			break
		}
	}
	w.accepted = append(w.accepted, pieces...)
}

// spares is why a rule is not exact when one before it could not be read.
const spares = "a rule before it that spares others"

// at returns the rule as it stands in a chain, without what comes before it.
func (d decoded) at(place Place) Rule {
	r := Rule{Place: place, Rule: d.rule, NotOut: d.notOut, Comment: d.comment, Unread: slices.Clone(d.unread)}
	r.Rule.Verdict = policy.Masquerade
	r.Action = map[effect]Action{masquerades: Masquerades, accepts: Accepts, drops: Drops, returns: Returns, goes: Returns}[d.effect]
	if d.snat {
		r.Action = Translates
	}
	return r
}

// report notes a rule that changes the source, if packets can get to it.
func (w *walk) report(place Place, d decoded, returned []condition) {
	r := d.at(place)
	r.Marked = d.mark == markNeeded
	if d.mark != noMark {
		r.Unread = append(r.Unread, "a mark")
	}
	if d.fromLocal {
		r.Unread = append(r.Unread, "the node's own addresses")
	}
	var absent []policy.Rule // that spare packets without a mark
	for _, e := range coalesce(append(slices.Clone(w.accepted), returned...)) {
		switch {
		case e.mark == markNeeded || e.apart(d.condition):
		case len(e.unread) > 0:
			r.Unread = append(r.Unread, spares)
		case !e.covers(d.condition):
		case e.mark == markAbsent:
			absent = append(absent, e.spared())
		default:
			r.Spared = append(r.Spared, e.spared())
		}
	}
	if len(r.Destinations(nil)) == 0 {
		return
	}
	if len(absent) > 0 {
		r.Unread = append(r.Unread, "a mark")
		if spared := append(slices.Clone(r.Spared), absent...); len(area(r.Family, r.Rule, spared, nil)) > 0 {
			r.Spared = spared
		} else {
			r.Marked = true
		}
	}
	slices.Sort(r.Unread)
	r.Unread = slices.Compact(r.Unread)
	r.Exact = len(r.Unread) == 0
	r.Text = r.text()
	w.found = append(w.found, r)
	w.founds = append(w.founds, w.at)
}
